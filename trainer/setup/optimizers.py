"""From any of the forms that `configure_optimizers` may return to named optimizers and scheduler configs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

FORMS = (
    "an optimizer; a list of them; (optimizers, schedulers); a dict with 'optimizer' and 'lr_scheduler'; or a dict of "
    "these by name"
)


@dataclass(frozen=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it steps. Raises ValueError or TypeError for what cannot be."""

    scheduler: Any
    name: str | None = None
    """What LearningRateMonitor calls it."""
    interval: str = "epoch"
    """"epoch" or "step" (optimizer steps)."""
    frequency: int = 1
    """Steps at every `frequency`-th interval."""
    reduce_on_plateau: bool | None = None
    """Whether it steps on the value of `monitor`, as a ReduceLROnPlateau always does."""
    monitor: str | None = None
    """Name of the metric that it is stepped on."""
    strict: bool = True
    """Whether a missing `monitor` is an error."""

    def __post_init__(self) -> None:
        on_plateau = bool(self.reduce_on_plateau) or isinstance(self.scheduler, ReduceLROnPlateau)
        object.__setattr__(self, "reduce_on_plateau", on_plateau)
        if self.interval not in ("epoch", "step"):
            raise ValueError(f"interval of an lr_scheduler must be 'epoch' or 'step', but interval={self.interval!r}")
        if not isinstance(self.frequency, Integral) or isinstance(self.frequency, bool) or self.frequency < 1:
            raise ValueError(
                f"frequency of an lr_scheduler must be a whole number of at least 1, but frequency={self.frequency!r}"
            )
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(self.scheduler, name, None)):
                raise TypeError(
                    f"a scheduler is saved with every checkpoint, but {type(self.scheduler).__name__} has no {name}; "
                    "define it"
                )


def parse(configured: Any) -> tuple[dict[str, Optimizer], list[SchedulerConfig]]:
    """Return (optimizers by name, schedulers). Optimizers without a name are called "0", "1", ....

    Raises TypeError or ValueError for a form that it does not know.
    """
    if configured is None:
        return {}, []
    if isinstance(configured, Mapping) and "optimizer" not in configured:
        named = {str(name): item for name, item in configured.items()}
    elif isinstance(configured, (list, tuple)) and len(configured) == 2 and isinstance(configured[0], (list, tuple)):
        optimizers, schedulers = configured
        schedulers = schedulers if isinstance(schedulers, (list, tuple)) else [schedulers]
        return {str(i): _optimizer(o) for i, o in enumerate(optimizers)}, [
            scheduler_of(s) for s in schedulers if s is not None
        ]
    elif isinstance(configured, (list, tuple)):
        named = {}
        for i, item in enumerate(configured):
            named[str(item.get("name", i)) if isinstance(item, Mapping) else str(i)] = item
    else:
        named = {"0": configured}
    optimizers, schedulers = {}, []
    for name, item in named.items():
        if isinstance(item, Mapping):
            if "frequency" in item:
                raise ValueError(
                    f"configure_optimizers gave optimizer {name!r} a frequency, but all optimizers step in each step; "
                    "set automatic_optimization = False and step them in turn, or give it to the dict of a scheduler"
                )
            unknown = set(item) - {"optimizer", "lr_scheduler", "monitor", "name"}
            if unknown or "optimizer" not in item:
                raise ValueError(
                    f"configure_optimizers may return {FORMS}, but {name!r} has the keys {sorted(map(str, item))}"
                )
            optimizers[name] = _optimizer(item["optimizer"])
            if item.get("lr_scheduler") is not None:
                schedulers.append(scheduler_of(item["lr_scheduler"], item.get("monitor")))
        else:
            optimizers[name] = _optimizer(item)
    return optimizers, schedulers


def _optimizer(value: Any) -> Optimizer:
    if not issubclass(type(value), Optimizer):
        raise TypeError(
            f"configure_optimizers may return {FORMS}, but it returned {type(value).__name__} where an optimizer "
            "belongs"
        )
    if "_optimizer_step_pre_hooks" not in vars(value):
        _complete(value)
    return value


def _complete(optimizer: Optimizer) -> None:
    """Give an optimizer that does not call `Optimizer.__init__` what that would have made, besides its groups."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"{type(optimizer).__name__} has no param_groups, by which an optimizer names what it trains; call "
            "super().__init__(params, defaults) in its __init__"
        )
    if not hasattr(optimizer, "defaults"):
        optimizer.defaults = {}
    if not hasattr(optimizer, "state"):
        optimizer.state = defaultdict(dict)
    Optimizer.__setstate__(optimizer, {})


def scheduler_of(value: Any, monitor: str | None = None) -> SchedulerConfig:
    """From a scheduler, or a dict of it with when it steps."""
    if isinstance(value, Mapping):
        if "scheduler" not in value:
            raise ValueError(
                f"an lr_scheduler given as a dict needs the key 'scheduler', but it has {sorted(map(str, value))}"
            )
        unknown = sorted(
            set(value) - {"scheduler", "interval", "frequency", "monitor", "name", "strict", "reduce_on_plateau"}
        )
        if unknown:
            raise ValueError(
                "an lr_scheduler dict may hold scheduler, interval, frequency, monitor, name and strict, but it has "
                f"{', '.join(unknown)}"
            )
        return SchedulerConfig(**{"monitor": monitor, **value})
    return SchedulerConfig(value, monitor=monitor)


def step_schedulers(run: RunState, module: Module, interval: str) -> None:
    """Step the schedulers that are due; in manual optimization the user's step does."""
    if not module.automatic_optimization:
        return
    done = run.progress.global_step if interval == "step" else run.progress.current_epoch
    for reader, config in enumerate(run.schedulers):
        if config.interval != interval:
            continue
        is_due = (done + 1) % config.frequency == 0
        metric: Any = None
        if config.reduce_on_plateau and interval == "step":
            metric = run.metrics.of_this_step(str(config.monitor), reader, run.strategy, wanted=is_due)
        if not is_due:
            continue
        if config.reduce_on_plateau and metric is None:
            value = run.callback_metrics.get(str(config.monitor))
            number = run.strategy.broadcast(None if value is None else float(value))  # one rank alone may have it
            metric = None if number is None else torch.tensor(number, dtype=torch.float64)
        if config.reduce_on_plateau and metric is None:
            if config.strict:
                raise ValueError(
                    f"a scheduler monitors {config.monitor!r}, which has not been logged when it is to step; "
                    f"logged are {', '.join(sorted(run.callback_metrics)) or 'none'}"
                )
            continue
        try:
            module.lr_scheduler_step(config.scheduler, metric)
        except (KeyError, ValueError) as error:
            if (why := _lacks_rates(config.scheduler)) is None:
                raise
            raise RuntimeError(why) from error


def _lacks_rates(scheduler: Any) -> str | None:
    """What to say of a scheduler, or of those in it, that was built before groups were added to its optimizer."""
    for part in (scheduler, getattr(scheduler, "scheduler", None), *getattr(scheduler, "_schedulers", ())):
        rates, groups = (getattr(part, "base_lrs", ()), getattr(getattr(part, "optimizer", None), "param_groups", ()))
        if 0 < len(rates) < len(groups):
            return (
                f"{type(part).__name__} has rates for {len(rates)} parameter groups, but its optimizer has "
                f"{len(groups)}, as some were added during the run; use a scheduler that takes the groups' own rates, "
                "as StepLR does, or give configure_optimizers all groups, those to be unfrozen later too"
            )
    return None
