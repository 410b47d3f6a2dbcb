"""Timer: when it stops a run, and that the budget outlives restarts."""

from __future__ import annotations

import json
import pickle
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import lockstep.callbacks.timer
from lockstep.callbacks import Guard, ModelCheckpoint
from lockstep.callbacks.timer import Timer
from tests.trainer.toy import Net, loader, net, quiet

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
    assert (timer.start_time(), timer.end_time("validate"), timer.end_time("test")) == (5.0, 10.0, 114.0)
    timer.on_test_start(trainer, MODULE)
    assert (timer.start_time("test"), timer.end_time("test"), timer.start_time("predict")) == (114.0, None, None)


@pytest.mark.parametrize(
    ("duration", "message"),
    [
        ("12:00:00", "duration must read DD:HH:MM:SS, .* but it is '12:00:00'"),
        (timedelta(seconds=-1), "must not be below zero"),
        ({"fortnights": 1}, "takes numbers for weeks, days"),
    ],
)
def test_durations_are_checked(duration: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timer(duration)


def test_a_duration_of_zero_trains_what_the_minimum_asks_for() -> None:
    for options, steps in (({}, 0), ({"min_steps": 3}, 3)):
        trainer = quiet(max_epochs=5, callbacks=[Timer(timedelta(0))], **options)
        trainer.fit(net(), loader(4))
        assert trainer.global_step == steps


def test_max_time_beside_a_timer_of_ones_own() -> None:
    own = Timer()
    quiet(max_epochs=1, max_time="00:01:00:00", callbacks=[own]).fit(net(), loader(4))
    assert own.time_elapsed() > 0


def test_max_time_counts_on_from_a_checkpoint_that_had_it_as_a_timer(tmp_path: Path) -> None:
    former = Timer()
    quiet(max_steps=2, callbacks=[former, ModelCheckpoint(str(tmp_path))], enable_checkpointing=True).fit(
        net(), loader(16)
    )
    saved = next(folder for folder in tmp_path.iterdir() if (folder / "state.json").exists())
    trainer = quiet(max_steps=3, max_time="00:01:00:00")
    trainer.fit(net(), loader(16), ckpt_path=str(saved))
    (now,) = (item for item in trainer.callbacks if isinstance(item, Timer))
    assert (
        now.time_elapsed()
        > json.loads((saved / "state.json").read_text())["callbacks"]["Timer"]["time_elapsed"]["train"]
    )


def test_a_duration_of_days() -> None:
    assert Timer("01:02:03:04").time_remaining() == 86400 + 2 * 3600 + 3 * 60 + 4


class Slow(Net):
    """A step takes a second of `clock`; one of them finds a loss that is not a number."""

    def __init__(self, clock: Clock, nan_at: int = 0) -> None:
        super().__init__()
        self.__dict__["clock"], self.nan_at, self.calls = clock, nan_at, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 1
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == self.nan_at else 1)


def test_a_timer_has_all_its_time_in_another_run(clock: Clock) -> None:
    timer = Timer({"seconds": 3})
    for _ in range(2):
        trainer = quiet(max_epochs=2, callbacks=[timer])
        trainer.fit(Slow(clock), loader(16))
        assert (trainer.global_step, timer.time_elapsed()) == (4, 4), "the step that was under way is done"


@pytest.mark.parametrize("own", [True, False])
def test_a_second_fit_has_the_time_that_the_first_has_left(own: bool, clock: Clock) -> None:
    time: dict[str, Any] = {"callbacks": [Timer({"seconds": 3})]} if own else {"max_time": {"seconds": 3}}
    trainer, module = quiet(max_steps=2, max_epochs=None, **time), Slow(clock)
    trainer.fit(module, loader(16))
    trainer.max_steps = 9
    trainer.fit(module, loader(16))
    assert trainer.global_step == 4
    name = "Timer" if own else "max_time"
    with pytest.raises(ValueError, match=f"has trained for the 0:00:03 of its {name} already; make a new Trainer"):
        trainer.fit(module, loader(16))


def test_time_is_spent_when_a_run_goes_back_to_a_checkpoint(tmp_path: Path, clock: Clock) -> None:
    timer, saver = Timer({"seconds": 7}), ModelCheckpoint(str(tmp_path), every_n_train_steps=2)
    trainer = quiet(max_epochs=3, callbacks=[timer, saver, Guard(non_finite="roll_back")], enable_checkpointing=True)
    trainer.fit(Slow(clock, nan_at=4), loader(32))
    assert (trainer.global_step, timer.time_elapsed()) == (6, 8), "steps 3 and 4 were taken back"


def test_a_run_that_fails_ends_its_time(clock: Clock) -> None:
    timer = Timer()
    with pytest.raises(FloatingPointError):
        quiet(callbacks=[timer]).fit(Slow(clock, nan_at=2), loader(16))
    clock.now += 100
    assert timer.time_elapsed() == 2
