"""The compressed reduction of gradients: what is sent, what is left for the next step, and what a checkpoint holds.

A share's gradient, in units of the true mean gradient, and what was left of those before it (the residual) are encoded
by parameter. What the optimizer gets is the mean over shares of what was decoded. With momentum correction a share's
velocity takes the place of its gradient. Residuals and velocities change only with the optimizer's step: one that is
skipped leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import Reader, State, TensorShard
from lockstep.strategies.sync.collectives import local
from lockstep.strategies.sync.compression.compressor import Compressor, Encoding, Exact, real
from lockstep.strategies.sync.compression.exchange import Exchange, Payload
from lockstep.strategies.sync.compression.kept import (
    apart,
    check_memory,
    decoded,
    encoded,
    keeping_nothing,
    mark_memory,
)

PREFIX = "strategy/compression"
"""Of names in a checkpoint: `/residual/<parameter>` and `/velocity/<parameter>`, with the shares as first dimension,
and `/memory/<shard>/<key>/<parameter>`."""

Gradients = Sequence[Tensor | None]


@dataclass
class _Left:
    """What a reduction leaves to the next, once the optimizer has stepped."""

    residuals: dict[int, Tensor]
    velocities: dict[int, Tensor]
    memory: dict[str, Tensor]


def _whole(parameter: Tensor, writes: bool) -> TensorShard | None:
    return TensorShard.whole(parameter)


@dataclass(frozen=True)
class Layout:
    """Where shares are: which are on this rank, of how many, and over which ranks they are spread."""

    own: Sequence[int] = (0,)
    """They follow each other, in the order of ranks."""
    num_shares: int = 1
    group: dist.ProcessGroup | None = None
    writes_memory: bool = True
    """Whether this rank writes what is equal on all ranks of `group`."""
    shard: str = "whole"
    """What this rank holds of parameters, if they are sharded."""
    place: Callable[[Tensor, bool], TensorShard | None] = _whole
    """What this rank holds of a parameter, and where; if asked for what it writes, None if another rank does."""


@dataclass
class Compression:
    """One run's compressor and what it remembers."""

    compressor: Compressor
    layout: Layout = field(default_factory=Layout)
    seed: int | None = None
    """What random compressors draw from; the first loader's, or that of the run that is resumed."""
    step: int = 0
    residuals: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """By parameter and own share."""
    velocities: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """The same, with momentum correction."""
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By parameter and the compressor's key; the same on all ranks."""
    _parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _optimizers: list[Optimizer] = field(default_factory=list)
    """With momentum correction, those that must have no momentum."""
    _left: dict[str, _Left] = field(default_factory=dict)
    _current: Compressor = field(default_factory=Exact)
    """What encodes now."""
    _moving: list[list[Tensor]] = field(default_factory=list)
    """With momentum correction, of each own share and parameter the velocity that the reduction leaves."""
    _specs: dict[tuple[torch.Size, torch.dtype], list[tuple[torch.Size, torch.dtype]]] = field(default_factory=dict)

    def seed_once(self, seed: int) -> None:
        self.seed = seed if self.seed is None else self.seed

    def watch(self, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Take the names of the parameters, by which everything is kept.

        Raises ValueError if gradients would have the momentum of the compressor and that of an optimizer.
        """
        self._optimizers = list(optimizers) if self.compressor.momentum else []
        self._refuse_momentum()
        self._parameters = dict(model.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def reduce_into(self, parameters: Sequence[nn.Parameter], shares: Sequence[Gradients], scale: float) -> None:
        """Let the mean over all shares of what is sent be the gradient of those of `parameters` that are trained.

        `shares` and `scale` are those of `reduce`, but that of the sum over shares. Raises ValueError if an optimizer
        has got a momentum since `watch`, as by a scheduler.
        """
        self._refuse_momentum()
        trained = [i for i, p in enumerate(parameters) if p.requires_grad and local(p).numel()]
        own = {self._names[id(parameters[i])]: local(parameters[i]) for i in trained}
        grads = [[gradients[i] for i in trained] for gradients in shares]
        means = self.reduce(own, grads, scale * self.layout.num_shares)
        for i, mean in zip(trained, means, strict=True):
            parameter = parameters[i]
            if mean is None or (local(parameter) is parameter and mean.stride() == parameter.stride()):
                parameter.grad = mean
                continue
            if parameter.grad is None or local(parameter) is parameter:
                parameter.grad = torch.empty_like(parameter)
            local(parameter.grad).copy_(mean)

    @torch.no_grad()
    def reduce(
        self, parameters: Mapping[str, Tensor], shares: Sequence[Gradients], scale: float
    ) -> list[Tensor | None]:
        """The mean over all shares of what is sent of their gradients; None for a parameter without any.

        `shares`: for each own share a gradient or None for each of `parameters`, whose product with `scale` is in units
        of the mean. Every rank calls it, with the same parameters. A gradient that is not finite on any share
        comes back as NaN.
        """
        self._left = {}
        if not parameters:
            return []
        encodings = [
            Encoding.of(name, tensor, self.seed or 0, self.step, self.memory.get(name, {}))
            for name, tensor in parameters.items()
        ]
        self._current = Exact() if self.step < self.compressor.start else self.compressor
        self.step += 1
        inputs: list[list[Tensor]] = []
        flags: list[Tensor] = []
        self._moving = []
        for share, gradients in zip(self.layout.own, shares, strict=True):
            if self.compressor.momentum:
                self._moving.append([])
            inputs.append([self._input(e, share, g, scale) for e, g in zip(encodings, gradients, strict=True)])
            flags.append(_flags(inputs[-1], gradients))
        exchange = Exchange(self.layout.own, self.layout.num_shares, self.layout.group)
        run = self._averaged if self._current.linear else self._gathered
        with keeping_nothing(self._current):
            means, found = run(exchange, encodings, inputs, flags)
        for i, encoding in enumerate(encodings):
            left = {share: values[i] for share, values in zip(self.layout.own, inputs, strict=True)}
            moving = {share: values[i] for share, values in zip(self.layout.own, self._moving, strict=False)}
            self._left[encoding.name] = _Left(left if self.compressor.feedback else {}, moving, encoding.memory)
        return self._completed(parameters, shares, means, found)

    def commit(self, optimizer: Optimizer, skipped: Tensor | None = None) -> None:
        """Take over what the last reduction has left of the parameters that an optimizer has stepped.

        `skipped`: on a device, above zero if the optimizer has skipped its step there.
        """
        stepped = {self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"]} - {None}
        for name in [name for name in self._left if not stepped or name in stepped]:  # none: it steps copies
            left = self._left.pop(name)
            pairs = (
                (self.residuals, left.residuals),
                (self.velocities, left.velocities),
                (self.memory, left.memory),
            )
            for kept, new in pairs:
                own: dict[Any, Tensor] = kept.setdefault(name, {})
                for key, value in new.items():
                    if skipped is not None:
                        value = torch.where(skipped > 0, own.get(key, torch.zeros_like(value)), value)
                    own[key] = value

    def _refuse_momentum(self) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                first = (group.get("betas") or (0.0,))[0]
                if group.get("momentum") or first:
                    what = f"betas={group['betas']}" if first else f"momentum={group['momentum']}"
                    raise ValueError(
                        f"{self.compressor!r} has momentum={self.compressor.momentum} and {type(optimizer).__name__} "
                        f"has {what}, so that momentum would be added up twice; set that of the optimizer to 0, as the "
                        "compressor's takes its place (OneCycleLR and CyclicLR set it too: cycle_momentum=False)"
                    )

    # ---- one reduction -------------------------------------------------------------------------------

    def _input(self, encoding: Encoding, share: int, gradient: Tensor | None, scale: float) -> Tensor:
        """What is encoded of a share: its gradient in units of the mean, and its residual."""
        residual = self.residuals.get(encoding.name, {}).get(share)
        if gradient is None:
            total = torch.zeros(encoding.shape, dtype=encoding.dtype, device=encoding.device)
        else:
            total = real(gradient).to(encoding.dtype) * scale
        if self.compressor.momentum:
            before = self.velocities.get(encoding.name, {}).get(share)
            if before is not None:
                total.add_(before, alpha=self.compressor.momentum)
            self._moving[-1].append(total.clone())
        return total if residual is None else total.add_(residual)

    def _gathered(
        self, exchange: Exchange, encodings: list[Encoding], inputs: list[list[Tensor]], flags: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Means over shares of what is decoded, and the flags of all shares. Leaves in `inputs` what was not sent."""
        sent, marks = self._encoded(encodings, inputs, flags)
        rows = zip(flags, marks, strict=True)
        everyone = exchange.gather([[pair, *payloads] for pair, payloads in zip(rows, sent, strict=True)])
        found = self._found(payloads[0] for payloads in everyone)
        means: list[Tensor] = []
        first = self.layout.own[0]
        for i, encoding in enumerate(encodings):
            total = None
            for share, payloads in enumerate(everyone):
                own = inputs[share - first][i] if 0 <= share - first < len(inputs) else None
                value = decoded(self._current, payloads[i + 1], replace(encoding, share=share), own)
                if own is not None:
                    own.sub_(value)
                    self._stop(share - first, i, payloads[i + 1], encoding)
                total = value if total is None else total.add_(value)
            assert total is not None
            means.append(total.div_(len(everyone)))
        return means, found

    def _averaged(
        self, exchange: Exchange, encodings: list[Encoding], inputs: list[list[Tensor]], flags: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """The same, where payloads are averaged before they are decoded."""
        last: list[list[Payload]] = []
        averages: list[Payload] = []
        for _ in range(self._current.rounds):
            for encoding, mean in zip(encodings, averages, strict=False):
                encoding.means.append(mean)
            last, marks = self._encoded(encodings, inputs, flags)
            averages = exchange.mean(last)
        found = exchange.gather([[pair] for pair in zip(flags, marks, strict=True)])
        for own, (values, payloads) in enumerate(zip(inputs, last, strict=True)):
            for i, (value, payload, encoding) in enumerate(zip(values, payloads, encodings, strict=True)):
                value.sub_(decoded(self._current, payload, apart(encoding, encoding.share, self._current), value))
                self._stop(own, i, payload, encoding)
        means = [decoded(self._current, mean, e, None) for mean, e in zip(averages, encodings, strict=True)]
        return means, self._found(payloads[0] for payloads in found)

    def _found(self, rows: Iterable[Payload]) -> Tensor:
        """The flags of all shares."""
        flags, marks = zip(*rows, strict=True)
        check_memory(self._current, marks)
        return torch.stack(flags)

    def _stop(self, own: int, i: int, payload: Payload, encoding: Encoding) -> None:
        """Let the velocity of what a share has sent start over (momentum factor masking), but not if it sends all."""
        places = self._current.places(payload, encoding) if self._moving else None
        if places is not None:
            sent = torch.zeros(self._moving[own][i].numel(), dtype=torch.bool, device=places.device)
            sent[places] = True
            self._moving[own][i].masked_fill_(sent.view(encoding.shape), 0.0)

    def _encoded(
        self, encodings: list[Encoding], inputs: list[list[Tensor]], flags: list[Tensor]
    ) -> tuple[list[list[Payload]], list[Tensor]]:
        """The payloads of each own share, and marks of what it leaves in memories, which must be the same of all.

        What is not finite is encoded as zeros, so that only its flag says so.
        """
        found, marks = [], []
        for share, values, row in zip(self.layout.own, inputs, flags, strict=True):
            bad = row == _NOT_FINITE
            if not bad.is_cpu or bad.any():  # on a device the host need not know
                values = [torch.where(bad[i], 0.0, value) for i, value in enumerate(values)]
            mine = [apart(encoding, share, self._current) for encoding in encodings]
            found.append([self._checked(encoding, value) for encoding, value in zip(mine, values, strict=True)])
            marks.append(mark_memory(self._current, mine, row))
        for encoding, own in zip(encodings, mine, strict=True):
            encoding.memory = own.memory
        return found, marks

    def _checked(self, encoding: Encoding, finite: Tensor) -> Payload:
        payload = encoded(self._current, finite, encoding)
        spec = [(tensor.shape, tensor.dtype) for tensor in payload]
        key = (torch.Size((len(encoding.means), *encoding.shape)), encoding.dtype)
        if spec != self._specs.get(key):  # what the other ranks send in this step too, whatever they encode
            zeros = encoded(self._current, torch.zeros_like(finite), apart(encoding, encoding.share, self._current))
            self._specs[key] = [(tensor.shape, tensor.dtype) for tensor in zeros]
        if spec != self._specs[key]:
            raise ValueError(
                f"{self._current!r} encodes a gradient of shape {list(encoding.shape)} as {_shown(spec)} and another "
                f"of that shape as {_shown(self._specs[key])}; the shapes of a payload must follow from the gradient's "
                "and from the step"
            )
        return payload

    def _completed(
        self, parameters: Mapping[str, Tensor], shares: Sequence[Gradients], means: list[Tensor], found: Tensor
    ) -> list[Tensor | None]:
        """The means as gradients of their parameters; NaN where a share's was not finite, None if no share had one."""
        bad = (found == _NOT_FINITE).any(0)
        complete = any(all(gradient is not None for gradient in gradients) for gradients in shares)
        exists = None if complete else (found != _ABSENT).any(0).tolist()  # a host synchronization, if one is missing
        poison = torch.where(bad, torch.nan, 0.0) if not bad.is_cpu or bad.any() else None
        completed: list[Tensor | None] = []
        for i, (name, parameter) in enumerate(parameters.items()):
            if exists is not None and not exists[i]:
                self._left.pop(name)
                completed.append(None)
                continue
            mean = means[i] if poison is None else means[i].add_(poison[i])
            if parameter.is_complex():
                mean = torch.view_as_complex(mean.contiguous())
            completed.append(mean.to(parameter.dtype))
        return completed

    # ---- optimizers and checkpoints ------------------------------------------------------------------

    def save(self, state: State) -> None:
        """Add what is remembered to what this rank writes. Every rank calls it."""
        for kind, kept in self._by_share().items():
            for name, of_share in kept.items():
                if of_share:
                    self._save_shares(state, f"{PREFIX}/{kind}/{name}", self._parameters[name], of_share)
        for name, memory in self.memory.items():
            for key, value in memory.items():
                if self.layout.writes_memory:
                    state.tensors[f"{PREFIX}/memory/{self.layout.shard}/{key}/{name}"] = TensorShard.whole(value)
        state.meta["compression"] = {"seed": self.seed, "step": self.step}

    def load(self, state: Reader) -> None:
        """Take over what any number of shares has saved: of as many each its own, else each the mean of all."""
        saved = state.meta.get("compression", {})
        self.seed, self.step = saved.get("seed", self.seed), saved.get("step", 0)
        self.residuals, self.velocities, self.memory, self._left = {}, {}, {}, {}
        kinds = self._by_share()
        if not self.compressor.momentum:
            del kinds["velocity"]
        for kind, kept in kinds.items():
            prefix = f"{PREFIX}/{kind}/"
            for found in state.names(prefix):
                name = found.removeprefix(prefix)
                piece = self.layout.place(self._parameters[name], False) if name in self._parameters else None
                if piece is not None:
                    kept[name] = self._load_shares(state, found, piece)
        prefix = f"{PREFIX}/memory/{self.layout.shard}/"
        for found in state.names(prefix):
            key, _, name = found.removeprefix(prefix).partition("/")
            if name in self._parameters:
                self.memory.setdefault(name, {})[key] = state.read(found).to(local(self._parameters[name]).device)

    def _by_share(self) -> dict[str, dict[str, dict[int, Tensor]]]:
        return {"residual": self.residuals, "velocity": self.velocities}

    def _save_shares(self, state: State, key: str, parameter: Tensor, of_share: Mapping[int, Tensor]) -> None:
        piece = self.layout.place(parameter, True)
        if piece is None:
            return
        mine = torch.stack([of_share[share] for share in self.layout.own])
        shape, offsets = piece.global_shape, piece.offsets
        if mine.dim() > len(shape) + 1:  # a complex parameter's pairs
            shape, offsets = (*shape, 2), (*offsets, 0)
        first, total = self.layout.own[0], self.layout.num_shares
        state.tensors[key] = TensorShard(mine, (total, *shape), (first, *offsets))

    def _load_shares(self, state: Reader, key: str, piece: TensorShard) -> dict[int, Tensor]:
        shape, offsets = piece.tensor.shape, piece.offsets
        number, *whole = state.shape(key)
        if len(whole) > len(shape):
            shape, offsets = torch.Size((*shape, 2)), (*offsets, 0)
        of_share = {}
        for share in self.layout.own:
            begin, count = (share, 1) if number == self.layout.num_shares else (0, number)
            rows = state.read(key, (begin, *offsets), (count, *shape))
            of_share[share] = rows.mean(0).to(piece.tensor.device)
        return of_share


_ABSENT, _NOT_FINITE = 0, 2


def _flags(values: list[Tensor], gradients: Gradients) -> Tensor:
    """Of each parameter whether the share has a gradient, and whether what it encodes is finite: uint8."""
    exists = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    finite = torch.stack([torch.linalg.vector_norm(value, torch.inf).isfinite() for value in values])
    return torch.where(finite, exists.to(finite.device), _NOT_FINITE)


def _shown(spec: list[tuple[torch.Size, torch.dtype]]) -> str:
    return " + ".join(f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in spec) or "nothing"
