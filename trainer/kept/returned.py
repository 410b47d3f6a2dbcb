"""What user code has left on rank 0 beside the model, for the program that started the ranks: attributes, objects of
the program's classes that these hold, and variables of functions."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.callbacks.base import Callback
from lockstep.strategies.launch.program.values import pickles_itself
from lockstep.strategies.sync.contents import checksum
from lockstep.trainer.kept.elsewhere import take_layer
from lockstep.trainer.kept.fields import Gone, caches_of, derived, dict_of, fields, put, put_tensor, take_away
from lockstep.trainer.kept.identity import in_state_dict, references, replaced
from lockstep.trainer.kept.opaque import Adopted, Unpickler, arrives, dumped, fingerprint, is_opaque, is_sample
from lockstep.trainer.kept.owners import (
    is_users_object,
    layers,
    metrics_of,
    networks_of,
    objects,
    parts,
    read_by_loaders,
    with_networks,
)
from lockstep.trainer.kept.values import (
    MOST_ITEMS,
    STATEFUL,
    Mark,
    attributes,
    filled,
    is_data,
    is_same,
    mark_of,
    on_host,
    storages,
    take_data,
    tensors_in,
)
from lockstep.trainer.kept.variables import MISSING, Variable, variables

_log = logging.getLogger("lockstep")
_DEPTH = 8
"""How deep values within others are searched."""
_MOST_BYTES, _FEW_BYTES = 2**26, 2**20
"""What a dataset collects in a larger container, such as decoded images, stays on the ranks."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)


class Holders:
    """All that user code may keep something in, by names that are the same in the program and on a rank as long as
    nothing has run there."""

    def __init__(
        self,
        beside: list[Any],
        module: nn.Module,
        callbacks: Iterable[Callback],
        loaders: Mapping[str, Any],
        names: Collection[str] | None = None,
    ) -> None:
        """`callbacks`: of which only the functions are searched that they hold. `loaders`: those that the run was
        given. `names`: those of the program, which may hold more than it has sent."""
        self._beside = {f"beside.{i}": owner for i, owner in enumerate(beside)}
        self.follow(module)
        searched = self.owners | {f"callbacks.{i}": each for i, each in enumerate(callbacks)}
        self.variables, self._classes, self._functions = variables(searched)
        seen = {*map(id, self.owners.values())}
        self._searched = searched
        self.objects = {where: item for path, each in self.owners.items() for where, item in objects(each, path, seen)}
        for path, variable in self.variables.items():
            value = variable.read()
            if is_users_object(value) and id(value) not in seen:
                seen.add(id(value))
                self.objects |= {path: value, **dict(objects(value, path, seen))}
        known = {*map(id, module.modules())}
        holding = self.owners | self.objects
        self.networks = {p: net for path, owner in holding.items() for p, net in networks_of(owner, path, known)}
        """Those that are not the module's: of a teacher in a list, of averaged weights that a callback holds."""
        self.metrics = {f"{name} metric": each for name, (each, _) in metrics_of(holding.items(), module).items()}
        self.objects |= {f"{path}:{place}": each for path, net in self.networks.items() for place, each in layers(net)}
        roots = {path: attributes(owner) for path, owner in self.owners.items()} | {"loaders": dict(loaders)}
        self.read = {where: item for path, held in roots.items() for where, item in read_by_loaders(held, path, seen)}
        if names is not None:
            self.read = {name: item for name, item in self.read.items() if name in names}
            self.networks = {name: item for name, item in self.networks.items() if name in names}
            self.metrics = {name: item for name, item in self.metrics.items() if name in names}
            self.objects = {name: item for name, item in self.objects.items() if name in names}
            self.variables = {name: item for name, item in self.variables.items() if name in names}
            self._classes = {name: item for name, item in self._classes.items() if name in names}
            self._functions = {name: item for name, item in self._functions.items() if name in names}

    @property
    def names(self) -> frozenset[str]:
        held = self.objects, self.read, self.networks, self.variables, self._classes, self._functions
        return frozenset(itertools.chain(*held, self.metrics))

    def given(self) -> dict[str, tuple[bytes, tuple[bytes, list[Any]]]]:
        """In the program: of variables what a rank that imports their files does not find there, pickled, each with
        what tells whether it does."""
        named, found = self.named, {}
        known = {id(each): name for name, each in named.items()}
        for name, value in self._not_imported():
            if (made := fingerprint(value, known)) and arrives(value, known, named):
                buffers: list[Any] = []
                found[name] = made, (dumped(value, known, buffers), buffers)
        return found

    def take_given(self, given: Mapping[str, tuple[bytes, tuple[bytes, list[Any]]]]) -> None:
        """On a rank: take over what `given` has returned."""
        known, adopted = {id(each): name for name, each in self.named.items()}, Adopted(self.named)
        for name, (made, packed) in given.items():
            if name in self.variables and fingerprint(now := self.variables[name].read(), known) != made:
                self.variables[name].write(adopted(now, Unpickler(packed, self.named).load()))

    def _not_imported(self) -> Iterator[tuple[str, Any]]:
        for name, variable in self.variables.items():
            value = variable.read()
            is_of_context = isinstance(variable.owner, ContextVar) and value is not MISSING
            if is_of_context or (is_opaque(value) and not is_users_object(value)):
                yield name, value

    def made(self) -> Iterator[tuple[str, str, Any]]:
        """Attributes of classes of the program and globals that a run has made: with the name of the class, or of a
        function that has these globals."""
        places = {id(each.__globals__): name for name, each in self._functions.items()}
        places |= {id(kind): name for name, kind in self._classes.items()}
        for name, variable in variables(self._searched)[0].items():
            if name not in self.variables and id(variable.owner) in places:
                yield places[id(variable.owner)], variable.key, variable.read()

    def follow(self, module: nn.Module) -> None:
        """Take the layers that the module has now."""
        self.module = module
        self._weights = storages(in_state_dict(module))
        self.owners = self._beside | {f"layers.{path}": layer for path, layer in layers(module)}

    @property
    def all(self) -> dict[str, Any]:
        return self.owners | self.objects | self.read

    @property
    def named(self) -> dict[str, Any]:
        """What is sent by its name."""
        code = {f"{name}()": each for name, each in (self._classes | self._functions).items()}
        nets = {"model": self.module} | self.networks
        layers = {f"{path}/{name}": layer for path, net in nets.items() for name, layer in net.named_modules()}
        sent = {id(each) for net in nets.values() for each in in_state_dict(net)}  # by other ways than here
        tensors = {f"{path}={name}": each for path, net in nets.items() for name, each in _tensors(net).items()}
        tensors = {name: each for name, each in tensors.items() if id(each) in sent}
        return tensors | layers | self.metrics | self.all | code

    def sums(self) -> dict[str, int]:
        """By name how often torchmetrics objects were updated since they were reset."""
        own = {name: each for name, each in self.module.named_modules() if hasattr(each, "metric_state")}
        found = own | {
            name.removesuffix(" metric").partition(".")[2].lstrip("."): each for name, each in self.metrics.items()
        }
        return {name: getattr(each, "_update_count", 0) for name, each in found.items()}

    def take(self, packed: tuple[bytes, list[Any]]) -> list[str]:
        """Give them what `Left.packed` has returned; return the names of what the run has made and could not send."""
        owners = self.all
        left = Unpickler(packed, self.named).load()
        for path, values in left["attributes"].items():
            if path not in owners:
                continue
            now = fields(owners[path])  # a copy of a weight would not follow it
            of_weights = {n for n in values if not self._weights.isdisjoint(storages(tensors_in(now.get(n))))}
            replaced = of_weights.union(left["replaced"].get(path, ()))
            if path in left["caches"]:
                take_layer(owners[path], values, left["caches"][path], replaced)
            else:
                take_data(owners[path], values, replaced)
        for path, tensors in left["networks"].items():
            own = _tensors(self.networks[path])
            for name in own.keys() & tensors.keys():
                put_tensor(own[name], tensors[name])
        for name, value in left["variables"].items():
            self.variables[name].write(filled(self.variables[name].read(), value))
        layers_now = dict(self.module.named_modules())
        for path, tensors in left["derived"].items():
            dict_of(layers_now[path]).update(tensors)
        self._adopt(left, owners)
        take_away(owners, left["gone"])
        if left["changed"]:
            _log.warning(
                f"{', '.join(left['changed'])} changed on the ranks, which have ended, and cannot be sent back: what "
                "is here is as it was before the run; keep what later code needs in numbers, tensors or objects of up "
                "to 64 MiB that can be pickled"
            )
        if left["sums"]:
            _log.warning(
                f"{', '.join(left['sums'])} hold sums of a part of the samples on each rank, which have ended, so that "
                "what is here is as it was before the run; call reset() of these metrics once they were computed, or "
                "log them, so that a next run begins alike"
            )
        return left["made"]

    def _adopt(self, left: Mapping[str, Any], owners: Mapping[str, Any]) -> None:
        """Take over what only pickle could send."""
        adopted = Adopted(self.named)
        for path, values in left["opaque"].items():
            for name, value in values.items() if path in owners else ():
                now = None if name in left["replaced"].get(path, ()) else fields(owners[path]).get(name)
                put(owners[path], name, adopted(now, value))
        for name, value in left["variables_of_pickle"].items():
            self.variables[name].write(adopted(self.variables[name].read(), value))
        for name, key, value in left["made_variables"]:
            owner = self._classes[name] if name in self._classes else self._functions[name].__globals__
            Variable(owner, key).write(adopted(None, value))


class Left:
    """On a rank: what has changed in `holders` since the run began."""

    def __init__(self, holders: Holders) -> None:
        self._holders, self._gone = holders, Gone()
        self._gone.note(
            {path: (owner, attributes(owner)) for path, owner in (holders.owners | holders.objects).items()}
        )
        self._first, self._names = references(holders.all), frozenset(holders.named)
        self._at_start = {
            path: {name: self._mark(path, value) for name, value in attributes(owner).items()}
            for path, owner in holders.all.items()
        }
        self._networks = {
            path: {name: _content(tensor) for name, tensor in _tensors(net).items()}
            for path, net in holders.networks.items()
        }
        self._variables = {name: mark_of(variable.read(), MOST_ITEMS) for name, variable in holders.variables.items()}
        self._sums = holders.sums()
        self._prints = dict[tuple[str, str], bytes | None]()
        """Of objects other than data."""
        self.note_setup(holders.module)

    def note_setup(self, module: nn.Module) -> None:
        """Called again once `setup` has been, which every run calls."""
        self._holders.follow(module)
        known, were = self._known(), {*self._prints}
        for place, value in self._opaque():
            if place not in were and not _is_returned(value, known):
                self._prints[place] = fingerprint(value, known, samples=True)

    def _known(self) -> dict[int, str]:
        return {id(each): name for name, each in self._holders.named.items() if name in self._names}

    def _opaque(self) -> Iterator[tuple[tuple[str, str], Any]]:
        """Owner and name of objects other than data, and variables of functions that hold such."""
        for path, owner in self._holders.all.items():
            for name, value in with_networks(owner, self._holders.module).items():
                if (path not in self._holders.read or _is_light(value)) and is_opaque(value):  # which reads all
                    yield (path, name), value
        for name, variable in self._holders.variables.items():
            if is_opaque(value := variable.read()):
                yield ("", name), value

    def packed(self, module: nn.Module, again: Collection[tuple[int, str]] = ()) -> tuple[bytes, list[Any]]:
        """The values, and the bytes of tensors and arrays. Of tensors of layers not views of weights, which follow
        these where they are. `again`: what every run makes, by the `id` of the owner."""
        self._holders.follow(module)
        owners, weights, known = self._holders.all, storages(in_state_dict(module)), self._known()
        found: dict[str, Any] = {"attributes": {}, "variables": {}, "gone": self._gone.names(owners)}
        found["replaced"] = replaced(self._first, owners)
        stays = {path for path, owner in owners.items() if path in self._holders.read and self._has_filled(path, owner)}
        for path, owner in owners.items():
            if path in stays:
                continue
            found["attributes"][path] = {
                name: value
                for name, value in attributes(owner).items()
                if self._is_sent(path, name, value, known)
                if not isinstance(value, Tensor) or (value.grad_fn is None and weights.isdisjoint(storages([value])))
            }
        found["caches"] = {path: [*caches_of(each)] for path, each in owners.items() if isinstance(each, nn.Module)}
        found["networks"] = {
            path: {
                name: tensor.detach().cpu()
                for name, tensor in _tensors(net).items()
                if _content(tensor) != self._networks[path].get(name)
            }
            for path, net in self._holders.networks.items()
        }
        for name, variable in self._holders.variables.items():
            value = variable.read()
            if not is_same(self._variables[name], mark_of(value, MOST_ITEMS)) and _is_returned(value, known):
                found["variables"][name] = value
        found["sums"] = [name for name, number in self._holders.sums().items() if number > self._sums.get(name, 0)]
        found["derived"] = {path: on_host(derived(layer)) for path, layer in module.named_modules() if derived(layer)}
        self._add_opaque(found, known, stays, again)
        buffers: list[Any] = []
        return dumped(found, known, buffers), buffers

    def _add_opaque(self, found: dict[str, Any], known: Any, stays: Collection[str], again: Collection[Any]) -> None:
        """What only pickle can send, and the names of what it cannot."""
        found["opaque"], found["variables_of_pickle"], found["changed"], found["made"] = {}, {}, [], []
        named = self._holders.named
        for (path, name), value in self._opaque():
            if path in stays or _is_returned(value, known):
                continue
            first, now = self._prints.get((path, name)), fingerprint(value, known, samples=True)
            if (first is None and not self._is_new(path, name, value)) or (now == first and now is not None):
                continue
            if now is None or is_sample(now) or not arrives(value, known, named):
                is_made = first is None and (id(self._holders.all.get(path)), name) in again
                if not is_made and not any(isinstance(each, STATEFUL) for each in parts(value)):  # known otherwise
                    found["changed" if first else "made"].append(self._shown(path, name))
            else:
                (found["opaque"].setdefault(path, {}) if path else found["variables_of_pickle"])[name] = value
        found["made_variables"] = [
            each
            for each in self._holders.made()
            if _is_returned(each[2], known)
            or (is_opaque(each[2]) and fingerprint(each[2], known) and arrives(each[2], known, named))
        ]

    def _shown(self, path: str, name: str) -> str:
        owner = self._holders.all.get(path)
        return name if owner is None else f"{type(owner).__name__}.{name}"

    def _is_new(self, path: str, name: str, value: Any) -> bool:
        """Whether it is another object than at the start, for all that can be seen from outside."""
        if not path:
            return not is_same(self._variables[name], mark_of(value, MOST_ITEMS))
        before = self._at_start.get(path, {}).get(name)
        return before is None or not is_same(before, self._mark(path, value))

    def _is_sent(self, path: str, name: str, value: Any, known: Mapping[int, str]) -> bool:
        """Data of what user code keeps state in always, as loading the state of a callback may have changed it."""
        if path in self._holders.owners and not isinstance(value, Tensor) and is_data(value):
            return True
        before = self._at_start.get(path, {}).get(name)
        is_new = before is None or not is_same(before, self._mark(path, value))
        return is_new and _is_returned(value, known) and (path not in self._holders.read or _is_light(value))

    def _has_filled(self, path: str, owner: Any) -> bool:
        """Whether what loaders read has read something large that it lacked, as datasets do that load when they are
        first used: it stays as it was, so that it loads again."""
        before = self._at_start.get(path, {})
        large = [name for name, value in attributes(owner).items() if not _is_light(value)]
        filled_now = [name for name in large if name not in before or is_same(before[name], mark_of(None, 0))]
        if filled_now:
            _log.warning(
                f"{', '.join(filled_now)} of {type(owner).__name__} has more than {_MOST_BYTES >> 20} MB and stays on "
                "the ranks, with all that this run has set on that object; the next run begins with it as it is here"
            )
        return bool(filled_now)

    def _mark(self, path: str, value: Any) -> Mark:
        """Of what loaders read large containers, such as the images of a dataset, are known by length and few items."""
        return mark_of(value, MOST_ITEMS if path not in self._holders.read or _is_light(value) else 0)


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a network that has them whole."""
    found = dict[str, Tensor](itertools.chain(net.named_parameters(), net.named_buffers()))
    return {name: each for name, each in found.items() if type(each) in (Tensor, nn.Parameter) and not each.is_meta}


def _content(tensor: Tensor) -> Any:
    """What tells whether a tensor was changed; of a large one not by a write past its version, into its own memory."""
    version = object() if tensor.is_inference() else tensor._version
    few = tensor.is_cpu and tensor.nbytes <= _FEW_BYTES
    return version, tensor.dtype, tensor.data_ptr(), checksum(tensor.detach()) if few else None


def _is_light(value: Any) -> bool:
    """Whether it has few items and bytes, and is not a container of many."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.nbytes <= _MOST_BYTES
    if not isinstance(value, (*_CONTAINERS, *_MAPPINGS)):
        return True
    return len(value) <= MOST_ITEMS and sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(value)) <= _MOST_BYTES


def _is_returned(value: Any, known: Mapping[int, str], depth: int = _DEPTH) -> bool:
    """Whether it is data, what the program knows, or an object of a class of the program that holds these."""
    if id(value) in known or is_data(value):
        return True
    kind: Any = type(value)
    if kind in _CONTAINERS and depth:
        return all(_is_returned(item, known, depth - 1) for item in value)
    if kind in _MAPPINGS and depth:
        return all(_is_returned(each, known, depth - 1) for item in value.items() for each in item)
    by_name = kind.__module__ != "__main__" and "<locals>" not in kind.__qualname__
    if not depth or not is_users_object(value) or not (by_name or id(kind) in known) or isinstance(value, (dict, list)):
        return False
    if pickles_itself(kind):
        return False
    return all(_is_returned(item, known, depth - 1) for item in fields(value).values())
