"""How values and gradients of sharded parameters come to the ranks that step them whole, and new values back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.sync.collectives import local
from lockstep.strategies.sync.contents import same_bits

_Kind = tuple[torch.dtype, torch.device]


class Piece(NamedTuple):
    """The part of a parameter that a rank holds."""

    rank: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))]


@dataclass
class Owned:
    """A parameter, and where it is stepped."""

    sharded: nn.Parameter
    name: str
    pieces: list[Piece]
    """What each rank holds of it, without the ranks that hold no element."""
    owner: int
    stepped: Any
    """The whole parameter on its owner, which has value and gradient within a step only; elsewhere a stand-in."""
    sent: Tensor | None = None
    """The whole value that its owner has sent last, if it keeps that."""

    @cached_property
    def sources(self) -> list[Piece]:
        """The pieces that make it whole, from the ranks nearest to the owner."""
        nearest: dict[tuple[int, ...], Piece] = {}
        for piece in sorted(self.pieces, key=lambda piece: abs(piece.rank - self.owner)):
            nearest.setdefault(piece.offsets, piece)
        return list(nearest.values())


class Exchange:
    """Brings values and gradients of an optimizer's parameters to their owners, and new values back. Every rank calls
    each method, with the same parameters.

    On the CPU an owner keeps the values that it has sent, and each rank what it has received, one shard. As long as all
    shards have the bits that were received, only gradients are sent. Any edit is found, however it was made.

    `group`: the ranks that take part, None for all; ranks are counted within it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self._known: list[Owned] = []
        """The parameters whose values owners keep: the same on all ranks."""
        self._received: list[tuple[Owned, Tensor]] = []
        """What this rank holds of them: the values that it has got."""

    def forget(self) -> None:
        """Keep no value."""
        for each in self._known:
            each.sent = None
        self._known, self._received = [], []

    def gather(self, held: Sequence[Owned]) -> None:
        """Give value and gradient to what this rank steps of these parameters."""
        if not held:
            return
        if not _identical(held, self._known):
            self.forget()
        have_gradients = [each for each in held if each.sharded.grad is not None]
        for each in filter(_is_stepped_here, held):
            value = each.sent
            if value is None:
                value = torch.empty(each.sharded.shape, dtype=each.sharded.dtype, device=local(each.sharded).device)
            each.stepped.data = value
            each.stepped.requires_grad_(each.sharded.requires_grad)
            if each.sharded.grad is not None:
                each.stepped.grad = torch.empty_like(each.stepped, dtype=each.sharded.grad.dtype)
        kinds = _kinds([*map(_value, held), *map(_gradient, have_gradients)])
        sends, receives = self._rows(kinds), self._rows(kinds)
        flags = local(held[0].sharded).new_zeros(self._size)
        if self._known:
            unchanged = flags.new_full((1,), float(self._has_received()))
            for rank in range(len(flags)):
                if rank == self._rank:
                    flags[rank] = unchanged
                    continue
                sends.add(rank, unchanged)
                receives.add(rank, flags[rank : rank + 1])
        else:
            self._add_sources(sends, receives, held, _value, _stepped)
        self._add_sources(sends, receives, have_gradients, _gradient, _stepped_gradient)
        self._send(sends, receives)
        if self._known and not flags.all():
            sends, receives = (self._rows(_kinds(map(_value, held))) for _ in range(2))
            self._add_sources(sends, receives, held, _value, _stepped)
            self._send(sends, receives)

    def scatter(self, held: Sequence[Owned]) -> None:
        """Write what owners have to what each rank holds."""
        kinds = list(_kinds(map(_value, held)))
        sends, receives = self._rows(kinds), self._rows(kinds)
        own, others = list[tuple[Owned, Tensor]](), list[Owned]()
        for each in held:
            for piece in each.pieces:
                if not _is_stepped_here(each):
                    if piece.rank == self._rank:
                        receives.add(each.owner, local(each.sharded))
                        others.append(each)
                elif piece.rank == self._rank:
                    own.append((each, piece.of(each.stepped).detach()))
                else:
                    sends.add(piece.rank, piece.of(each.stepped))
        for each, value in own:
            local(each.sharded).copy_(value)
        came = self._send(sends, receives)
        self.forget()
        if all(device.type == "cpu" for _, device in kinds):  # elsewhere the host would wait for the comparison
            others.sort(key=lambda each: (kinds.index(_kind(_value(each))), each.owner))
            self._known, self._received = list(held), [*own, *zip(others, came, strict=True)]
            for each in filter(_is_stepped_here, held):
                each.sent = each.stepped.detach()

    def scatter_gradients(self, held: Sequence[Owned], edits: Sequence[str]) -> None:
        """Do to the gradients of what each rank holds what the optimizer on the owner did to its own: nothing (""), or
        it was "dropped" or "changed"."""
        changed: list[Owned] = []
        for each, edit in zip(held, edits, strict=True):
            if edit == "dropped":
                each.sharded.grad = None
            elif edit == "changed":
                changed.append(each)
                if each.sharded.grad is None:
                    each.sharded.grad = torch.zeros_like(each.sharded)
        sends, receives = (self._rows(_kinds(map(_gradient, changed))) for _ in range(2))
        for each in changed:
            if _is_stepped_here(each):
                for piece in each.pieces:
                    sends.add(piece.rank, piece.of(each.stepped.grad).to(_gradient(each).dtype))
            if any(piece.rank == self._rank for piece in each.pieces):
                receives.add(each.owner, local(_gradient(each)))
        self._send(sends, receives)

    def _has_received(self) -> bool:
        """Whether all that this rank holds of what owners keep has the bits that it has received."""
        return all(same_bits(local(each.sharded), value) for each, value in self._received)

    def _add_sources(
        self, sends: Rows, receives: Rows, moved: Sequence[Owned], part: Callable[[Owned], Any],
        whole: Callable[[Owned], Any],
    ) -> None:  # fmt: skip
        """Let `whole` of each on its owner be filled from the ranks' parts."""
        for each in moved:
            for piece in each.sources:
                if piece.rank == each.owner == self._rank:
                    piece.of(whole(each)).copy_(local(part(each)))
                elif piece.rank == self._rank:
                    sends.add(each.owner, local(part(each)))
                elif each.owner == self._rank:
                    receives.add(piece.rank, piece.of(whole(each)))

    def _rows(self, kinds: Iterable[_Kind]) -> Rows:
        return Rows(kinds, self._size)

    def _send(self, sends: Rows, receives: Rows) -> list[Tensor]:
        """Send and receive, by one call for each dtype and device. Every rank calls it with the same ones. Returns what
        came for each of `receives`, in the order of `flat`."""
        arrived: list[Tensor] = []
        for kind, flat in sends.flat().items():
            rows = receives.kinds[kind]
            double = 2 if flat.is_complex() else 1
            theirs, mine = (
                [double * sum(t.numel() for t in row) for row in lists] for lists in (rows, sends.kinds[kind])
            )
            got = flat.new_empty(sum(theirs) // double)
            into, out = (torch.view_as_real(t).view(-1) if double == 2 else t for t in (got, flat))
            dist.all_to_all_single(into, out, theirs, mine, group=self._group)
            targets = [t for row in rows for t in row]
            parts = [p.view(t.shape) for t, p in zip(targets, got.split([t.numel() for t in targets]), strict=True)]
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
            arrived += parts
        return arrived


class Rows:
    """Tensors to send to each rank, or to receive from it, apart by dtype and device."""

    def __init__(self, kinds: Iterable[_Kind], size: int) -> None:
        self.kinds: dict[_Kind, list[list[Tensor]]] = {kind: [[] for _ in range(size)] for kind in kinds}

    def add(self, rank: int, tensor: Tensor) -> None:
        self.kinds[tensor.dtype, tensor.device][rank].append(tensor.detach())

    def flat(self) -> dict[_Kind, Tensor]:
        """All of a kind in one tensor, in the order of ranks."""
        return {
            (dtype, device): torch.cat(
                [torch.empty(0, dtype=dtype, device=device), *(t.reshape(-1) for row in rows for t in row)]
            )
            for (dtype, device), rows in self.kinds.items()
        }


def _kinds(tensors: Iterable[Any]) -> dict[_Kind, None]:
    """Their dtypes and devices, in the same order on each rank."""
    return dict.fromkeys(map(_kind, tensors))


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, local(tensor).device


def _identical(some: Sequence[Owned], others: Sequence[Owned]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _is_stepped_here(owned: Owned) -> bool:
    return is_here(owned.stepped)


def _value(owned: Owned) -> Any:
    return owned.sharded


def _gradient(owned: Owned) -> Any:
    return owned.sharded.grad


def _stepped(owned: Owned) -> Any:
    return owned.stepped


def _stepped_gradient(owned: Owned) -> Any:
    return owned.stepped.grad
