"""What every rank holds for itself and rank 0's overwrites: buffers, such as the statistics of BatchNorm, and whole
models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.sync.collectives import all_gather, local
from lockstep.strategies.sync.contents import same_values
from lockstep.strategies.sync.counts import sizes_and_sums

if TYPE_CHECKING:
    from lockstep.strategies.data.sharded_loader import Window

_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_LOOKS = 10
"""Steps in which the host waits for an accelerator to compare buffers."""
_DIMS = 8
"""More than the dimensions of a buffer whose shape is followed."""


@contextmanager
def refusing_counts(
    held: Callable[[], Mapping[str, Tensor]],
    own: int,
    total: int,
    strategy: str,
    batches: Iterable[Any],
    suspects: dict[str, float],
) -> Iterator[None]:
    """Raise RuntimeError if a number in a buffer of `held()` grows within by the `own` samples or by the elements of a
    tensor in all of this rank's `batches`, not by the `total` samples of the step: it counts samples or tokens, alike
    on all ranks, but not as one process does.

    One that grows by another multiple of `own`, as the largest length of a batch may, or by the sum of a tensor, such
    as a mask, is among `suspects` first, and refused if it does so in a later step too, by another sum.
    """
    before = _numbers(held()) if 1 < own < total else {}
    yield
    grown = {name: now - before[name] for name, now in (_numbers(held()) if before else {}).items() if name in before}
    grown = {name: number for name, number in grown.items() if number > 0 and number != total}
    elements, sums = sizes_and_sums(batches) if grown else (set[int](), set[float]())
    for name, number in grown.items():
        counts = number == own or (number % own == 0 and number in elements)
        if not counts and number not in sums and (number % own or number % total == 0):
            continue
        is_constant = number % own != 0 and suspects.get(name) == number  # what counts by a mask is another each time
        if not counts and (name not in suspects or is_constant):
            suspects[name] = number
        else:
            raise RuntimeError(
                f"a step added {number:g} to the buffer {name}, which counts the {own} samples that {strategy} showed "
                f"it, and not the {total} of the batch; add self.sum_over_ranks({'len(x)' if number == own else '...'})"
                " in its place, or use strategy='single'; if it counts something else, keep it as a number in an "
                "attribute, which is saved too"
            )


def _numbers(held: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(buffer) for name, buffer in held.items() if buffer.numel() == 1 and not buffer.is_complex()}


@contextmanager
def shared(
    buffers: SharedBuffers | None, window: Window, strategy: str, group: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Around a step, after which ranks hold the same buffers. Every rank of the group calls it."""
    if buffers is None:
        yield
        return
    own = sum(micro_batch.num_samples for micro_batch in window.micro_batches)
    looks = buffers.compares and own > len(window.micro_batches)  # else it may count micro-batches
    batches = (micro_batch.batch for micro_batch in window.micro_batches)
    held = partial(kept_buffers, buffers.model)
    with refusing_counts(held, own * looks, window.num_samples, strategy, batches, buffers.suspects):
        yield
    buffers.share(window, group)


class SharedBuffers:
    """Rank 0's buffers overwrite the others' after each step, or those of the first rank that had samples in it.

    Those that are not in a state dict are caches, and each rank's own.

    `broadcast`: True whatever the others hold; None if they hold the same, but for statistics of normalizing layers;
    False leaves each rank its own.
    """

    def __init__(self, model: nn.Module, broadcast: bool | None) -> None:
        self.model, self._broadcast = model, broadcast
        self._names = {module: name for name, module in model.named_modules()}
        self._looks = 0
        self.suspects: dict[str, float] = {}
        """Buffers that may count samples."""
        self._shapes = self._now()

    @property
    def compares(self) -> bool:
        """Whether the next step is one whose numbers the host reads."""
        return self._broadcast is None and self._looks < _LOOKS

    def _now(self) -> dict[tuple[nn.Module, str], torch.Size | None]:
        """The shapes of all that is in the state dict, also of what is None yet."""
        return {
            (module, name): None if buffer is None else buffer.shape
            for module in self._names
            if module._buffers
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }

    def _path(self, place: tuple[nn.Module, str]) -> str:
        return f"{self._names[place[0]]}.{place[1]}".lstrip(".")

    def adopt(self, places: Iterable[tuple[nn.Module, str]]) -> list[str]:
        """Share from here on what user code has put in these places between steps, on every rank. Returns the names
        of those that are new or have another shape."""
        now, changed = self._now(), []
        for place in places:
            if place[0] not in self._names:
                continue
            if self._shapes.pop(place, None) != now.get(place):
                changed.append(self._path(place))
            if place in now:
                self._shapes[place] = now[place]
        if changed:
            self._looks = 0
        return changed

    def share(self, window: Window, group: dist.ProcessGroup | None = None) -> None:
        """Every rank of the group calls it after a step. Raises RuntimeError for a buffer that differs from the first
        rank's, on a rank that had samples in all of the step."""
        if self._broadcast is False:
            return
        if (shapes := self._now()) != self._shapes:
            places = [place for place in shapes | self._shapes if shapes.get(place) != self._shapes.get(place)]
            if places:
                raise RuntimeError(
                    f"the shape of a buffer changed in a step ({', '.join(sorted(map(self._path, places))[:5])}), so "
                    "ranks cannot share it; register it in __init__ with a tensor of that shape, or with "
                    "persistent=False, or give the strategy broadcast_buffers=False"
                )
        if not shapes:
            return
        compares = self._broadcast is None and window.has_samples
        self._looks += compares
        modules = dict.fromkeys(module for module, _ in shapes)
        src = self._first_with_samples(window, group) if window.may_lack else 0
        others = share_buffers(modules, group, compares, waits=self._looks <= _LOOKS, src=src)
        if not others:
            return
        names = sorted(name for name, buffer in self.model.named_buffers() if id(buffer) in others)
        raise RuntimeError(
            f"after a step the ranks hold different values of a buffer ({', '.join(names[:5])}), computed from the "
            "samples of each, and none of them is that of one process; sum what goes into it over the ranks "
            "(self.sum_over_ranks), use virtual_ranks, or give the strategy broadcast_buffers=True to take rank 0's"
        )

    def _first_with_samples(self, window: Window, group: dist.ProcessGroup | None) -> int:
        """The first rank of the group that had samples in all of the step, else in a part of it; 0 if none had."""
        lacks = 0 if window.has_samples else 1 if any(part.num_samples for part in window.micro_batches) else 2
        device = next((buffer.device for buffer in self.model.buffers()), None)
        return int(all_gather(torch.tensor(lacks, device=device), group).argmin())


class FollowedShapes:
    """Lets buffers that user code has given another shape have that of the first rank's, whose values follow."""

    def __init__(self) -> None:
        self._looks = 0

    def follow(self, modules: Iterable[nn.Module], group: dist.ProcessGroup | None = None) -> None:
        """Every rank of the group calls it. On an accelerator the host waits for it, so only in the first steps."""
        places = [
            (module, name, buffer)
            for module in modules
            if module._buffers and not all(cls.__module__.startswith("torch.") for cls in type(module).__mro__[:-1])
            for name, buffer in _kept(module)
            if type(buffer) is Tensor and buffer.dim() < _DIMS
        ]
        if not places or (self._looks >= _LOOKS and not places[0][2].is_cpu):
            return
        self._looks += 1
        shapes = [[buffer.dim(), *buffer.shape, *[0] * (_DIMS - 1 - buffer.dim())] for _, _, buffer in places]
        found = torch.tensor(shapes, device=places[0][2].device)
        dist.broadcast(found, group=group, group_src=0)
        for (module, name, buffer), (dim, *sizes) in zip(places, found.tolist(), strict=True):
            if [*buffer.shape] != sizes[:dim]:
                module._buffers[name] = buffer.new_empty(sizes[:dim])


@torch.no_grad()
def share_model(model: nn.Module) -> None:
    """Rank 0's parameters and buffers overwrite the others'. Every rank calls it."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    share_buffers(model.modules(), caches=True)


@torch.no_grad()
def share_buffers(
    modules: Iterable[nn.Module],
    group: dist.ProcessGroup | None = None,
    compares: bool = False,
    waits: bool = False,
    caches: bool = False,
    src: int = 0,
) -> set[int]:
    """Rank `src`'s buffers of each module itself overwrite the others', as in DDP; one broadcast a dtype. Every rank
    of the group calls it.

    With `compares` returns the `id` of those that were others on this rank, without statistics of normalizing layers;
    on an accelerator only if the host `waits` for it. Buffers in no state dict are each rank's own, of any
    length, and skipped without `caches`.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    compared: set[int] = set()
    for buffer, is_statistic in {
        id(buffer): (buffer, isinstance(module, _NORMS))
        for module in modules
        for buffer in (module._buffers.values() if caches else (buffer for _, buffer in _kept(module)))
        if buffer is not None
    }.values():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
        if compares and not is_statistic and (waits or buffer.is_cpu):
            compared.add(id(buffer))
    differing = set()
    for buffers in by_dtype.values():
        mine = [local(buffer) for buffer in buffers]  # that of a tensor-parallel layer is a DTensor
        flat = torch.cat([buffer.reshape(-1) for buffer in mine])
        dist.broadcast(flat, group=group, group_src=src)
        pieces = [piece.view_as(own) for own, piece in zip(mine, flat.split([b.numel() for b in mine]), strict=True)]
        for buffer, own, piece in zip(buffers, mine, pieces, strict=True):
            if id(buffer) in compared and not same_values(own, piece):
                differing.add(id(buffer))
        for own, piece in zip(mine, pieces, strict=True):
            own.copy_(piece)
    return differing


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """By name the buffers of the state dict, but for statistics of normalizing layers."""
    return kept_buffers_of(model.named_modules())


def kept_buffers_of(named_modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """`kept_buffers` of these modules themselves."""
    return {
        f"{name}.{key}".lstrip("."): buffer
        for name, module in named_modules
        if not isinstance(module, _NORMS)
        for key, buffer in _kept(module)
    }


def _kept(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own buffers that are in its state dict; the others are caches."""
    caches = module._non_persistent_buffers_set
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None and name not in caches]
