"""The shares of `Trainer(virtual_ranks=…)`: each with its own random streams and torchmetrics, all with one model.

A share is what a rank would compute if there were `virtual_ranks` of them. Ranks run theirs one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.strategies.checkpoint_state import TensorShard, pack, unpack
from lockstep.strategies.launch import environment
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.side_effect_free import PlainAttributes, PlainValues, UserAttributes, differ
from lockstep.trainer.checkpoint.rank_state import on_device_of, torchmetrics_of
from lockstep.trainer.metrics.model_parts import Parts
from lockstep.trainer.metrics.updates import put_rows
from lockstep.trainer.seeding import derive
from lockstep.trainer.shares.evaluated import EvaluatedModel
from lockstep.trainer.shares.metric_states import MetricState
from lockstep.trainer.shares.optimizer_values import OptimizerValues
from lockstep.trainer.shares.user_state import UserState

if TYPE_CHECKING:
    from lockstep.trainer.checkpoint.store import Checkpoint
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState

Values = dict[tuple[nn.Module, str], Any]
_LOOKS = 10
"""Windows in which the bits of what optimizers hold are compared; in later ones only what torch notes is."""


class Shares:
    """What a rank switches from share to share, in training and in evaluation."""

    def __init__(self, run: RunState, module: Module) -> None:
        self._run, self._module = run, module
        self._parts = Parts(module)
        self.state = UserState(run, self._parts)
        self._keeps_state, self._windows = False, 0
        self.place: tuple[str | int, ...] = ("outside",)
        """Names what is computed now: all random streams are functions of the run's seed and this."""
        self._share: int | None = None
        self._number = 0
        """The micro-batch within the share."""
        self._metrics: dict[str, Any] = {}
        self._current = self.own[0]
        """The share whose states the metrics hold."""
        self._held: dict[int, dict[str, MetricState]] = {}
        self._buffers: list[_Buffer] = []
        """The model's as they were when the window began."""
        self._after_first: list[_Buffer] | None = None
        """As the first share has left them."""
        self._values: Values = {}
        """What no share may change of layers of the user's classes: modes, numbers and tensors."""
        self._plain = _NONE
        """And of those of torch's."""
        self._of_optimizers = OptimizerValues((), False)
        self.evaluated = EvaluatedModel(run, module)
        self._modules: list[nn.Module] = []
        self._users = UserAttributes([])

    @property
    def own(self) -> tuple[int, ...]:
        """Those that this rank stands for."""
        return self._run.strategy.shares  # type: ignore[attr-defined]

    def enter(self, share: int, *place: str | int) -> None:
        """Called before each micro-batch: begins its share unless that has begun, and its random streams."""
        self._number += 1
        if share != self._share:
            follows = self._share is not None and self._keeps_state
            if self._share is None:
                self._begin()
            else:
                self._end_share()
                if share == self.own[-1]:
                    self._of_optimizers.refuse_changed_state()
                for buffer in self._buffers:
                    buffer.put_back()
            self._share, self._number = share, 0
            self._switch_metrics(share)
            watches = len(self.own) > 1
            if self._run.evaluating is not None:  # refused on any number of ranks
                watches = (self._run.arguments.virtual_ranks or 1) > 1
            self._keeps_state = watches and not self.state.is_open
            if self._keeps_state:
                self.state.begin(share, at_once=follows)
        self._seed(*place, share, self._number)

    def ran(self) -> None:
        """Called after the step of a micro-batch, for hooks: the stages of a pipeline end it with other streams."""
        self._seed("after", *self.place)

    def leave(self, *place: str | int) -> None:
        """Called after the last share of a window: buffers are those of the first, streams those of `place`."""
        self._end_share()
        if self._keeps_state:
            self.state.rest()
        self._keeps_state = False
        for buffer in self._after_first or ():
            buffer.put_back()
        self._of_optimizers.leave()
        self._of_optimizers = OptimizerValues((), False)
        self._share, self._after_first = None, None
        self._buffers.clear()
        self._values.clear()
        self._plain = _NONE
        self.outside(*place)

    @property
    def current(self) -> int:
        """The share whose states torchmetrics hold."""
        return self._current

    def turn_to(self, share: int) -> None:
        """Let torchmetrics count for this share, after the step."""
        self._switch_metrics(share)

    def outside(self, *place: str | int) -> None:
        """Seed the streams of what is drawn between shares, alike on all ranks."""
        self._seed("outside", *place)

    def _seed(self, *place: str | int) -> None:
        self.place = place
        run = self._run
        seed_streams(derive(run.seed, "share", *place))
        for key, generator in run.streams.items():
            generator.manual_seed(derive(run.seed, "stream", key, *place))

    # ---- buffers follow the first share; other state of the model may not change in a share ------------

    def _begin(self) -> None:
        parts = self._parts.now()
        self._metrics = parts.metrics
        if self._run.evaluating:
            self.evaluated.begin()
            return
        self._modules = [module for _, module in parts.parts]
        self._users = parts.attributes
        self._buffers = [_Buffer(*place) for place in self._places()]
        self._values, self._plain = _values(self._users.now()), (parts.plain, parts.plain.now())
        self._windows += 1
        reads = self._windows <= _LOOKS and not environment.in_plan()  # where tensors have no bits
        self._of_optimizers = OptimizerValues(self._run.optimizers.values(), len(self.own) > 1, reads)

    def _places(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and is_here(buffer)
        ]

    def _end_share(self) -> None:
        if self._run.evaluating:
            self._end_evaluated()
            return
        wrong = [key for key, value in _values(self._users.now()).items() if _differ(self._values.get(key), value)]
        wrong += self._plain[1].changed(self._plain[0].now())
        remembered = self.state.end(follows=True) if self._keeps_state else []
        if changed := self._named(wrong) if wrong else remembered:
            raise RuntimeError(
                f"training_step changed {shortened(changed)}, which would depend on how many shares or learners a rank "
                "runs, or a hook of a batch did; use a registered buffer (those of share 0 hold), trainer.global_step, "
                "self.log or a torchmetrics Metric (CatMetric for a list)"
            )
        known = {(buffer.module, buffer.name) for buffer in self._buffers}
        new = [place for place in self._places() if place not in known]
        if new := [(module, name) for module, name in new if name not in module._non_persistent_buffers_set]:
            raise RuntimeError(
                f"training_step set the buffer {shortened(self._named(new))}, which there was not, so that it would "
                "depend on how many shares a rank runs; register it in __init__ with a tensor of its shape, or a cache "
                "with persistent=False"
            )
        self._of_optimizers.end_share()
        if self._after_first is None:
            self._after_first = [_Buffer(buffer.module, buffer.name) for buffer in self._buffers]

    def _end_evaluated(self) -> None:
        self.evaluated.end_share()
        if changed := self.state.end(follows=True) if self._keeps_state else []:
            raise RuntimeError(
                f"a step or hook of a batch changed {shortened(changed)} in an evaluation, so that what reads it would "
                "depend on how many shares or learners a rank runs; log the value in the step, or a torchmetrics "
                "Metric, take it back by the end of the batch, make a cache in setup, and compute what is shown of one "
                "sample in on_validation_epoch_end, from the dataset"
            )

    def _named(self, places: list[tuple[nn.Module, str]]) -> list[str]:
        names = {module: name for name, module in self._module.named_modules()}
        return sorted(f"{names[module]}.{name}".lstrip(".") for module, name in places)

    # ---- torchmetrics: a share has states of its own, which meet where a metric computes ---------------

    def _switch_metrics(self, share: int) -> None:
        if share == self._current or not self._metrics:
            self._current = share
            return
        self._held[self._current] = {name: MetricState.of(metric) for name, metric in self._metrics.items()}
        states = self._held.pop(share, {})
        for name, metric in self._metrics.items():
            if name in states:
                states[name].put(metric)
            else:
                type(metric).reset(metric)
                put_rows(metric, None)
        self._current = share

    def states_of(self, metric: Any) -> dict[int, dict[str, Any]]:
        """By own share what it holds of `metric`; nothing of those that have not updated it."""
        name = next(name for name, other in torchmetrics_of(self._module).items() if other is metric)
        held = {share: states[name] for share, states in self._held.items() if name in states}
        held[self._current] = MetricState.of(metric)
        return {share: held[share].entry() for share in sorted(held)}

    def forget(self, metric: Any) -> None:
        """What `metric.reset()` does: within a share, as torchmetrics' forward calls it, of that; else of all."""
        type(metric).reset(metric)
        if self._share is not None:
            return
        name = next(name for name, other in torchmetrics_of(self._module).items() if other is metric)
        for states in self._held.values():
            states.pop(name, None)

    def save(self, folder: str, tensors: dict[str, TensorShard], but: Collection[str | None]) -> dict[str, Any]:
        """The states of all metrics by share, as JSON, but of some by name; their tensors go to `tensors`."""
        return {
            name: {
                str(share): pack(state, f"{folder}/metrics/{name}/{share}", tensors)
                for share, state in self.states_of(metric).items()
            }
            for name, metric in torchmetrics_of(self._module).items()
            if name not in but
        }

    def restore(self, saved: list[dict[str, Any]], checkpoint: Checkpoint) -> None:
        """Take back the states of this rank's shares from what all ranks have saved.

        Raises ValueError for those of a share that there is not, in a run with fewer workers of a parameter server.
        """
        found: dict[int, dict[str, MetricState]] = {}
        for by_name in saved:
            for name, by_share in by_name.items():
                for share, packed in by_share.items():
                    if int(share) >= self._run.strategy.virtual_ranks and unpack(packed, checkpoint.read)["count"]:
                        raise ValueError(
                            f"torchmetric {name} has sums of {int(share) + 1} workers or more, but this run has "
                            f"{self._run.strategy.virtual_ranks}; reset it before the checkpoint, or give workers"
                        )
                    if int(share) in self.own:
                        entry = unpack(packed, checkpoint.read)
                        state = MetricState(entry["state"], entry["count"], entry.get("added"))
                        of_share = found.setdefault(int(share), {})
                        of_share[name] = max(of_share.get(name, state), state, key=_count)
        self._current = self.own[0]
        metrics = torchmetrics_of(self._module)
        for of_share in found.values():
            for name in of_share.keys() & metrics.keys():
                of_share[name].values = on_device_of(metrics[name], of_share[name].values)
        for name, state in found.pop(self._current, {}).items():
            if name in metrics:
                state.put(metrics[name])
        self._held = found


class _Buffer:
    """A buffer and its value, all of which is kept: BatchNorm changes its statistics without a trace."""

    __slots__ = ("_tensor", "_value", "module", "name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self._tensor = module._buffers[name]
        self._value = torch.empty(0) if self._tensor is None else self._tensor.clone()

    @torch.no_grad()
    def put_back(self) -> None:
        self.module._buffers[self.name] = self._tensor
        if self._tensor is None or torch.equal(self._tensor, self._value):
            return
        if isinstance(self.module, nn.modules.batchnorm._NormBase):
            self._tensor.data.copy_(self._value)  # as its kernels do: no backward to come reads it
        else:
            self._tensor.copy_(self._value)


def _count(state: MetricState) -> int:
    return state.count


_NONE = PlainAttributes([]), PlainValues([], [])


def _values(attributes: Iterable[tuple[tuple[nn.Module, str], Any]]) -> Values:
    """The numbers and tensors among the attributes of modules, with what tells whether a tensor has changed."""
    found: Values = {}
    for place, value in attributes:
        if isinstance(value, (int, float, complex)):
            found[place] = value
        elif isinstance(value, Tensor):
            found[place] = (value, value._version)
        elif type(value) is dict and value:
            for name, item in value.items():
                if isinstance(item, (int, float, complex)):
                    found[place[0], f"{place[1]}[{name!r}]"] = item
    return found


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one[0] is not other[0] or one[1] != other[1]
    return differ(one, other)
