"""What optimizers remember in attributes, outside of `state` and `param_groups`: saved, and put back."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import Reader, TensorShard, pack, unpack
from lockstep.strategies.data.batch_slices import move
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers.copies import HOOKS, REPLACED, WARNED
from lockstep.strategies.sync.contents import checksum, generator_state

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy

_log = logging.getLogger("lockstep")

_OF_TORCH = ("_opt_called", "_step_count", "_step_supports_amp_scaling", "_fused_here", "_zero_grad_profile_name")
_ASIDE = frozenset(("state", "param_groups", "defaults", *HOOKS, *REPLACED, WARNED, *_OF_TORCH))
"""Attributes that are saved otherwise, or that torch and schedulers put on every optimizer."""
_SIMPLE = (bool, int, float, str, type(None))
_DEPTH = 6
"""How deep containers and objects within attributes are searched."""
_ADDRESS = 1 << 40
"""From here on a whole number that is a key is taken for the `id` of an object."""


class Attributes:
    """The attributes of optimizers, compared with those that they were made with.

    Those of torch's own classes hold nothing that a step needs, and a class with a `state_dict` and a `load_state_dict`
    of its own saves what it has.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._made = {key: _marks(each) for key, each in optimizers.items() if _is_searched(each)}
        self._simple = {
            key: {name: value for name, value in vars(optimizers[key]).items() if type(value) in _SIMPLE}
            for key in self._made
        }
        self._loaded = dict(self._made)
        """As `_made`, or as a checkpoint has brought them."""
        self._warns = True

    def save(self, optimizers: Mapping[str, Optimizer], tensors: dict[str, TensorShard], strategy: Strategy) -> Any:
        """As JSON data what has changed since the optimizers were made; its tensors go to `tensors`. Every rank calls
        it.

        A rank may step nothing of an optimizer; those that do must agree with rank 0. What cannot be saved is named
        under "lost", and in a warning.
        """
        saved: dict[str, Any] = {}
        for key in self._made:  # of which every rank has the same
            values, on_device, lost = {}, [], {}
            now = _marks(optimizers[key])
            differ = self._differ(key, now, strategy)
            for name in sorted(now.keys() | differ):
                value, (mark, why) = vars(optimizers[key]).get(name), now.get(name, (None, ""))
                why = why or ("is not the same on all ranks" if name in differ else "")
                if name not in differ and mark == self._made[key].get(name, (None, ""))[0]:
                    continue
                if why:
                    lost[name] = why
                    continue
                values[name] = pack(value, f"attributes/{key}/{name}", tensors)
                on_device += [name] if _is_on_device(value) else []
            if values or lost:
                saved[key] = {"values": values, "on_device": on_device, "lost": lost}
            if lost and self._warns and strategy.topology.rank == 0:
                _log.warning(f"{_described(key, optimizers[key], lost)}; to resume from them, {_ADVICE}")
        self._warns = self._warns and not any(entry["lost"] for entry in saved.values())
        return saved

    def _differ(self, key: str, now: dict[str, tuple[Any, str]], strategy: Strategy) -> set[str]:
        """The attributes that a rank has changed otherwise than rank 0. Every rank calls it."""
        if strategy.topology.world_size == 1:
            return set()
        mine = {
            name: repr(mark) for name, (mark, _) in now.items() if mark != self._loaded[key].get(name, (None, ""))[0]
        }
        first = strategy.broadcast(mine)
        wrong = sorted(name for name, mark in mine.items() if first.get(name) != mark)
        of_ranks = strategy.all_gather(torch.tensor(len(wrong), device=strategy.topology.device)).tolist()
        return {name for rank, many in enumerate(of_ranks) if many for name in strategy.broadcast(wrong, rank)}

    def load(self, optimizers: Mapping[str, Optimizer], saved: Mapping[str, Any], reader: Reader) -> None:
        """Put back what `save` returned.

        Raises ValueError for what could not be saved, and for what has changed since and was not saved.
        """
        for key in self._made:
            optimizer, entry = optimizers[key], saved.get(key, {"values": {}, "on_device": [], "lost": {}})
            if entry["lost"]:
                raise ValueError(f"{_described(key, optimizer, entry['lost'])}; {_ADVICE}")
            now = _marks(optimizer)
            for name in now.keys() - entry["values"].keys():
                if now[name][0] == self._made[key].get(name, (None, ""))[0]:
                    continue
                if name not in self._simple[key]:
                    raise ValueError(_described(key, optimizer, {name: "has changed since this one was saved"}))
                vars(optimizer)[name] = self._simple[key][name]
            for name, packed in entry["values"].items():
                device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
                value = unpack(packed, reader.read)
                _put(optimizer, name, move(value, device, None) if device and name in entry["on_device"] else value)
            self._loaded[key] = _marks(optimizer)


def take_over(key: str, optimizer: Optimizer, other: Optimizer) -> None:
    """Give `optimizer` the attributes of a copy that has stepped in its place.

    Raises RuntimeError for one that would refer to what the copy steps.
    """
    if not _is_searched(optimizer):
        return
    mine = _marks(optimizer)
    for name, (mark, why) in _marks(other).items():
        if mark == mine.get(name, (None, ""))[0]:
            continue
        if why:
            raise RuntimeError(f"{_described(key, optimizer, {name: why})}; {_ADVICE}")
        _put(optimizer, name, copy.deepcopy(vars(other)[name]))


def marks(optimizer: Optimizer) -> dict[str, Any]:
    """By attribute, also if it is an optimizer, what tells whether it has changed; {} for torch's own classes."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    return {name: mark for name, (mark, _) in _marks(optimizer).items()}


def kept(optimizer: Optimizer) -> dict[str, tuple[Any, Any]]:
    """What `put_back` needs: by attribute a mark, and a copy if one can be made. Optimizers that it holds are not in
    it."""
    return {
        name: (mark, None if why else copy.deepcopy(vars(optimizer)[name]))
        for name, (mark, why) in _own_marks(optimizer).items()
    }


def put_back(optimizer: Optimizer, before: dict[str, tuple[Any, Any]]) -> list[str]:
    """Let the attributes be what they were when `kept` returned `before`. Returns the names of changed
    attributes that could not be copied."""
    now = _own_marks(optimizer)
    lost = [name for name, (_, copied) in before.items() if name not in now and copied is None]
    for name in before.keys() - now.keys() - set(lost):
        _put(optimizer, name, copy.deepcopy(before[name][1]))
    for name, (mark, why) in now.items():
        if name not in before:
            del vars(optimizer)[name]
        elif mark != before[name][0] and why:
            lost.append(name)
        elif mark != before[name][0]:
            _put(optimizer, name, copy.deepcopy(before[name][1]))
    return lost


def _own_marks(optimizer: Optimizer) -> dict[str, tuple[Any, str]]:
    if type(optimizer).__module__.startswith("torch.optim"):
        return {}
    return {k: mark for k, mark in _marks(optimizer).items() if not isinstance(vars(optimizer)[k], Optimizer)}


_ADVICE = "keep it in state or param_groups, or define state_dict and load_state_dict with a key for it in the class"


def _is_searched(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer) or kind.__module__.startswith("torch.optim"):
        return False
    return kind.state_dict is Optimizer.state_dict or kind.load_state_dict is Optimizer.load_state_dict


def _described(key: str, optimizer: Optimizer, lost: Mapping[str, str]) -> str:
    which = shortened([f"{name} (it {why})" for name, why in lost.items()])
    return (
        f"optimizer {key!r} ({type(optimizer).__name__}) keeps outside of state and param_groups what checkpoints do "
        f"not hold: {which}"
    )


def _put(optimizer: Optimizer, name: str, value: Any) -> None:
    """Let an attribute hold `value`; in place where it is one of the same kind, which other code may hold too."""
    now = vars(optimizer).get(name)
    if isinstance(now, Tensor) and isinstance(value, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            now.copy_(value)
    elif isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(value)
    else:
        vars(optimizer)[name] = value


def _is_on_device(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_is_on_device, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor) and not value.is_cpu


def _marks(optimizer: Optimizer) -> dict[str, tuple[Any, str]]:
    """By attribute what tells whether it has changed, and why it cannot be saved, if so."""
    found = {}
    for name, value in vars(optimizer).items():
        if name not in _ASIDE:
            search = _Search(optimizer)
            found[name] = search.mark(value, _DEPTH), search.why
    return found


class _Search:
    def __init__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        self._known = {
            id(each) for each in (optimizer, optimizer.state, groups, *groups, *(g["params"] for g in groups))
        }
        self.why = ""
        """Why what was marked cannot be saved."""

    def mark(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind in _SIMPLE or isinstance(value, np.generic):
            if kind not in (*_SIMPLE, np.float64, np.int64, np.bool_):
                self._refuse(f"is a {kind.__name__}")
            return kind.__name__, repr(value)
        if id(value) in self._known or isinstance(value, nn.Parameter) or not depth:
            self._refuse("holds parameters, groups or state")
            return None
        if isinstance(value, Tensor):
            if kind is not Tensor or value.layout != torch.strided or value.is_meta:
                self._refuse("is not a plain tensor")
                return id(value), value._version
            return str(value.dtype), tuple(value.shape), checksum(value)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return self.mark(torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="))), depth)
        if kind not in (list, tuple) and not (isinstance(value, dict) and (kind is dict or depth == _DEPTH)):
            self._refuse(f"is a {kind.__name__}" if depth == _DEPTH else f"holds a {kind.__name__}")
        if isinstance(value, dict):
            keys = list(value)
            if any(isinstance(key, Tensor) or (type(key) is int and key >= _ADDRESS) for key in keys):
                self._refuse("has parameters, or their ids, as keys")
            return [(self.mark(key, depth - 1), self.mark(item, depth - 1)) for key, item in value.items()]
        if isinstance(value, list | tuple):
            return [self.mark(item, depth - 1) for item in value]
        if isinstance(value, Optimizer):
            inner = {name: item for name, item in vars(value).items() if name not in _ASIDE}
            return self.mark({**inner, "groups": value.param_groups, "state": value.state}, depth)
        return self._of_object(value, depth)

    def _of_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(map(repr, value))
        if (state := generator_state(value)) is not None:
            return state
        if hasattr(value, "bit_generator"):  # of a package that numpy's generators are not of
            return repr(value.bit_generator.state)
        if hasattr(value, "getstate") and not isinstance(value, random.SystemRandom):
            return repr(value.getstate())
        if isinstance(value, type) or callable(value) or not hasattr(value, "__dict__"):
            return id(value)
        return id(value), self.mark({**vars(value)}, depth - 1)

    def _refuse(self, why: str) -> None:
        self.why = self.why or why
