"""WeightAveraging: averages of the weights (EMA, SWA) that are validated and saved in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from lockstep.callbacks._support.monitored_metric import check_state, is_count, is_count_or_none
from lockstep.callbacks._support.parameter_state import ParameterState, is_held, local
from lockstep.callbacks.base import Callback, check_number

if TYPE_CHECKING:
    from lockstep import Module, Trainer

_SAVED = {"num_updates": is_count, "last_step": is_count_or_none, "ended": lambda n: n == -1 or is_count_or_none(n)}


class WeightAveraging(Callback):
    """Keep a running average of the trained weights, and validate, save and return it in their place.

    After each update `average = decay * average + (1 - decay) * weights` (an exponential moving average, EMA), or
    with `decay=None` the mean of all updates (stochastic weight averaging, Izmailov et al. 2018, arXiv:1803.05407).
    The first update copies the weights. Averages are sharded as the parameters are and need as much memory as these,
    in float32 at least.

    In validation the module has the averages, and so have the weights of each checkpoint, beside which it keeps those
    that train: a resumed run is the run that was never stopped. After `fit` the module has the averages. Buffers,
    such as the running statistics of BatchNorm, stay those of training, unless `use_buffers` is True.

    Args:
        decay: Weight of the old average, above 0 and below 1; None for the mean of all updates.
        update_every_n_steps: Optimizer steps between updates; None to update after each epoch instead.
        update_starting_at_step: `global_step` before which nothing is averaged.
        update_starting_at_epoch: `current_epoch` before which nothing is averaged.
        use_buffers: Average buffers of floating-point numbers too.

    Raises RuntimeError at the start of `fit` under a strategy that keeps weights in a layout of its own (DeepSpeed).
    Override `should_update` for another schedule.
    """

    def __init__(
        self,
        decay: float | None = 0.999,
        *,
        update_every_n_steps: int | None = 1,
        update_starting_at_step: int = 0,
        update_starting_at_epoch: int = 0,
        use_buffers: bool = False,
    ) -> None:
        for name, start in (
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            check_number("WeightAveraging", name, start, 0, whole=True)
        check_number("WeightAveraging", "decay", decay, optional=True)
        if decay is not None and not 0 < decay < 1:
            raise ValueError(f"decay must be above 0 and below 1, or None for the mean of all updates, got {decay!r}")
        if update_every_n_steps is not None and (
            isinstance(update_every_n_steps, bool)
            or not isinstance(update_every_n_steps, int)
            or update_every_n_steps < 1
        ):
            raise ValueError(
                "update_every_n_steps must be a whole number of at least 1, or None to update after each epoch, "
                f"got {update_every_n_steps!r}"
            )
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self.use_buffers = use_buffers
        self._averages: Averages | None = None
        self._num_updates = 0
        self._last_step: int | None = None  # the last step, and the last epoch, whose end this has seen
        self._ended: int | None = None  # None: not known

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update now. Called with `step_idx`, from 0, after each optimizer step, and with `epoch_idx`, from
        0, after each epoch; on every rank, and must return the same on all."""
        if epoch_idx is not None:
            return self.update_every_n_steps is None and epoch_idx >= self.update_starting_at_epoch
        if self.update_every_n_steps is None or step_idx is None or step_idx < self.update_starting_at_step:
            return False
        return (step_idx - self.update_starting_at_step) % self.update_every_n_steps == 0

    def multi_average(self) -> Callable[[list[Tensor], list[Tensor], int], Any]:
        """What takes weights into averages, as `multi_avg_fn` in `torch.optim.swa_utils`; it gets the rank's shards."""
        return get_swa_multi_avg_fn() if self.decay is None else get_ema_multi_avg_fn(self.decay)

    @property
    def num_updates(self) -> int:
        """Updates so far in this fit, or in the last one."""
        return self._num_updates if self._averages is None else self._averages.num_updates

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState:
        if any(isinstance(item, WeightAveraging) and item is not self for item in trainer.callbacks):
            raise ValueError("only one WeightAveraging can put its averages in the weights' place; give one of them")
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._averages = Averages(
            (parameter for group in groups for parameter in group["params"]),
            BufferAverages(module, trainer.strategy) if self.use_buffers else None,
        )
        self._last_step = self._ended = None
        return self._averages

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"num_updates": self.num_updates, "last_step": self._last_step, "ended": self._ended}
        if self.num_updates and self._averages is not None and self._averages.buffers is not None:
            state["buffers"] = self._averages.buffers.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {"last_step": None, "ended": None} | state_dict  # which checkpoints of old do not say
        check_state("WeightAveraging", state_dict, _SAVED)
        self._num_updates, self._last_step, self._ended = map(state_dict.__getitem__, _SAVED)
        if self._averages is not None:
            self._averages.num_updates = self._num_updates
            saved, buffers = state_dict.get("buffers"), self._averages.buffers
            if buffers is not None:
                if saved is None and self._num_updates and buffers.names:
                    raise ValueError(
                        f"it holds averages, but none of buffers such as {buffers.names[0]!r}; give WeightAveraging "
                        "use_buffers=False to continue that run"
                    )
                buffers.load_state_dict(saved or {})
            elif saved is not None and saved["average"]:
                raise ValueError(
                    "it holds averages in the place of buffers, beside those of training; give WeightAveraging "
                    "use_buffers=True to continue that run"
                )

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.catch_up(trainer)

    def catch_up(self, trainer: Trainer) -> None:
        """Do in a resumed run, once, what a checkpoint lacks that a callback before this saved at the end of a step or
        an epoch. Every rank calls it, once the checkpoint is loaded."""
        if self._last_step is None:
            self._last_step = trainer.global_step
        self._end_step(trainer)
        is_closed, epoch = trainer._run.progress.epoch_closed, trainer.current_epoch
        if is_closed and self._ended is not None and self._ended < epoch:
            self._end_epoch(trainer)
        self._ended = epoch if is_closed else epoch - 1

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_step(trainer)

    def _end_step(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step == self._last_step:  # within an accumulation window, or the step was skipped
            return
        self._last_step = step
        starts = trainer.current_epoch >= self.update_starting_at_epoch
        if starts and self.should_update(step_idx=step - 1):
            self._update(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self._end_epoch(trainer)

    def _end_epoch(self, trainer: Trainer) -> None:
        self._ended = trainer.current_epoch
        starts = trainer.global_step >= self.update_starting_at_step
        if starts and self.should_update(epoch_idx=trainer.current_epoch):
            self._update(trainer)

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        if self._averages is not None:
            self._averages.swap_in()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        if self._averages is not None:
            self._averages.check_unchanged()
            self._averages.swap_out()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        if self._averages is not None:
            self._averages.swap_in()  # the last checkpoint is still to come

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        self._num_updates, self._averages = self.num_updates, None

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        if self._averages is not None:
            self._averages.swap_out()
            self._num_updates, self._averages = self.num_updates, None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_averages": None}

    def _update(self, trainer: Trainer) -> None:
        assert self._averages is not None
        self._averages.follow(trainer.optimizers)
        self._averages.update(self.multi_average())


class Averages(ParameterState):
    """Running averages of parameters, in float32 or the parameter's own dtype if that is wider."""

    def __init__(self, parameters: Iterable[Tensor], buffers: BufferAverages | None = None) -> None:
        super().__init__(parameters)
        self.num_updates = 0
        self.buffers = buffers
        self._average: dict[Tensor, Tensor] = {}
        self._training: dict[Tensor, Tensor] = {}  # the weights that train, while the averages are in their place
        self.is_swapped = False
        """Whether the parameters are the averages at the moment."""

    def reset(self) -> None:
        """Forget all averages: the next update copies the weights."""
        self.num_updates = 0
        self._average.clear()
        self._training.clear()
        self.is_swapped = False
        if self.buffers is not None:
            self.buffers.load_state_dict({})

    @torch.no_grad()
    def update(self, multi_average: Any) -> None:
        """Take the weights of now into the averages. `multi_average` is as in `torch.optim.swa_utils`."""
        averages, weights = [], []
        for parameter in filter(is_held, self.parameters()):
            if parameter in self._average:
                averages.append(local(self._average[parameter]))
                weights.append(local(parameter))
            else:
                self._average[parameter] = parameter.detach().to(_wide(parameter.dtype), copy=True)
        _average(multi_average, averages, weights, self.num_updates)
        if self.buffers is not None:
            self.buffers.update(multi_average, self.num_updates)
        self.num_updates += 1

    @torch.no_grad()
    def swap_in(self, for_a_save: bool = False) -> None:
        """Put the averages in the place of the weights, which are kept. `for_a_save` leaves no trace in what tells
        whether a hook has changed weights."""
        self.is_swapped = True
        self._training = {parameter: parameter.detach().clone() for parameter in self._average}
        self._put(self._average, for_a_save)
        if self.buffers is not None:
            self.buffers.swap_in(for_a_save)

    def check_unchanged(self) -> None:
        """Raise RuntimeError if a parameter or buffer differs from the average that replaced it."""
        what, instead = "weights were", ""
        if all(torch.equal(local(p), local(self._average[p]).to(p.dtype)) for p in self._training):
            changed = None if self.buffers is None else self.buffers.changed()
            if changed is None:
                return
            what, instead = f"buffer {changed!r} was", "give use_buffers=False, or "
        raise RuntimeError(
            f"{what} changed in validation, where averages are in the place of what trains, so that the change would "
            f"be lost; {instead}change it in a hook of training"
        )

    @torch.no_grad()
    def swap_out(self, for_a_save: bool = False) -> None:
        """Put the weights back, in every bit."""
        if self.is_swapped:
            self._put(self._training, for_a_save)
            if self.buffers is not None:
                self.buffers.swap_out(for_a_save)
        self._training.clear()
        self.is_swapped = False

    def _put(self, values: dict[Tensor, Tensor], for_a_save: bool) -> None:
        """Write values to parameters, and to those of other ranks in name only: ranks compare what is written to while
        hooks run."""
        for parameter in self.parameters():
            if for_a_save:
                if parameter in values:
                    local(parameter).data.copy_(local(values[parameter]))
            elif parameter in values:
                parameter.copy_(values[parameter])
            elif not is_held(parameter):
                parameter.mul_(1)

    @contextmanager
    def saving(self) -> Iterator[None]:
        if self.is_swapped or not self.num_updates:
            yield
            return
        self.swap_in(for_a_save=True)
        try:
            yield
        finally:
            self.swap_out(for_a_save=True)

    def tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        return {p: {"average": self._average[p], "weights": weights} for p, weights in self._training.items()}

    @torch.no_grad()
    def take(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        self._average[parameter] = saved["average"].to(parameter.device)
        parameter.copy_(saved["weights"])


class BufferAverages:
    """Running averages of a module's buffers of floating-point numbers, which ranks that hold them hold alike."""

    def __init__(self, module: nn.Module, strategy: Any) -> None:
        """Every rank calls it."""
        self._module, self._strategy = module, strategy
        self._average: dict[str, Tensor] = {}
        self._training: dict[str, Tensor] = {}  # the buffers of training, while the averages are in their place
        self._owners: dict[str, int] = {}
        """The first rank that holds a buffer, of those that other ranks lack."""
        named = [(name, buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()]
        self.names = [name for name, _ in named]
        if named and getattr(strategy, "broadcast_buffers", None) is False and strategy.topology.world_size > 1:
            raise ValueError(
                f"with broadcast_buffers=False each rank of {strategy.name} has buffers of its own, and a checkpoint "
                "holds the averages of one; give WeightAveraging use_buffers=False"
            )
        if named:
            device = strategy.topology.device
            here = torch.tensor([is_held(buffer) for _, buffer in named], device=device, dtype=torch.float32)
            ranks = strategy.all_gather(here).reshape(-1, len(named))
            away = zip(named, ranks.T.tolist(), strict=True)
            self._owners = {name: held.index(1.0) for (name, _), held in away if len({*held}) == 2}

    def _buffers(self) -> dict[str, Tensor]:
        buffers = self._module.named_buffers()
        now = {n: local(b) for n, b in buffers if b.is_floating_point() and is_held(b)}
        for name, average in self._average.items():
            if name not in now or now[name].shape != average.shape:
                is_now = f"has the shape {tuple(now[name].shape)} now" if name in now else "is gone"
                raise RuntimeError(
                    f"buffer {name!r}, whose average has the shape {tuple(average.shape)}, {is_now}; give "
                    "WeightAveraging use_buffers=False, or let the buffer keep its shape"
                )
        return now

    def update(self, multi_average: Any, done: int) -> None:
        """Take the buffers of now into the averages."""
        now = self._buffers()
        known = [name for name in now if name in self._average]
        before = [self._average[name].clone() for name in known]
        _average(multi_average, [self._average[name] for name in known], [now[name] for name in known], done)
        for name, old in zip(known, before, strict=True):  # the mean of equal infinities
            self._average[name] = torch.where(old.isinf() & (old == now[name]), old, self._average[name])
        self._average |= {n: b.to(_wide(b.dtype), copy=True) for n, b in now.items() if n not in self._average}

    def swap_in(self, for_a_save: bool = False) -> None:
        """Put the averages in the place of the buffers, which are kept."""
        now = self._buffers()
        self._training = {name: now[name].clone() for name in self._average}
        for name, average in self._average.items():
            (now[name].data if for_a_save else now[name]).copy_(average)

    def changed(self) -> str | None:
        """The first buffer that differs from the average that replaced it."""
        now = self._buffers()
        for name in self._training:
            if not torch.equal(now[name].nan_to_num(), self._average[name].to(now[name].dtype).nan_to_num()):
                return name
        return None

    def swap_out(self, for_a_save: bool = False) -> None:
        """Put the buffers of training back, in those that are as they were."""
        now = {name: local(buffer) for name, buffer in self._module.named_buffers()}
        for name, buffer in self._training.items():
            if name in now and now[name].shape == buffer.shape:
                (now[name].data if for_a_save else now[name]).copy_(buffer)
        self._training.clear()

    def state_dict(self) -> dict[str, Any]:
        """The averages, and the buffers of training, in whose place they are. Every rank calls it."""
        average, training = dict(self._average), dict(self._training)
        away = {name: buffer for name, buffer in self._module.named_buffers() if name in self._owners}
        for name, buffer in away.items():
            for values, dtype in ((average, _wide(buffer.dtype)), (training, buffer.dtype)):
                shape = torch.empty(buffer.shape, dtype=dtype, device=self._strategy.topology.device)
                values[name] = self._strategy.broadcast(values.get(name, shape), self._owners[name])
        return {"average": average, "training": training}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.clear()
        self._average.clear()
        now = self._buffers()
        self._average = {n: v.to(now[n].device) for n, v in state_dict.get("average", {}).items() if n in now}
        now = self._buffers()
        for name in self._average:
            now[name].copy_(state_dict["training"][name])


def _average(multi_average: Any, averages: list[Tensor], values: list[Tensor], done: int) -> None:
    for dtype in {average.dtype for average in averages}:
        chosen = [i for i, average in enumerate(averages) if average.dtype == dtype]
        multi_average([averages[i] for i in chosen], [values[i].to(dtype) for i in chosen], done)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
