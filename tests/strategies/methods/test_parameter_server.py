"""The parameter server: its limit case, its specification, replay, and what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import Trainer
from lockstep.callbacks import Guard
from lockstep.strategies import ParameterServer
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.methods.parameter_server.links import Dealer
from lockstep.strategies.methods.parameter_server.schedule import Schedule
from tests.strategies.methods.served import Rows, Toy, difference, fit, plain


def schedule_of(trainer: Trainer) -> Path:
    return Path(str(trainer.log_dir)) / "schedule.jsonl"


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
    got, trainer = fit(ParameterServer(staleness=0), tmp_path, **options)
    assert trainer.global_step == of_ddp.global_step >= 50
    assert difference(got, expected) <= 1e-12
    for name, value in of_ddp.callback_metrics.items():
        assert abs(float(trainer.callback_metrics[name] - value)) <= 1e-12, name
    assert float(trainer.callback_metrics["staleness_max"]) == 0


@pytest.mark.ranks
def test_a_recorded_run_is_the_algorithm_and_replays_bit_for_bit(tmp_path: Path) -> None:
    server = ParameterServer(staleness=2, workers=4, servers=1)
    options = {"optimizer": "SGD", "gradient_clip_val": 0.3, "samples": 150}
    got, trainer = fit(server, tmp_path, slow=0.02, **options)
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
    assert difference(got, expected) <= 1e-12


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
    got, trainer = fit(ParameterServer(staleness=3), tmp_path, devices=4, slow=0.05, **options)
    for devices in (1, 2, 4):
        again, replayed = fit(ParameterServer(replay=schedule_of(trainer)), tmp_path, devices=devices, **options)
        assert difference(again, got) == 0, devices
        assert replayed.callback_metrics.keys() == trainer.callback_metrics.keys()
        for name, value in replayed.callback_metrics.items():
            assert float(value) == float(trainer.callback_metrics[name]), (devices, name)
        assert Schedule(schedule_of(replayed)).reads == Schedule(schedule_of(trainer)).reads


def test_batches_are_handed_out_clock_by_clock_and_all_ranks_conclude_alike() -> None:
    dealer = Dealer(workers=4, ranks=2, clock=10)
    assert [dealer.take(0, 10, 0)[0] for _ in range(3)] == [40, 41, None]  # its own part of the first
    assert dealer.take(0, 11, 0) == (44, 0)
    assert [dealer.take(1, 10, 15)[0] for _ in range(3)] == [42, 43, None]  # its signal is too late for this clock
    assert [dealer.take(0, 11, 0)[0] for _ in range(4)] == [45, 46, 47, None]
    assert dealer.take(1, 11, 0) == (None, 15)
    assert dealer.take(0, 12, 0) == (48, 0)


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
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ParameterServer(replay=tmp_path / "schedule.jsonl")
    (tmp_path / "schedule.jsonl").write_text("[1, 2]\n")
    with pytest.raises(ValueError, match="replay must be the schedule.jsonl of a run's folder"):
        ParameterServer(replay=tmp_path / "schedule.jsonl")


class _Looks(Toy):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


class _Closes(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _Hooks(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)


class _Manual(Toy):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        pytest.param(_Looks, {}, "on_before_optimizer_step cannot be called with gradients", id="hook"),
        pytest.param(_Closes, {}, "one that calls a closure is refused", id="closure"),
        pytest.param(_Hooks, {}, "gradient hooks on parameters are refused", id="gradient hook"),
        pytest.param(_Manual, {}, "needs automatic optimization", id="manual"),
        pytest.param(Toy, {"callbacks": [Guard(non_finite="skip")]}, "non_finite", id="guard"),
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
