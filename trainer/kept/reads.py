"""What user code reads of a model."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lockstep.trainer.kept.values import is_small

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11


class ReadsOf(TorchFunctionMode):
    """Notices whether weights of a module, or large buffers, are read while it lasts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        large = (buffer for buffer in module.buffers() if not is_small(buffer))
        self._weights = {*map(id, (*module.parameters(), *large))}
        self._layers = {id(layer) for layer in module.modules() if next(layer.parameters(), None) is not None}
        self.found = False

    def __enter__(self) -> Self:
        super().__enter__()
        self._handle = register_module_forward_pre_hook(self._note)  # sharded layers compute with other tensors
        return self

    def __exit__(self, *exception: Any) -> None:
        self._handle.remove()
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling() and not self.found and func not in _facts():
            given = [*args, *(kwargs or {}).values()]
            given += [part for each in given if isinstance(each, list | tuple) for part in each]
            self.found = not self._weights.isdisjoint(map(id, given))
        return func(*args, **(kwargs or {}))

    def _note(self, layer: Any, _: Any) -> None:
        self.found |= id(layer) in self._layers


@functools.cache
def _facts() -> frozenset[Any]:
    """What tells of a tensor, and nothing of its values."""
    properties = "shape device dtype ndim layout requires_grad is_leaf is_cuda is_meta is_sparse is_quantized grad"
    methods = "size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous"
    others = "get_device is_shared type __len__ requires_grad_ new_empty new_zeros new_ones new_full"
    functions = (torch.numel, torch.is_floating_point, torch.is_complex)
    made = (torch.empty_like, torch.zeros_like, torch.ones_like)
    getters = (getattr(Tensor, name).__get__ for name in f"{properties} nbytes itemsize".split())
    return frozenset({*getters, *(getattr(Tensor, name) for name in f"{methods} {others}".split()), *functions, *made})
