"""`Trainer(compile=...)`: which parts of a module go through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from lockstep.strategies.base import Strategy
from lockstep.strategies.modules.activation_checkpointing import keep
from lockstep.strategies.modules.blocks import find_blocks
from lockstep.strategies.modules.forwards import with_forward

OPTIONS = ("backend", "dynamic", "fullgraph", "mode", "options")


def check(compile: bool | Mapping[str, Any], strategy: Strategy) -> dict[str, Any] | None:
    """The arguments for torch.compile under `strategy`, None for no compilation. Raises TypeError or ValueError for
    others."""
    if compile is False:
        return None
    if compile is not True and not isinstance(compile, Mapping):
        raise TypeError(f"compile must be True, False or a dict of arguments of torch.compile, but compile={compile!r}")
    if "compile" in strategy.capabilities.refuses:
        raise ValueError(strategy.capabilities.refuses["compile"])
    options = {} if compile is True else dict(compile)
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"compile takes {', '.join(OPTIONS)}, as torch.compile does, but compile has {', '.join(map(str, unknown))}"
        )
    if strategy.capabilities.dynamic_shapes:
        return options
    if options.get("dynamic"):
        raise ValueError(
            f"compile must not set dynamic under strategy {strategy.name}, but compile={compile}: "
            "torch cannot compile sharded layers for all shapes at once, and each shape gets a graph of its own"
        )
    return options | {"dynamic": False}


class Compiled:
    """The repeated blocks of a module, or where it has none its submodules, compiled in place.

    Names stay, so checkpoints are those of the plain module; blocks of one class and shape share one compilation; hooks
    and `training_step`, with what it logs, run as they are written. A block that is recomputed in the backward is
    so around what is compiled. Make it before the strategy places the module.
    """

    def __init__(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        self.regions = list(find_blocks(module, "auto").values()) or _outermost(module)
        self._plain: dict[type, type] = {}
        for region in self.regions:
            cls = type(region)
            region.__class__ = _compiled(region, options)
            self._plain[type(region)] = cls

    def undo(self) -> None:
        """Let the regions run as they are written again."""
        for region in self.regions:
            keep(region)  # where a run has failed
            region.__class__ = self._plain.get(type(region), type(region))


_made: dict[Any, type[nn.Module]] = {}
_MOST_MADE = 200


def _compiled(block: nn.Module, options: Mapping[str, Any]) -> type[nn.Module]:
    """The compiled class for blocks such as this one, in this run and the next: torch checks the class before it
    takes a graph that it has."""
    cls = type(block)
    tensors = [*block.named_parameters(), *block.named_buffers()]
    key = cls, tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors), repr(sorted(options.items()))
    if key not in _made:
        # The class's forward: `nn.Module.compile` would compile nothing of torch's own containers.
        _made[key] = with_forward(cls, torch.compile(_with_own_code(cls.forward), **options))
        while len(_made) > _MOST_MADE:
            del _made[next(iter(_made))]
    return _made[key]


def _with_own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of `forward`: torch compiles a piece of code at most eight times, which blocks of one class and many
    shapes would use up."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # What is in torch itself is compiled only where it is called from elsewhere.
    plain = forward if isinstance(forward, FunctionType) and not forward.__module__.startswith("torch.") else call
    own = FunctionType(
        plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    own.__kwdefaults__ = plain.__kwdefaults__
    own.__dict__.update(plain.__dict__)  # such as that torch is not to compile it
    return own


def _outermost(module: nn.Module) -> list[nn.Module]:
    """The children that have parameters; of lists and dicts of modules, which are never called, their items."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _outermost(child)
        elif next(child.parameters(), None) is not None:
            found.append(child)
    return found
