"""What is collected in steps and logged by hand at the end of an epoch, on ranks that have seen more, fewer or no
samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep import Trainer
from lockstep.callbacks import Callback
from lockstep.trainer.metrics.store import MetricStore
from tests.trainer.toy import Net, loader, quiet

pytestmark = pytest.mark.ranks


class Collects(Net):
    """Keeps losses of samples in lists of its own and logs them in the hooks of each loop."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def step(self, batch: Any) -> torch.Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.seen.append(losses.detach())
        return losses.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("batch/loss", self.step(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)

    def summed_up(self, name: str) -> None:
        self.log(f"{name}/rate", 0.1)
        if self.seen:
            losses = torch.cat(self.seen)
            self.log(f"{name}/mean", losses.mean())
            self.log(f"{name}/max", losses.max(), reduce_fx="max")
            self.log(f"{name}/min", losses.min(), reduce_fx="min")
            self.log(f"{name}/sum", losses.sum(), reduce_fx="sum")
            self.log(f"{name}/own weight", losses.mean(), batch_size=len(losses))
        self.seen = []

    def on_validation_epoch_end(self) -> None:
        self.summed_up("val")

    def on_test_epoch_end(self) -> None:
        self.summed_up("test")

    def on_train_epoch_end(self) -> None:
        self.summed_up("train")


class Collector(Callback):
    """The same from outside, in the batch hook."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.sizes += batch[1].tolist()

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        if self.sizes:
            self.log("callback/mean", torch.tensor(self.sizes, dtype=torch.float64).mean())
        self.sizes = []


def numbers(strategy: str, devices: int, n: int, batch_size: int = 4) -> dict[str, float]:
    torch.manual_seed(0)
    module = Collects()
    trainer = quiet(
        strategy=strategy, devices=devices, accelerator="cpu", precision="64-true", seed=0, callbacks=[Collector()]
    )
    shown: dict[str, float] = {}
    for result in (
        trainer.validate(module, loader(n, batch_size), verbose=False),
        trainer.test(module, loader(n, batch_size), verbose=False),
    ):
        shown |= result[0]
    return shown


@pytest.mark.parametrize(
    ("strategy", "devices", "n", "batch_size"),
    [
        ("ddp", 2, 13, 4),
        ("ddp", 3, 13, 4),
        ("ddp", 3, 2, 1),
        ("fsdp", 2, 13, 4),
        ("fsdp", 3, 2, 1),
        ("dp", 2, 13, 4),
        ("tensor", 2, 13, 4),
    ],
)
def test_values_are_those_of_one_process(strategy: str, devices: int, n: int, batch_size: int) -> None:
    want, found = numbers("single", 1, n, batch_size), numbers(strategy, devices, n, batch_size)
    assert found == pytest.approx(want, rel=1e-12)
    assert found["val/rate"] == found["test/rate"] == 0.1


def test_a_pipeline_refuses_lists_that_a_step_keeps() -> None:
    with pytest.raises(RuntimeError, match="an evaluation step adds to the list seen"):
        numbers("pipeline", 2, 13)


def test_training_values_weigh_the_samples_of_the_epoch() -> None:
    """7 samples in one step of each epoch: the losses are those of the first weights on any number of ranks."""
    found = []
    for devices in (1, 2):
        torch.manual_seed(0)
        trainer = quiet(
            devices=devices, accelerator="cpu", precision="64-true", seed=0, split_batches=True, max_epochs=2
        )
        trainer.fit(Collects(), loader(7, 7))
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[1]["train/rate"] == 0.1


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


def test_training_values_weigh_the_samples_before_a_resume(tmp_path: Path) -> None:
    """The first rank has 3, 3 and 1 samples, the second 2, 2 and none, of which the last step is resumed."""
    found = []
    for devices, ckpt_path in ((1, None), (2, None), (2, tmp_path / "saved")):
        torch.manual_seed(0)
        options = {"precision": "64-true", "seed": 0, "split_batches": True}
        trainer = quiet(devices=devices, accelerator="cpu", callbacks=[Saves(tmp_path / "saved")], **options)
        trainer.fit(Collects(), loader(11, 5), ckpt_path=ckpt_path)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[2] == found[1]


class Repeats(Net):
    """Logs a name several times outside of batches."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_epoch_start(self) -> None:
        self.log("several", 1.0)

    def on_validation_epoch_end(self) -> None:
        for value in (4.0, 7.0):
            self.log("several", value)


class Twice(Net):
    """Logs a name in batches and outside of them."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", 1.0)

    def on_validation_epoch_end(self) -> None:
        self.log("both", 4.0)


def test_a_name_logged_several_times_outside_of_batches_counts_each_time() -> None:
    for devices in (1, 2):
        (found,) = quiet(devices=devices, accelerator="cpu").validate(Repeats(), loader(5, 2), verbose=False)
        assert found == {"several": 4.0}


def test_a_name_logged_in_batches_and_outside_is_refused_on_several_ranks() -> None:
    (found,) = quiet(accelerator="cpu").validate(Twice(), loader(5, 2), verbose=False)
    assert found == {"both": 1.5}
    with pytest.raises(ValueError, match="self.log\\('both'\\) was called both in a batch, .* under another name"):
        quiet(devices=2, accelerator="cpu").validate(Twice(), loader(5, 2), verbose=False)


def test_ranks_with_values_of_their_own_are_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    numbers("ddp", 2, 13)
    said = capfd.readouterr().err
    assert said.count("logged outside of a batch with another value on each rank: 'callback/mean', 'val/mean'.") == 1
    assert "log a torchmetrics Metric, or call all_gather first" in said
    assert "rate" not in said
    assert "own weight" not in said
    assert said.count("all_gather") == 2  # validation and test


class Sizes(Callback):
    """Raises on the rank whose metrics keep more from epoch to epoch."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        sizes = {k: len(v) for k, v in vars(trainer._run.metrics).items() if isinstance(v, list | set | dict)}
        if trainer.current_epoch == 1:
            self.sizes = sizes
        elif trainer.current_epoch == 3 and sizes != self.sizes:
            raise RuntimeError(f"{self.sizes} has grown to {sizes}")


class OfRank(Net):
    def on_train_epoch_end(self) -> None:
        self.log("own", float(self.global_rank))


def test_what_ranks_average_does_not_grow() -> None:
    quiet(devices=2, accelerator="cpu", max_epochs=4, callbacks=[Sizes()]).fit(OfRank(), loader(4, 2))


class Careless(Collects):
    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.cat(self.seen).mean())


class Sometimes(Net):
    """One rank that has samples logs nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.log("alone", 1.0)


class Extra(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("usual", 1.0)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 2:
            self.log("without samples", 1.0)


class Names(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("odd" if self.global_rank and batch_idx == 1 else "usual", 1.0)
        return self(batch[0]).sum()


@pytest.mark.parametrize(
    ("make", "devices", "message"),
    [
        (Careless, 3, "on_validation_epoch_end failed on rank 2, which has seen no sample .*log in the step"),
        (Sometimes, 2, "rank 1 did not log 'alone'|rank 0 logged 'alone'"),
        (Extra, 3, "rank 2, which has seen no sample of a loader, logged 'without samples'"),
    ],
)
def test_what_ranks_without_samples_cannot_do_is_refused_by_name(make: Any, devices: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        quiet(devices=devices, accelerator="cpu").validate(make(), loader(2, 1), verbose=False)


def test_names_that_differ_in_a_step_are_named() -> None:
    with pytest.raises(RuntimeError, match="rank 1 logged 'odd', which not all did"):
        quiet(devices=2, accelerator="cpu").fit(Names(), loader(40, 2))


class OfLoaders(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))


def test_a_rank_may_have_samples_of_one_validation_loader_alone() -> None:
    found = []
    for devices in (1, 3):
        trainer = quiet(devices=devices, accelerator="cpu", split_batches=True, precision="64-true")
        torch.manual_seed(0)
        found.append(trainer.validate(OfLoaders(), [loader(9, 3), loader(4, 2)], verbose=False))
    for alone, over_ranks in zip(*found, strict=True):
        assert alone == pytest.approx(over_ranks, abs=1e-12) and len(alone) == 1


class Reads(Net):
    """Reads in the hook what its steps have logged."""

    def on_validation_epoch_end(self) -> None:
        loss = float(self.trainer.callback_metrics["val/loss"])
        self.log("read", loss)
        self.log("val/twice", 2 * loss)


def test_the_hook_at_the_end_of_a_validation_sees_what_its_steps_have_logged() -> None:
    for devices in (1, 2):
        trainer = quiet(devices=devices, accelerator="cpu", max_epochs=2)
        trainer.fit(Reads(), loader(), loader(30))
        metrics = trainer.callback_metrics
        assert metrics["read"] == metrics["val/loss"] == metrics["val/twice"] / 2


class LogsInHook(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("step", float(self.global_step), on_step=False, on_epoch=True, reduce_fx="max")


def test_a_rank_without_samples_may_log_in_hooks_of_a_window_before_its_step_runs() -> None:
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu", split_batches=True, accumulate_grad_batches=2)
    trainer.fit(LogsInHook(), loader(3, 1))
    assert trainer.callback_metrics["step"] == 3


class LogsNaN(Net):
    """Of the samples 0 to 4 the second is not a number."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for fx in ("max", "min"):
            self.log(fx, getattr(batch[0].flatten(), fx)(), reduce_fx=fx)


def test_a_nan_is_the_largest_and_the_smallest_on_any_number_of_ranks() -> None:
    rows = torch.arange(5.0)[:, None]
    rows[1] = float("nan")
    for devices in (1, 2):
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 1)
        (found,) = quiet(devices=devices, accelerator="cpu").validate(LogsNaN(), loader, verbose=False)
        assert sorted(found) == ["max", "min"] and all(value != value for value in found.values())


def test_a_resumed_run_refuses_a_name_that_is_logged_in_both_ways_as_one_that_never_stopped() -> None:
    saved = MetricStore()
    saved.weight, saved.in_batch = 2.0, True
    saved.log("both", 1.0, on_epoch=True)
    resumed = MetricStore(several=True)
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=r"self.log\('both'\) was called both in a batch"):
        resumed.log("both", 1.0, on_epoch=True)
    of_old = {name: state[:11] for name, state in saved.state_dict().items()}
    resumed = MetricStore(several=True)
    resumed.load_state_dict(of_old)
    again = MetricStore(several=True)
    again.load_state_dict(resumed.state_dict())
    again.log("both", 1.0, on_epoch=True)
