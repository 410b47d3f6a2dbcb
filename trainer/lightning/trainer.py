"""Trainer with Lightning's arguments and defaults."""

from __future__ import annotations

import math
import os
from typing import Any

from torch import Tensor

from lockstep import callbacks as _callbacks
from lockstep.callbacks.base import Callback, Logger
from lockstep.strategies.ddp import DDP
from lockstep.strategies.devices import device_count, resolve_accelerator
from lockstep.trainer.facts import TrainerState
from lockstep.trainer.lightning.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.trainer.lightning.callbacks.shown import ModelSummary, TQDMProgressBar
from lockstep.trainer.lightning.loggers import TensorBoardLogger
from lockstep.trainer.lightning.loops import EvaluationLoop, FitLoop, PredictionLoop
from lockstep.trainer.lightning.names import ACCEPTED
from lockstep.trainer.lightning.parsing import from_environment
from lockstep.trainer.lightning.types import RunningStage, TrainerFn, TrainerStatus
from lockstep.trainer.lightning.utilities import MisconfigurationException
from lockstep.trainer.lightning_names import ARGUMENTS
from lockstep.trainer.metrics.reduction import of_kind
from lockstep.trainer.setup import compilation
from lockstep.trainer.trainer import Trainer as _Trainer

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
_DEFAULTS = {
    "limit_train_batches": 1.0,
    "limit_val_batches": 1.0,
    "limit_test_batches": 1.0,
    "limit_predict_batches": 1.0,
    "val_check_interval": 1.0,
    "min_epochs": 0,
}
"""What arguments are where they limit nothing, for code that computes with them."""
_NOTHING = ("max_epochs", "max_steps", "limit_train_batches")
"""Arguments of which 0 lets `fit` train nothing."""
_DDP = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")
_ANY_CASE = ("auto", "ddp", "deepspeed", "fsdp", "single")
"""First words of Lightning's names of strategies, whose case does not matter."""


class Trainer(_Trainer):
    """`lockstep.Trainer` with Lightning's arguments and defaults: 1,000 epochs if nothing limits a run, and runs in
    `lightning_logs/version_N`.

    It takes Lockstep's own arguments too. None stands for a default, and `PL_TRAINER_MAX_EPOCHS` and the like in the
    environment for what is not given. Raises TypeError for an argument that is not offered, with what to write instead,
    and MisconfigurationException, a ValueError, for a value that is not possible.
    """

    def __init__(self, **arguments: Any) -> None:
        self._barebones = bool(arguments.get("barebones"))
        self._predictions: list[Any] = []
        given = from_environment() | arguments
        zero = {name for name in _NOTHING if name in given and _is_zero(given[name])}
        try:
            super().__init__(**_ours({name: value for name, value in given.items() if name not in zero}))
        except ValueError as error:
            raise MisconfigurationException(str(error)) from None
        zero = set() if self.fast_dev_run else zero
        self._trains_none = "limit_train_batches" in zero
        self._is_open = given.get("max_epochs") is None and not self.fast_dev_run
        self._idle = _savers(given) if self.fast_dev_run else []
        if "max_epochs" in zero:
            self._run.max_epochs = 0
        if "max_steps" in zero or self._trains_none:
            self._run.max_steps = 0

    @property
    def barebones(self) -> bool:
        """Whether all that takes time beside the steps is turned off."""
        return self._barebones

    @property
    def accelerator(self) -> str:
        """ "cpu" or "gpu"; what "auto" stands for is found by now."""
        return "cpu" if resolve_accelerator(self.arguments.accelerator) == "cpu" else "gpu"

    @property
    def max_epochs(self) -> int | None:
        """The last epoch's number; -1 if only steps or time limit the run, and None before `fit` if it is not given."""
        own = super().max_epochs
        return None if self._is_open else -1 if own is None else own

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._limit_epochs(value)

    def _limit_epochs(self, value: int | None) -> None:
        self._is_open = False
        self._run.max_epochs = None if value == -1 else value

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps; -1 for no limit, and the batches of `fast_dev_run`."""
        steps = self.arguments.max_steps if self._trains_none else super().max_steps
        return int(self.arguments.fast_dev_run) or -1 if steps is None else steps

    @max_steps.setter
    def max_steps(self, value: int | None) -> None:
        self._run.max_steps = None if value == -1 else value

    @property
    def loggers(self) -> list[Logger]:
        """All of them. Other ones can be set between runs."""
        return super().loggers

    @loggers.setter
    def loggers(self, loggers: list[Logger] | None) -> None:
        if self._run.active:
            raise RuntimeError(f"loggers of a Trainer cannot be set while it runs {self._run.stage}; set them before")
        for logger in loggers or ():
            if not isinstance(logger, Logger):
                raise TypeError(f"a logger of a Trainer must be a Logger, but one is {logger!r}")
            logger.run_dir = None
        self._run.log_dir = None  # the next run has a folder of its own
        self._run.callbacks = [*(loggers or ()), *(c for c in self._run.callbacks if not isinstance(c, Logger))]

    @property
    def logger(self) -> Logger | None:
        """The first logger; in a `fast_dev_run` one that writes nothing. Another one can be set between runs."""
        return super().logger

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self.loggers = [] if logger is None else [logger]

    @property
    def checkpoint_callback(self) -> _callbacks.ModelCheckpoint | None:
        """The first ModelCheckpoint; in a `fast_dev_run` it saves nothing."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[_callbacks.ModelCheckpoint]:
        """All of them; in a `fast_dev_run` they save nothing."""
        return super().checkpoint_callbacks or self._idle

    @property
    def log_dir(self) -> str | None:
        """Folder of the run, before it that of the first logger; `default_root_dir` without a logger."""
        own = super().log_dir
        return (self.loggers[0].log_dir or own) if self.loggers else own or str(self.arguments.default_root_dir)

    @property
    def num_sanity_val_steps(self) -> int | float:
        """Batches of the validation before training; infinity for all."""
        steps = self.arguments.num_sanity_val_steps
        return math.inf if steps < 0 else steps

    @property
    def progress_bar_callback(self) -> _callbacks.ProgressBar | None:
        """The progress bar; None with `enable_progress_bar=False`."""
        return next((item for item in self.callbacks if isinstance(item, _callbacks.ProgressBar)), None)

    @property
    def early_stopping_callbacks(self) -> list[_callbacks.EarlyStopping]:
        """All of them."""
        return [item for item in self.callbacks if isinstance(item, _callbacks.EarlyStopping)]

    @property
    def state(self) -> TrainerState:
        """As `lockstep.Trainer.state`, with members of Lightning's enums, which are equal to the strings."""
        status, fn, stage = super().state
        return TrainerState(TrainerStatus(status), fn and TrainerFn(fn), stage and RunningStage(stage))

    @property
    def fast_dev_run(self) -> int | bool:
        """The batches of a trial run; True for 1."""
        batches = self.arguments.fast_dev_run
        return True if batches == 1 else batches

    @property
    def ckpt_path(self) -> str | None:
        """Path of the checkpoint that the last run began with."""
        return self._run.begins_from

    @property
    def evaluating(self) -> bool:
        """Whether validation or a test runs, the validation before training included."""
        return self.validating or self.testing or self.sanity_checking

    @property
    def enable_validation(self) -> bool:
        """Whether `fit` validates."""
        return any(self.num_val_batches)

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of the validation before training, for each loader."""
        return [min(self.num_sanity_val_steps, batches) for batches in self.num_val_batches]

    @property
    def num_test_batches(self) -> list[int | float]:
        """Batches of each rank in a test, for each loader."""
        return self._run.evaluation_batches["test"]

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each rank in `predict`, for each loader."""
        return self._run.evaluation_batches["predict"]

    @property
    def device_ids(self) -> list[int]:
        """The devices of this node, which are always the first ones that torch sees."""
        return list(range(self.num_devices))

    @property
    def progress_bar_metrics(self) -> Any:
        """What `self.log(…, prog_bar=True)` shows, as floats."""
        shown: dict[str, Tensor] = super().progress_bar_metrics
        return {name: float(value) for name, value in shown.items()}

    @property
    def fit_loop(self) -> FitLoop:
        """Where training is, and its limits."""
        return FitLoop(self)

    @property
    def validate_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self, "val")

    @property
    def test_loop(self) -> EvaluationLoop:
        return EvaluationLoop(self, "test")

    @property
    def predict_loop(self) -> PredictionLoop:
        return PredictionLoop(self, "predict")

    def __getattr__(self, name: str) -> Any:
        if name == "limit_train_batches" and self._trains_none:
            return 0
        value = super().__getattr__(name)
        if name in ("limit_train_batches", "limit_val_batches") and self.arguments.overfit_batches:
            return self.arguments.overfit_batches
        return _DEFAULTS[name] if value is None and name in _DEFAULTS else value

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a run, with a module in the place of what torch.compile has made of it; it is compiled as by
        `Trainer(compile=True)`."""
        given = args[0] if args else kwargs.get("model")
        plain = getattr(given, "_orig_mod", given)
        options = self.arguments.compile or plain is not given
        self._run.compile_options = compilation.check(options, self._run.strategy)
        if plain is not given:
            kwargs.pop("model", None)
            args = (plain, *args[1:])
        return args

    def fit(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> None:
        """As `lockstep.Trainer.fit`; `weights_only` changes nothing, as no checkpoint is unpickled."""
        args = self._plain(args, kwargs)
        searched = next((word for word in (kwargs.get("ckpt_path"), *args[4:]) if word in ("auto", "last")), None)
        if searched is not None and not getattr(self.checkpoint_callback, "dirpath", None):
            for logger in self.loggers:
                if getattr(logger, "took_version", False) and logger.run_dir is None:
                    raise ValueError(
                        f"ckpt_path={searched!r} looks for the newest version, but logger.log_dir was read before fit, "
                        f"which has taken version {logger.version}; give the logger version=, or read log_dir in setup"
                    )
        self._is_open = False
        for saver in self._idle:
            saver.dirpath = saver.dirpath or os.path.abspath(
                os.path.join(self.arguments.default_root_dir, "checkpoints")
            )
        super().fit(*args, **kwargs)

    def validate(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[dict[str, float]]:
        """As `lockstep.Trainer.validate`; a value logged per step and per epoch is there once."""
        return _of_epochs(super().validate(*self._plain(args, kwargs), **kwargs))

    def test(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[dict[str, float]]:
        """As `lockstep.Trainer.test`; a value logged per step and per epoch is there once."""
        return _of_epochs(super().test(*self._plain(args, kwargs), **kwargs))

    def predict(self, *args: Any, weights_only: bool | None = None, **kwargs: Any) -> list[Any] | None:
        """As `lockstep.Trainer.predict`; `return_predictions=None` returns them."""
        if kwargs.get("return_predictions", True) is None:
            del kwargs["return_predictions"]
        returned = super().predict(*self._plain(args, kwargs), **kwargs)
        self._predictions = returned or []
        return returned


def _of_epochs(returned: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: v for name, v in found.items() if of_kind(name, "epoch") not in found} for found in returned]


def _ours(given: dict[str, Any]) -> dict[str, Any]:
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


def _savers(given: dict[str, Any]) -> list[_callbacks.ModelCheckpoint]:
    """The ModelCheckpoints that a run has without `fast_dev_run`."""
    found = [item for item in _callbacks_of(given) if isinstance(item, _callbacks.ModelCheckpoint)]
    return found or ([] if given.get("enable_checkpointing") is False else [ModelCheckpoint()])


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0
