"""What a module tree was before it was wrapped."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from lockstep.strategies.data.batch_slices import Replaced, tensors_of
from lockstep.strategies.data.sample_axis import with_tensors
from lockstep.strategies.mesh import mixed_tensors


class Structure:
    """What a module tree was before it was wrapped, to put it back: classes, hooks and attributes, not values."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {module: (type(module), _attributes(module)) for module in model.modules()}
        self._changed: list[tuple[nn.Module, type, dict[str, Any], set[str], dict[str, set[int]]]] = []

    def seal(self) -> None:
        """Placing is done: whatever differs now is what `undo` takes back; what comes later is the user's."""
        for module, (cls, before) in self._before.items():
            after = _attributes(module)
            hooks = {
                key: set(value) - set(before.get(key, ()))
                for key, value in after.items()
                if isinstance(value, dict) and key in before
            }
            replaced = {
                key: value
                for key, value in before.items()
                if not isinstance(value, dict) and after.get(key) is not value
            }
            self._changed.append((module, cls, replaced, set(after) - set(before), hooks))
        self._before = {}

    def undo(self) -> None:
        for module, cls, replaced, added, hooks in self._changed:
            if type(module) is not cls:
                module.__class__ = cls
            vars(module).update(replaced)
            for key in added:
                vars(module).pop(key, None)
            for key, numbers in hooks.items():
                for number in numbers:
                    vars(module)[key].pop(number, None)
            _module_state_mapping.pop(module, None)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes but for values and submodules; dicts, such as those of hooks, copied."""
    skipped = ("_parameters", "_buffers", "_modules")
    return {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in vars(module).items()
        if key not in skipped
    }


warnings.filterwarnings(
    "ignore", message=r"FSDP2-wrapped module \(\w*MeshModel\) returned a view", category=UserWarning
)
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: not re.search(r"\d sequential all_\w+ operations", record.getMessage())
)  # of tensors sharded over two axes, made whole where somebody checks them
mixed_tensors.install()


def keep_containers(unit: Any, called: Callable[[nn.Module, list[Tensor]], None] | None = None) -> None:
    """Let a sharded module write to the lists, dicts and dataclasses that it is given, as it can on one process.

    In front of a forward FSDP takes the tensors in them one by one, as by itself it makes other containers, and what
    it makes of these tensors is where they were until the forward is over. What the forward has written to them is an
    output, too.
    `called(unit, outputs)` follows.
    """
    state, replaced = unit._get_fsdp_state(), Replaced()

    @torch.compiler.disable
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not kwargs and all(type(arg) is Tensor for arg in args):
            return replaced.begin(None, lambda: state._pre_forward(module, args, kwargs))

        def replace() -> Any:
            made = iter(state._pre_forward(module, tuple(tensors_of((args, kwargs))), {})[0])
            return with_tensors((args, kwargs), lambda _: next(made))

        return replaced.begin((args, kwargs), replace)

    @torch.compiler.disable
    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
        written = [tensor for tensor in tensors_of(given) if tensor.requires_grad and not _is_given(tensor)]
        for tensor in written:
            tensor.register_hook(state._pre_backward)
        if called is not None:
            called(module, tensors_of(output) + written)

    for key, hook in unit._forward_pre_hooks.items():
        if hook == state._pre_forward:
            unit._forward_pre_hooks[key] = before
    unit.register_forward_hook(after, with_kwargs=True)
    unit.register_forward_hook(torch.compiler.disable(replaced.end), with_kwargs=True, always_call=True)


def _is_given(tensor: Tensor) -> bool:
    """Whether FSDP has made it of a tensor that the module was given."""
    return tensor.grad_fn is None or "RegisterPostBackward" in type(tensor.grad_fn).__name__
