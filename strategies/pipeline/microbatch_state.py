"""What a step keeps in the model, where it runs once for each pipeline microbatch and stage instead of once.

Numbers beside the layers (counters, annealed weights) and those of torch's layers (the slope of a LeakyReLU) begin each
run as the micro-batch found them, so that the microbatches of one micro-batch see the same, and after it they are what
one run has left. What cannot be followed so is refused by name before the optimizer steps: sums over samples, lists
that grow, tensors that are changed in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.modules.absent import Refusing, is_here
from lockstep.strategies.modules.blocks import Layer, is_metric, is_of_torch, measures
from lockstep.strategies.modules.side_effect_free import PlainAttributes, PlainValues, differ
from lockstep.strategies.pipeline.hook_state import Enclosed, hook_holders
from lockstep.strategies.pipeline.partition import Cut

_NUMBERS = (int, float, complex, np.number)
_PLAIN = frozenset((bool, int, float, complex))
OF_TORCH = frozenset(vars(nn.Module()))
_Holder = nn.Module | Tensor
"""What user code sets attributes of: a module, or a parameter."""
_Place = tuple[_Holder, str, Any]
_Numbers = dict[_Place, Any]
_BUFFER = object()
"""In the place of a key, of a buffer."""
_ADVICE = "in on_train_batch_start or on_train_batch_end, which run once on every rank"


class _Found(NamedTuple):
    """What a run of the step may change."""

    numbers: _Numbers
    plain: PlainValues = PlainValues([], [])
    """Of layers of torch's classes in the pipelined module, whose forward changes none."""


_NOTHING = _Found({})


class StepState:
    """Watches the modules of one model, of whose layers `here` are this rank's; `shared` are the ids of tensors that
    several stages use."""

    def __init__(self, model: nn.Module, parts: Cut, here: list[Layer], shared: set[int]) -> None:
        inside = {child for layer in parts.layers for child in layer.module.modules()}
        own = [child for layer in here for child in layer.module.modules()]
        self._model = model
        metrics = {part for metric in filter(is_metric, model.modules()) for part in metric.modules()} - inside
        free = parts.free() - metrics
        outside = [m for m in model.modules() if m not in inside | free | metrics]
        self._outside: list[_Holder] = [*outside, *model.parameters()]
        self._layers: list[Any] = [m for m in (*own, *free) if not is_of_torch(m)]
        self._plain = PlainAttributes(m for m in inside | free if is_of_torch(m))
        self._own_code, self._hooked, self._registered = self._layers, [*own, *free, *outside], -1
        self._tensors = [t for m in (*outside, *free) if not measures(m) for t in _tensors_of(m)]
        self._tensors += [t for m in own for t in _tensors_of(m) if id(t) in shared]
        self._layer_tensors = [t for m in own if not measures(m) for t in _tensors_of(m)]
        self.pads = False
        """Whether this rank has no samples, so that the step runs for its shapes only."""
        self._start = _NOTHING
        self._end: _Found | None = None
        self._called: _Found | None = None
        self._inside: _Numbers = {}
        self._changed_once: set[tuple[int, str, Any]] = set()
        self._changed_by_hooks: set[tuple[int, str, Any]] = set()
        self._held: dict[_Place, Tensor] | None = None
        self._partial: set[_Place] = set()

    def around(self, wants: str, is_last: bool) -> AbstractContextManager[None]:
        """Around a run of the step, for what a `stage_run.Run` wants."""
        if wants == "stage":
            return self.run(is_last)
        return self.side_effect_free() if wants == "inputs" else self.evaluation()

    @contextmanager
    def micro_batch(self, sizes_of_parts: Sequence[int]) -> Iterator[None]:
        """Around all runs of a step on one micro-batch, whose parts have so many samples. Raises RuntimeError naming
        what they have changed that cannot be followed."""
        self._start, self._end, self._held = self._now(), None, None
        self._partial.clear()
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            known = [holder for holder in self._layers if isinstance(holder, Enclosed)]
            self._layers = [*self._own_code, *hook_holders(self._hooked, known)]
        self._inside, sizes = _kept(self._layers), _sizes(self._outside)
        tensors = [*self._tensors, *self._layer_tensors] if len(sizes_of_parts) > 1 else self._tensors
        versions = [t._version for t in tensors]
        yield
        self._refuse_counting()  # in the backward
        self._refuse_grown(sizes, "training_step")
        self._refuse_counting_samples(sizes_of_parts)
        if versions != [t._version for t in tensors]:
            changed = [t for t, before in zip(tensors, versions, strict=True) if t._version != before]
            names = {id(t): name for name, t in (*self._model.named_parameters(), *self._model.named_buffers())}
            self._refuse(f"changes {names.get(id(changed[0]), 'a tensor')} in place", f"change it {_ADVICE}")
        for place in self._partial:
            vars(place[0])[place[1]] = Refusing(
                f"training_step has set self.{self._name(place)}, but a pipeline runs it for each part of a "
                "micro-batch, so it holds a part; return it from training_step and read it in on_train_batch_end, or "
                "use self.log"
            )

    @contextmanager
    def run(self, is_last: bool = False) -> Iterator[None]:
        """Around one run of the step, which begins with the numbers that the micro-batch found."""
        self._put(self._start)
        self._called = None
        yield
        end = self._now()
        if is_last and self._called is not None and (place := _difference(self._called, end)) is not None:
            self._refuse(
                f"changes {self._name(place)} after it has called the pipelined module, where only the last stage "
                "comes",
                f"change it before, or {_ADVICE}",
            )
        if self._end is not None and (place := _difference(self._end, end)) is not None:
            self._refuse(f"leaves another {self._name(place)} for each part of a micro-batch", f"change it {_ADVICE}")
        self._end = end
        held: dict[_Place, Tensor] = {
            (module, name, None): value
            for module in (*self._outside, *self._layers)
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }
        if self._held is not None:  # what each run sets again holds one part; a cache is set once
            self._partial.update(place for place, value in held.items() if self._held.get(place) is not value)
        self._held = held
        self._refuse_counting()

    @contextmanager
    def before_backward(self) -> Iterator[None]:
        """Around `on_before_backward`, on the rank of the last stage. Raises RuntimeError naming a number that it
        changes."""
        before = self._now(), _Found(_kept(self._layers))
        yield
        for one, other in zip(before, (self._now(), _Found(_kept(self._layers))), strict=True):
            if (place := _difference(one, other)) is not None:
                raise RuntimeError(
                    f"on_before_backward changes {self._name(place)}, but a pipeline calls it for each part of a "
                    "micro-batch, on the "
                    f"rank of the last stage only; change it {_ADVICE}"
                )

    @contextmanager
    def parameter_hooks(self, hooks: list[Callable[..., Any]]) -> Iterator[None]:
        """Around the hooks of parameters, which only the rank that holds a parameter calls. Raises RuntimeError naming
        a number that they change; one that is new may be a cache, and changes once, as a flag does."""
        holders = [*self._outside, *self._own_code, *map(Enclosed, hooks)]
        before = _kept(holders)
        yield
        after = _kept(holders)
        for place in {**before, **after}:
            if _differ(before.get(place), after.get(place)):
                key = (id(getattr(place[0], "hook", place[0])), place[1], place[2])
                known = place in before and place in after and type(after[place]) is not bool
                if known or key in self._changed_by_hooks:
                    raise RuntimeError(
                        f"a hook of a parameter counts in {self._name(place)}, but in a pipeline only the rank that "
                        "holds the parameter calls it, so that other ranks would have another number; count in "
                        "on_before_optimizer_step or on_train_batch_end, which run on every rank"
                    )
                self._changed_by_hooks.add(key)

    @contextmanager
    def padding(self) -> Iterator[None]:
        """Around a run of the step on a rank that has no samples, which must not leave numbers behind."""
        self.pads = True
        try:
            yield
        finally:
            self.pads = False

    @contextmanager
    def side_effect_free(self) -> Iterator[None]:
        """Around a run of the step that leaves nothing behind."""
        found, lists = self._now(), [(held, len(held)) for _, _, held in _lists(self._outside)]
        try:
            yield
            if self.pads and (place := _difference(found, self._now())) is not None:
                raise RuntimeError(
                    f"training_step changed the number {self._name(place)} of the model in a step in which a rank has "
                    "no "
                    f"samples, and would fall behind the others; change it {_ADVICE}"
                )
        finally:
            self._put(found)
            for held, length in lists:
                while len(held) > length:
                    held.pop()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around the run of an evaluation step, which comes to its end on the last stage only."""
        sizes = _sizes(self._outside)
        yield
        self._refuse_grown(sizes, "an evaluation step")

    def calling(self) -> None:
        """The step calls the pipelined module."""
        self._called = self._now()

    # ---- helpers ---------------------------------------------------------------------------------------

    def _now(self) -> _Found:
        return _Found(_numbers(self._outside), self._plain.now())

    def _put(self, found: _Found) -> None:
        _restore(self._outside, found.numbers)
        self._plain.put(found.plain)

    def _refuse_grown(self, before: dict[_Place, int], step: str) -> None:
        for (module, name, key), size in _sizes(self._outside).items():
            if before.get((module, name, key), size) != size:
                raise RuntimeError(
                    f"{step} adds to the list {self._name((module, name, key))}, but a pipeline runs it for parts of a "
                    "micro-batch, to its end on the last stage only; use self.log, a metric of torchmetrics, or "
                    "on_train_batch_end"
                )

    def _refuse_counting_samples(self, sizes: Sequence[int]) -> None:
        own, total = min(sizes, default=0), sum(sizes)
        for place, now in self._end.numbers.items() if self._end is not None and 1 < own < total else ():
            grown = _grown(self._start.numbers.get(place, 0), now)
            if grown > 0 and grown % own == 0 and grown % total:
                self._refuse(f"counts the samples of a part in {self._name(place)}", f"count them {_ADVICE}")

    def _refuse_counting(self) -> None:
        """A layer may keep a number once, as a cache does; one that continues changing counts."""
        before, now = self._inside, _kept(self._layers)
        self._inside = now
        for place in {**before, **now}:
            if _differ(before.get(place), now.get(place)):
                key = (id(place[0]), place[1], place[2])
                if key in self._changed_once:
                    what = "hook" if isinstance(place[0], Enclosed) else "layer"
                    self._refuse(f"calls a {what} that counts in {self._name(place)}", f"count {_ADVICE}")
                self._changed_once.add(key)

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise RuntimeError(f"training_step {what}, but a pipeline runs it for each part of a micro-batch; {instead}")

    def _name(self, place: _Place) -> str:
        module, attribute, key = place
        named: chain[tuple[str, _Holder]] = chain(self._model.named_modules(), self._model.named_parameters())
        path = next((name for name, child in named if child is module), "")
        return ".".join(filter(None, (path, attribute))) + ("" if key is None or key is _BUFFER else f"[{key!r}]")


def containers_of(module: nn.Module) -> Iterator[Any]:
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


def _numbers(modules: Sequence[_Holder]) -> _Numbers:
    """Numbers among the attributes, and in attributes that are dicts; buffers, which a step may replace."""
    found: _Numbers = {}
    for module in modules:
        if isinstance(module, nn.Module) and module._buffers and not measures(module):
            found |= {
                (module, name, _BUFFER): buffer
                for name, buffer in module._buffers.items()
                if buffer is not None and is_here(buffer)
            }
        for name, value in vars(module).items():
            if type(value) in _PLAIN or isinstance(value, _NUMBERS):
                found[module, name, None] = value
            elif type(value) is dict and name not in OF_TORCH:
                for key, item in value.items():
                    if type(item) in _PLAIN or isinstance(item, _NUMBERS):
                        found[module, name, key] = item
    return found


def _restore(modules: Sequence[_Holder], numbers: _Numbers) -> None:
    for module, name, key in _numbers(modules).keys() - numbers.keys():
        if isinstance(module, nn.Module) and key is _BUFFER:
            module._buffers[name] = None
        elif key is None:
            del module.__dict__[name]
        else:
            del module.__dict__[name][key]
    for (module, name, key), value in numbers.items():
        if isinstance(module, nn.Module) and key is _BUFFER:
            module._buffers[name] = value
        elif key is None:
            module.__dict__[name] = value
        else:
            module.__dict__[name][key] = value


def _lists(modules: Sequence[_Holder]) -> Iterator[tuple[_Place, int, Any]]:
    """Lists among the attributes of modules, and in attributes that are dicts."""
    for module in modules:
        for name, value in vars(module).items():
            if name in OF_TORCH:
                continue
            if isinstance(value, list | deque):
                yield (module, name, None), len(value), value
            elif isinstance(value, dict):
                for key, item in value.items():
                    if isinstance(item, list | deque):
                        yield (module, name, key), len(item), item


def _kept(modules: Sequence[_Holder]) -> _Numbers:
    """What layers may count in: numbers, buffers, and lists by their lengths."""
    return {**_numbers(modules), **_sizes(modules)}


def _sizes(modules: Sequence[_Holder]) -> dict[_Place, int]:
    return {place: size for place, size, _ in _lists(modules)}


def _difference(one: _Found, other: _Found) -> _Place | None:
    before, now = one.numbers, other.numbers
    for place in {**before, **now}:
        if _differ(before.get(place), now.get(place)):
            return place
    return next(((*place, None) for place in one.plain.changed(other.plain)), None)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is not other and not (isinstance(one, Tensor) and isinstance(other, Tensor) and _equal(one, other))
    return differ(one, other)


def _grown(before: Any, now: Any) -> float:
    """By how much a number has grown; a host synchronization, for a buffer that was replaced."""
    if now is before or not (_is_real(before) and _is_real(now)):
        return 0.0
    return float(now) - float(before)


def _is_real(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return not isinstance(value, complex | np.complexfloating)


def _equal(one: Tensor, other: Tensor) -> bool:
    """A host synchronization, for a buffer that was replaced."""
    return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    held = [*module._parameters.values(), *module._buffers.values()]
    return [t for t in held if t is not None and is_here(t) and not hasattr(t, "device_mesh")]
