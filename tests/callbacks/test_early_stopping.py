"""EarlyStopping: when it stops, why, and that a resumed run stops at the same check."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason


def start(callback: EarlyStopping, *, step: int = 0, **options: Any) -> Any:
    attributes = {
        "callback_metrics": {},
        "global_step": step,
        "current_epoch": 0,
        "global_rank": 0,
        "is_global_zero": True,
        "world_size": 1,
        "should_stop": False,
        "sanity_checking": False,
        "arguments": SimpleNamespace(fast_dev_run=False),
        "num_val_batches": [1],
        "print": print,
        "strategy": SimpleNamespace(broadcast=lambda value: value),
        "_run": SimpleNamespace(measured_at={}),
    }
    trainer: Any = SimpleNamespace(**(attributes | options))
    for hook, *args in (("setup", "fit"), ("on_fit_start",), ("on_train_start",)):
        getattr(callback, hook)(trainer, None, *args)
    return trainer


def checks(callback: EarlyStopping, trainer: Any, *values: float) -> int:
    """One epoch with one validation for each value; how many there were when the callback stopped the run."""
    for i, value in enumerate(values):
        trainer.global_step += 1
        trainer.callback_metrics["val/loss"] = torch.tensor(value)
        callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
        callback.on_train_epoch_end(trainer, None)  # type: ignore[arg-type]
        if trainer.should_stop:
            return i + 1
        trainer.current_epoch += 1
    return 0


def test_it_stops_after_patience_checks_without_improvement(capsys: pytest.CaptureFixture[str]) -> None:
    callback = EarlyStopping("val/loss", patience=2)
    trainer = start(callback)
    assert checks(callback, trainer, 3.0, 2.0, 2.5, 1.5, 1.5, 1.75, 1.0) == 6
    assert callback.wait_count == 2
    assert callback.stopped_epoch == 5
    assert callback.best_score.item() == 1.5
    assert callback.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert callback.stopping_reason_message == "val/loss = 1.75: 2 checks in a row without improvement over 1.5"
    assert capsys.readouterr().out == f"EarlyStopping: {callback.stopping_reason_message}\n"


@pytest.mark.parametrize(
    ("options", "values", "stops_at"),
    [
        ({"mode": "max", "patience": 1}, (1.0, 2.0, 1.5), 3),
        ({"patience": 0}, (2.0, 1.0, 1.0), 3),
        ({"min_delta": 0.5, "patience": 1}, (2.0, 1.4, 1.0), 3),
        ({"min_delta": -0.5, "patience": 1, "mode": "max"}, (1.0, 1.6, 2.0), 3),
        ({"stopping_threshold": 0.5}, (1.0, 0.5, 0.4), 3),
        ({"stopping_threshold": 0.9, "mode": "max"}, (0.5, 0.95), 2),
        ({"divergence_threshold": 10.0}, (1.0, 10.0, 11.0), 3),
        ({"divergence_threshold": 0.1, "mode": "max"}, (1.0, 0.05), 2),
        ({}, (1.0, math.nan), 2),
        ({}, (1.0, -math.inf), 2),
        ({"check_finite": False, "patience": 2}, (1.0, math.nan, 0.5, math.nan, math.nan), 5),
    ],
)
def test_criteria(options: dict[str, Any], values: tuple[float, ...], stops_at: int) -> None:
    callback = EarlyStopping("val/loss", **options)
    assert checks(callback, start(callback), *values) == stops_at
    reasons = {
        "stopping_threshold": EarlyStoppingReason.STOPPING_THRESHOLD,
        "divergence_threshold": EarlyStoppingReason.DIVERGENCE_THRESHOLD,
    }
    by_metric = math.isfinite(values[-1]) or "check_finite" in options
    usual = EarlyStoppingReason.PATIENCE_EXHAUSTED if by_metric else EarlyStoppingReason.NON_FINITE_METRIC
    assert callback.stopping_reason is next((reasons[name] for name in options if name in reasons), usual)
    assert math.isfinite(callback.best_score)


def test_a_resumed_run_stops_at_the_same_check() -> None:
    values = (3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.8)
    whole = EarlyStopping("val/loss", patience=3)
    assert checks(whole, start(whole), *values) == 7
    for cut in range(1, 7):
        first = EarlyStopping("val/loss", patience=3)
        checks(first, start(first), *values[:cut])
        second = EarlyStopping("val/loss", patience=3)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.stopping_reason is EarlyStoppingReason.NOT_STOPPED and not second.stopping_reason
        assert cut + checks(second, start(second, step=cut), *values[cut:]) == 7
        assert second.state_dict() == whole.state_dict() | {"stopped_epoch": 6 - cut}


def test_a_run_that_is_resumed_where_it_had_stopped_stops_unless_more_is_allowed_now(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = EarlyStopping("val/loss", patience=2)
    assert checks(first, start(first), 1.0, 1.0, 1.0) == 3
    capsys.readouterr()
    same, patient = EarlyStopping("val/loss", patience=2), EarlyStopping("val/loss", patience=4)
    same.load_state_dict(first.state_dict())
    assert same.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED and same.stopping_reason
    same.load_state_dict(EarlyStopping("val/loss").state_dict())  # saved before the first check
    assert same.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    same.load_state_dict(first.state_dict())
    patient.load_state_dict(first.state_dict())
    assert start(same, step=3).should_stop
    assert "the resumed run had already stopped: val/loss = 1: 2 checks" in capsys.readouterr().out
    trainer = start(patient, step=3)
    assert not trainer.should_stop
    assert checks(patient, trainer, 1.0, 1.0) == 2


def test_a_second_run_with_the_same_callback_starts_from_scratch() -> None:
    callback = EarlyStopping("val/loss", patience=1)
    assert checks(callback, start(callback), 1.0, 1.0) == 2
    assert checks(callback, start(callback), 3.0, 2.0, 2.0) == 3
    assert moments(callback, start(callback), "ev") == [0, 0], (
        "no validation of this run is overdue after its first epoch"
    )


def test_state_of_another_shape_is_refused() -> None:
    callback = EarlyStopping("val/loss")
    state = callback.state_dict()
    with pytest.raises(ValueError, match="saved state of EarlyStopping must have the keys"):
        callback.load_state_dict({"wait_count": 1})
    for name, values in {
        "wait_count": (None, -1, 0.5, True, "x", []),
        "stopped_epoch": (None, -1, [[1]]),
        "stopping_reason": (0.5, False, []),
        "best_score": (None, "x", [], [[1]], True, 2**1200),
        "last_score": (None, "1", [], {}),
        "check_on_train_epoch_end": (2, "x", [], {}),
    }.items():
        for value in values:
            with pytest.raises(ValueError, match=f"saved state of EarlyStopping has no valid {name}, but "):
                callback.load_state_dict({**state, name: value})
    callback.load_state_dict({**state, "best_score": math.nan, "last_score": -math.inf})


def test_sanity_check_validate_and_fast_dev_run_do_not_count() -> None:
    callback = EarlyStopping("val/loss", patience=0)
    trainer = start(callback, sanity_checking=True)
    trainer.callback_metrics["val/loss"] = torch.tensor(math.nan)
    callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
    trainer.sanity_checking = False
    callback.setup(trainer, None, "validate")  # type: ignore[arg-type]
    callback.on_validation_end(trainer, None)  # type: ignore[arg-type]
    assert not trainer.should_stop
    assert checks(callback, start(callback, arguments=SimpleNamespace(fast_dev_run=True)), math.nan, math.nan) == 0


# ---- the moment ------------------------------------------------------------------------------------


def moments(callback: EarlyStopping, trainer: Any, epochs: str) -> list[int]:
    """Run epochs of 'v' (validation logs val/loss), 'e' (the epoch ends and logs train/loss), all worse and worse; the
    wait counts."""
    counts = []
    for position, moment in enumerate(epochs):
        trainer.global_step += 1
        name = "val/loss" if moment == "v" else "train/loss"
        trainer.callback_metrics[name] = torch.tensor(float(position))
        hook: Any = callback.on_validation_end if moment == "v" else callback.on_train_epoch_end
        hook(trainer, None)
        counts.append(callback.wait_count)
    return counts


@pytest.mark.parametrize(
    ("monitor", "option", "epochs", "counts"),
    [
        ("val/loss", None, "vvevve", [0, 1, 1, 2, 3, 3]),
        ("val/loss", None, "evee", [0, 0, 0, 0]),
        ("train/loss", None, "vevve", [0, 0, 0, 0, 1]),
        ("train/loss", None, "ee", [0, 1]),
        ("val/loss", True, "vvevve", [0, 0, 0, 0, 0, 1]),
    ],
)
def test_the_metric_is_read_when_it_is_fresh(monitor: str, option: bool | None, epochs: str, counts: list[int]) -> None:
    callback = EarlyStopping(monitor, patience=100, check_on_train_epoch_end=option)
    assert moments(callback, start(callback), epochs) == counts


def test_the_moment_is_kept_over_a_resume() -> None:
    first = EarlyStopping("val/loss", patience=100)
    moments(first, start(first), "ve")
    second = EarlyStopping("val/loss", patience=100)
    second.load_state_dict(first.state_dict())
    trainer = start(second, step=2)
    trainer.callback_metrics["val/loss"] = torch.tensor(9.0)
    assert moments(second, trainer, "ev") == [0, 1]


def test_a_metric_that_nothing_logs_is_an_error_once_it_should_be_there() -> None:
    callback = EarlyStopping("val/los")
    trainer = start(callback)
    moments(callback, trainer, "v")
    with pytest.raises(
        ValueError, match=r"EarlyStopping monitors 'val/los', which was not logged: .*: train/loss, val/loss"
    ):
        moments(callback, trainer, "e")
    callback = EarlyStopping("val/los", check_on_train_epoch_end=False)
    with pytest.raises(ValueError, match="val/loss"):
        moments(callback, start(callback), "v")
    callback = EarlyStopping("val/loss")
    with pytest.raises(ValueError, match="train/loss"):
        moments(callback, start(callback, num_val_batches=[]), "e")

    lax = EarlyStopping("val/los", strict=False)
    trainer = start(lax)
    with pytest.warns(UserWarning, match="'val/los'") as caught:
        moments(lax, trainer, "veve")
    assert len(caught) == 1
    assert not trainer.should_stop


# ---- printing ----------------------------------------------------------------------------------------


def test_verbose_prints_improvements_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def said(**options: Any) -> str:
        rank = options.pop("rank")
        callback = EarlyStopping("val/loss", **options)
        checks(callback, start(callback, global_rank=rank, is_global_zero=rank == 0, world_size=2), 2.0, 1.5)
        return capsys.readouterr().out

    line = (
        "EarlyStopping on rank {}: val/loss improved from inf to 2\nEarlyStopping on rank {}: val/loss improved from 2 "
        "to 1.5\n"
    )
    assert said(verbose=True, rank=1) == line.format(1, 1)
    assert said(verbose=True, log_rank_zero_only=True, rank=1) == ""
    assert said(verbose=True, log_rank_zero_only=True, rank=0) == line.format(0, 0)
    assert said(rank=0) == ""


def test_state_keys_differ_by_metric_and_mode() -> None:
    assert (
        len({EarlyStopping("a").state_key, EarlyStopping("b").state_key, EarlyStopping("a", mode="max").state_key}) == 3
    )


@pytest.mark.parametrize("options", [{"mode": "auto"}, {"patience": -1}])
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"got .*{next(iter(options.values()))}"):
        EarlyStopping("val/loss", **options)
