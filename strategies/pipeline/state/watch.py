"""What a step changes in objects, containers, globals and classes: around each run of it in the first
micro-batches, and in few later ones."""

from __future__ import annotations

import dis
import functools
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NoReturn

from torch import nn

from lockstep.strategies.launch.program.functions import codes_of
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.modules.blocks import OF_TORCH, is_of_torch
from lockstep.strategies.pipeline.state.hook_slots import HookSlots
from lockstep.strategies.pipeline.state.marks import PLAIN, content_of, put_content
from lockstep.strategies.pipeline.state.snapshot import Slot, Snapshot
from lockstep.strategies.pipeline.state.step_code import functions_of, is_of_program, is_own, names_in, stores

ADVICE = (
    "in on_train_batch_start or on_train_batch_end (with virtual_ranks in on_before_zero_grad), which run once on "
    "every rank"
)
_STEPS = "training_step", "validation_step", "test_step", "predict_step"
_FIRST = 4
_log = logging.getLogger("lockstep")


class Watch:
    """What steps change in the modules `outside` of the layers, and in `layers`, those of this rank that are not of
    torch's classes.

    Each run of a micro-batch that is watched begins with what the micro-batch found, and leaves what the others
    leave: nothing else, or what was not there before, as in a cache. What another object takes the place of in an
    attribute or a dict, for each part of a micro-batch, may be used within the run only.

    Layers that set objects, such as the state of a recurrent one, begin each run with what the micro-batch found in
    them, also if it is not watched. Others keep their numbers, so that one that counts is refused at once.
    """

    def __init__(
        self, model: nn.Module, outside: Sequence[nn.Module], layers: Sequence[nn.Module], group: Any = None
    ) -> None:
        """`group`: of the ranks of the pipeline."""
        self._model, self.hooks = model, HookSlots(model.named_modules, group)
        named = dict(model.named_modules())
        self._outside = {name: module for name, module in named.items() if module in {*outside}}
        self._own_code = [*outside, *layers]
        self.watch_layers(layers)
        self._count = self._evaluations = self.num_parts = 0
        self._is_light = False
        """Whether what the program's own code stores is watched only."""
        self._known_now: set[int] = set()
        self._start: Snapshot | None = None
        self._called: Snapshot | None = None
        self._ends: dict[int, Snapshot] = {}
        self._layers_start: Snapshot | None = None
        self._layers_ends: dict[int, Snapshot] = {}
        self.setting: set[nn.Module] = set()
        """Layers that have set objects."""
        self._contents: list[tuple[Any, Any]] = []
        """What is in the attributes of these, and in containers there, as the micro-batch begins."""
        self._changed_once: set[str] = set()
        self._changed_now: set[str] = set()
        """In this micro-batch."""
        self._named: set[str] = set()
        self._filled: set[str] = set()
        self._partial: dict[tuple[int, Any], Slot] = {}
        self._before: list[tuple[Slot, Any]] = []

    @property
    def are_due(self) -> bool:
        """Whether the next micro-batch is watched."""
        return _is_due(self._count)

    @property
    def is_watching(self) -> bool:
        """Whether this one is, as a whole."""
        return self._start is not None and not self._is_light

    def begin(self, num_parts: int) -> None:
        """A micro-batch of so many parts begins."""
        self.num_parts, self._ends, self._layers_ends = num_parts, {}, {}
        self._is_light = self._stores and not self.are_due
        is_watched = (self.are_due or self._stores) and num_parts > 0
        self._known_now = self._known if self._is_light else set()
        self._start = self.snapshot() if is_watched else None
        self._layers_start = self._of_layers() if is_watched else None
        self._changed_now.clear()
        self.hooks.begin(is_watched and not self._is_light)
        self._count += num_parts > 0
        self._before = [(slot, slot.now()) for slot in self._partial.values()]
        setting = self.setting if not is_watched else self.setting - {*self._few.values()} if self._is_light else ()
        self._contents = [(held, content_of(held)) for module in setting for held in _held_in(module)]

    @property
    def generators(self) -> list[tuple[str, Any]]:
        """Those of random numbers that are found where a micro-batch is watched, with their names."""
        return [] if self._start is None else [(name, value) for name, value, _ in self._start.generators]

    def begin_again(self) -> None:
        """Give containers and objects what this micro-batch found."""
        if self._start is not None:
            self._start.put_back()

    def partial(self) -> list[Slot]:
        """At the end of a micro-batch: where there is what belongs to a part of it."""
        (self.hooks.agree if self.is_watching else self.hooks.refuse)()
        known = {(id(slot.holder), slot.key) for slot, _ in self._before}
        found = [slot for slot, before in self._before if slot.now() is not before]
        found += [slot for place, slot in self._partial.items() if place not in known]
        if self.is_watching and self._start is not None and self._layers_start is not None:
            kept = [s for s in self._partial.values() if self._start.holds(s) or self._layers_start.holds(s)]
            self._partial = {(id(slot.holder), slot.key): slot._replace(value=None) for slot in kept}
        self._start = self._layers_start = None
        self._ends, self._layers_ends, self._contents = {}, {}, []
        return found

    def refused(self) -> list[str]:
        """The names of what holds a part, and refuses any use."""
        return [slot.name for slot in self._partial.values() if isinstance(slot.now(), Refusing)]

    def snapshot(self) -> Snapshot:
        """At what is outside of the layers."""
        if self._is_light:
            return Snapshot(self._outside_few, self._own_functions, self._known_now, self.storing_items, is_of_program)
        found = Snapshot(self._outside, self._functions, self._known, self.storing_items)
        for name in sorted(found.cut - self._named):
            _log.warning(
                "%s holds too much to be read whole: what training_step changes in it is not all noticed, but a "
                "pipeline runs it for each part of a micro-batch; change it %s",
                name,
                ADVICE,
            )
        self._named |= found.cut
        return found

    @contextmanager
    def around(self, stage: int) -> Iterator[None]:
        """Around a run of the step for a stage. Raises RuntimeError naming what it changes."""
        if not self.is_watching:
            for holder, content in self._contents:
                put_content(holder, content)
            for slot, before in self._before:
                slot.put(before)
        if self._start is None or self._layers_start is None:
            yield
            return
        self._start.put_back()
        self._layers_start.put_back(of=self.setting)
        reuses = self._is_light and not self.setting and self._layers_ends
        layers = [*self._layers_ends.values()][-1] if reuses else self._of_layers()  # nothing is put back in them
        with self._start.refusing_iterators(ADVICE), layers.refusing_iterators(ADVICE):
            yield
        self.hooks.follow()
        self._compare(stage, self.snapshot())
        self._compare_layers(stage, layers, self._of_layers())

    def calling(self) -> None:
        """On the last stage, the step calls the pipelined module."""
        self._called = self.snapshot() if self._start is not None else None

    @contextmanager
    def before_backward(self) -> Iterator[None]:
        """Around `on_before_backward`. Raises RuntimeError naming what it changes."""
        before = self.snapshot() if self._start is not None else None
        yield
        if before is not None and (name := _changed(self.snapshot(), before)) is not None:
            raise RuntimeError(
                f"on_before_backward changes {name}, but a pipeline calls it for each part of a micro-batch, on the "
                f"rank of the last stage only; change it {ADVICE}"
            )

    def called_in_evaluation(self) -> Snapshot | None:
        """On the last stage, an evaluation step continues once the pipelined module has returned."""
        self._evaluations += 1
        is_due = _is_due(self._evaluations - 1)
        self._is_light = self._stores and not is_due
        self._known_now = self._known if self._is_light else set()
        return self.snapshot() if is_due or self._stores else None

    def refuse_in_evaluation(self, called: Snapshot) -> None:
        """Raise RuntimeError naming what an evaluation step has changed since; what it has set refuses any use."""
        new = set[str]()
        for change in self.snapshot().changed(called):
            name, slot, filled = change.name, change.slot, change.name.partition("[")[0]
            if change.is_new and filled not in self._filled:  # a cache is filled once
                new.add(filled)
                continue
            if slot is None or isinstance(slot.value, PLAIN):
                raise in_evaluation(name)
            slot.put(Refusing(str(in_evaluation(slot.name))))
        self._filled |= new

    @functools.cached_property
    def names(self) -> set[str]:
        """The names in the code of steps."""
        return set().union(*map(names_in, self._functions))

    @functools.cached_property
    def stored(self) -> set[str]:
        """Those to which it assigns, or to whose items."""
        operations = [each for f in self._functions for each in _operations(f)]
        has_items = any(each.opname in _STORING for each in operations)
        return {each.argval for each in operations if each.opname == "STORE_ATTR"} | (
            self.names if has_items else set()
        )

    @functools.cached_property
    def storing_items(self) -> set[str]:
        """The names in functions that store items, by statements or by methods of dicts."""
        found = [f for f in self._functions if any(each.opname in _STORING for each in _operations(f))]
        found += [f for f in self._functions if not _STORING_METHODS.isdisjoint(names_in(f))]
        return set[str]().union(*map(names_in, found))

    def watch_layers(self, layers: Iterable[nn.Module]) -> None:
        """From now on: those of this rank that have code or hooks of the user's."""
        self.hooks.find()
        watched = {*layers}
        self._layers = {name: module for name, module in self._model.named_modules() if module in watched}
        storing = {kind for kind in {type(module) for module in watched} if _stores(kind)}
        self._few = {name: module for name, module in self._layers.items() if type(module) in storing}

    # ---- helpers ---------------------------------------------------------------------------------------

    @functools.cached_property
    def _functions(self) -> Any:
        return functions_of(self._own_code, _STEPS)

    @property
    def _known(self) -> set[int]:
        """Of what is watched elsewhere."""
        found = set[int]()
        for module in self._model.modules():
            found.update((id(module), *map(id, module._parameters.values()), *map(id, module._buffers.values())))
        return found - {id(None)}

    def _of_layers(self) -> Snapshot:
        if self._is_light:
            return Snapshot(self._few, (), self._known_now, self.storing_items, is_of_program)
        return Snapshot(self._layers, (), self._known, self.storing_items)

    @functools.cached_property
    def _own_functions(self) -> list[FunctionType]:
        """Those of the program whose code stores."""
        return [f for f in self._functions if is_own(f) and stores(f)]

    @functools.cached_property
    def writes_data(self) -> bool:
        """Whether the program's own code names the `data` of tensors."""
        return any("data" in names_in(f) for f in self._functions if is_own(f))

    @functools.cached_property
    def _stores(self) -> bool:
        """Whether the program's own code changes more than local variables, or calls objects that may."""
        held = (value for module in self._outside_few.values() for value in vars(module).values())
        return bool(self._own_functions) or any(
            is_of_program(type(each)) for each in held if not isinstance(each, nn.Module)
        )

    @functools.cached_property
    def _outside_few(self) -> dict[str, nn.Module]:
        return {n: m for n, m in self._outside.items() if is_of_torch(m) or is_of_program(type(m))}

    def _compare_layers(self, stage: int, begun: Snapshot, end: Snapshot) -> None:
        """A run of the step for a stage began with what was `begun`."""
        assert self._layers_start is not None
        before = self._layers_ends.pop(stage, None)  # the last is the latest
        self._layers_ends[stage] = end
        for change in end.changed(begun):
            if not change.counts and not change.grows_a_list:
                self.setting |= end.owners_of(change.name)
            if change.is_new or not change.counts:
                continue
            puts_back = end.owners_of(change.name) <= self.setting
            if change.name in self._changed_once and not (puts_back and change.name in self._changed_now):
                refuse(f"calls a layer that counts in {change.name}", f"count {ADVICE}")
            self._changed_once.add(change.name)
            self._changed_now.add(change.name)
        for change in end.changed(before) if before is not None else ():
            if (change.is_cache or change.is_missing) and self._layers_start.held_nothing(change.name):
                continue
            if change.counts and not end.owners_of(change.name) <= self.setting:
                continue
            if change.slot is None or change.counts:
                refuse(f"calls a layer that counts in {change.name}", f"count {ADVICE}")
            self._partial[id(change.slot.holder), change.slot.key] = change.slot

    def _compare(self, stage: int, end: Snapshot) -> None:
        assert self._start is not None
        for change in end.changed(self._called) if self._called is not None else ():
            if change.is_item:
                refuse(f"changes {change.name} after it has called the pipelined module", f"change it {ADVICE}")
        self._called = None
        before = self._ends.get(stage)
        self._ends[stage] = end
        for change in end.changed(before) if before is not None else ():
            if change.is_cache and self._start.held_nothing(change.name):
                continue
            if (slot := change.slot) is None or change.counts_in_globals:
                refuse(f"leaves another {change.name} for each part of a micro-batch", f"change it {ADVICE}")
            self._partial[id(slot.holder), slot.key] = slot
        for change in end.changed(self._start):
            slot = change.slot
            if change.is_new or (slot is not None and (id(slot.holder), slot.key) in self._partial):
                continue
            is_set = slot is not None and not change.is_global and self._sets_again(slot)
            if slot is None or change.counts_in_globals or (before is not None and not is_set):
                refuse(f"changes {change.name}", f"change it {ADVICE}")
            if self.num_parts == 1 or is_set:  # else the next part tells
                self._partial[id(slot.holder), slot.key] = slot

    def _sets_again(self, slot: Slot) -> bool:
        """Whether another object is in a slot, or the slot is in one, rather than another number in the same one."""
        assert self._start is not None
        is_other = not isinstance(slot.value, PLAIN) or not self._start.holds(slot)
        return is_other and slot.is_there


def refuse(what: str, instead: str) -> NoReturn:
    """Raise RuntimeError for what a step does."""
    raise RuntimeError(f"training_step {what}, but a pipeline runs it for each part of a micro-batch; {instead}")


def partial(name: str) -> Refusing:
    """In the place of what belongs to a part of a micro-batch."""
    return Refusing(
        f"training_step has set self.{name}, but a pipeline runs it for each part of a micro-batch, so it holds a "
        "part; return it from training_step and read it in on_train_batch_end, or use self.log"
    )


def in_evaluation(name: str) -> RuntimeError:
    """For what an evaluation step has changed where not all ranks come."""
    return RuntimeError(
        f"an evaluation step changes {name} after it has called the pipelined module, where only the last stage of a "
        "pipeline comes; use self.log or a metric of torchmetrics, or return it and read it in the hook at the end of "
        "the batch"
    )


def _changed(now: Snapshot, before: Snapshot) -> str | None:
    counted = (each for each in now.changed(before) if not each.is_new)
    return next((each.name for each in counted if each.slot is None or isinstance(each.slot.value, PLAIN)), None)


_STORING = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_STORING_METHODS = {"update", "pop", "popitem", "setdefault", "clear", "subtract", "move_to_end", "__setitem__"}


def _operations(function: Any) -> Iterator[dis.Instruction]:
    return (each for code in codes_of(function) for each in dis.get_instructions(code))


def _stores(kind: type) -> bool:
    return is_of_program(kind) and any(is_own(f) and stores(f) for f in functions_of([kind], ()))


def _held_in(layer: nn.Module) -> list[Any]:
    """Its attributes, and the containers among them."""
    own = vars(layer)
    kinds = (dict, list, deque, set)
    return [own, *(value for name, value in own.items() if isinstance(value, kinds) and name not in OF_TORCH)]


def _is_due(number: int) -> bool:
    return number < _FIRST or number & (number - 1) == 0
