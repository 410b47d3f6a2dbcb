"""What user code has left on rank 0 beside the model, for the program that started the ranks: attributes, objects of
the program's classes that these hold, and variables of functions."""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.callbacks.base import Callback
from lockstep.strategies.launch import payload
from lockstep.strategies.sync.contents import checksum
from lockstep.trainer.kept.elsewhere import take_layer
from lockstep.trainer.kept.fields import caches_of, fields, put_tensor
from lockstep.trainer.kept.gone import Gone, take_away
from lockstep.trainer.kept.identity import in_state_dict, references, replaced
from lockstep.trainer.kept.owners import is_users_object, layers, networks_of, objects, read_by_loaders
from lockstep.trainer.kept.values import (
    MOST_ITEMS,
    Mark,
    attributes,
    filled,
    is_data,
    is_same,
    mark_of,
    own_data,
    storages,
    take_data,
    tensors_in,
)
from lockstep.trainer.kept.variables import variables

_log = logging.getLogger("lockstep")
_DEPTH = 8
"""How deep values within others are searched."""
_MOST_BYTES, _FEW_BYTES = 2**26, 2**20
"""What a dataset collects in a larger container, such as decoded images, stays on the ranks."""
_CONTAINERS = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_OWN_PICKLE = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")


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
        self.variables, self._classes = variables(searched)
        seen = {*map(id, self.owners.values())}
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
        self.objects |= {f"{path}:{place}": each for path, net in self.networks.items() for place, each in layers(net)}
        roots = {path: attributes(owner) for path, owner in self.owners.items()} | {"loaders": dict(loaders)}
        self.read = {where: item for path, held in roots.items() for where, item in read_by_loaders(held, path, seen)}
        if names is not None:
            self.read = {name: item for name, item in self.read.items() if name in names}
            self.networks = {name: item for name, item in self.networks.items() if name in names}
            self.objects = {name: item for name, item in self.objects.items() if name in names}
            self.variables = {name: item for name, item in self.variables.items() if name in names}
            self._classes = {name: item for name, item in self._classes.items() if name in names}

    @property
    def names(self) -> frozenset[str]:
        return frozenset({*self.objects, *self.read, *self.networks, *self.variables, *self._classes})

    def follow(self, module: nn.Module) -> None:
        """Take the layers that the module has now."""
        self._weights = storages(in_state_dict(module))
        self.owners = self._beside | {f"layers.{path}": layer for path, layer in layers(module)}

    @property
    def all(self) -> dict[str, Any]:
        return self.owners | self.objects | self.read

    @property
    def named(self) -> dict[str, Any]:
        """What is sent by its name."""
        return self.all | {f"class {name}": kind for name, kind in self._classes.items()}

    def take(self, packed: tuple[bytes, list[Any]]) -> None:
        """Give them what `Left.packed` has returned."""
        owners = self.all
        left = _Unpickler(packed, self.named).load()
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
        take_away(owners, left["gone"])


class Left:
    """On a rank: what has changed in `holders` since the run began."""

    def __init__(self, holders: Holders) -> None:
        self._holders, self._gone = holders, Gone()
        self._gone.note({path: (owner, own_data(owner)) for path, owner in (holders.owners | holders.objects).items()})
        self._first = references(holders.all)
        self._at_start = {
            path: {name: self._mark(path, value) for name, value in attributes(owner).items()}
            for path, owner in holders.all.items()
        }
        self._networks = {
            path: {name: _content(tensor) for name, tensor in _tensors(net).items()}
            for path, net in holders.networks.items()
        }
        self._variables = {name: mark_of(variable.read(), MOST_ITEMS) for name, variable in holders.variables.items()}

    def packed(self, module: nn.Module) -> tuple[bytes, list[Any]]:
        """The values, and the bytes of tensors and arrays. Of tensors of layers not views of weights, which follow
        these where they are."""
        self._holders.follow(module)
        owners, weights = self._holders.all, storages(in_state_dict(module))
        named = self._holders.named
        known = {id(each): name for name, each in named.items() if name not in owners or name in self._at_start}
        found: dict[str, Any] = {"attributes": {}, "variables": {}, "gone": self._gone.names(owners)}
        found["replaced"] = replaced(self._first, owners)
        for path, owner in owners.items():
            if path in self._holders.read and self._has_filled(path, owner):
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
        buffers: list[Any] = []
        return _dumped(found, known, buffers), buffers

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
        """Of what loaders read large containers, such as the images of a dataset, are known by their length."""
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
    if any(name in vars(cls) for cls in kind.__mro__[:-1] for name in _OWN_PICKLE):
        return False
    return all(_is_returned(item, known, depth - 1) for item in fields(value).values())


class _Pickler(payload.Pickler):
    """Names what the program knows."""

    known: Mapping[int, str]

    def persistent_id(self, obj: Any) -> Any:
        return self.known.get(id(obj))


def _dumped(found: Any, known: Mapping[int, str], buffers: list[Any]) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, buffers.append)
    pickler.known = known
    pickler.dump(found)
    return file.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, packed: tuple[bytes, list[Any]], known: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(packed[0]), buffers=packed[1])
        self._known = known

    def persistent_load(self, name: Any) -> Any:
        return self._known[name]
