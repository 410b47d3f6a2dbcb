"""The common weights of learners: what is sent of each, how the mean moves them, and when learners take them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.strategies.checkpoint_state import LocalShard, Reader, State, Take, TensorShard, pack, unpack
from lockstep.strategies.methods.averaging import gather_numbers, sum_over_learners
from lockstep.strategies.methods.beside import Beside
from lockstep.strategies.methods.kept import Kept
from lockstep.strategies.methods.learner import Learner
from lockstep.strategies.methods.options import Rounds, made_by
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.parameter_hooks import copy_attributes
from lockstep.strategies.sync.collectives import differing, local
from lockstep.strategies.sync.compression.compression import Compression, Layout
from lockstep.strategies.sync.compression.kept import check_means
from lockstep.strategies.sync.tree import total_of

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

Means = list[Tensor] | None
"""The mean of what learners have moved, by parameter; None if none has counted anything."""


class Counterparts(NamedTuple):
    """Ranks that hold the same part of the model, each of other learners."""

    assignment: Sequence[range]
    """The learners of each."""
    rank: int
    """This rank's place among them."""
    group: dist.ProcessGroup | None = None
    shard: LocalShard = TensorShard.whole
    """What this rank writes of its own learners' state."""
    layout: Layout | None = None
    """How parameters are sharded, if they are."""

    @property
    def own(self) -> range:
        return self.assignment[self.rank]


@dataclass
class _Sent:
    fragment: int
    places: list[int]
    due: int | None
    means: Callable[[], Means]


class Outer:
    """The weights from which the learners of all ranks start a round, alike on every rank, and their optimizer.

    A fragment is a run of parameters of about the same size, which are sent together.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        rounds: Rounds,
        make: Callable[[list[nn.Parameter]], Optimizer],
        counterparts: Counterparts,
        seed: int,
    ) -> None:
        self._model = model
        named = list(model.named_parameters())
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        total, seen = sum(p.numel() for p in self._parameters), 0
        self._fragment_of = []
        for parameter in self._parameters:
            self._fragment_of.append(seen * rounds.fragments // max(1, total))
            seen += parameter.numel()
        self._rounds, self._counterparts, self._compression = rounds, counterparts, None
        if rounds.compress is not None:
            own, number, writes = counterparts.own, counterparts.assignment[-1].stop, counterparts.rank == 0
            layout = counterparts.layout or Layout(own, number, writes_memory=writes)
            self._compression = Compression(rounds.compress, replace(layout, group=counterparts.group), seed)
            self._compression.watch(model)
        self._weights: dict[int, nn.Parameter] = {}
        self.moving: list[int] = []
        """Places of the parameters that learners train, and a round brings together."""
        self._sent: deque[_Sent] = deque()
        self._noted: dict[str, tuple[int, int, int]] = {}
        self._take(optimizers)
        self.optimizer = made_by(make, list(self._weights.values()), "outer")
        self._kept = Kept({"outer": self.optimizer})

    @property
    def is_mean(self) -> bool:
        """Whether a step of the outer optimizer lets the common weights be the mean of the learners'."""
        kind, options = type(self.optimizer), self.optimizer.defaults
        return kind is SGD and options["lr"] == 1.0 and not (options["momentum"] or options["weight_decay"])

    def follow(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Step what optimizers have got since, too, and what is trainable now."""
        self.optimizer.param_groups[0]["params"] += self._take(optimizers)
        self.moving = [place for place in self._weights if self._parameters[place].requires_grad]

    def begin(self, learners: Sequence[Learner]) -> None:
        """All learners, which have the model's weights, start from these."""
        for place in self.moving:
            local(self._weights[place].data).copy_(local(self._parameters[place].data))
        for learner in learners if self._rounds.keeps_unsent else ():
            for place in self.moving:
                local(learner.weights[place]).copy_(self._start_of(learner, place))

    def _start_of(self, learner: Learner, place: int) -> Tensor:
        """The common weights; less what was not sent of the learner, if that stays in its own."""
        common = local(self._weights[place].data)
        if not self._rounds.keeps_unsent or self._compression is None:
            return common
        unsent = self._compression.residuals.get(self._names[place], {}).get(learner.number)
        if unsent is None:
            return common
        if common.is_complex():
            unsent = torch.view_as_complex(unsent)
        return (common - unsent).to(common.dtype)

    def share_still(self) -> None:
        """Let learner 0's parameters that no round moves be those of all, as its buffers are. Every rank calls it."""
        for place in self._differing([place for place in range(len(self._parameters)) if place not in self.moving]):
            value = local(self._parameters[place].data)
            sent = value.contiguous()
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self._counterparts.group, group_src=0)
            value.copy_(sent)

    def refuse_different(self, all_of_them: bool) -> None:
        """Raise RuntimeError if ranks hold different weights; `all_of_them`, or those that rounds move. Every rank
        calls it while learners are together."""
        if found := self._differing(range(len(self._parameters)) if all_of_them else self.moving):
            raise RuntimeError(
                f"{shortened([self._names[place] for place in found])} should be common to all learners between "
                "rounds and in an evaluation, but a hook has written other values on each rank; write the same on all "
                "ranks, such as from registered buffers, which are those of learner 0 there"
            )

    def _differing(self, places: Sequence[int]) -> list[int]:
        """Those of the parameters that are not the same on all ranks with the same part of the model."""
        held, (assignment, _, group, *_) = [self._parameters[place] for place in places], self._counterparts
        return [places[i] for i in differing(held, len(assignment), group)]

    def due(self, position: int) -> list[int]:
        """The fragments that are sent after step `position` of a round, counted from 1."""
        period, number = self._rounds.period, self._rounds.fragments
        ends = [(fragment + 1) * period // number for fragment in range(number)]
        return [fragment for fragment, end in enumerate(ends) if (position - end) % period == 0]

    @torch.no_grad()
    def send(
        self,
        fragment: int,
        learners: Sequence[Learner],
        beside: Beside | None = None,
        due: int | None = None,
    ) -> None:
        """Begin to average what learners have moved in a fragment since it was last sent, `beside` the steps if given.

        Every rank calls it in the same order.
        """
        places = [place for place in self.moving if self._fragment_of[place] == fragment]
        counts = []
        for learner in learners:
            counts.append(learner.counted - learner.counted_at.get(fragment, 0.0))
            learner.counted_at[fragment] = learner.counted
        if not places:
            return
        moved = [
            [self._start_of(learner, place) - local(learner.weights[place]) for place in places] for learner in learners
        ]
        if self._compression is None:
            work = partial(_average, moved, counts, self._counterparts)
        else:
            weights = {self._names[place]: local(self._weights[place].data) for place in places}
            work = partial(_compressed, self._compression, self.optimizer, weights, moved, counts, self._counterparts)
        if beside is None:
            means = work()
            self._sent.append(_Sent(fragment, places, due, lambda: means))
        else:
            given = [tensor for tensors in moved for tensor in tensors]
            given += [] if self._compression is None else _kept(self._compression)
            self._sent.append(_Sent(fragment, places, due, beside.submit(work, given)))

    @torch.no_grad()
    def apply(self, learners: Sequence[Learner], mixing: float, early: bool = False) -> None:
        """Wait for what was sent first, step the common weights, and let learners take them over: `mixing` of their own
        stays. After a round that has ended `early` the common weights are the mean of the learners', without the outer
        optimizer, whose momentum is that of whole rounds."""
        if not self._sent:  # an empty fragment
            return
        sent = self._sent.popleft()
        means = sent.means()
        if means is not None:
            for place, mean in zip(sent.places, means, strict=True):
                if early:
                    common = local(self._weights[place].data)
                    common.sub_(mean.view_as(common))
                else:
                    self._weights[place].grad = _laid_out(mean, self._weights[place])
            if not early:
                self._step()
                self.optimizer.zero_grad()
        for learner in learners:
            for place in sent.places:
                common, own = local(self._weights[place].data), local(learner.weights[place])
                if mixing:
                    own.mul_(mixing).add_(common, alpha=1 - mixing)
                else:
                    own.copy_(common if early else self._start_of(learner, place))

    def apply_due(self, step: int, learners: Sequence[Learner], mixing: float) -> None:
        """`apply` what is due after `step`."""
        while self._sent and self._sent[0].due == step:
            self.apply(learners, mixing)

    def drain(self, learners: Sequence[Learner], mixing: float) -> None:
        """`apply` all that was sent."""
        while self._sent:
            self.apply(learners, mixing)

    def note(self) -> None:
        """The model's weights and buffers are as a learner's turn has left them."""
        self._noted = self._marks()

    def changed(self) -> list[str]:
        """The parameters and buffers that were changed or replaced since `note`."""
        now = self._marks()
        return sorted(name for name in now.keys() | self._noted.keys() if now.get(name) != self._noted.get(name))

    def _marks(self) -> dict[str, tuple[int, int, int]]:
        tensors = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        return {
            name: (id(tensor), tensor._version, local(tensor).untyped_storage()._cdata)
            for name, tensor in tensors.items()
        }

    def _step(self) -> None:
        if any(hasattr(weight, "to_local") for weight in self._weights.values()):
            from lockstep.strategies.mesh.dtensors import groups_by_mesh

            with groups_by_mesh(self.optimizer):
                self.optimizer.step()
        else:
            self.optimizer.step()

    def save(self, state: State, shard: LocalShard, strategy: Strategy) -> None:
        """Add the state of the outer optimizer, and what was not sent yet, to a checkpoint's. Every rank calls it."""
        state.meta["outer_kept"] = self._kept.save(state.tensors, strategy)
        if self._compression is not None:
            self._compression.save(state)
        names = {id(weight): self._names[place] for place, weight in self._weights.items()}
        state.meta["outer"] = {
            names[id(weight)]: {
                key: pack(value, f"strategy/outer/{names[id(weight)]}/{key}", state.tensors, shard)
                for key, value in entry.items()
            }
            for weight, entry in self.optimizer.state.items()
        }

    def load(self, reader: Reader, take: Take) -> None:
        """Take over what `save` added, if it did."""
        if self._compression is not None:
            self._compression.load(reader)
        weights = {self._names[place]: weight for place, weight in self._weights.items()}
        self._kept.load(reader.meta.get("outer_kept", {}), reader)
        self.optimizer.state.clear()
        for name, entry in reader.meta.get("outer", {}).items():
            if name in weights:
                like = weights[name]
                self.optimizer.state[like] = {
                    key: value.to(like.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in (
                        (key, unpack(packed, partial(take, reader, like=like))) for key, packed in entry.items()
                    )
                }

    def _take(self, optimizers: Mapping[str, Optimizer]) -> list[nn.Parameter]:
        """Make common weights for what optimizers step and has none; return these."""
        stepped = {id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]}
        added = []
        for place, parameter in enumerate(self._parameters):
            if id(parameter) in stepped and place not in self._weights:
                self._weights[place] = nn.Parameter(parameter.detach().clone())
                copy_attributes(parameter, self._weights[place])
                added.append(self._weights[place])
        return added


def _kept(compression: Compression) -> list[Tensor]:
    """What it keeps of the times before, and replaces in the next."""
    kept: list[Mapping[Any, Tensor]] = [*compression.residuals.values(), *compression.velocities.values()]
    return [tensor for tensors in [*kept, *compression.memory.values()] for tensor in tensors.values()]


def _laid_out(mean: Tensor, weight: Tensor) -> Tensor:
    """What this rank holds of a mean, as a gradient of the weight."""
    if not hasattr(weight, "to_local"):
        return mean.view_as(weight)
    gradient = torch.empty_like(weight)
    local(gradient).copy_(mean.view_as(local(gradient)))
    return gradient


@torch.no_grad()
def _average(
    moved: list[list[Tensor]],
    counts: Sequence[float],
    counterparts: Counterparts,
) -> Means:
    """The mean over learners, each weighted by what it counted; `moved` of each own learner, by parameter."""
    assignment, rank, group, *_ = counterparts
    total = total_of(gather_numbers(counts, assignment, group))
    if not total:
        return None
    means: dict[int, Tensor] = {}
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(moved[0]):
        by_dtype.setdefault(tensor.dtype, []).append(i)
    for members in by_dtype.values():
        flats = [
            torch.cat([tensors[i].reshape(-1) for i in members]).mul_(count / total)
            for tensors, count in zip(moved, counts, strict=True)
        ]
        mean = sum_over_learners(flats, assignment, rank, group)
        means |= zip(members, mean.split([moved[0][i].numel() for i in members]), strict=True)
    return [means[i] for i in range(len(means))]


@torch.no_grad()
def _compressed(
    compression: Compression,
    optimizer: Optimizer,
    weights: Mapping[str, Tensor],
    moved: list[list[Tensor]],
    counts: Sequence[float],
    counterparts: Counterparts,
) -> Means:
    """The same of what a compressor sends, which adds what it does not send to the learner's next."""
    assignment, _, group, *_ = counterparts
    total, learners = total_of(gather_numbers(counts, assignment, group)), assignment[-1].stop
    if not total:
        return None
    for tensors, count in zip(moved, counts, strict=True):
        torch._foreach_mul_(tensors, count / total * learners)
    sent = [i for i, weight in enumerate(weights.values()) if weight.numel()]
    some = {name: weight for name, weight in weights.items() if weight.numel()}
    means = compression.reduce(some, [[tensors[i] for i in sent] for tensors in moved], 1.0)
    made = {name: mean for name, mean in zip(some, means, strict=True) if mean is not None}
    check_means(compression.compressor, [each for tensors in moved for each in tensors], made, len(assignment), group)
    compression.commit(optimizer)
    found = dict(zip(sent, means, strict=True))
    return [weight if (mean := found.get(i)) is None else mean for i, weight in enumerate(weights.values())]
