"""A check at the first call of modules that could not be tried at setup, as they take more than one tensor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lockstep.strategies.modules.parameter_hooks import copy_module
from lockstep.strategies.modules.side_effect_free import side_effect_free


def kind_of(module: nn.Module, layers: Sequence[str]) -> tuple[Any, ...]:
    """Equal for modules that compute alike once `layers` of them are sharded: one of them is checked for all."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    return (type(module), tuple(name.rpartition(".")[2] for name in layers), shapes)


class FirstCall:
    """Compares a sharded module, at its first call, with a whole copy of it on the same inputs.

    The copy follows what was loaded and set since setup: a checkpoint's values, and numbers in attributes.
    """

    def __init__(self, module: nn.Module, name: str, layers: Sequence[str]) -> None:
        """`module` is still whole. Raises ValueError if it cannot be copied."""
        self._name, self._layers = name, layers
        try:
            self._whole = copy_module(module)
        except Exception as error:
            raise ValueError(
                f"the automatic plan shards {', '.join(layers)} and compares {name} with a copy, which cannot be made "
                f"({type(error).__name__}: {error}); give strategy=TensorParallel(plan={{...}})"
            ) from error

    def watch(self, module: nn.Module) -> None:
        """Check the next call of `module`, which is sharded by now."""
        self._attributes = _attributes(module)
        self._handle = module.register_forward_pre_hook(self._check, with_kwargs=True, prepend=True)

    def _check(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._handle.remove()
        self._follow(module)
        expected = _outputs(self._whole, args, kwargs, self._name)
        found = _outputs(module, args, kwargs, self._name)
        del self._whole
        if len(found) != len(expected) or not all(map(agree, found, expected)):
            raise ValueError(
                f"the automatic plan shards {', '.join(self._layers)}, but {self._name} then computes something else; "
                "give strategy=TensorParallel(plan={...}) or define tensor_plan() in a module"
            )

    @torch.no_grad()
    def _follow(self, module: nn.Module) -> None:
        """Every rank that shards `module` calls it."""
        for name, parameter in module.named_parameters():
            self._whole.get_parameter(name).copy_(_gathered(parameter))
        for name, buffer in module.named_buffers(remove_duplicate=False):
            path, _, key = name.rpartition(".")
            self._whole.get_submodule(path)._buffers[key] = _gathered(buffer).clone()
        for (path, key), value in _attributes(module).items():
            if self._attributes.get((path, key), value) != value:
                setattr(self._whole.get_submodule(path), key, value)


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Numbers and strings in attributes of the module and its layers, of which the plan has set some."""
    return {
        (path, key): value
        for path, child in module.named_modules()
        for key, value in vars(child).items()
        if isinstance(value, bool | int | float | str)
    }


def agree(found: Tensor, wanted: Tensor) -> bool:
    """Whether two outputs are equal up to the order of sums."""
    if found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point() or not wanted.numel():
        return torch.equal(found, wanted)
    tolerance = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 5e-2
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1e-3))


@torch.no_grad()
def _outputs(module: nn.Module, args: Any, kwargs: Any, name: str) -> list[Tensor]:
    """The first tensor that `module` returns on copies of its inputs, in evaluation mode, without side effects."""
    modes = [(child, child.training) for child in module.modules()]
    with side_effect_free(module):
        try:
            module.eval()
            inputs, structure = tree_flatten((args, kwargs))
            given, named = tree_unflatten([_copied(value) for value in inputs], structure)
            output = module(*given, **named)
        finally:
            for child, mode in modes:
                child.training = mode
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)][:1]


def _copied(value: Any) -> Any:
    """An input that the call may change: a cache of keys and values, for example."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
