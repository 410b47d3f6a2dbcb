"""Trainer with Lightning's arguments and defaults."""

from __future__ import annotations

from typing import Any

from lockstep import callbacks as _callbacks
from lockstep.callbacks.base import Callback
from lockstep.strategies.ddp import DDP
from lockstep.strategies.devices import device_count
from lockstep.trainer.lightning.loggers import TensorBoardLogger
from lockstep.trainer.lightning.model_checkpoint import ModelCheckpoint
from lockstep.trainer.lightning.names import ACCEPTED
from lockstep.trainer.lightning_names import ARGUMENTS
from lockstep.trainer.trainer import Trainer as _Trainer

_BAREBONES = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")


class Trainer(_Trainer):
    """`lockstep.Trainer` with Lightning's arguments and defaults: 1,000 epochs if nothing limits a run, and runs in
    `lightning_logs/version_N`.

    It takes Lockstep's own arguments too. None stands for a default. Raises TypeError for an argument that is not
    offered, with what to write instead.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**_ours(arguments))

    def fit(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> None:
        """As `lockstep.Trainer.fit`; `weights_only` changes nothing, as no checkpoint is unpickled."""
        super().fit(*args, **kwargs)

    def validate(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[dict[str, float]]:
        """As `lockstep.Trainer.validate`."""
        return super().validate(*args, **kwargs)

    def test(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[dict[str, float]]:
        """As `lockstep.Trainer.test`."""
        return super().test(*args, **kwargs)

    def predict(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[Any] | None:
        """As `lockstep.Trainer.predict`; `return_predictions=None` returns them."""
        if kwargs.get("return_predictions", True) is None:
            del kwargs["return_predictions"]
        return super().predict(*args, **kwargs)


def _ours(given: dict[str, Any]) -> dict[str, Any]:
    arguments = {name: value for name, value in given.items() if value is not None}
    if arguments.pop("barebones", False):
        arguments = _BAREBONES | arguments
    for name in ACCEPTED.keys() & arguments.keys():
        if arguments.pop(name) not in ACCEPTED[name]:
            raise TypeError(f"Trainer has no argument {name!r}; {ARGUMENTS[name]}")
    limits = (arguments.get(name) for name in ("max_epochs", "max_time"))
    if all(limit is None for limit in limits) and arguments.get("max_steps", -1) == -1:
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
    given = arguments.get("callbacks") or []
    given = [given] if isinstance(given, Callback) else list(given)
    if arguments.get("logger", True) is True and not arguments.get("fast_dev_run"):
        arguments["logger"] = TensorBoardLogger(arguments["default_root_dir"])
    saves = arguments.get("enable_checkpointing", True) and not arguments.get("fast_dev_run")
    if saves and not any(isinstance(item, _callbacks.ModelCheckpoint) for item in given):
        given.append(ModelCheckpoint())
    arguments["callbacks"] = given
