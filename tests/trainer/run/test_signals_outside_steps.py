"""A signal in any phase of a run ends it with 143 or 130, with a checkpoint as soon as a step has been done, and never
as if it were done."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from lockstep import Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.trainer.checkpoint.store import newest
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights

BEFORE = ("setup", "configure_optimizers", "on_fit_start", "sanity check", "on_train_start", "first read")
AFTER = ("validation", "on_train_epoch_start", "on_train_epoch_end", "later read", "on_save_checkpoint")
AT_THE_END = ("on_train_end", "on_fit_end", "teardown")


class Phases(Net):
    """Sends itself `number` at `place`, on `rank`, once; the loss follows how often hooks of epochs were called."""

    place, number, rank, sent = "", signal.SIGTERM, 0, False
    calls = 1

    def send(self, place: str, when: bool = True) -> None:
        if place == self.place and when and not self.sent and self.global_rank == self.rank:
            self.sent = True
            os.kill(os.getpid(), self.number)

    def setup(self, stage: str) -> None:
        self.send("setup")

    def configure_optimizers(self) -> Any:
        self.send("configure_optimizers")
        return super().configure_optimizers()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.send("sanity check", self.trainer.sanity_checking)
        self.send("validation", self.global_step == 3)
        super().validation_step(batch, batch_idx)

    def on_fit_start(self) -> None:
        self.send("on_fit_start")

    def on_train_start(self) -> None:
        self.send("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.calls

    def on_train_epoch_start(self) -> None:
        self.calls += 1
        self.send("on_train_epoch_start", self.current_epoch == 1)

    def on_train_epoch_end(self) -> None:
        self.calls += 1
        self.send("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.send("on_save_checkpoint")

    def on_train_end(self) -> None:
        self.send("on_train_end")

    def on_fit_end(self) -> None:
        self.send("on_fit_end")

    def teardown(self, stage: str) -> None:
        self.send("teardown")


class Reads(Dataset):
    """Tells the module when it reads."""

    def __init__(self, module: Phases) -> None:
        self.samples, self.module, self.count = data(48), module, 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        self.module.send("first read")
        self.module.send("later read", self.count > 16)
        return self.samples[index]


def train(module: Phases, ckpt_path: str | None = None, **options: Any) -> Trainer:
    trainer = quiet(
        max_epochs=2,
        val_check_interval=3,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(every_n_train_steps=5)],
        seed=0,
        **options,
    )
    batches = torch.utils.data.DataLoader(Reads(module), batch_size=4)
    trainer.fit(module, batches, loader(8), ckpt_path=ckpt_path)
    return trainer


def phases(place: str = "", number: int = signal.SIGTERM, rank: int = 0) -> Phases:
    module = net()
    module.__class__ = Phases
    module.place, module.number, module.rank = place, number, rank
    return module


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_signal_in_any_phase_ends_the_run_with_its_code_and_a_checkpoint(devices: int) -> None:
    undisturbed = phases()
    train(undisturbed, devices=devices, default_root_dir="undisturbed")
    places = BEFORE + AFTER + AT_THE_END if devices == 1 else BEFORE[1::2] + AFTER + AT_THE_END[::2]
    for i, place in enumerate(places):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        root = Path(f"run{i}")
        with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
            train(phases(place, number, rank=i % devices), devices=devices, default_root_dir=root)
        assert isinstance(caught.value, SystemExit) == (number == signal.SIGTERM), place
        assert getattr(caught.value, "code", 143) == 143, place
        for summary in root.glob("**/summary.json"):
            assert json.loads(summary.read_text())["exit"].startswith("stopped"), place
        checkpoint = newest(root / "Phases/version_0/checkpoints")
        assert (checkpoint is None) == (place in BEFORE), place
        if checkpoint is not None and (devices == 1 or place in AFTER[:3]):
            resumed = phases()
            train(resumed, str(checkpoint), devices=devices, default_root_dir=root)
            assert equal(weights(resumed), weights(undisturbed)), place


@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_signal_ends_an_evaluation_at_once(stage: str) -> None:
    class Stops(Net):
        def step(self, batch: Any, batch_idx: int) -> Any:
            assert batch_idx < 2 or self.global_rank == 1, "it continued after the signal"
            if batch_idx == 1 and self.global_rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            return self(batch[0])

        validation_step = test_step = predict_step = step

    for devices in (1, 2):
        with pytest.raises(SystemExit) as caught:
            getattr(quiet(devices=devices), stage)(Stops(), loader(64, 4))
        assert caught.value.code == 143


def test_a_signal_that_user_code_swallows_stops_the_run_all_the_same() -> None:
    class Swallows(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except BaseException:
                pass

    trainer = quiet(callbacks=[Swallows(), ModelCheckpoint()], enable_checkpointing=True)
    with pytest.raises(SystemExit) as caught:
        trainer.fit(net(), loader(16, 4))
    assert caught.value.code == 143 and trainer.global_step == 0
    assert newest("runs/Net/version_0/checkpoints") is None


def test_two_signals_at_once_are_one_and_a_third_apart_ends_at_once() -> None:
    class Hard(Net):
        asked = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                for _ in range(2):  # as GNU timeout does
                    os.kill(os.getpid(), signal.SIGINT)

    trainer = quiet(enable_checkpointing=True)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Hard(), loader(16, 4))
    assert trainer.global_step == 2 and newest("runs/Hard/version_0/checkpoints") is not None


@pytest.mark.ranks
def test_a_process_that_a_hook_forks_dies_of_sigterm_as_usual() -> None:
    class Forks(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                ready, born = os.pipe()
                child = os.fork()
                if not child:
                    os.write(born, b".")  # Python forgets signals that come within the fork itself
                    for _ in range(3000):  # no `pause`, which would miss a signal that came just before it
                        time.sleep(0.01)
                    os._exit(0)
                os.read(ready, 1)
                os.close(ready)
                os.close(born)
                os.kill(child, signal.SIGTERM)
                _, status = os.waitpid(child, 0)
                assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM

    for devices in (1, 2):
        quiet(devices=devices).fit(Forks(), loader(16, 4))


def test_a_run_within_a_run_leaves_signals_to_the_outer_one() -> None:
    class Outer(Net):
        def on_train_epoch_end(self) -> None:
            class Inner(Net):
                def validation_step(self, batch: Any, batch_idx: int) -> None:
                    os.kill(os.getpid(), signal.SIGTERM)

            quiet().validate(Inner(), loader(8))

    trainer = quiet(enable_checkpointing=True, max_epochs=3)
    with pytest.raises(SystemExit):
        trainer.fit(Outer(), loader(16, 4))
    assert newest("runs/Outer/version_0/checkpoints") is not None and trainer.current_epoch == 1
