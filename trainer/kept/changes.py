"""Attributes that user code has changed in a run, kept for one that continues it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lockstep.callbacks.base import Callback
from lockstep.trainer.kept import owners as held_by
from lockstep.trainer.kept.agreed import is_equal
from lockstep.trainer.kept.fields import Gone, absent_caches, caches_of, fields, put, take_away
from lockstep.trainer.kept.identity import Reference, in_state_dict, is_object, is_replaced, references, shared
from lockstep.trainer.kept.opaque import is_in_place, marks_of
from lockstep.trainer.kept.owners import beside, has_no_state, iterators, layers, objects, parts, shown
from lockstep.trainer.kept.values import (
    MOST_ITEMS,
    NOTHING,
    Mark,
    Marks,
    as_it_is,
    copied,
    encoded,
    is_free,
    is_same,
    is_savable,
    is_small,
    mark_of,
    moved,
    on_host,
    storages,
    take,
    tensors_in,
)
from lockstep.trainer.kept.variables import Watched

if TYPE_CHECKING:
    from lockstep.trainer.datamodule import DataModule

_DATA_KINDS = (Dataset, DataLoader, Sampler)


class Changes:
    """What user code has changed since a fit was set up in the attributes of the module and its layers, of the
    Trainer, of callbacks and a DataModule of the user's that save no state by themselves, and of objects of the
    user's that these hold: numbers, strings, modes, tensors, arrays, generators, small containers of them, buffers
    that are not in the state dict, and optimizers and schedulers that are not the run's, which are saved, and other
    objects, which are not."""

    def __init__(
        self,
        module: nn.Module,
        callbacks: Iterable[Callback] = (),
        datamodule: DataModule | None = None,
        trainer: Any = None,
    ) -> None:
        self._module = module
        self._beside = beside(callbacks, datamodule, trainer)
        """Callbacks, the DataModule and the Trainer."""
        self.modes: Sequence[tuple[nn.Module, bool]] = ()
        """Of an evaluation that runs the modes that layers have outside of it."""
        self.saved_modes = False  # by a checkpoint within it
        self._say = [path for path, each in self._beside.items() if not has_no_state(each)]
        """Which of them say by themselves what is saved."""
        self._of_run: list[Any] = []
        """The run's optimizers and schedulers, which are saved by themselves."""
        self._at_start = self._marks()
        self._first: dict[str, Reference] = {}
        """The objects that attributes were then."""
        self._gone = Gone()
        self._variables: Watched | None = None
        self._living: set[int] = set()
        """The ids of the references of which somebody has been found to hold the objects."""
        self._after_hooks: dict[str, Reference] = {}
        """The objects that attributes were as hooks of the start had been called."""
        self._since: Mapping[str, Any] = {}
        """What the run that is resumed has of objects: a `state_dict`."""
        self._had: dict[str, set[str]] = {}
        """By owner the attributes that every run has as its first step begins."""
        self._by_hook: set[tuple[str, str]] = set()
        """What `on_load_checkpoint` has taken up, and loader methods have made."""
        self._begun: dict[str, dict[str, Any]] = {}
        """By owner and name the values that hooks of the start have left; before they are called, those that they had
        left in the run that is resumed, and that it has changed since."""
        self._begun_marks: dict[str, Marks] = {}
        self._resumed: dict[str, dict[str, Any]] = {}
        """Of those, and of owners that these hooks make, what the run that is resumed has."""

    def note_loaded(self) -> None:
        """Called once `on_load_checkpoint` has been."""
        self._by_hook = {(path, name) for path, _, name, *_ in self._changed(self._marks())}

    def begin(self, of_run: Iterable[Any]) -> None:
        """Called once `configure_optimizers` has been, whose optimizers and schedulers are `of_run`: what is as it left
        it each run makes again."""
        self._of_run = [*of_run]
        self._at_start = self._marks()
        self._gone.note(self._at_start)
        self._variables = Watched(dict(self._owners()))
        self._first = references({path: found.owner for path, found in self._at_start.items()})
        for path, name in self._by_hook:
            if path in self._at_start:
                self._at_start[path].marks.pop(name, None)

    def note_begun(self, of_run: Iterable[Any], has_hooks: bool) -> list[str]:
        """Called once `on_train_start` has been, which every run calls. What hooks of the start have left, if there are
        any, as when the run was new is again what the run that is resumed had made of it. Returns the names of what
        they have changed to something else."""
        self._of_run += of_run
        marks, owners = self._marks(), dict(self._owners())
        self._had = {
            path: {n for n, value in fields(owner).items() if value is not None} for path, owner in owners.items()
        }
        giving_way, resumed, self._resumed = [*self._giving_way(marks)], self._resumed, {}
        made = {path: found for path, found in marks.items() if not self._is_known(path, found.owner)}
        for parent in self._at_start.values() if made else ():
            for name, value in fields(parent.owner).items():
                if any(found.owner is part for found in made.values() for part in parts(value)):
                    parent.marks[name] = mark_of(value, MOST_ITEMS)
        self._at_start |= made
        self._first |= references({path: found.owner for path, found in made.items()})
        before, self._begun, self._begun_marks = self._begun, self._left(marks) if has_hooks else {}, marks
        given = {(path, name) for path, name, _ in giving_way}
        otherwise = [
            shown(path, name)
            for path, values in before.items()
            for name in values.keys() & resumed.get(path, {}).keys() & self._begun.get(path, {}).keys()
            if (path, name) not in given and not is_equal(self._begun[path][name], on_host(resumed[path][name]))
        ]
        self._after_hooks = references(owners)
        for path, name, value in giving_way:
            if path in owners:
                take(owners[path], name, value, fresh=shown(path, name) in self._since.get("left", ()))
        self._join(owners, given)
        self._gone.note(marks)
        take_away(owners, [each for each in self._since.get("gone", ()) if (*each,) not in self._by_hook])
        return sorted(otherwise)

    def _giving_way(self, marks: Mapping[str, Marks]) -> Iterator[tuple[str, str, Any]]:
        """What hooks of the start have left as when the run was new, or have yet to make, with the value that the run
        that is resumed has of it."""
        for path, values in self._resumed.items():
            for name, value in values.items():
                if path in self._at_start:
                    if path not in marks or name not in self._begun.get(path, ()):
                        continue
                    owner, own = marks[path]
                    if not is_savable(own.get(name, (None, None))):
                        continue
                    if not is_equal(copied(fields(owner)[name]), self._begun[path][name]):
                        continue
                yield path, name, value

    def _is_known(self, path: str, owner: Any) -> bool:
        return path in self._at_start and self._at_start[path].owner is owner

    def _left(self, marks: Mapping[str, Marks]) -> dict[str, dict[str, Any]]:
        """Copies of what may be found changed later; of what is large only if hooks may have made it."""
        weights = storages(in_state_dict(self._module))
        left: dict[str, dict[str, Any]] = {}
        for path, (owner, own) in marks.items():
            for name, mark in own.items():
                value = fields(owner)[name]
                is_new = not is_same(self._at_start[path].marks.get(name, NOTHING), mark)
                if is_savable(mark) and (is_new or is_small(value)) and weights.isdisjoint(storages(tensors_in(value))):
                    left.setdefault(path, {})[name] = copied(value)
        return left

    def state_dict(self, whole: bool = False) -> dict[str, Any]:
        """What is saved by owner and name, the names of what is not, which tensors are on the model's device, and which
        values are in other objects than at the start while somebody still holds the former. `whole`: also of what says
        by itself what is saved.

        Of a layer in which steps have made an object that cannot be saved nothing is, as a flag may say that it is
        there.
        """
        values: dict[str, dict[str, Any]] = {}
        lost, in_place, apart, on_device = [], list[str](), set(), []
        all_marks = self._marks(whole)
        for path, _, name, value, mark in self._changed(all_marks):
            if not is_savable(mark):
                lost.append(shown(path, name))
                in_place += lost[-1:] if is_in_place(self._at_start[path].marks.get(name, NOTHING), mark) else []
                apart |= {path} if name not in self._had.get(path, (name,)) else set()
                continue
            if any(tensor.device.type != "cpu" for tensor in tensors_in(value)):
                on_device.append(shown(path, name))
            values.setdefault(path, {})[name] = encoded(value)
        for path, (owner, marks) in all_marks.items():
            if self._says(path):  # also what is as at the start, where it may be otherwise in a run that is continued
                kept = {n for n, mark in marks.items() if is_savable(mark) and is_small(fields(owner)[n])}
                values[path] = {n: encoded(fields(owner)[n]) for n in kept} | values.get(path, {})
        lost += [shown(path, name) for path in apart for name in values.pop(path, ())]
        for path, name, value in self._giving_way(all_marks):  # where hooks of the start are still called
            values.setdefault(path, {})[name] = value
            if any(tensor.device.type != "cpu" for tensor in tensors_in(value)):
                on_device.append(shown(path, name))
        owners = {path: found.owner for path, found in all_marks.items()}
        known = set(map(id, (*owners.values(), *self._of_run)))
        lost += [shown(path, name) for path, owner in owners.items() for name in iterators(owner, known)]
        variables = [] if self._variables is None else self._variables.changed()
        lost, in_place = [*lost, *variables], [*in_place, *variables]
        begun = {
            path: found for path in self._begun if path not in apart and (found := self._since_begun(path, all_marks))
        }
        elsewhere = [shown(path, name) for path, owner in owners.items() for name in absent_caches(owner)]
        gone = self._gone.names(owners)
        if not (values or lost or begun or elsewhere or gone):
            return {}
        places = [(path, name) for path, own in values.items() if path in owners for name in own]
        now = {shown(path, name): fields(owners[path]).get(name) for path, name in places}
        caches = [shown(path, name) for path, name in places if name in caches_of(owners[path])]
        state = {"values": values, "lost": [*dict.fromkeys(lost)], "on_device": on_device, "begun": begun, "gone": gone}
        state["in_place"] = in_place
        state |= {"replaced": self._replaced(self._first, now), "left": self._replaced(self._after_hooks, now)}
        return state | {"shared": shared(values, owners), "caches": caches, "elsewhere": elsewhere}

    def held(self) -> dict[str, Reference]:
        """The objects that attributes are, where that can be known later."""
        return references(dict(self._owners()))

    def made_at_start(self) -> set[tuple[int, str]]:
        """By the `id` of owners the attributes that were there as the first step began, which every run makes."""
        return {(id(owner), name) for path, owner in self._owners() for name in self._had.get(path, ())}

    def since(self, held: Mapping[str, Reference]) -> tuple[list[str], list[str]]:
        """The names of attributes that are the objects that were `held`; and of those that are others now, while
        somebody still holds the former."""
        now = {shown(path, name): v for path, owner in self._owners() if held for name, v in fields(owner).items()}
        same = [place for place, each in held.items() if place in now and is_object(each, now[place])]
        return same, self._replaced(held, now)

    def _replaced(self, former: Mapping[str, Reference], now: Mapping[str, Any]) -> list[str]:
        """The names of those that are others now than the `former`, which somebody still holds."""
        places = [place for place in former.keys() & now.keys() if is_replaced(former[place], now[place])]
        if not self._living.issuperset(map(id, map(former.__getitem__, places))):
            gc.collect()  # once for each: garbage may still hold it
            places = [place for place in places if is_replaced(former[place], now[place])]
            self._living |= {*map(id, map(former.__getitem__, places))}
        return sorted(places)

    def _since_begun(self, path: str, marks: Mapping[str, Marks]) -> dict[str, Any]:
        """The values that hooks of the start left in an owner and that have changed since."""
        if path not in self._begun_marks:  # hooks of the start are still called
            return self._begun[path]
        if path not in marks:
            return {}
        (owner, own), before = marks[path], self._begun_marks[path].marks
        changed = {n for n, mark in own.items() if is_savable(mark) and not is_same(before.get(n, NOTHING), mark)}
        found = {name: value for name, value in self._begun[path].items() if name in changed}
        return {name: value for name, value in found.items() if not is_equal(copied(fields(owner)[name]), value)}

    def load_state_dict(
        self, state: Mapping[str, Any], device: Any, same: Collection[str] = (), moved_on: Collection[str] = ()
    ) -> None:
        """Take up the values of a run that is continued, but for what a hook has taken up already: in the objects that
        are there, as others may hold them, but for those that the run had replaced while others held them. Those of
        `same` were the objects that are there since `as_seen`, and those of `moved_on` were not."""
        owners = dict(self._owners())
        self._begun, self._resumed, self._since = state.get("begun", {}), {}, state
        for path, values in state.get("values", {}).items():
            for name, value in values.items():
                value = moved(value, device) if shown(path, name) in state["on_device"] else value
                owner = owners.get(path)
                if owner is None or name in self._begun.get(path, ()):
                    self._resumed.setdefault(path, {})[name] = copy.deepcopy(value)
                if owner is None or (path, name) in self._by_hook or not is_free(owner, name):
                    continue
                place = shown(path, name)
                fresh = place in moved_on or (place in state.get("replaced", ()) and place not in same)
                take(owner, name, value, fresh, place in state.get("caches", ()))
                if path in self._at_start:  # it is saved again, whatever the module began with
                    self._at_start[path].marks.pop(name, None)
        self._join(owners)
        for path, values in self._begun.items():
            for name in values:
                if path in owners and name in fields(owners[path]):
                    is_taken = (path, name) in self._by_hook or name not in self._resumed.get(path, ())
                    if is_taken and is_savable(mark_of(now := fields(owners[path])[name], MOST_ITEMS)):
                        self._resumed.setdefault(path, {})[name] = copy.deepcopy(encoded(now))

    def _join(self, owners: Mapping[str, Any], of: Collection[tuple[str, str]] | None = None) -> None:
        """Make one of what was one object in the run that is resumed, or of what was one with some `of` those."""
        groups = [[(path, name) for path, name in group] for group in self._since.get("shared", ())]
        for (path, name), *others in [group for group in groups if of is None or not set(group).isdisjoint(of)]:
            for there, other in others if path in owners else ():
                if there in owners and (there, other) not in self._by_hook and is_free(owners[there], other):
                    put(owners[there], other, fields(owners[path]).get(name))

    @contextmanager
    def as_seen(
        self,
        seen: Mapping[str, Any],
        later: Mapping[str, Any],
        same: Collection[str],
        moved_on: Collection[str],
        device: Any,
    ) -> Iterator[list[str]]:
        """While it lasts attributes have the values of `seen`, a `state_dict`, and then those of before. Datasets,
        loaders and samplers that are made meanwhile stay, and objects that `load_state_dict` will write to, or that
        somebody may hold in whose places it will put others. Yields the names of what has no place."""
        before, by_hook = self._marks(whole=True), {*self._by_hook}
        put_back = {
            (path, name): as_it_is(found.owner, name)
            for path, found in before.items()
            for name, mark in found.marks.items()
            if is_savable(mark)
        }
        missing, changed = [], set[tuple[str, str]]()
        for path, values in seen.get("values", {}).items():
            for name, value in values.items():
                if path not in before or not is_free(before[path].owner, name):
                    missing += [] if path.startswith("callbacks.") else [shown(path, name)]  # of one that is not given
                    continue
                changed.add((path, name))
                put_back.setdefault((path, name), as_it_is(before[path].owner, name))
                value = moved(value, device) if shown(path, name) in seen["on_device"] else value
                fresh, is_cache = (shown(path, name) in seen.get(key, ()) for key in ("replaced", "caches"))
                take(before[path].owner, name, copy.deepcopy(value), fresh, is_cache)
        within = self._marks(whole=True) if self._say else {}
        try:
            yield missing
        finally:
            for path, found in self._marks(whole=True).items():
                was = before[path].marks if path in before else {}
                if self._says(path) and path in within:  # what the run that was saved had of it was made there
                    made = {
                        n for n, mark in found.marks.items() if not is_same(within[path].marks.get(n, NOTHING), mark)
                    }
                    put_back = {key: each for key, each in put_back.items() if key[0] != path or key[1] not in made}
                other = {name for name, mark in found.marks.items() if not is_same(was.get(name, NOTHING), mark)}
                own = fields(found.owner)
                self._by_hook |= {(path, name) for name in other if isinstance(own[name], _DATA_KINDS)}
                changed |= {(path, name) for name in other}
            values = later.get("values", {})
            stays = {*later.get("replaced", ()), *same, *moved_on}
            for path, name in changed & put_back.keys():
                place = shown(path, name)
                if (path, name) in by_hook or name not in values.get(path, ()):
                    put_back[path, name](place in same and (path, name) not in by_hook)
                elif place not in stays:
                    put_back[path, name](False)

    def lost(self, state: Mapping[str, Any], key: str = "lost") -> list[str]:
        """The names of what `state` does not hold and no hook has taken up."""
        found = [(place, *place.rpartition(".")[::2]) for place in state.get(key, [])]
        return [place for place, path, name in found if (path, name) not in self._by_hook]

    def _changed(self, all_marks: Mapping[str, Marks]) -> Iterator[tuple[str, Any, str, Any, Mark]]:
        weights = storages(in_state_dict(self._module))
        for path, (owner, marks) in all_marks.items():
            if path not in self._at_start or self._at_start[path].owner is not owner:  # built by a hook
                continue
            before = self._at_start[path].marks
            for name, mark in marks.items():
                value = fields(owner)[name]
                if is_same(before.get(name, NOTHING), mark):
                    continue
                if not is_savable(mark) or weights.isdisjoint(storages(tensors_in(value))):
                    yield path, owner, name, value, mark
                elif name not in before or before[name] == (type(None), None):  # a copy would not follow the weights
                    yield path, owner, name, value, (None, id(value))

    def _owners(self) -> Iterator[tuple[str, Any]]:
        """By name all whose attributes are saved."""
        seen, paths, known = set[int](), set[str](), {*map(id, self._module.modules())}
        for path, owner in (*layers(self._module), *self._module.named_parameters(), *self._beside.items()):
            for place, found in ((path, owner), *objects(owner, path, seen)):
                for at, each in ((place, found), *held_by.of_networks(found, place, known)):
                    while at in paths:  # as of the keys 1 and "1" of a dict
                        at += "'"
                    paths.add(at)
                    yield at, each

    def _marks(self, whole: bool = False) -> dict[str, Marks]:
        owners = [each for each in self._owners() if whole or not self._says(each[0])]
        return marks_of(owners, self._module, self._of_run, self.metrics())

    def metrics(self) -> dict[str, tuple[Any, nn.Module]]:
        return held_by.metrics_of((each for each in self._owners() if not self._says(each[0])), self._module)

    def _says(self, path: str) -> bool:
        """Whether it is, or is held by, what says by itself what is saved."""
        return any(path == each or path.startswith(f"{each}.") for each in self._say)
