"""The Trainer's arguments: one frozen record that checks itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from lockstep import callbacks
from lockstep.callbacks.base import Callback, Logger, check_local
from lockstep.strategies.base import Strategy
from lockstep.strategies.devices import device_count
from lockstep.trainer import lightning_names

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """What `Trainer(...)` takes.

    Where the work runs
        `strategy`: "auto", "single", "ddp", or a Strategy object with options.
        `devices`: devices (ranks) on this node, "auto" or -1 (every GPU, or one CPU process), or a list such as [0, 1].
        `accelerator`: "auto", "cpu" or "gpu".
        `num_nodes`: nodes; more than one needs a launcher such as torchrun.
        `precision`: "32-true", "tf32-true", "64-true", "bf16-mixed", "bf16-true" or "16-mixed".
    How long
        `max_epochs`: epochs; -1 or None for no limit. To fit needs one of the limits; the first that is reached counts.
        `max_steps`: optimizer steps; -1 or None for no limit.
        `max_time`: "DD:HH:MM:SS" or a timedelta, over all fits of the Trainer and restarts; None for no limit.
        `min_epochs`: epochs before which `should_stop` has no effect.
        `min_steps`: optimizer steps before which `should_stop` has no effect.
        `virtual_ranks`: cut each step into so many shares, a power of two, as if there were so many ranks: every number
            is then the same, bit for bit, on 1, 2, 4 … of them. The loader's batch size is that of a share.
    The step
        `accumulate_grad_batches`: micro-batches of each rank in one optimizer step.
        `split_batches`: the loader's batch size is the global batch of a step, split over ranks and micro-batches.
        `gradient_clip_val`: where gradients are clipped; None for no clipping.
        `gradient_clip_algorithm`: "norm" (of the global gradient) or "value".
    Validation and limits
        `val_check_interval`: batches (int) or fraction of an epoch (float) between validations.
        `check_val_every_n_epoch`: epochs between validations; None counts `val_check_interval` across epochs.
        `num_sanity_val_steps`: validation batches before training; -1 all, 0 none.
        `limit_train_batches`: training batches of each rank (int) or fraction (float).
        `limit_val_batches`: validation batches, likewise.
        `limit_test_batches`: test batches, likewise.
        `limit_predict_batches`: prediction batches, likewise.
        `overfit_batches`: train and validate on these first training batches, in order.
        `fast_dev_run`: one batch (or as many as given) of everything, nothing written.
        `reload_dataloaders_every_n_epochs`: call the module's or DataModule's train_dataloader and val_dataloader again
        every so many epochs of training, 0 never. A resumed run calls them as in the epoch in which they were due.
        `inference_mode`: changes nothing: evaluation runs under `torch.no_grad`, in which `torch.enable_grad` works, as
        sharded parameters must not become inference tensors.
    What is seen and kept
        `callbacks`: Callback objects.
        `logger`: True (TensorBoard), False, a Logger or a list of them.
        `log_every_n_steps`: optimizer steps between logged values.
        `enable_progress_bar`: show a progress bar.
        `enable_checkpointing`: add a ModelCheckpoint unless one is given.
        `enable_model_summary`: print a table of layers; None prints it with the progress bar.
        `default_root_dir`: folder of runs; a run is in `<default_root_dir>/<name>/version_<N>`.
    Reproducibility
        `seed`: seeds every random stream when a run begins; None uses the streams of the process as they are.
        `deterministic`: only deterministic algorithms of torch; "warn" warns where there is none instead of raising.
        `detect_anomaly`: during a run torch names the forward of a NaN that a backward finds; slow.
    Speed
        `compile`: True, or a dict of arguments of torch.compile, compiles the module's repeated blocks, or its
            submodules if it has none. Numbers are those of the plain module up to rounding, checkpoints are the same.
        `benchmark`: during a run cuDNN tries its algorithms and takes the fastest for each shape, so that rounding may
        differ from run to run; None leaves torch's setting.
        `profiler`: "simple" prints where the time went, "torch" writes a trace of some steps
        (`lockstep.callbacks.Profiler`).
    When something fails
        `max_restarts`: how often `fit` restarts ranks that died, from the newest checkpoint of the run. Above 0
            even a single rank gets a process of its own, so that the caller survives it.
    """

    strategy: str | Strategy = "auto"
    devices: int | str | list[int] = "auto"
    accelerator: str = "auto"
    num_nodes: int = 1
    precision: str | int = "32-true"
    virtual_ranks: int | None = None
    max_epochs: int | None = None
    max_steps: int | None = None
    max_time: str | timedelta | dict[str, float] | None = None
    min_epochs: int | None = None
    min_steps: int | None = None
    accumulate_grad_batches: int = 1
    split_batches: bool = False
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str = "norm"
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0
    fast_dev_run: int | bool = False
    reload_dataloaders_every_n_epochs: int = 0
    inference_mode: bool = False
    callbacks: Sequence[Callback] | Callback | None = None
    logger: bool | Logger | Sequence[Logger] = True
    log_every_n_steps: int = 50
    enable_progress_bar: bool = True
    enable_checkpointing: bool = True
    enable_model_summary: bool | None = None
    default_root_dir: str | Path = "runs"
    seed: int | None = None
    deterministic: bool | str = False
    detect_anomaly: bool = False
    compile: bool | dict[str, Any] = False
    benchmark: bool | None = None
    profiler: str | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError or TypeError for a value that no run can have; -1 steps or epochs become None, no limit."""
        for name in ("max_epochs", "max_steps"):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, None)
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Real) and not isinstance(value, int | float):  # of numpy
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, field.name, value)
            if field.type in ("bool", "bool | None") and value is not None and value not in (True, False):
                raise TypeError(f"{field.name} must be True or False, but {field.name}={value!r}")
        if self.deterministic not in (True, False, "warn"):
            raise ValueError(f"deterministic must be True, False or 'warn', but deterministic={self.deterministic!r}")
        for name, least in _LEAST.items():
            _check_at_least(name, getattr(self, name), least)
        for name in _BATCHES:
            _check_batches(name, getattr(self, name))
        self._check_validation_and_clipping()
        _check_order("epochs", self.min_epochs, self.max_epochs)
        _check_order("steps", self.min_steps, self.max_steps)
        if self.virtual_ranks is not None and self.virtual_ranks & (self.virtual_ranks - 1):
            below = 1 << (self.virtual_ranks.bit_length() - 1)
            raise ValueError(
                f"virtual_ranks must be a power of two, as shares are added in pairs, but virtual_ranks="
                f"{self.virtual_ranks}; use {below} or {2 * below}"
            )
        if self.benchmark and self.deterministic:
            raise ValueError(
                "benchmark=True may take another algorithm in each run, which deterministic=True forbids; remove one"
            )
        seed = self.seed
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
            raise ValueError(f"seed must be in [0, 2**63), but seed={self.seed!r}")
        given: Any = self.callbacks if isinstance(self.callbacks, Callback) else self.callbacks or []
        is_one = isinstance(given, Callback | str) or not isinstance(given, Iterable)
        given = [given] if is_one else list(given)
        for item in given:
            if not isinstance(item, Callback):
                raise TypeError(
                    f"callbacks must be Callback objects, but one is {item!r}; {_instead(item, 'Callback')}"
                )
        check_local("default_root_dir", self.default_root_dir)
        object.__setattr__(self, "callbacks", given)
        object.__setattr__(self, "default_root_dir", os.path.expanduser(self.default_root_dir))

    def _check_validation_and_clipping(self) -> None:
        if self.limit_train_batches == 0 or self.val_check_interval == 0:
            raise ValueError(
                "limit_train_batches and val_check_interval must be above 0; to turn validation off set "
                "limit_val_batches=0"
            )
        if self.check_val_every_n_epoch is None and not isinstance(self.val_check_interval, int):
            raise ValueError(
                "check_val_every_n_epoch=None counts batches across epochs, so val_check_interval must be a whole "
                "number, "
                f"but it is {self.val_check_interval!r}"
            )
        if self.gradient_clip_algorithm not in ("norm", "value"):
            raise ValueError(
                "gradient_clip_algorithm must be 'norm' or 'value', "
                f"but gradient_clip_algorithm={self.gradient_clip_algorithm!r}"
            )
        at: Any = self.gradient_clip_val
        if at is not None and (isinstance(at, bool) or not isinstance(at, Real) or not float(at) > 0):
            raise ValueError(
                f"gradient_clip_val must be a number above 0, or None for no clipping, but gradient_clip_val={at!r}"
            )

    @property
    def layout(self) -> dict[str, Any]:
        """What a strategy is built from, besides its name."""
        return {
            "devices": device_count(self.devices, self.accelerator),
            "accelerator": self.accelerator,
            "num_nodes": self.num_nodes,
            "precision": str(self.precision),
            "virtual_ranks": self.virtual_ranks,
        }

    def effective(self) -> TrainerArguments:
        """The arguments that hold: under `fast_dev_run` a few batches of everything and nothing written."""
        if not self.fast_dev_run:
            return self
        batches, given = int(self.fast_dev_run), list(self.callbacks)  # type: ignore[arg-type]
        return replace(
            self,
            fast_dev_run=batches,
            limit_train_batches=batches,
            limit_val_batches=batches,
            limit_test_batches=batches,
            limit_predict_batches=batches,
            max_epochs=1,
            min_epochs=None if self.min_epochs is None else min(self.min_epochs, 1),
            min_steps=None,
            max_steps=None,
            val_check_interval=None,
            check_val_every_n_epoch=1,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            callbacks=[item for item in given if not isinstance(item, (Logger, callbacks.ModelCheckpoint))],
        )

    def described(self) -> dict[str, Any]:
        """The arguments as they are written into the run's folder."""
        return {field.name: _described(getattr(self, field.name)) for field in fields(self)}

    def all_callbacks(self) -> list[Callback]:
        """The run's callbacks in the order in which they are called: loggers first, ModelCheckpoint last."""
        given = list(self.callbacks)  # type: ignore[arg-type]
        savers = [item for item in given if isinstance(item, callbacks.ModelCheckpoint)]
        if savers and not self.enable_checkpointing:
            raise ValueError(
                "enable_checkpointing=False contradicts a ModelCheckpoint among the callbacks; drop one of them"
            )
        if self.enable_checkpointing and not savers:
            savers = [callbacks.ModelCheckpoint()]
        rest = [item for item in given if not isinstance(item, (Logger, callbacks.ModelCheckpoint))]
        if self.max_time is not None:
            from lockstep.callbacks.timer import MaxTime, seconds  # here, so that `import lockstep` does not load it

            rest.append(MaxTime(duration=timedelta(seconds=seconds(self.max_time, "max_time"))))
        if self.profiler is not None:
            rest.append(callbacks.Profiler(self.profiler))
        summary = self.enable_progress_bar if self.enable_model_summary is None else self.enable_model_summary
        for kind, wanted in ((callbacks.ModelSummary, summary), (callbacks.ProgressBar, self.enable_progress_bar)):
            if wanted and not any(isinstance(item, kind) for item in rest):
                rest.append(kind())
        return [*self._loggers(given), *rest, *savers]

    def _loggers(self, given: list[Callback]) -> list[Callback]:
        loggers: list[Callback] = [item for item in given if isinstance(item, Logger)]
        if self.logger is True:
            if not loggers:
                loggers = [callbacks.TensorBoardLogger()]
        elif isinstance(self.logger, Logger):
            loggers.append(self.logger)
        elif self.logger:
            given_loggers: Any = self.logger
            loggers.extend(given_loggers if isinstance(given_loggers, (list, tuple)) else [given_loggers])
        wrong = next((item for item in loggers if not isinstance(item, Logger)), None)
        if wrong is not None:
            raise TypeError(
                f"logger must be True, False, a Logger or a list of them, but one is {wrong!r}; "
                f"{_instead(wrong, 'Logger')}"
            )
        return loggers


def _instead(given: Any, base: str) -> str:
    is_class = isinstance(given, type) and issubclass(given, Callback)
    return f"write {given.__name__}(…)" if is_class else f"subclass lockstep.callbacks.{base}"


_LEAST = {
    "max_epochs": 1,
    "max_steps": 1,
    "accumulate_grad_batches": 1,
    "log_every_n_steps": 1,
    "check_val_every_n_epoch": 1,
    "num_nodes": 1,
    "virtual_ranks": 1,
    "min_epochs": 0,
    "min_steps": 0,
    "reload_dataloaders_every_n_epochs": 0,
    "fast_dev_run": 0,
    "max_restarts": 0,
    "num_sanity_val_steps": -1,
}
_BATCHES = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "val_check_interval",
)


def takes_arguments(
    record: Callable[P, R],
) -> Callable[[Callable[[S, R], None]], Callable[Concatenate[S, P], None]]:
    """Decorate an `__init__` that takes a record: it is called with the record's arguments and has their signature."""

    def decorate(init: Callable[[S, R], None]) -> Callable[Concatenate[S, P], None]:
        parameters = inspect.signature(record).parameters

        def __init__(self: S, *args: P.args, **kwargs: P.kwargs) -> None:
            owner = init.__qualname__.split(".")[0]
            if args:
                raise TypeError(
                    f"{owner} takes its arguments by name, but got {args[0]!r}; write {owner}(max_epochs=…)"
                )
            for name in kwargs:
                if name not in parameters:
                    known = lightning_names.ARGUMENTS
                    raise TypeError(lightning_names.missing(f"{owner} has no argument", name, known, parameters))
            init(self, record(*args, **kwargs))

        shown = inspect.Signature(
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters.values()],
            return_annotation=None,
        )
        __init__.__signature__ = shown  # type: ignore[attr-defined]
        __init__.__qualname__, __init__.__doc__ = init.__qualname__, init.__doc__
        return __init__

    return decorate


def _check_at_least(name: str, value: Any, least: int) -> None:
    if name == "fast_dev_run" and isinstance(value, bool):
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ValueError(f"{name} must be a whole number of at least {least}, but {name}={value!r}")


def _check_order(what: str, least: int | None, most: int | None) -> None:
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_{what}={least} is more than max_{what}={most}; lower it")


def _check_batches(name: str, value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0 or (isinstance(value, float) and value > 1.0):
        raise ValueError(f"{name} must be a whole number of batches or a fraction in [0.0, 1.0], but {name}={value!r}")


def _described(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return f"{type(value).__module__}.{type(value).__qualname__}"
