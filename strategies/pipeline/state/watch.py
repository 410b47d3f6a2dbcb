"""What a step changes in objects, containers, globals and classes: around each run of it in the first
micro-batches, and in few later ones."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn

from lockstep.strategies.launch.program.functions import codes_of
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.pipeline.state.snapshot import PLAIN, Slot, Snapshot
from lockstep.strategies.pipeline.state.step_code import functions_of, names_in

ADVICE = "in on_train_batch_start or on_train_batch_end, which run once on every rank"
_STEPS = "training_step", "validation_step", "test_step", "predict_step"
_FIRST = 4


class Watch:
    """What steps change in the modules `outside` of the layers, and in `layers`, those of this rank that are not of
    torch's classes.

    Each run of a micro-batch that is watched begins with what the micro-batch found, and leaves what the others
    leave: nothing else, or what was not there before, as in a cache. What another object takes the place of in an
    attribute or a dict, for each part of a micro-batch, may be used within the run only.
    """

    def __init__(self, model: nn.Module, outside: Sequence[nn.Module], layers: Sequence[nn.Module]) -> None:
        named = dict(model.named_modules())
        self._outside = {name: module for name, module in named.items() if module in {*outside}}
        self._layers = {name: module for name, module in named.items() if module in {*layers}}
        self._model = model
        self._count = self._evaluations = self.num_parts = 0
        self._start: Snapshot | None = None
        self._called: Snapshot | None = None
        self._ends: dict[int, Snapshot] = {}
        self._changed_once: set[str] = set()
        self._filled: set[str] = set()
        self._partial: dict[tuple[int, Any], Slot] = {}
        self._before: list[tuple[Slot, Any]] = []

    @property
    def are_due(self) -> bool:
        """Whether the next micro-batch is watched."""
        return _is_due(self._count)

    @property
    def is_watching(self) -> bool:
        """Whether this one is."""
        return self._start is not None

    def begin(self, num_parts: int) -> None:
        """A micro-batch of so many parts begins."""
        self.num_parts, self._ends = num_parts, {}
        self._start = self.snapshot() if self.are_due and num_parts else None
        self._count += num_parts > 0
        self._before = [(slot, slot.holder.get(slot.key)) for slot in self._partial.values()]

    def begin_again(self) -> None:
        """Give containers and objects what this micro-batch found."""
        assert self._start is not None
        self._start.put_back()

    def partial(self) -> list[Slot]:
        """At the end of a micro-batch: where there is what belongs to a part of it."""
        known = {(id(slot.holder), slot.key) for slot, _ in self._before}
        found = [slot for slot, before in self._before if slot.holder.get(slot.key, before) is not before]
        found += [slot for place, slot in self._partial.items() if place not in known]
        if self._start is not None:
            kept = filter(self._start.holds, self._partial.values())
            self._partial = {(id(slot.holder), slot.key): slot._replace(value=None) for slot in kept}
        self._start, self._ends = None, {}
        return found

    def snapshot(self) -> Snapshot:
        """At what is outside of the layers."""
        return Snapshot(self._outside, self._functions, self._known)

    @contextmanager
    def around(self, stage: int) -> Iterator[None]:
        """Around a run of the step for a stage. Raises RuntimeError naming what it changes."""
        if self._start is None:
            yield
            return
        self._start.put_back()
        layers = self._of_layers()
        with self._start.refusing_iterators(ADVICE), layers.refusing_iterators(ADVICE):
            yield
        self._compare(stage, self.snapshot())
        for name, slot, is_new, _, is_item in self._of_layers().changed(layers):
            if is_new or is_item or (slot is not None and not isinstance(slot.value, PLAIN)):
                continue
            if name in self._changed_once:
                refuse(f"calls a layer that counts in {name}", f"count {ADVICE}")
            self._changed_once.add(name)

    def calling(self) -> None:
        """On the last stage, the step calls the pipelined module."""
        self._called = self.snapshot() if self.is_watching else None

    @contextmanager
    def before_backward(self) -> Iterator[None]:
        """Around `on_before_backward`. Raises RuntimeError naming what it changes."""
        before = self.snapshot() if self.is_watching else None
        yield
        if before is not None and (name := _changed(self.snapshot(), before)) is not None:
            raise RuntimeError(
                f"on_before_backward changes {name}, but a pipeline calls it for each part of a micro-batch, on the "
                f"rank of the last stage only; change it {ADVICE}"
            )

    def called_in_evaluation(self) -> Snapshot | None:
        """On the last stage, an evaluation step continues once the pipelined module has returned."""
        self._evaluations += 1
        return self.snapshot() if _is_due(self._evaluations - 1) else None

    def refuse_in_evaluation(self, called: Snapshot) -> None:
        """Raise RuntimeError naming what an evaluation step has changed since; what it has set refuses any use."""
        new = set[str]()
        for name, slot, is_new, *_ in self.snapshot().changed(called):
            filled = name.partition("[")[0]
            if is_new and filled not in self._filled:  # a cache is filled once
                new.add(filled)
                continue
            if slot is None or isinstance(slot.value, PLAIN):
                raise in_evaluation(name)
            slot.holder[slot.key] = Refusing(str(in_evaluation(slot.name)))
        self._filled |= new

    @functools.cached_property
    def names(self) -> set[str]:
        """The names in the code of steps."""
        return set().union(*map(names_in, self._functions))

    @functools.cached_property
    def stored(self) -> set[str]:
        """Those to which it assigns, or to whose items."""
        operations = [each for f in self._functions for code in codes_of(f) for each in dis.get_instructions(code)]
        has_items = any(each.opname == "STORE_SUBSCR" for each in operations)
        return {each.argval for each in operations if each.opname == "STORE_ATTR"} | (
            self.names if has_items else set()
        )

    # ---- helpers ---------------------------------------------------------------------------------------

    @functools.cached_property
    def _functions(self) -> Any:
        return functions_of([*self._outside.values(), *self._layers.values()], _STEPS)

    @property
    def _known(self) -> set[int]:
        """Of what is watched elsewhere."""
        return {*map(id, self._model.modules()), *map(id, self._model.parameters()), *map(id, self._model.buffers())}

    def _of_layers(self) -> Snapshot:
        return Snapshot(self._layers, (), self._known)

    def _compare(self, stage: int, end: Snapshot) -> None:
        assert self._start is not None
        for change in end.changed(self._called) if self._called is not None else ():
            if change.is_item:
                refuse(f"changes {change.name} after it has called the pipelined module", f"change it {ADVICE}")
        self._called = None
        before = self._ends.get(stage)
        self._ends[stage] = end
        for change in end.changed(before) if before is not None else ():
            if change.is_item:  # each run sets it
                continue
            if (slot := change.slot) is None or change.counts_in_globals:
                refuse(f"leaves another {change.name} for each part of a micro-batch", f"change it {ADVICE}")
            self._partial[id(slot.holder), slot.key] = slot
        for change in end.changed(self._start):
            slot = change.slot
            if change.is_new or change.is_item or (slot is not None and (id(slot.holder), slot.key) in self._partial):
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
        return is_other and slot.key in slot.holder


def refuse(what: str, instead: str) -> NoReturn:
    """Raise RuntimeError for what a step does."""
    raise RuntimeError(f"training_step {what}, but a pipeline runs it for each part of a micro-batch; {instead}")


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


def _is_due(number: int) -> bool:
    return number < _FIRST or number & (number - 1) == 0
