"""Numbers, lists and tensors in the attributes of modules and parameters, as a step finds and leaves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.blocks import OF_TORCH, measures
from lockstep.strategies.modules.parameter_hooks import attributes
from lockstep.strategies.modules.side_effect_free import PlainValues, differ
from lockstep.strategies.pipeline.state.marks import PLAIN
from lockstep.strategies.pipeline.state.snapshot import MANY, is_followed
from lockstep.strategies.sync.contents import sum_of_bits

_NO_STATE = OF_TORCH - {"training"}
Holder = nn.Module | Tensor
"""What user code sets attributes of: a module, or a parameter."""
Place = tuple[Holder, str, Any]
Numbers = dict[Place, Any]
BUFFER = object()
"""In the place of a key, of a buffer."""


class Found(NamedTuple):
    """What a run of the step may change."""

    numbers: Numbers
    """And strings, None, and buffers, which a step may replace."""
    sizes: dict[Place, int]
    """Of lists."""
    tensors: dict[Place, Tensor]
    """In attributes."""
    plain: PlainValues = PlainValues([], [])
    """Of layers of torch's classes in the pipelined module, whose forward changes none."""
    children: Sequence[tuple[nn.Module, dict[str, Any]]] = ()
    """What modules hold, in its order."""

    @property
    def counts(self) -> dict[Place, Any]:
        """What layers may count in."""
        return {**self.numbers, **self.sizes}


NOTHING = Found({}, {}, {})


def containers_of(module: nn.Module) -> Iterator[Any]:
    """Its attributes that are dicts and lists, beside torch's own."""
    return (value for name, value in vars(module).items() if type(value) in (dict, list) and name not in OF_TORCH)


def attributes_of(module: nn.Module) -> dict[tuple[str, Any], Any]:
    """The attributes of a module beside torch's own, and what is in dicts and lists among them."""
    found: dict[tuple[str, Any], Any] = {}
    for name, value in vars(module).items():
        if type(value) in (dict, list) and name not in OF_TORCH:
            found |= {
                (name, key): held for key, held in (value if type(value) is dict else dict(enumerate(value))).items()
            }
        elif name not in OF_TORCH:
            found[name, None] = value
    return found


def is_other(before: Any, now: Any) -> bool:
    """Whether `now` is a tensor or number that has taken the place of `before`."""
    if isinstance(now, Tensor):
        return now is not before
    return isinstance(now, int | float) and not (type(now) is type(before) and now == before)


def scan(holders: Iterable[Any], stored: Collection[str] = ()) -> Found:
    """Numbers, strings and None among the attributes, and in attributes that are dicts and followed; buffers, which a
    step may replace; lists by their lengths, and tensors. Steps store items into dicts that are `stored`."""
    found = Found({}, {}, {})
    numbers, sizes, tensors, *_ = found
    for module in holders:
        is_module = isinstance(module, nn.Module | Tensor)
        if isinstance(module, nn.Module) and module._buffers and not measures(module):
            for name, buffer in module._buffers.items():
                if buffer is not None and is_here(buffer):
                    numbers[module, name, BUFFER] = buffer
        for name, value in (attributes(module) if isinstance(module, Tensor) else vars(module)).items():
            if name in _NO_STATE:
                continue
            if isinstance(value, PLAIN):
                numbers[module, name, None] = value
            elif isinstance(value, Tensor):
                tensors[module, name, None] = value
            elif isinstance(value, list | deque):
                sizes[module, name, None] = len(value)
            elif isinstance(value, dict) and (len(value) <= MANY or not is_module or name in stored):
                follows = is_followed(name, value, stored) or not is_module
                for key, item in dict.items(value):
                    if isinstance(item, list | deque):
                        sizes[module, name, key] = len(item)
                    elif follows and isinstance(item, PLAIN):
                        numbers[module, name, key] = item
    return found


def restore(found: Found, now: Numbers) -> None:
    """Give modules the numbers that they had."""
    numbers = found.numbers
    for module, name, key in now.keys() - numbers.keys():
        if key is BUFFER:
            module._buffers[name] = None  # type: ignore[union-attr]
        elif (module, name, key) in found.tensors:
            vars(module)[name] = found.tensors[module, name, key]
        else:
            del holder_of(module, name, key)[name if key is None else key]
    for (module, name, key), value in numbers.items():
        if now.get((module, name, key), BUFFER) is not value:
            holder = module._buffers if key is BUFFER else holder_of(module, name, key)  # type: ignore[union-attr]
            holder[name if key is None or key is BUFFER else key] = value


def holder_of(module: Holder, name: str, key: Any) -> Any:
    """The dict that holds what is in a place."""
    return vars(module) if key is None else vars(module)[name]


def differences(one: Found, other: Found) -> Iterator[Place]:
    """The places of numbers that differ."""
    before, now = one.numbers, other.numbers
    for place in {**before, **now}:
        if are_other(before.get(place), now.get(place)):
            yield place
    yield from ((*place, None) for place in one.plain.changed(other.plain))
    yield from ((*place, None) for place in exchanged(one.children, other.children))


def children_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    return [(module, module._modules.copy()) for module in modules]


def put_children(found: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give modules what they held, in its order."""
    for module, children in found:
        if module._modules != children or [*module._modules] != [*children]:
            module._modules.clear()
            module._modules.update(children)


def exchanged(
    before: Iterable[tuple[nn.Module, dict[str, Any]]], now: Iterable[tuple[nn.Module, dict[str, Any]]]
) -> Iterator[tuple[nn.Module, str]]:
    """Where the same modules hold others."""
    for (module, one), (_, other) in zip(before, now, strict=False):
        if one != other or [*one] != [*other]:
            names = [*one, *other]  # of the same in another order the first stands for all
            yield module, next((name for name in names if one.get(name) is not other.get(name)), names[0])


def are_other(one: Any, other: Any) -> bool:
    """Whether two numbers, or buffers, differ."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is not other and not (isinstance(one, Tensor) and isinstance(other, Tensor) and equal(one, other))
    return differ(one, other)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether they hold the same; a host synchronization, for what was replaced."""
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Its parameters and buffers that are whole on this rank."""
    held = [*module._parameters.values(), *module._buffers.values()]
    return [t for t in held if t is not None and is_here(t) and not hasattr(t, "device_mesh")]


def bits_of(modules: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], tuple[Tensor, int]]:
    """A sum of the bits of their tensors, by place, as a layer may make some: `.data` is changed past versions."""
    held = (((m, n), t) for m in modules for n, t in chain(m._parameters.items(), m._buffers.items()))
    here = [(place, t) for place, t in held if t is not None and is_here(t) and t.layout is torch.strided]
    return {place: (t, int(sum_of_bits(t))) for place, t in here if not t.is_meta and not t.is_quantized}
