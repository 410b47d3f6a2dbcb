"""Activation checkpointing: a block that keeps its inputs only, and computes the rest again in the backward.

torch's `checkpoint` (https://pytorch.org/docs/stable/checkpoint.html, the non-reentrant kind) does the work; what
it leaves to its caller is done here: which blocks, what a second forward must find and must not leave behind.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import MutableMapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.strategies.modules.blocks import Rule, match
from lockstep.strategies.modules.forwards import with_forward


def recompute(model: nn.Module, rule: Rule) -> None:
    """Turn on activation checkpointing for the blocks of `model` that `rule` finds (as in `find_blocks`).

    In place, and the same when called twice; names, parameters, hooks and copies stay as they are. Raises ValueError
    where the rule finds none.
    """
    for block in find_recomputed(model, rule).values():
        block.__class__ = type(block) if type(block) in _PLAIN else _recomputed(type(block))  # type: ignore[arg-type]


def find_recomputed(model: nn.Module, rule: Rule) -> dict[str, nn.Module]:
    """The blocks that `recompute` is for, by name. Raises ValueError as it does."""
    found = match(model, rule, "activation_checkpointing")
    if not found:
        raise ValueError(
            "activation_checkpointing needs blocks to recompute, but "
            f"{'the rule' if callable(rule) else repr(rule)} finds none in {type(model).__name__}; "
            "give their class or name, such as activation_checkpointing='net.*'"
        )
    for name, block in found.items():
        if "forward" in vars(block):
            raise ValueError(
                f"activation_checkpointing wraps the forward of a block's class, but {name} has one of its own; define "
                f"it in {type(block).__name__}"
            )
    return found


def keep(model: nn.Module) -> None:
    """Undo `recompute`: the blocks keep their activations again."""
    for module in model.modules():
        if type(module) in _PLAIN:
            module.__class__ = _PLAIN[type(module)]


def is_recomputed(module: nn.Module) -> bool:
    """Whether this module's activations are recomputed in the backward."""
    return any(cls in _PLAIN for cls in type(module).__mro__)


# ---- helpers -------------------------------------------------------------------------------------------


_PLAIN: dict[type, type[nn.Module]] = {}
"""The user's class of each class that is recomputed."""


@functools.cache
def _recomputed(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `cls` with its name whose forward is recomputed.

    A class and no attribute of the object, so that replicas that share the object's attributes run their own forward.
    """

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        again = _Again(self, args, kwargs)
        # As plain arguments, so that torch looks for devices whose random state matters in all of them.
        output = checkpoint(
            _call,
            functools.partial(cls.forward, self),
            again.devices,
            args,
            kwargs,
            again,
            use_reentrant=False,
            context_fn=again.contexts,
        )
        again.forward_is_over()
        return output

    made = with_forward(cls, forward)
    _PLAIN[made] = cls
    return made


def _call(forward: Any, devices: Any, args: Any, kwargs: Any, again: _Again) -> Any:
    if again.runs:
        args, kwargs = _in_own_containers(again.given)
    return forward(*args, **kwargs)


def _in_own_containers(value: Any) -> Any:
    """`value` with the same tensors in lists, dicts and objects of its own, which a forward may write to."""
    if isinstance(value, Tensor | nn.Module | type):
        return value
    if isinstance(value, tuple):
        items = [_in_own_containers(item) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    moves_itself = callable(getattr(value, "to", None)) and hasattr(value, "__dict__")
    if not isinstance(value, list | MutableMapping) and not dataclasses.is_dataclass(value) and not moves_itself:
        return value
    made = copy.copy(value)
    if isinstance(value, list | MutableMapping):
        attributes = getattr(made, "__dict__", {})  # a mapping of the user's may keep its items there
        attributes.update({name: dict(held) for name, held in attributes.items() if type(held) is dict})
        for key in range(len(value)) if isinstance(value, list) else [*value]:
            made[key] = _in_own_containers(value[key])
        return made
    for name in {*getattr(value, "__dict__", ()), *getattr(value, "__dataclass_fields__", ())}:
        if hasattr(value, name):
            object.__setattr__(made, name, _in_own_containers(getattr(value, name)))
    return made


class _Again:
    """What the second run of a forward finds as it was in the first, and leaves as it is: buffers, the containers that
    it is given, and how activations are laid out."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.given, self.runs = _in_own_containers((args, kwargs)), False
        self._buffers = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._sequence = vars(block).get("recompute_sequence")
        self._on = self._sequence is not None and self._sequence.on
        self._there: list[tuple[nn.Module, str, Tensor | None]] = []
        self._there_as = (False, False)
        self.devices = [
            torch.empty(0, device=device)
            for device in {p.device for p in block.parameters()}
            if device.type not in ("cpu", "meta")
        ]

    def contexts(self) -> tuple[Any, Any]:
        """What torch enters around the first and around the second run."""
        return nullcontext(), self

    def forward_is_over(self) -> None:
        """Keep the buffers of modules that changed any. BatchNorm's kernels count no version of its statistics, but its
        counter has one."""
        changed = {
            module
            for module, name, buffer, _, version in self._buffers
            if module._buffers.get(name) is not buffer or buffer._version != version
        }
        self._buffers = [kept for kept in self._buffers if kept[0] in changed]

    def __enter__(self) -> None:
        self.runs = True
        self._there = [(module, name, module._buffers.get(name)) for module, name, *_ in self._buffers]
        for module, name, _, before, _ in self._buffers:
            module._buffers[name] = before.clone()
        if self._sequence is not None:
            self._there_as = self._sequence.on, self._sequence.follows
            self._sequence.on, self._sequence.follows = self._on, True

    def __exit__(self, *error: Any) -> None:
        self.runs = False
        for module, name, buffer in self._there:
            module._buffers[name] = buffer
        self._there = []
        if self._sequence is not None:
            self._sequence.on, self._sequence.follows = self._there_as
