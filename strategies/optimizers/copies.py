"""Copy an optimizer without danger to the real one, and step the copy."""

from __future__ import annotations

import copy
import os
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


class UnknownOptimizer(Exception):
    """The optimizer cannot be copied without danger to the real one."""


class Contents:
    """What an optimizer holds: its parameters, other tensors, optimizers within. Raises UnknownOptimizer for what may
    reach the real ones."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.parameters: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self.optimizers: list[Optimizer] = []
        self.generators: list[torch.Generator] = []
        self.elsewhere = False
        """Whether attributes list parameters too, by their `id` or as keys as well, or tensors that go with them."""
        self.by_id = False
        """Whether they have the `id` of one."""
        self._seen: set[int] = set()
        self._owned: set[int] = set()
        self._optimizer(optimizer)

    def _optimizer(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._seen:
            return
        self._seen.add(id(optimizer))
        self.optimizers.append(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._owned:
                    self._owned.add(id(parameter))
                    self.parameters.append(parameter)
            self._seen.add(id(group["params"]))
        for parameter, entry in list(optimizer.state.items()):
            if isinstance(parameter, Tensor) and id(parameter) not in self._owned:
                self.elsewhere = True
            self._value(entry, "its state")
        for name, value in optimizer.__dict__.items():
            if name not in ("state", *HOOKS, *REPLACED, WARNED):
                self._value(value, name)

    def _value(self, value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if id(value) in self._owned or isinstance(value, nn.Parameter):
                self.elsewhere = True
                if id(value) not in self._owned:
                    self._owned.add(id(value))
                    self.parameters.append(value)
            else:
                self.tensors.append(value)
            return
        if isinstance(value, int) and value in self._owned:
            self.elsewhere = self.by_id = True
        if id(value) in self._seen or isinstance(value, str | bytes | int | float | complex | type(None) | type):
            return
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            self._optimizer(value)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, nn.Module):
            self._value([*value.parameters(), *value.buffers()], name)
        elif isinstance(value, types.FunctionType | types.MethodType):
            if getattr(value, "__closure__", None) or getattr(value, "__self__", None) is not None:
                raise UnknownOptimizer(f"its {name} is a function that may reach the real parameters")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if isinstance(key, Tensor | int):
                    self._value(key, name)
                self._value(item, str(key) if isinstance(key, str) else name)
        elif isinstance(value, list | tuple | set | frozenset):
            self.elsewhere |= any(
                isinstance(item, Tensor) and item.dim() > 0 for item in value
            )  # one a parameter, by its place
            for item in value:
                self._value(item, name)
        elif hasattr(value, "__dict__") and not isinstance(value, _SHARED):
            for key, item in vars(value).items():
                self._value(item, f"{name}.{key}")


HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


REPLACED = ("step", "zero_grad")
"""What schedulers and profilers put on the object."""
WARNED = "_warned_capturable_if_run_uncaptured"
"""Set by torch in every optimizer; without it, its check on CUDA wants `capturable` in groups that have none."""


_SHARED = (dist.ProcessGroup, torch.device, types.ModuleType)


def duplicate(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A deep copy without hooks, and without what replaces `step` on the object. `copy.deepcopy` of an optimizer omits
    its attributes."""
    if steps_by_own_code(optimizer):
        raise UnknownOptimizer("its step is replaced on the object")
    contents = Contents(optimizer)
    found = contents.optimizers
    empties = [object.__new__(type(each)) for each in found]
    memo.update({id(each): empty for each, empty in zip(found, empties, strict=True)})
    for each, empty in zip(found, empties, strict=True):
        for name, value in each.__dict__.items():
            if name in HOOKS:
                empty.__dict__[name] = OrderedDict()
            elif name not in REPLACED:
                empty.__dict__[name] = value if isinstance(value, _SHARED) else copy.deepcopy(value, memo)
    if contents.by_id:
        ids = {id(parameter): id(memo[id(parameter)]) for parameter in contents.parameters}
        for empty in empties:
            _put_ids(vars(empty), ids, set())
    return empties[0]


def _put_ids(value: Any, ids: Mapping[int, int], seen: set[int]) -> Any:
    """`value`, in which copies of parameters are known by their own `id`; what can be changed is changed in place."""
    if isinstance(value, int):
        return ids.get(value, value)
    if isinstance(value, tuple | frozenset) and not hasattr(value, "_fields"):
        return type(value)([_put_ids(item, ids, seen) for item in value])
    if id(value) in seen or isinstance(value, Tensor):
        return value
    seen.add(id(value))
    if isinstance(value, dict):
        items = [(_put_ids(key, ids, seen), _put_ids(item, ids, seen)) for key, item in value.items()]
        value.clear()
        value.update(items)
    elif isinstance(value, set):
        items = [_put_ids(item, ids, seen) for item in value]
        value.clear()
        value.update(items)
    elif isinstance(value, list):
        value[:] = [_put_ids(item, ids, seen) for item in value]
    return value


def names_of_kept(group: Mapping[str, Any], keeps: Iterable[Any]) -> dict[str, list[str]]:
    """The `param_names` that a group of torch has beside its `params`, of those that `keeps` is true for; {} if it has
    none."""
    return {"param_names": [*compress(group["param_names"], keeps)]} if "param_names" in group else {}


def steps_by_own_code(optimizer: Optimizer) -> bool:
    """Whether its `step` is replaced on the object, by more than what a scheduler puts around the step of the class."""
    own = optimizer.__dict__.get("step")
    if own is None:
        return False
    return not hasattr(own, "_wrapped_by_lr_sched") or getattr(own, "__wrapped__", None) is not type(optimizer).step


def steps_with(optimizer: Optimizer) -> str:
    """What of the user's runs around its step, in words: nothing (""), a hook, or a function in the place of `step`."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        if not all(getattr(hook, "__module__", "").startswith("lockstep.") for hook in hooks.values()):
            return "a step hook"
    return "another step on the object" if steps_by_own_code(optimizer) else ""


INSTEAD = "remove it and override on_before_optimizer_step or on_train_batch_end"
"""What to do about what `steps_with` names."""


def plain_step(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    return _step_of(optimizer)(optimizer)


def closure_step(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    return _step_of(optimizer)(optimizer, closure)


def _step_of(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's `step`, without hooks that are registered for all optimizers."""
    step = type(optimizer).step
    is_torchs = _file_of(step).startswith(_OF_TORCH)  # a wrapper of the user's takes `hooked` over too
    return step.__wrapped__ if hasattr(step, "hooked") and is_torchs else step  # type: ignore[attr-defined]


_OF_TORCH = tuple(os.path.join(os.path.dirname(torch.__file__), name, "") for name in ("optim", "_dynamo"))


def is_of_torch(function: Any) -> bool:
    """Whether torch.optim wrote it and all that it wraps, or torch.compile, which wraps parts of optimizers when it is
    first used. A wrapper takes the name and module of what it wraps, but not its file."""
    wrapped = getattr(function, "__wrapped__", None)
    return _file_of(function).startswith(_OF_TORCH) and (wrapped is None or is_of_torch(wrapped))


def _file_of(function: Any) -> str:
    """Where its code is; nowhere if it was compiled."""
    return getattr(getattr(function, "__code__", None), "co_filename", "")


def make_it_move(group: dict[str, Any]) -> None:
    """A schedule may begin with a rate of zero, under which everything looks alike."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        if float(rate) < 1e-4:
            rate.fill_(1e-3)
    elif isinstance(rate, int | float) and rate < 1e-4:
        group["lr"] = 1e-3
    if "capturable" in group:
        group["capturable"] = False


Place = tuple[str, int, Any]
Name = tuple[str, Any]
"""Whether it is of attributes, a group or state; and the key."""


def step_counts(optimizer: Optimizer) -> dict[Place, float]:
    """The numbers in attributes, groups and state of an optimizer, by where they are."""
    return {
        (kind, i, key): float(value)
        for i, (kind, held) in enumerate(_places(optimizer))
        for key, value in held.items()
        if _is_number(value)
    }


def counting(counts: list[dict[Place, float]]) -> frozenset[Name]:
    """The names of those that have grown by one in each step, wherever they are; `counts` are after three steps."""
    before, between, after = counts
    steady: dict[Name, bool] = {}
    for (kind, i, key), now in after.items():
        place, then = (kind, i, key), between.get((kind, i, key), now)
        by_one = now - then == 1 == then - before.get(place, then)
        steady[kind, key] = by_one and steady.get((kind, key), True)
    return frozenset(name for name, by_one in steady.items() if by_one)


def make_older(optimizer: Optimizer, names: frozenset[Name], age: int) -> None:
    """Set the numbers of these names, which count steps, to `age`."""
    for kind, held in _places(optimizer):
        for key, value in list(held.items()):
            if (kind, key) not in names or not _is_number(value):
                continue
            if isinstance(value, Tensor):
                with torch.no_grad():
                    value.fill_(age)
            else:
                held[key] = type(value)(age)


def _places(optimizer: Optimizer) -> list[tuple[str, dict[Any, Any]]]:
    found: list[tuple[str, Any]] = []
    for each in Contents(optimizer).optimizers:
        found.append(("attributes", vars(each)))
        found += [("group", group) for group in each.param_groups]
        found += [("state", held) for held in each.state.values()]
    return [(kind, held) for kind, held in found if isinstance(held, dict)]


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.requires_grad
    return isinstance(value, int | float) and not isinstance(value, bool)
