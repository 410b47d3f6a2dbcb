"""What user code remembers in Python: attributes of the module, its layers and callbacks, and what hooks close over.

Shares, learners and clients that one rank runs one after the other have it in common, where on ranks of their own each
would have its own. So nothing of it may change in a step, but for numbers of callbacks that become the same in each
share, such as counters, and for lists of learners that only grow, of which each sees what it has appended itself and
code between rounds what all of them have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.trainer.metrics.model_parts import Parts
from lockstep.trainer.shares.search import NOTHING, Found, Items, differs, find, starts_with

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState


class UserState:
    """Keeps apart what user code remembers while shares of this rank run."""

    def __init__(self, run: RunState, parts: Parts) -> None:
        self._run, self._parts = run, parts
        self._share: int | None = None
        self._before = NOTHING
        self._grown: dict[str, _Grown] = {}
        self._counted: dict[str, _Counted] = {}
        self.is_open = False

    def begin(self, share: int | None, at_once: bool = False) -> None:
        """Called before the code of a share, or with None before that of one which never comes again; `at_once` if no
        code of the user has run since `end`."""
        self.is_open, self._share = True, share
        if at_once and not self._grown and not self._counted:
            return
        now = self._found()
        for name, kept in list(self._grown.items()):
            if name in now.lists:
                kept.follow(now.lists[name], name)
                kept.show(share)
            else:
                del self._grown[name]
        for kept_number in self._counted.values():
            kept_number.show(share)
        self._before = self._found() if self._grown or self._counted else now

    def end(self, more: bool = False, follows: bool = False) -> list[str]:
        """Called after it, and before `more` code of the same share; `follows` if `begin` may be called at once.
        Returns the names of what it has changed and may not."""
        self.is_open = False
        now, before = self._found(), self._before
        self._before = now if follows else NOTHING
        if now is before and not self._grown and not self._counted:
            return []
        names = [n for n in before.marks.keys() | now.marks.keys() if differs(before.marks.get(n), now.marks.get(n))]
        if plain := before.plain.changed(now.plain):
            paths = self._parts.now().names
            names += [f"{paths[layer]}.{name}" for layer, name in plain if layer in paths]
        for name in [
            name for name in names if self._share is not None and name in before.owners and name in now.owners
        ]:
            names.remove(name)
            self._counted.setdefault(name, _Counted(*now.owners[name], before.marks[name]))
        watches_lists = (self._run.arguments.virtual_ranks or 1) > 1
        for name, (container, items, _) in now.lists.items():
            has_grown = name in before.lists and len(items) > len(before.lists[name].items)
            if watches_lists and has_grown and name not in names:
                names.append(name)  # hooks, and who called fit, would read what the shares of one rank have appended
            if name in self._grown:
                self._grown[name].take(self._share)
            elif not names and has_grown:
                self._grown[name] = _Grown(container, [*before.lists[name].items])
                self._grown[name].take(self._share)
        shares = () if self._share is None or more else self._run.strategy.shares  # type: ignore[attr-defined]
        names += [name for name, kept in self._counted.items() if not kept.take(self._share, shares)]
        return sorted(names)

    def counted(self) -> dict[str, list[str]]:
        """By name what numbers of callbacks are in the shares of this rank."""
        shares = self._run.strategy.shares  # type: ignore[attr-defined]
        return {name: sorted({repr(kept.of(share)) for share in shares}) for name, kept in self._counted.items()}

    def rest(self) -> None:
        """Called where code of the user follows that is not of a share: holds on to nothing of it."""
        self._before = NOTHING

    def _found(self) -> Found:
        model, followed = self._parts.now(), {id(kept.container) for kept in self._grown.values()}
        return self._before if self._before.holds(model, followed) else find(self._run, model, followed)


class _Grown:
    """A list to which learners append."""

    def __init__(self, container: Any, common: list[Any]) -> None:
        self.container = container
        self._common, self._all = common, [*common]
        self._own: dict[int, list[Any]] = {}

    def follow(self, now: Items, name: str) -> None:
        """Let code between steps have appended to the list, or emptied or replaced it by an empty one."""
        number = len(self._all)
        if not now.items:
            self._common, self._own = [], {}
        elif now.container is self.container and starts_with(now.items, self._all):
            for items in (self._common, *self._own.values()):
                items.extend(now.items[number:])
        else:
            raise RuntimeError(
                f"{name} was changed between steps, but holds what several learners of this rank have appended, each "
                "for itself; clear it or append to it, or use self.log"
            )
        self.container, self._all = now.container, [*now.items]

    def show(self, share: int | None) -> None:
        """Let the list hold what it would hold if there were only this learner."""
        _put(self.container, self._of(share))

    def take(self, share: int | None) -> None:
        """Take what a learner has appended; the list holds what all have."""
        items, before = [*self.container], self._of(share)
        self._all.extend(items[len(before) :])
        if share is not None:
            self._own[share] = items
        _put(self.container, self._all)

    def _of(self, share: int | None) -> list[Any]:
        return self._common if share is None else self._own.get(share, self._common)


class _Counted:
    """A number of a callback that shares change alike."""

    def __init__(self, owner: Any, key: str, common: Any) -> None:
        self._owner, self._key = owner, key
        self._common = self._left = common
        self._own: dict[int, Any] = {}

    def show(self, share: int | None) -> None:
        """Let the callback hold the number of this share; that which code between steps has set is that of all."""
        now = vars(self._owner).get(self._key)
        if differs(now, self._left):
            self._common, self._own = now, {}
        vars(self._owner)[self._key] = self.of(share)

    def take(self, share: int | None, shares: Sequence[int]) -> bool:
        """Take what a share has left; whether all have the same after the last one."""
        self._left = vars(self._owner).get(self._key)
        if share is not None:
            self._own[share] = self._left
        return not shares or share != shares[-1] or not any(differs(self.of(s), self._left) for s in shares)

    def of(self, share: int | None) -> Any:
        """The number of a share, or with None of code between steps."""
        return self._common if share is None else self._own.get(share, self._common)


def _put(container: Any, items: list[Any]) -> None:
    container.clear()
    container.extend(items)
