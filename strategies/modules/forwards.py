"""Another forward for a module, in its class: what copies the module's attributes, as replicas do, keeps it right."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

from torch import nn


def within_compiled(model: nn.Module) -> set[nn.Module]:
    """The modules that a compiled forward calls, whose hooks torch takes into its graph."""
    forwards = {module: [vars(cls).get("forward") for cls in type(module).__mro__] for module in model.modules()}
    compiled = [
        module
        for module, found in forwards.items()
        if any(hasattr(forward, "_torchdynamo_orig_callable") for forward in found)
    ]
    return {inner for module in compiled for inner in module.modules() if inner is not module}


def is_called(module: nn.Module) -> bool:
    """Whether it has a forward: others call the items of a ModuleDict one by one."""
    return type(module).forward is not nn.Module.forward


def is_compiled(module: nn.Module) -> bool:
    """Whether its forward is compiled, by whatever way torch has."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(hasattr(vars(cls).get("forward"), "_torchdynamo_orig_callable") for cls in type(module).__mro__)
    )


def with_forward(cls: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass of `cls` with its name and `forward`, for `module.__class__ = …`; copies and pickles are of the plain
    class."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        found: Any = super(made, self).__reduce_ex__(protocol)
        make, args, *rest = found
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make = object.__new__  # pickle lets the other make no other class
        return make, tuple(cls if arg is made else arg for arg in args), *rest

    made: type[nn.Module] = type(
        cls.__name__,
        (cls,),
        {
            "forward": forward,
            "__reduce_ex__": reduce,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        },
    )
    return made
