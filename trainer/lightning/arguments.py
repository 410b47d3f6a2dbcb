"""Lightning's arguments of a Trainer as ours."""

from __future__ import annotations

from typing import Any

from lockstep import callbacks as _callbacks
from lockstep.callbacks.base import Callback
from lockstep.strategies.ddp import DDP
from lockstep.strategies.devices import device_count
from lockstep.trainer.lightning.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.trainer.lightning.callbacks.shown import ModelSummary, TQDMProgressBar
from lockstep.trainer.lightning.loggers import TensorBoardLogger
from lockstep.trainer.lightning.names import ACCEPTED
from lockstep.trainer.lightning_names import ARGUMENTS

_BAREBONES = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_MEASURED = {
    **_BAREBONES,
    "fast_dev_run": False,
    "detect_anomaly": False,
    "log_every_n_steps": 0,
    "profiler": None,
}
"""What `barebones` allows: that which has no part in the time of a step."""
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_ANY_CASE = ("auto", "ddp", "deepspeed", "fsdp", "single")
"""First words of Lightning's names of strategies, whose case does not matter."""


def ours(given: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in given.items() if value is not None}
    if "check_val_every_n_epoch" in given:
        arguments["check_val_every_n_epoch"] = given["check_val_every_n_epoch"]
    if arguments.pop("barebones", False):
        wrong = next((name for name, off in _MEASURED.items() if arguments.get(name, off) != off), None)
        if wrong is not None:
            raise ValueError(f"barebones=True turns {wrong} off, but {wrong}={arguments[wrong]!r}; remove one of them")
        arguments = _BAREBONES | arguments
        arguments.pop("log_every_n_steps", None)
    for name in ACCEPTED.keys() & arguments.keys():
        if arguments.pop(name) not in ACCEPTED[name]:
            raise TypeError(f"Trainer has no argument {name!r}; {ARGUMENTS[name]}")
    limits = (arguments.get(name) for name in ("max_epochs", "max_time"))
    timed = any(isinstance(item, _callbacks.Timer) for item in _callbacks_of(arguments))
    if not timed and all(limit is None for limit in limits) and arguments.get("max_steps", -1) == -1:
        arguments["max_epochs"] = 1000
    if arguments.get("gradient_clip_val") == 0:
        del arguments["gradient_clip_val"]
    if arguments.get("profiler") == "pytorch":
        arguments["profiler"] = "torch"
    _choose_strategy(arguments)
    _choose_callbacks(arguments)
    return arguments


def _choose_strategy(arguments: dict[str, Any]) -> None:
    """Give the names that Lightning has for ours, and the option that it has as an argument of the Trainer."""
    name = arguments.get("strategy", "auto")
    synchronizes = arguments.pop("sync_batchnorm", False)
    if not isinstance(name, str):
        if synchronizes:
            raise TypeError(f"Trainer has no argument 'sync_batchnorm'; {ARGUMENTS['sync_batchnorm']}")
        return
    if name.lower().partition("_")[0] in _ANY_CASE:
        name = arguments["strategy"] = name.lower()
    kind = name.removesuffix("_find_unused_parameters_true").removesuffix("_find_unused_parameters_false")
    devices = device_count(arguments.get("devices", "auto"), arguments.get("accelerator", "auto"))
    if kind in _DDP or (kind == "auto" and synchronizes and devices not in (1, "auto")):
        unused = name.endswith("_true")
        arguments["strategy"] = "ddp"
        if unused or synchronizes:
            arguments["strategy"] = DDP(find_unused_parameters=unused, sync_batchnorm=synchronizes)
    elif name == "single_device":
        arguments["strategy"] = "single"
    elif synchronizes and kind != "auto":
        raise TypeError(f"Trainer has no argument 'sync_batchnorm'; {ARGUMENTS['sync_batchnorm']}")


def _choose_callbacks(arguments: dict[str, Any]) -> None:
    arguments.setdefault("default_root_dir", ".")
    given = _callbacks_of(arguments)
    if arguments.get("logger", True) is True and not arguments.get("fast_dev_run"):
        arguments["logger"] = TensorBoardLogger(arguments["default_root_dir"])
    saves = arguments.get("enable_checkpointing", True) and not arguments.get("fast_dev_run")
    if saves and not any(isinstance(item, _callbacks.ModelCheckpoint) for item in given):
        given.append(ModelCheckpoint())
    for name, kind, default in (
        ("enable_model_summary", _callbacks.ModelSummary, ModelSummary),
        ("enable_progress_bar", _callbacks.ProgressBar, TQDMProgressBar),
    ):
        wanted, found = arguments.setdefault(name, True), [item for item in given if isinstance(item, kind)]
        if found and not wanted:
            raise ValueError(f"{name}=False contradicts a {kind.__name__} among the callbacks; drop one of them")
        if len(found) > 1:
            raise ValueError(f"callbacks has {len(found)} of {kind.__name__}, and a Trainer takes one; drop the others")
        if wanted and not found:
            given.append(default())
    arguments["callbacks"] = given


def _callbacks_of(arguments: dict[str, Any]) -> list[Callback]:
    given = arguments.get("callbacks") or []
    return [given] if isinstance(given, Callback) else list(given)


def savers(given: dict[str, Any]) -> list[_callbacks.ModelCheckpoint]:
    """The ModelCheckpoints that a run has without `fast_dev_run`."""
    found = [item for item in _callbacks_of(given) if isinstance(item, _callbacks.ModelCheckpoint)]
    return found or ([] if given.get("enable_checkpointing") is False else [ModelCheckpoint()])
