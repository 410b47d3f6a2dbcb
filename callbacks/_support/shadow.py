"""A look-alike of a module whose forward can be run without a trace on the original."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

M = TypeVar("M", bound=nn.Module)


def shadow(module: M, convert: Callable[[Tensor], Tensor]) -> M:
    """Return a module of the same structure and code that holds `convert(tensor)` for every parameter and buffer.

    Hooks are skipped, so those that a strategy or a user has hung in do not run; what forward assigns to
    an attribute stays on the copy. A tensor or submodule that occurs twice is converted once. Attributes
    other than parameters, buffers and submodules are shared with the original. Calls no collective if
    `convert` does not.
    """
    made: dict[int, Any] = {}

    def tensor(original: Tensor | None) -> Tensor | None:
        if original is not None and id(original) not in made:
            made[id(original)] = convert(original)
        return None if original is None else made[id(original)]

    def copy(original: nn.Module | None) -> nn.Module | None:
        if original is None:
            return None
        if id(original) in made:
            return made[id(original)]
        # object.__new__: `fully_shard` gives the module a class whose own __new__ makes another one.
        twin = made[id(original)] = object.__new__(type(original))
        twin.__dict__.update(original.__dict__)
        for name, value in original.__dict__.items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                twin.__dict__[name] = type(value)()
        twin.__dict__["_compiled_call_impl"] = None
        twin.__dict__["_parameters"] = {name: tensor(value) for name, value in original._parameters.items()}
        twin.__dict__["_buffers"] = {name: tensor(value) for name, value in original._buffers.items()}
        twin.__dict__["_modules"] = {name: copy(value) for name, value in original._modules.items()}
        return twin

    return copy(module)  # type: ignore[return-value]


def fitting(module: nn.Module, example_input: Any, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """Return `example_input` with `convert`ed tensors on the device of `module`, floating point ones in its dtype."""
    like = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), torch.empty(0))
    return tree_map_only(
        Tensor,
        lambda tensor: convert(tensor).to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype),
        example_input,
    )


def call(module: nn.Module, example_input: Any) -> Any:
    """Run forward on `example_input`: a tuple is its positional arguments, a dict its keyword arguments."""
    if isinstance(example_input, Mapping):
        return module(**example_input)
    return module(*example_input) if isinstance(example_input, tuple) else module(example_input)


@contextmanager
def restored_rng() -> Iterator[None]:
    """Put the CPU generators of torch, random and numpy back where they were."""
    numpy_random = sys.modules["numpy"].random if "numpy" in sys.modules else None
    states = torch.get_rng_state(), random.getstate(), numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy_random:
            numpy_random.set_state(states[2])
