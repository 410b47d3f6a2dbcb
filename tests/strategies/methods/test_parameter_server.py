"""The parameter server: its limit case, its specification, replay, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Trainer
from lockstep.callbacks import Callback, GradientNorm, Guard, LambdaCallback, LRFinder, ModelCheckpoint
from lockstep.strategies import ParameterServer
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.methods.parameter_server.dealer import Dealer
from lockstep.strategies.methods.parameter_server.schedule import Arrival, Record, Schedule
from tests.strategies.methods.served import Rows, Toy, difference, fit, plain
from tests.trainer.test_user_code import Base, batches
from tests.trainer.toy import quiet


def schedule_of(trainer: Trainer) -> Path:
    return Path(str(trainer.log_dir)) / "schedule.jsonl"


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimizer": "SGD", "tokens": True, "norm": True}, id="SGD, tokens, BatchNorm"),
        pytest.param({"optimizer": "AdamW"}, id="AdamW", marks=pytest.mark.slow),
        pytest.param({"optimizer": "Adafactor"}, id="Adafactor", marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "AdamW", "accumulate_grad_batches": 1, "gradient_clip_algorithm": "value"},
            id="clipped by value",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_without_staleness_the_numbers_are_those_of_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "max_epochs": 9, "samples": 93, **options}
    expected, of_ddp = fit("ddp", tmp_path, **options)
    got, trainer = fit(ParameterServer(staleness=0, servers=2), tmp_path, **options)
    assert trainer.global_step == of_ddp.global_step >= 50
    assert difference(got, expected) <= 1e-12
    for name, value in of_ddp.callback_metrics.items():
        assert abs(float(trainer.callback_metrics[name] - value)) <= 1e-12, name
    assert float(trainer.callback_metrics["staleness_max"]) == 0


class _Counts(Callback):
    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append(batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch_idx)


@pytest.mark.ranks
def test_a_recorded_run_is_the_algorithm_and_replays_bit_for_bit(tmp_path: Path) -> None:
    server = ParameterServer(staleness=2, workers=4, servers=1)
    options: dict[str, Any] = {"optimizer": "SGD", "gradient_clip_val": 0.3, "samples": 150}
    counts = _Counts()
    got, trainer = fit(server, tmp_path, slow=0.05, callbacks=[counts], **options)
    assert len(counts.starts) == len(counts.ends) >= trainer.global_step
    lines = [json.loads(line) for line in schedule_of(trainer).read_text().splitlines()]
    assert lines.pop(0) == {"workers": 4, "servers": 1, "staleness": 2}
    assert sorted(line["batch"] for line in lines) == [*range(4 * trainer.global_step)]  # every batch once
    staleness = [line["batch"] // 4 - min(line["read"]) for line in lines]
    assert max(staleness) <= 2 and max(staleness) > 0
    by_worker = Counter(line["worker"] for line in lines)
    assert by_worker[1] < by_worker[0]  # the slow one has had fewer
    assert all(line["made"] == line["batch"] // 4 + 1 for line in lines)

    loader = ShardedLoader(DataLoader(Rows(150), 4), rank=0, size=4, seed=0, virtual=range(4))
    assert loader.num_windows() == trainer.global_step // 2
    again, _ = fit(ParameterServer(replay=schedule_of(trainer)), tmp_path, devices=1, **options)
    assert difference(again, got) == 0
    # By the samples that the replay saw, which is one process and so saw all, in order.
    clocks: list[list[list[int]]] = [[] for _ in range(trainer.global_step)]
    for clock in range(trainer.global_step):
        clocks[clock] = _in_batches([index for step, index in again.seen if step == clock])
    for epoch in (clocks[: len(clocks) // 2], clocks[len(clocks) // 2 :]):
        assert sorted(index for batches in epoch for batch in batches for index in batch) == [*range(150)]
    expected = plain(Schedule(schedule_of(trainer)), clocks, 0.3)
    assert difference(got.net, expected.net) <= 1e-12


def _in_batches(samples: list[int]) -> list[list[int]]:
    """A clock's samples by worker, of which the first get one more if they must be uneven."""
    size, rest = divmod(len(samples), 4)
    batches, start = [], 0
    for share in range(4):
        end = start + size + (share < rest)
        batches.append(samples[start:end])
        start = end
    return batches


@pytest.mark.ranks
@pytest.mark.slow
def test_replay_is_bitwise_on_1_2_and_4_ranks_with_dropout_and_batch_norm(tmp_path: Path) -> None:
    options = {"drop": 0.3, "norm": True, "gradient_clip_val": 0.3, "samples": 200}
    got, trainer = fit(ParameterServer(staleness=3, servers=4), tmp_path, devices=4, slow=0.05, **options)
    for devices in (1, 2, 4):
        again, replayed = fit(ParameterServer(replay=schedule_of(trainer)), tmp_path, devices=devices, **options)
        assert difference(again, got) == 0, devices
        assert replayed.callback_metrics.keys() == trainer.callback_metrics.keys()
        for name, value in replayed.callback_metrics.items():
            assert float(value) == float(trainer.callback_metrics[name]), (devices, name)
        assert Schedule(schedule_of(replayed)).reads == Schedule(schedule_of(trainer)).reads


@pytest.mark.long
@pytest.mark.ranks
def test_how_many_servers_there_are_changes_no_bit_of_a_clipped_run(tmp_path: Path) -> None:
    options = {"optimizer": "AdamW", "norm": True, "gradient_clip_val": 0.3, "samples": 93}
    of_one, _ = fit(ParameterServer(staleness=0, workers=2, servers=1), tmp_path, devices=2, **options)
    of_two, _ = fit(ParameterServer(staleness=0, workers=2, servers=2), tmp_path, devices=2, **options)
    assert difference(of_two, of_one) == 0


def test_batches_are_handed_out_clock_by_clock_and_all_ranks_conclude_alike() -> None:
    dealer = Dealer(workers=4, ranks=2, clock=10)
    assert [dealer.take(0, 10, 0)[0] for _ in range(3)] == [40, 41, None]  # its own part of the first
    assert dealer.take(0, 11, 0) == (44, 0)
    assert [dealer.take(1, 10, 15)[0] for _ in range(3)] == [42, 43, None]  # its signal is too late for this clock
    assert [dealer.take(0, 11, 0)[0] for _ in range(4)] == [45, 46, 47, None]
    assert dealer.take(1, 11, 0) == (None, 15)
    assert dealer.take(0, 12, 0, order=7) == (48, 0)
    assert dealer.take(1, 12, 0, order=8) == (None, -1), "its sampler has yielded other indices than that of rank 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"staleness": -1}, "staleness must be a whole number of steps"),
        ({"staleness": True}, "staleness must be a whole number of steps"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"servers": 1.5}, "servers must be a whole number of at least 1"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterServer(**options)


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="workers=3 must be a multiple of the number of ranks, but there are 2"):
        ParameterServer(workers=3).configure(devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match="servers=3 are more than the 2 ranks"):
        ParameterServer(servers=3).configure(devices=2, accelerator="cpu")


def test_what_is_not_a_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ParameterServer(replay=tmp_path / "schedule.jsonl")
    (tmp_path / "schedule.jsonl").write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="replay must be the path of a run.s schedule.jsonl"):
        ParameterServer(replay=tmp_path / "schedule.jsonl")


class _Looks(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class _Clears(Toy):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


class _SetsRate(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] = 0.01 * (1 + self.global_step)


class _Closes(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _Hooks(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)


class _Rate(Toy):
    lr = 0.05


class _Manual(Toy):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        pytest.param(_Looks, {}, "on_before_optimizer_step cannot be called with gradients", id="hook"),
        pytest.param(_Clears, {}, "on_before_zero_grad cannot be called with gradients", id="hook of clearing"),
        pytest.param(_SetsRate, {}, "lr of param_groups changed while a batch was computed", id="rate"),
        pytest.param(_Closes, {}, "one that calls a closure is refused", id="closure"),
        pytest.param(_Hooks, {}, "gradient hooks on parameters are refused", id="gradient hook"),
        pytest.param(_Manual, {}, "needs automatic optimization", id="manual"),
        pytest.param(Toy, {"callbacks": [Guard(non_finite="skip")]}, "non_finite", id="guard"),
        pytest.param(_Rate, {"callbacks": [LRFinder()]}, "LRFinder needs the loss of each step", id="finder"),
        pytest.param(Toy, {"virtual_ranks": 2}, "virtual_ranks=2 needs a strategy", id="virtual ranks"),
        pytest.param(Toy, {"precision": "16-mixed"}, "use 'bf16-mixed'", id="loss scaling"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    module: type[Toy], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    toy = module()
    before = [p.detach().clone() for p in toy.parameters()]
    options = {"max_epochs": 1, "enable_checkpointing": False, "logger": False, "precision": "64-true", **options}
    with pytest.raises((ValueError, RuntimeError), match=message):
        Trainer(strategy=ParameterServer(), devices=1, accelerator="cpu", **options).fit(toy, DataLoader(Rows(8), 4))
    assert all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))


class _StopsRank2(Callback):
    """Rank 0 stops rank 2 for 5 seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.global_rank == 2:
            (self.folder / "process").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 100:
            threading.Thread(target=self._stop, args=(int((self.folder / "process").read_text()),)).start()

    def _stop(self, process: int) -> None:
        os.kill(process, signal.SIGSTOP)
        time.sleep(5)
        os.kill(process, signal.SIGCONT)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_bound_holds_in_10000_updates_with_a_worker_that_is_stopped(tmp_path: Path) -> None:
    options = {"samples": 12000, "max_epochs": 4, "callbacks": [_StopsRank2(tmp_path)]}
    began = time.monotonic()
    _, trainer = fit(ParameterServer(staleness=3, servers=1), tmp_path, devices=3, **options)
    assert time.monotonic() - began > 5
    reads = Schedule(schedule_of(trainer)).reads
    assert sorted(reads) == [*range(3 * trainer.global_step)] and len(reads) >= 10_000
    staleness = Counter(batch // 3 - min(read) for batch, read in reads.items())
    assert max(staleness) == 3 and min(staleness) == 0, staleness


class _Kills(Callback):
    """In some steps one rank kills itself, the first time."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step, killed = trainer.global_step, self.folder / f"killed{trainer.global_step}"
        if step in self.steps and trainer.global_rank == step % trainer.world_size and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class _Skips(Toy):
    """Every other clock its first batch has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        self.steps = self.steps + 1
        loss = F.cross_entropy(self.net(self.norm(x)), y)
        self.log("loss", loss)
        return None if int(index[0]) % 16 == 0 else loss


@pytest.mark.unit
def test_buffers_follow_a_first_batch_that_counts_nothing() -> None:
    def run(strategy: Any, **options: Any) -> Toy:
        torch.manual_seed(0)
        module = _Skips(norm=True)
        trainer = quiet(strategy=strategy, devices=1, accelerator="cpu", precision="64-true", max_epochs=2, **options)
        trainer.fit(module, DataLoader(Rows(64), 4))
        return module

    assert difference(run(ParameterServer(staleness=0, workers=2)), run("ddp", virtual_ranks=2)) <= 1e-12


@pytest.mark.unit
def test_a_replay_that_resumes_where_the_recorded_run_did_not_wait_is_refused(tmp_path: Path) -> None:
    reads = [Arrival(batch, 0, [max(0, batch - 1)], batch + 1)._asdict() for batch in range(6)]
    lines = [{"workers": 1, "servers": 1, "staleness": 1}, *reads]
    record = tmp_path / "schedule.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    saver = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=3, save_top_k=-1)
    options: dict[str, Any] = {"devices": 1, "samples": 24, "max_epochs": 1}
    fit(ParameterServer(replay=record), tmp_path, callbacks=[saver], enable_checkpointing=True, **options)
    with pytest.raises(RuntimeError, match="has batch 3 read parameters of step 2, but this replay begins again at st"):
        fit(ParameterServer(replay=record), tmp_path, ckpt_path=saver.dirpath + "/step=3", **options)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_was_killed_and_one_that_resumes_replay_bit_for_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"drop": 0.3, "norm": True, "samples": 93, "max_epochs": 9}
    steps = sorted(random.Random(0).sample(range(4, 100), 25))
    saver = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    got, trainer = fit(
        ParameterServer(staleness=3, servers=2),
        tmp_path,
        slow=0.01,
        enable_checkpointing=True,
        max_restarts=26,
        callbacks=[saver, _Kills(tmp_path, steps)],
        **options,
    )
    assert len([*tmp_path.glob("killed*")]) == 25 and trainer.global_step == 108
    record = schedule_of(trainer)
    batches = [json.loads(line)["batch"] for line in record.read_text().splitlines()[1:]]
    assert sorted(batches) == [*range(2 * 108)]  # of what was lost none is left
    whole, _ = fit(ParameterServer(replay=record), tmp_path, devices=1, **options)
    assert difference(whole, got) == 0
    saved = next(path for path in saver.best_k_models if "step=52" in path)
    resumed, _ = fit(ParameterServer(replay=record), tmp_path, ckpt_path=saved, **options)
    assert difference(resumed, got) == 0


class _Writes(Callback):
    """Changes weights behind the servers' back, or within `trainer.whole`."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            with trainer.whole(module) if self.whole else nullcontext():
                module.net[0].weight.data.mul_(0.5)


class _Gathers(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(torch.ones(2))


class _Wholes(Toy):
    def on_train_batch_start(self, *args: Any) -> None:
        with self.trainer.whole(self):
            pass


class _Measures(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.accuracy(self.net(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class _Fails(Toy):
    """Returns a NaN, or nothing, in some step."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = value

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.trainer.global_step < 3 else None if self.value is None else loss * self.value


def on_one_rank(module: Toy, **options: Any) -> None:
    options = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, "precision": "64-true", **options}
    Trainer(strategy=ParameterServer(0), devices=1, accelerator="cpu", **options).fit(module, DataLoader(Rows(20), 4))


@pytest.mark.parametrize(
    ("module", "options", "error", "message"),
    [
        pytest.param(Toy, {"callbacks": [_Writes(False)]}, RuntimeError, r"net.0.weight were changed", id="weights"),
        pytest.param(_Gathers, {}, RuntimeError, "all_gather was called while a batch is computed", id="collective"),
        pytest.param(_Wholes, {}, RuntimeError, "trainer.whole was called while a batch is computed", id="whole"),
        pytest.param(_Measures, {}, RuntimeError, "updates a torchmetrics object", id="torchmetrics"),
        pytest.param(partial(_Fails, math.nan), {}, FloatingPointError, "the loss is NaN .* of step 3", id="NaN"),
        pytest.param(partial(_Fails, None), {}, RuntimeError, "no batch of step 3 has a loss", id="no loss"),
        pytest.param(Toy, {"callbacks": [GradientNorm()]}, ValueError, "on_before_optimizer_step", id="norm"),
        pytest.param(
            Toy,
            {"callbacks": [LambdaCallback(on_before_optimizer_step=lambda *_: None)]},
            ValueError,
            "on_before_optimizer_step",
            id="lambda",
        ),
    ],
)
def test_what_a_run_cannot_take_over_ends_it_by_name(
    module: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        on_one_rank(module(), **options)


class Slowing(torch.optim.SGD):
    """Counts its steps in its groups, and sets its rate by them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.5 / group["count"]
        return super().step(closure)


class Slower(Base):
    """Its servers end after each epoch, as weights are changed there."""

    scheduled = False

    def configure_optimizers(self) -> Any:
        optimizer = Slowing(self.parameters(), lr=0.5)
        schedule = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return ([optimizer], [schedule]) if self.scheduled else optimizer

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            with self.trainer.whole(self), torch.no_grad():
                self.net[0].weight.mul_(0.5)


def slower(strategy: Any, folder: Path, epochs: int = 3, **options: Any) -> dict[str, torch.Tensor]:
    module = Slower()
    run = quiet(
        strategy=strategy, devices=2, precision="64-true", max_epochs=epochs, split_batches=True,
        enable_checkpointing=True, default_root_dir=folder, callbacks=options.pop("callbacks", []),
    )  # fmt: skip
    run.fit(module, batches(17), **options)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.ranks
@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_steps_on_servers_leave_in_groups_is_saved_and_goes_to_the_next_servers(
    servers: int, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(dirpath=str(tmp_path / "saved"), save_top_k=-1, filename="{epoch}")
    strategy = ParameterServer(staleness=0, servers=servers)
    whole = slower(strategy, tmp_path, callbacks=[saver])
    resumed = slower(strategy, tmp_path, ckpt_path=str(tmp_path / "saved" / "epoch=0"))
    exact = slower("ddp", tmp_path)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
        torch.testing.assert_close(value, exact[name], rtol=0, atol=1e-12)


@pytest.mark.ranks
def test_a_number_that_steps_and_a_scheduler_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slower, "scheduled", True)
    with pytest.raises(RuntimeError, match="Slowing changes 'lr' of its param_groups in its step, on a server"):
        slower(ParameterServer(staleness=0), tmp_path)


def test_weights_may_be_changed_within_whole() -> None:
    got, expected = Toy(), Toy()
    expected.load_state_dict(got.state_dict())
    on_one_rank(got, callbacks=[_Writes(True)], seed=0)
    options: Any = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, "precision": "64-true"}
    single = Trainer(strategy="single", accelerator="cpu", callbacks=[_Writes(True)], seed=0, **options)
    single.fit(expected, DataLoader(Rows(20), 4))
    assert difference(got, expected) <= 1e-12


def test_a_full_disk_costs_the_record_and_not_the_training(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    record = Record(tmp_path, {"workers": 1, "servers": 1, "staleness": 0}, 0)
    record.close()
    record._file = open("/dev/full", "w")  # noqa: SIM115 - `record` closes it
    record.add(Arrival(0, 0, [0], 1))
    record.flush()
    record.add(Arrival(1, 0, [0], 2))
    record.close()
    assert caplog.messages == [
        "schedule.jsonl is not complete, so this run cannot be replayed to its end: [Errno 28] No space left on device"
    ]


def test_no_thread_is_left_after_an_error() -> None:
    before = threading.active_count()
    with pytest.raises(FloatingPointError):
        on_one_rank(_Fails(math.nan))
    assert threading.active_count() == before


def test_a_second_run_in_a_folder_keeps_the_record_of_the_first(tmp_path: Path) -> None:
    for workers in (1, 2, 3):
        Record(tmp_path, {"workers": workers, "servers": 1, "staleness": 0}, 0).close()
    held = [Schedule(tmp_path / f"schedule{end}.jsonl").workers for end in ("-1", "-2", "")]
    assert held == [1, 2, 3]
