"""Running a step so that nothing remembers it: what keeps ranks without samples in step with the others."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.strategies.modules.blocks import OF_TORCH, is_metric
from lockstep.strategies.modules.model_changes import shortened


@contextmanager
def side_effect_free(model: nn.Module) -> Iterator[None]:
    """Put back, at the end, the buffers and attributes of every submodule and torch's random state.

    Counters, lists of outputs, statistics of BatchNorm and the sums of torchmetrics objects are then what they
    were; parameters and their gradients are not touched. Reaches into attributes that are lists, dicts, tuples
    and tensors, not into other objects, which may belong to somebody else.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), _put_back([*model.modules()]):
        yield


@contextmanager
def metrics_uncounted(model: nn.Module) -> Iterator[None]:
    """Let torchmetrics objects of `model` count nothing: for what user code does with a batch of padding."""
    parts = {part: None for metric in filter(is_metric, model.modules()) for part in metric.modules()}
    with _put_back([*parts]) if parts else nullcontext():
        yield


@contextmanager
def _put_back(modules: list[nn.Module]) -> Iterator[None]:
    """Put back, at the end, buffers and attributes. A metric that was reset within is reset."""
    before = [
        (module, {key: value for key, value in vars(module).items() if _is_state(key)}, dict(module._buffers))
        for module in modules
    ]
    values = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers(recurse=False)]
    held = _Held(modules)
    for _, attributes, _ in before:
        for value in attributes.values():
            held.note(value)
    metrics: list[Any] = [module for module in modules if is_metric(module) and hasattr(module, "_update_count")]
    for metric in metrics:
        metric._update_count += _MANY
    try:
        yield
    finally:
        reset = [metric for metric in metrics if metric._update_count < _MANY]  # a forward puts its count back
        with torch.no_grad():
            for buffer, value in values:
                buffer.data.copy_(value)  # a backward may still need the buffer, and must not find it changed
        for module, attributes, buffers in before:
            for key in [key for key in vars(module) if _is_state(key) and key not in attributes]:
                del vars(module)[key]
            vars(module).update(attributes)
            module._buffers.update(buffers)
        held.put_back()
        for metric in reset:
            metric.reset()


_MANY = 1_000_000
"""More updates of a metric than a step makes."""


def _is_state(key: str) -> bool:
    if key.startswith(_OF_ZERO):
        return False
    return key not in ("_parameters", "_buffers", "_modules", "_trainer") and "hooks" not in key


class _Held:
    """What attributes hold, to be put back in the same objects: others may hold these, and tensors be views."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._seen: dict[int, Any] = {}
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._parameters = {_storage(p) for module in modules for p in module.parameters(recurse=False)}

    def note(self, value: Any) -> None:
        if (type(value) not in _CONTAINERS and not isinstance(value, Tensor)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            # A tensor that is sharded over ranks, or part of a parameter, changes on all of them alike. `is_leaf` is
            # asked last: a view of a shard would ask the other ranks.
            if not hasattr(value, "_local_tensor") and _storage(value) not in self._parameters and value.is_leaf:
                self._tensors.append((value, value.detach().clone()))
            return
        if type(value) is not tuple:
            self._containers.append((value, value.copy()))
        for item in value.values() if type(value) is dict else value:
            self.note(item)

    def put_back(self) -> None:
        for container, items in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(items)
        for tensor, value in self._tensors:
            if tensor.shape != value.shape or 0 in tensor.stride():
                tensor.data = value
            else:
                tensor.data.copy_(value)


_CONTAINERS = (dict, list, tuple, set, deque)


def _storage(tensor: Any) -> int:
    """By which tensors that share memory are found; another for each that has none."""
    memory = getattr(tensor, "_local_tensor", tensor)
    return (memory.untyped_storage().data_ptr() if memory.layout is torch.strided else 0) or -id(tensor)


# ---- numbers that a step keeps in the model's attributes: a rank without samples would fall behind in them ----

Numbers = dict[tuple[nn.Module, str, Any], Any]
"""Values by the module, its attribute, and the key where the attribute is a dict, else None."""


def numbers(model: nn.Module) -> Numbers:
    """The numbers among the attributes of `model` and its submodules, and in attributes that are dicts.

    Metrics of torchmetrics are skipped: their counts are reduced over ranks by themselves. Walks the whole tree.
    """
    return {(module, name, key): value for module in model.modules() for name, key, value in _numbers_of(module)}


def changed_numbers(model: nn.Module, before: Numbers) -> list[str]:
    """The names of the numbers that differ from `before`, which is `numbers(model)` from earlier."""
    now = numbers(model)
    places = [place for place in {**before, **now} if differ(before.get(place), now.get(place))]
    names = {module: name for name, module in model.named_modules()} if places else {}
    return sorted(
        ".".join(filter(None, (names.get(module, "?"), attribute))) + ("" if key is None else f"[{key!r}]")
        for module, attribute, key in places
    )


def put_back_numbers(model: nn.Module, before: Numbers) -> None:
    """Let the numbers be `before`, which is `numbers(model)` from earlier."""
    for module, attribute, key in numbers(model).keys() - before.keys():
        vars(module).pop(attribute) if key is None else vars(module)[attribute].pop(key)
    for (module, attribute, key), value in before.items():
        if key is None:
            vars(module)[attribute] = value
        elif isinstance(held := vars(module).get(attribute), dict):
            held[key] = value


def refuse_changed_numbers(model: nn.Module, before: Numbers) -> None:
    """Raise RuntimeError naming the numbers that differ from `before`, which is `numbers(model)` from before a step.

    For windows in which a rank has no samples. Its step has no effect or does not run, so it cannot count along, and no
    rank can know whether the others counted calls (alike on all ranks) or samples (each its own).
    """
    if changed := changed_numbers(model, before):
        raise RuntimeError(
            f"training_step, or backward, changed the number{'s' * (len(changed) > 1)} {shortened(changed, 5)} of the "
            "model in a step in which a rank has no samples, and would fall behind the others; use "
            "trainer.global_step, self.log(..., reduce_fx='sum') or a registered buffer instead, or leave such steps "
            "out with drop_last=True in the DataLoader"
        )


class PlainAttributes:
    """Modes, numbers, strings and tuples in attributes of layers of torch's classes, which only user code changes: read
    at once, as a step has many layers."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = [*layers]
        self._own = [vars(layer) for layer in self._layers]
        self._find()

    def _find(self) -> None:
        self._number = sum(map(len, self._own))
        self._places = [
            (layer, name)
            for layer, own in zip(self._layers, self._own, strict=True)
            for name, value in own.items()
            if isinstance(value, _PLAIN) and not name.startswith(_OF_ZERO)
        ]
        self._dicts = [vars(layer) for layer, _ in self._places]
        self._names = [name for _, name in self._places]

    def now(self) -> PlainValues:
        if sum(map(len, self._own)) != self._number:
            self._find()
        return PlainValues(self._places, [*map(dict.get, self._dicts, self._names)])

    def put(self, values: PlainValues) -> None:
        """Give layers the values of an earlier `now`."""
        before = dict(zip(values.places, values.values, strict=True))
        for layer, name in values.changed(self.now()):
            if (layer, name) in before:
                vars(layer)[name] = before[layer, name]
            else:
                del vars(layer)[name]


class PlainValues(NamedTuple):
    """What `PlainAttributes` found."""

    places: list[tuple[nn.Module, str]]
    values: list[Any]

    def changed(self, now: PlainValues) -> list[tuple[nn.Module, str]]:
        """The places of what is another value `now`, in layers that are there in both."""
        if self.places is now.places and all(map(operator.is_, self.values, now.values)):
            return []
        one, other = (dict(zip(found.places, found.values, strict=True)) for found in (self, now))
        layers = {layer for layer, _ in self.places} & {layer for layer, _ in now.places}
        return [p for p in {**one, **other} if p[0] in layers and _is_other(one.get(p), other.get(p))]


def _is_other(one: Any, other: Any) -> bool:
    return one is not other and (type(one) is not type(other) or not isinstance(other, _PLAIN) or differ(one, other))


class UserAttributes:
    """Attributes of layers of the user's classes but for those that torch gives every module, of which only modes and
    kinds of hooks are numbers: a step has far more of these."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._own = [(layer, vars(layer)) for layer in layers]
        self._tables = [own for _, own in self._own]
        self._find()

    def _find(self) -> None:
        self._lengths = [*map(len, self._tables)]
        self._places = [(layer, name) for layer, own in self._own for name in own if name not in _TABLES]
        self._dicts = [vars(layer) for layer, _ in self._places]
        self._names = [name for _, name in self._places]

    def now(self) -> Iterator[tuple[tuple[nn.Module, str], Any]]:
        values = [*map(dict.get, self._dicts, self._names, repeat(_GONE))]
        if [*map(len, self._tables)] != self._lengths or any(map(operator.is_, values, repeat(_GONE))):
            self._find()
            values = [*map(dict.get, self._dicts, self._names)]
        return zip(self._places, values, strict=True)


_TABLES = OF_TORCH - {"training", "_is_full_backward_hook"}
_GONE = object()
_PLAIN = (type(None), bool, int, float, complex, str, tuple)


def _numbers_of(module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    if is_metric(module):
        return
    for name, value in vars(module).items():
        if name.startswith(_OF_ZERO):
            continue
        if isinstance(value, Number):
            yield name, None, value
        elif type(value) is dict and name not in OF_TORCH:
            yield from ((name, key, item) for key, item in value.items() if isinstance(item, Number))


def differ(one: Any, other: Any) -> bool:
    """Whether two values are unequal; NaN equals NaN."""
    return bool(one is not other and one != other and (one == one or other == other))


_OF_ZERO = ("ds_", "applied_pre_backward")
"""How the names of counters begin by which ZeRO-3 runs its backward."""
