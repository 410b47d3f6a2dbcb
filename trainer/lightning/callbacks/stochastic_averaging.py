"""StochasticWeightAveraging with Lightning's arguments, in Lightning's order of averages and rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR

from lockstep.callbacks._support.parameter_state import ParameterState
from lockstep.callbacks.training.finetuning import BATCH_NORMS
from lockstep.callbacks.training.weight_averaging import Averages
from lockstep.trainer.lightning.callbacks.adapters import WeightAveraging
from lockstep.trainer.lightning.utilities import MisconfigurationException, rank_zero_warn
from lockstep.trainer.setup.optimizers import SchedulerConfig

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer


class StochasticWeightAveraging(WeightAveraging):
    """The mean of the weights at the starts of the last epochs, which a fit that runs to its `max_epochs` ends with.

    From the first of them on `torch.optim.swa_utils.SWALR` sets the rates, in the place of the scheduler. Validation
    and checkpoints within the run have the weights that train, with the averages beside these. Raises ValueError at
    `fit` for layers of BatchNorm, whose statistics are not those of the averages, for several optimizers or
    schedulers, and for `avg_fn` if a strategy shards parameters. `device` changes nothing.
    """

    changes_model = True

    def __init__(
        self,
        swa_lrs: float | list[float],
        swa_epoch_start: int | float = 0.8,
        annealing_epochs: int = 10,
        annealing_strategy: str = "cos",
        avg_fn: Callable[..., Any] | None = None,
        device: Any = "cpu",
    ) -> None:
        rates = swa_lrs if isinstance(swa_lrs, list) else [swa_lrs]
        if not all(isinstance(rate, float) and rate > 0 for rate in rates):
            raise MisconfigurationException(f"swa_lrs must be a float above 0, or a list of such, got {swa_lrs!r}")
        fraction = isinstance(swa_epoch_start, float)
        if not (0 <= swa_epoch_start <= 1 if fraction else swa_epoch_start >= 1):
            raise MisconfigurationException(
                f"swa_epoch_start must be an int of at least 1, or a float from 0 to 1, got {swa_epoch_start!r}"
            )
        if avg_fn is not None and not callable(avg_fn):
            raise MisconfigurationException(f"avg_fn must be a function, got {avg_fn!r}")
        if annealing_strategy not in ("cos", "linear"):
            raise MisconfigurationException(f"annealing_strategy must be 'cos' or 'linear', got {annealing_strategy!r}")
        super().__init__(device, False, avg_fn)
        self._swa_lrs, self._swa_epoch_start = swa_lrs, swa_epoch_start
        self._annealing_epochs, self._annealing_strategy = annealing_epochs, annealing_strategy
        self._max_epochs = -1
        self._latest_update_epoch = -1
        self._rates: _Rates | None = None

    @property
    def swa_start(self) -> int:
        """The first epoch at whose start weights are averaged, from 0."""
        start = self._swa_epoch_start
        return max((int(start * self._max_epochs) if isinstance(start, float) else start) - 1, 0)

    @property
    def swa_end(self) -> int | float:
        """The last such epoch."""
        return self._max_epochs - 1 if self._max_epochs != -1 else float("inf")

    @property
    def n_averaged(self) -> int:
        """Updates so far."""
        return self.num_updates

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return False  # but at the start of epochs

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        if stage == "fit" and any(
            isinstance(layer, BATCH_NORMS) and layer.running_mean is not None for layer in module.modules()
        ):
            raise ValueError(
                f"{type(module).__name__} has layers of BatchNorm, and StochasticWeightAveraging has no statistics "
                "for its averages; use lockstep.callbacks.WeightAveraging(decay=None, use_buffers=True), "
                "or average in a callback of your own and call torch.optim.swa_utils.update_bn after fit"
            )

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState:
        self._averages = _Beside(super().parameter_state(trainer, module).parameters())
        self._latest_update_epoch = -1
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"latest_update_epoch": self._latest_update_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._latest_update_epoch = state_dict["latest_update_epoch"]

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        super().on_fit_start(trainer, module)
        configs = trainer.lr_scheduler_configs
        if len(trainer.optimizers) != 1 or len(configs) > 1 or not module.automatic_optimization:
            raise ValueError(
                "StochasticWeightAveraging needs automatic optimization with one optimizer and at most one scheduler, "
                f"but there are {len(trainer.optimizers)} and {len(configs)}; use lockstep.callbacks.WeightAveraging"
            )
        self._max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
        if isinstance(self._swa_epoch_start, float) and self._max_epochs == -1:
            raise ValueError(
                f"swa_epoch_start={self._swa_epoch_start} is a share of max_epochs, which is not set; give an int"
            )
        _check_number(self._swa_lrs, trainer.optimizers[0])
        if self._rates is None:
            self._rates = _Rates(trainer.optimizers[0], self._annealing_epochs, self._annealing_strategy)
            first = [dataclasses.replace(each, scheduler=_Until(each.scheduler, self._rates)) for each in configs]
            trainer.lr_scheduler_configs = [*first, SchedulerConfig(self._rates)]

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        epoch = trainer.current_epoch
        if not self.swa_start <= epoch <= self.swa_end or epoch <= self._latest_update_epoch:
            return
        assert self._rates is not None
        self._rates.begin(self._swa_lrs)
        self._update(trainer)
        self._latest_update_epoch = epoch

    def on_validation_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_validation_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        ended = self._max_epochs == -1 or trainer.current_epoch >= self._max_epochs
        if ended and self.num_updates:
            super().on_train_end(trainer, module)
        else:
            rank_zero_warn(
                f"the module keeps the weights of training: fit ended after {trainer.current_epoch} epochs, and "
                f"StochasticWeightAveraging averages from epoch {self.swa_start} on and puts the averages in their "
                f"place after epoch {self.swa_end}; lower swa_epoch_start, or train all of max_epochs"
            )

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        super().on_fit_end(trainer, module)
        self._rates = None

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        super().on_exception(trainer, module, exception)
        self._rates = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_rates": None}


class _Rates:
    """SWALR, once it has begun."""

    def __init__(self, optimizer: Optimizer, epochs: int, strategy: str) -> None:
        self.optimizer, self._epochs, self._strategy = optimizer, epochs, strategy
        self.scheduler: SWALR | None = None

    def begin(self, rates: float | list[float]) -> None:
        """Let the rates of now go to `rates`; nothing if they do."""
        if self.scheduler is not None:
            return
        _check_number(rates, self.optimizer)  # groups may have been added
        groups = self.optimizer.param_groups
        rates = rates if isinstance(rates, list) else [rates] * len(groups)
        for rate, group in zip(rates, groups, strict=True):
            group["initial_lr"] = rate
        self.scheduler = SWALR(self.optimizer, rates, self._epochs, self._strategy)  # type: ignore[arg-type]

    def step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {"swa": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler = None
        if state["swa"] is not None:
            groups = self.optimizer.param_groups
            now = [group["lr"] for group in groups]
            self.begin([group["swa_lr"] for group in groups])
            for rate, group in zip(now, groups, strict=True):
                group["lr"] = rate  # which SWALR sets at once where it does not anneal
            assert self.scheduler is not None
            self.scheduler.load_state_dict(state["swa"])


def _check_number(rates: float | list[float], optimizer: Optimizer) -> None:
    groups = len(optimizer.param_groups)
    if isinstance(rates, list) and len(rates) != groups:
        raise ValueError(f"swa_lrs has {len(rates)} rates, but the optimizer has {groups} groups; give one for each")


class _Until:
    """A scheduler that steps until SWALR begins."""

    def __init__(self, scheduler: Any, rates: _Rates) -> None:
        self._scheduler, self._rates = scheduler, rates

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._rates.scheduler is None:
            self._scheduler.step(*args, **kwargs)


class _Beside(Averages):
    """Averages that are saved beside the weights, in whose place they are at the end only."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        yield

    def tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        swapped = super().tensors()
        return {p: {"average": average} | swapped.get(p, {}) for p, average in self._average.items()}

    @torch.no_grad()
    def take(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        super().take(parameter, {"weights": parameter} | saved)
