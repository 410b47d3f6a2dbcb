"""What hooks of modules keep beside the modules, in variables that they enclose and objects: in a pipeline of a part of
a micro-batch, and on the rank that runs the module alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.launch import environment
from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.modules.parameter_hooks import OF_MODULE, users_hooks
from lockstep.strategies.pipeline.shapes.fake_tensors import is_fake
from lockstep.strategies.pipeline.state.marks import content_of, mark_of, put_content
from lockstep.strategies.pipeline.state.reached import Holder, Key, OfModule, Place, Reached
from lockstep.strategies.sync.collectives import gather_objects

_OF_A_PART = (Tensor, float, complex, np.ndarray, np.floating, np.complexfloating)
"""What hooks measure; other numbers, that change again and again, are counts."""


class HookSlots:
    """The places of the hooks of `modules`, by the path of the module and the number of the hook: alike on all
    ranks, which are those of `group`."""

    def __init__(
        self,
        named_modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.named_modules, self.group, self._registered = named_modules, group, -1
        self._hooks: dict[Key, Callable[..., Any]] = {}
        self._marks: dict[Key, Any] | None = None
        self._changed_once: set[Key] = set()
        self.partial: set[Key] = set()
        """Where hooks keep what holds for a part, and is on one rank."""

    def find(self) -> None:
        """Look for hooks, if some may have been registered since."""
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            self._hooks = {
                (path, kind, i): hook
                for path, module in self.named_modules()
                for kind in OF_MODULE
                if getattr(module, kind)
                for i, (_, hook) in enumerate(users_hooks(module, kind))
            }

    @property
    def are_some(self) -> bool:
        """Whether some hooks were found."""
        return bool(self._hooks)

    def begin(self, is_watched: bool) -> None:
        self._marks = self._now() if is_watched and self._hooks else None

    def _now(self) -> dict[Key, Any]:
        return {key: mark_of(place.now(), True) for key, place in self.places()}

    def follow(self) -> None:
        """Note what has changed since the last call, a second time, of what is measured."""
        marks = self._marks
        if marks is None:
            return
        for key, place in [*self.places()]:
            value, before = place.now(), marks.get(key)
            now = marks[key] = mark_of(value, True)
            if now != before and isinstance(value, _OF_A_PART):
                if key in self._changed_once:
                    self.partial.add(key)
                self._changed_once.add(key)

    def refuse(self) -> None:
        """Let all that is partial refuse any use."""
        known = dict(self.places()) if self.partial else {}
        for key in self.partial & known.keys():
            if not isinstance(known[key].now(), Refusing):
                known[key].put(refusing(known[key].name))

    def agree(self) -> None:
        """Let what is partial on a rank refuse any use on all of them, which call it."""
        found = self.gather([*self.partial])
        self.partial |= {key for keys in found for key in keys if key[:3] in self._hooks}
        holders: dict[Key, Holder] = {}
        known = dict(self.places(holders)) if self.partial else {}
        for key in self.partial - known.keys():
            if (holder := holders.get(key[:-1])) is None:
                raise RuntimeError(sentence(".".join(map(str, key[3:]))))
            if isinstance(holder.held, dict):
                holder.held[self.item(key)] = refusing(holder.shown(key[-1]))
        self.refuse()

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank of the pipeline, this rank's own as the same object; a plan has no other rank."""
        if environment.in_plan() or not dist.is_initialized():
            return [value]
        found = gather_objects(value, self.group)
        found[dist.get_rank(self.group)] = value
        return found

    def item(self, key: Key) -> Any:
        """What holds it in its dict or list."""
        return dict(self.named_modules())[key[-1].path] if isinstance(key[-1], OfModule) else key[-1]

    def places(
        self, holders: dict[Key, Holder] | None = None, known: Collection[int] | None = None
    ) -> Iterator[tuple[Key, Place]]:
        """All of them, without what is `known` by its id: without it what modules have in dicts and lists."""
        paths = {module: path for path, module in self.named_modules()} if self._hooks else {}
        if known is None:  # `found` and `watch` follow it
            own = (value for module in paths for value in vars(module).values())
            known = {id(value) for value in own if isinstance(value, dict | list)}
        for key, hook in self._hooks.items():
            reached = Reached(key, {*known}, paths)
            reached.function(hook)
            if holders is not None:
                holders.update(reached.holders)
            yield from reached.places.items()


def hidden_fakes(modules: list[nn.Module], elsewhere: set[nn.Module]) -> Callable[[], None]:
    """Called before hooks run on fake tensors. What it returns gives places that hold some then what they held; those
    of hooks of modules that are `elsewhere` refuse any use."""
    slots = HookSlots(lambda: ((str(i), module) for i, module in enumerate(modules)))
    slots.find()
    before = {key: (place, place.now()) for key, place in slots.places()}
    lists = [(held, content_of(held)) for _, held in before.values() if isinstance(held, list | deque)]
    numbers = {str(i) for i, module in enumerate(modules) if module in elsewhere}

    def hide() -> None:
        for held, content in lists:
            put_content(held, content)
        found = [*slots.places()]
        for key, place in sorted(found, key=lambda each: each[0][0] in numbers):
            value = None if isinstance(place.holder, dict) and place.key not in place.holder else place.now()
            if key in before and _is_number(value) and _is_number(before[key][1]):
                place.put(before[key][1])  # a count
            if not is_fake(value) and not (isinstance(value, tuple) and any(map(is_fake, value))):
                continue
            if key[0] in numbers:
                place.put(refusing(place.name))
            elif key in before:
                place.put(before[key][1])
            elif isinstance(place.holder, dict):
                del place.holder[place.key]

    return hide


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def refusing(name: str) -> Refusing:
    return Refusing(sentence(name))


def sentence(name: str) -> str:
    return (
        f"a layer or a hook of a layer has set {name}, but in a pipeline only the rank that runs the layer calls it, "
        "for each part of a micro-batch; return the value from the layer, measure times in on_train_batch_start and "
        "on_train_batch_end, or use strategy='ddp' or 'fsdp'"
    )
