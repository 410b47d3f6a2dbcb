"""Gradient hooks that users register on parameters, run once an accumulation window on the final gradient.

`parameter.register_hook(fn)` and `parameter.register_post_accumulate_grad_hook(fn)` are called by autograd with what
one backward on one rank has computed, of the tensor that was registered. Under a strategy that is a part of the
gradient, or the tensor takes no part in the backward at all, so a hook that is not linear (a clamp, a norm) would
change the numbers. The hooks are therefore taken off the parameters before anything wraps them, and called with the
gradient that the optimizer gets.

What users set on parameters besides (`parameter.no_decay = True`) is read by hooks and optimizers, which see in their
place what an engine has made of them: `share_attributes` lets these have it too.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

M = TypeVar("M", bound=nn.Module)
ATTRIBUTES = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of a tensor: dicts, in which the handles that users hold find what to remove."""
_OF_TORCH = ("_is_param", "_fsdp_", "_dynamo_")
"""What attributes begin with that torch sets on parameters."""
OF_DEEPSPEED = ("ds_", "_ds", "_hp", "_z3", "_index_in", "grad_accum", "zero_")
"""What those begin with that an engine of DeepSpeed sets on the parameters that it holds."""
_OF_FAKE = {"_fake_device", "fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor"}
"""What torch sets on each FakeTensor, `fake_device` before torch 2.12."""
_HOOKS, _PARAMETER = operator.attrgetter(*ATTRIBUTES), operator.itemgetter(1)


class Deferred(NamedTuple):
    """In the place of a user's hook: autograd calls it, and it does nothing."""

    hook: Callable[[Any], Any]

    def __call__(self, tensor: Tensor) -> None: ...


class ParameterHooks:
    """The users' hooks on the parameters of one model, by the parameter's name."""

    def __init__(self) -> None:
        self.taken: dict[str, dict[str, dict[int, Any]]] = {}
        """By name and attribute: the dict of hooks of the user's own parameter. Empty as long as no user registered
        any."""
        self.around: Callable[[list[Callable[..., Any]]], AbstractContextManager[Any]] = nullcontext
        """Around the call of these hooks of users."""
        self._given_back = False
        self._registered = 0
        """How many hooks torch had given handles for when parameters were last seen."""

    def take(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Let autograd call none of the users' hooks on these parameters. Does nothing after `put_back`."""
        self._registered = RemovableHandle.next_id
        for name, parameter in [] if self._given_back else _hooked(named_parameters):
            for attribute, hooks in zip(ATTRIBUTES, _HOOKS(parameter), strict=True):
                theirs = _users(hooks)
                for key in theirs:
                    hooks[key] = Deferred(hooks[key])
                if theirs:
                    known = self.taken.setdefault(name, {}).setdefault(attribute, hooks)
                    if known is not hooks:  # of a parameter that stands in the place of the user's own
                        known.update((key, hooks[key]) for key in theirs)

    def added(self, named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of parameters with hooks of users that are not taken. Cheap where torch gave out no handle since
        the last look."""
        if self._given_back or self._registered == RemovableHandle.next_id:
            return []
        self._registered = RemovableHandle.next_id
        return [
            name
            for name, parameter in _hooked(named_parameters)
            if any(not isinstance(hooks[key], Deferred) for hooks in _HOOKS(parameter) for key in _users(hooks))
        ]

    def put_back(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """From here on let a plain backward of these parameters call the hooks."""
        self._given_back = True
        for name, parameter in named_parameters:
            for attribute, hooks in self.taken.pop(name, {}).items():
                for key, hook in tuple(hooks.items()):
                    hooks[key] = hook.hook if isinstance(hook, Deferred) else hook
                if getattr(parameter, attribute) is not hooks:
                    setattr(parameter, attribute, hooks)
        self.taken.clear()

    def all(self) -> list[Callable[..., Any]]:
        """Those of all parameters."""
        return [hook for kinds in self.taken.values() for held in kinds.values() for hook in _deferred(held)]

    def number(self) -> int:
        return len(self.all()) if self.taken else 0

    @torch.no_grad()
    def run(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        gradient_of: Callable[[nn.Parameter], Tensor | None],
        put_gradient: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        """Call the hooks of these parameters. Ranks that share a parameter call it alike.

        `gradient_of` gives the whole gradient as a plain tensor, None if there is none; `put_gradient` takes the new
        one.
        """
        with self.around(self.all()):
            for name, parameter in named_parameters:
                hooks = self.taken.get(name)
                gradient = gradient_of(parameter) if hooks and any(hooks.values()) else None
                if hooks is None or gradient is None:
                    continue
                for hook in _deferred(hooks.get("_backward_hooks")):
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
                put_gradient(parameter, gradient)
                for hook in _deferred(hooks.get("_post_accumulate_grad_hooks")):
                    hook(parameter)


def share_attributes(original: Tensor, other: Tensor) -> None:
    """Let what user code sets on one of two tensors be set on both: `other` stands for `original` for a while."""
    held = vars(original)
    if _is_fake(original) or _is_fake(other):  # in a plan, which runs no hooks
        copy_attributes(original, other)
    elif vars(other) is not held:
        held.update(vars(other))  # torch marks a DTensor that is a parameter
        other.__dict__ = held


@contextmanager
def keeping_attributes(module: nn.Module) -> Iterator[None]:
    """While it lasts parameters of `module` are replaced; those that are there at the end share the attributes of those
    that were in their place."""
    before = [*module.named_parameters(remove_duplicate=False)]
    yield
    now = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in before:
        share_attributes(parameter, now[name])


def copy_attributes(original: Tensor, other: Tensor) -> None:
    """Give `other` what user code has set on `original`."""
    vars(other).update(attributes(original))


def attributes(tensor: Tensor) -> dict[str, Any]:
    """What user code has set on a tensor."""
    found = {name: value for name, value in vars(tensor).items() if not name.startswith(_OF_TORCH)}
    if _is_fake(tensor):
        found = {name: value for name, value in found.items() if name not in _OF_FAKE and "_memo" not in name}
    return found


def of_engines(parameter: Tensor) -> tuple[str, ...]:
    """What attributes of this parameter begin with that torch or the engine that holds it has set."""
    held = vars(parameter)
    return (*_OF_TORCH, *OF_DEEPSPEED) if "zero_access" in held or "ds_id" in held else _OF_TORCH


def _is_fake(tensor: Tensor) -> bool:
    return "fake_mode" in vars(tensor)


def copy_module(module: M, memo: dict[int, Any] | None = None) -> M:
    """A deep copy whose parameters keep what user code has set on them, which torch's copy of a parameter omits."""
    copied = copy.deepcopy(module, {} if memo is None else memo)
    for original, other in zip(module.parameters(), copied.parameters(), strict=True):
        copy_attributes(original, other)
    return copied


FORWARD = ("_forward_hooks", "_forward_pre_hooks")
OF_MODULE = (*FORWARD, "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps the hooks of a module, as `ATTRIBUTES` of a tensor."""


def users_hooks(module: nn.Module, kind: str) -> list[tuple[int, Callable[..., Any]]]:
    """The hooks of a module that user code has registered, and their ids; `kind` is one of `FORWARD`."""
    return [(key, hook) for key, hook in getattr(module, kind).items() if not _is_of_an_engine(hook)]


def _hooked(named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    named = [*named_parameters]
    return compress(named, map(any, map(_HOOKS, map(_PARAMETER, named))))  # without Python's loop


def _users(hooks: dict[int, Any] | None) -> list[int]:
    return [key for key, hook in (hooks or {}).items() if not _is_of_an_engine(hook)]


def _deferred(hooks: dict[int, Any] | None) -> list[Callable[[Any], Any]]:
    return [hook.hook for hook in (hooks or {}).values() if isinstance(hook, Deferred)]


def _is_of_an_engine(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(("lockstep.strategies.", "deepspeed.", "torch.distributed."))


def reserve_hook_ids(module: nn.Module) -> None:
    """Let hooks that are registered from here on take the place of none that the module has.

    torch numbers the hooks of one process. Those of a module that was unpickled, say by `torch.load`, have the numbers
    of the process that registered them, and a later hook of the same layer with the same number would replace one.
    """
    kept = [value for layer in module.modules() for name, value in vars(layer).items() if name.endswith("_hooks")]
    kept += [getattr(parameter, name) for parameter in module.parameters() for name in ATTRIBUTES]
    ids = [key for hooks in kept if isinstance(hooks, dict) for key in hooks if isinstance(key, int)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for key in ids)])
