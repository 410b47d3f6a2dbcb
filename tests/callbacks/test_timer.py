"""Timer: when it stops a run, and that the budget outlives restarts."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import lockstep.callbacks.timer
from lockstep.callbacks.timer import Timer

MODULE: Any = nn.Identity()


class Clock:
    now = 5.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lockstep.callbacks.timer, "time", clock)
    return clock


def make_trainer() -> Any:
    return SimpleNamespace(should_stop=False, is_global_zero=True, global_step=0)


def train(timer: Timer, clock: Clock, trainer: Any, num_batches: int) -> int:
    """Run up to `num_batches` batches of one second each, as one epoch; return how many ran."""
    timer.on_train_start(trainer, MODULE)
    done = 0
    while done < num_batches and not trainer.should_stop:
        clock.now += 1
        done += 1
        trainer.global_step += 1
        timer.on_train_batch_end(trainer, MODULE, None, None, done - 1)
    timer.on_train_epoch_end(trainer, MODULE)
    return done


def test_training_stops_when_the_time_is_used_up_across_restarts(clock: Clock) -> None:
    first = Timer("00:00:00:10")
    assert train(first, clock, make_trainer(), 6) == 6
    saved = json.loads(json.dumps(first.state_dict()))
    assert first.time_remaining() == 4

    clock.now = 123.0  # another process
    resumed, trainer = pickle.loads(pickle.dumps(Timer(timedelta(seconds=10)))), make_trainer()
    resumed.load_state_dict(saved)
    assert train(resumed, clock, trainer, 100) == 4
    assert trainer.should_stop
    assert (resumed.time_elapsed(), resumed.time_remaining()) == (10, 0)

    spent, trainer = Timer({"seconds": 10}), make_trainer()
    spent.load_state_dict(resumed.state_dict())
    assert train(spent, clock, trainer, 100) == 0, "nothing is left"


def test_by_epoch_the_epoch_is_finished_first(clock: Clock) -> None:
    timer, trainer = Timer({"seconds": 3}, interval="epoch"), make_trainer()
    assert train(timer, clock, trainer, 10) == 10
    assert trainer.should_stop


def test_stages_are_measured_apart(clock: Clock) -> None:
    timer, trainer = Timer(), make_trainer()
    timer.on_train_start(trainer, MODULE)
    clock.now += 2
    timer.on_validation_start(trainer, MODULE)
    clock.now += 3
    timer.on_validation_end(trainer, MODULE)
    timer.on_train_end(trainer, MODULE)
    clock.now += 100
    timer.on_test_start(trainer, MODULE)
    clock.now += 4
    timer.teardown(trainer, MODULE, "test")  # it raised
    assert [timer.time_elapsed(stage) for stage in ("train", "validate", "test", "predict")] == [5, 3, 4, 0]
    assert timer.time_remaining() is None
    assert not trainer.should_stop


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        ("12:00:00", "duration must read DD:HH:MM:SS, .* but it is '12:00:00'"),
        ("00:00:00:00", "longer than zero"),
        ({"fortnights": 1}, "takes numbers for weeks, days"),
    ],
)
def test_durations_are_checked(duration: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timer(duration)


def test_a_duration_of_days() -> None:
    assert Timer("01:02:03:04").time_remaining() == 86400 + 2 * 3600 + 3 * 60 + 4
