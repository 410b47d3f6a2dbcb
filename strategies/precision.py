"""Number formats of a run: which dtype parameters have, which dtype the forward computes in, loss scaling."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

PRECISIONS = {
    # name: (dtype of parameters and inputs, dtype of autocast)
    "32-true": (torch.float32, None),
    "tf32-true": (torch.float32, None),  # and matrix products in TensorFloat-32, where the device has it
    "64-true": (torch.float64, None),
    "bf16-true": (torch.bfloat16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
ALIASES = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed", "fp32": "32-true"}
ELSEWHERE = {
    **dict.fromkeys(("fp16", "float16", "half", "16-true", "fp16-mixed", "f16", "mixed", "amp"), "16-mixed"),
    **dict.fromkeys(("bfloat16", "bfloat16-mixed"), "bf16-mixed"),
    **dict.fromkeys(("tf32", "tf32-mixed"), "tf32-true"),
    **dict.fromkeys(("float32", "float", "full", "f32", "no"), "32-true"),
    **dict.fromkeys(("fp64", "float64", "double", "f64"), "64-true"),
    **dict.fromkeys(("transformer-engine", "transformer-engine-float16", "fp8"), "bf16-mixed"),
}
"""Names that other libraries have for precisions, and the nearest one here."""


COMPLEX = {torch.float64: torch.complex128}
"""The complex dtype that goes with a dtype; none has numbers as short as bfloat16's, beside which complex tensors stay
as they are."""


def dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What `tensor` becomes in a run of `dtype`: that, the complex dtype that goes with it, or what an integer has."""
    if tensor.is_complex():
        return COMPLEX.get(dtype, tensor.dtype)
    return dtype if tensor.is_floating_point() else tensor.dtype


class LossScaler(torch.amp.GradScaler):
    """Torch's, which knows what the running step has done with it."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._used = False
        self._unscaled: set[int] = set()
        self._skipped: Callable[[], str | None] | None = None
        self._steps_on_host = False

    def watch(self, optimizers: Iterable[Optimizer], on_host: bool) -> None:
        """Learn from these whether they skip a step; `on_host` if they step parameters there, of a model on a GPU."""
        self._steps_on_host = on_host
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._mark_step)

    def end_step(self) -> None:
        """Adapt the scale to the steps since the last call. Before a scale is used or saved."""
        if self._used:
            self.update()
            self._unscaled.clear()
            self._used = False

    @property
    def is_within_step(self) -> bool:
        """Whether gradients are without the scale."""
        return bool(self._unscaled)

    def unscale_once(self, optimizer: Optimizer, has_gradients: bool) -> bool:
        """Divide the gradients of `optimizer` by the scale, once in a step. False if it has none on any rank."""
        if has_gradients and id(optimizer) not in self._unscaled:
            self.unscale_(optimizer)
            self._unscaled.add(id(optimizer))
        return id(optimizer) in self._unscaled

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is not finite; whether `optimizer` was called. One that gets `found_inf` may skip the
        step by itself, on the device, and then it has not."""
        self._skipped = None
        self.step(optimizer)
        self._used = True
        return self._skipped is not None and self._skipped() is None

    def _mark_step(self, optimizer: Any, *_: Any) -> None:
        from lockstep.strategies.modules import finite

        found = getattr(optimizer, "found_inf", None)
        if found is None:
            self._skipped = lambda: None
            return
        if self._steps_on_host:  # torch would copy it beside the host, which reads it at once
            found = optimizer.found_inf = found.cpu()
        self._skipped = finite.later(found)


class Precision:
    """One row of `PRECISIONS`, with the gradient scaler that "16-mixed" needs (its state is saved)."""

    def __init__(self, name: str | int = "32-true") -> None:
        name = ALIASES.get(str(name), str(name))
        if name not in PRECISIONS:
            given = name.lower().removeprefix("torch.")
            known = ELSEWHERE | ALIASES
            near = [known[given]] if given in known else difflib.get_close_matches(given, PRECISIONS, 1)
            raise ValueError(
                f"precision must be one of {', '.join(PRECISIONS)}, but precision={name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        self.name = name
        self.dtype, self.autocast_dtype = PRECISIONS[name]
        self.scaler: LossScaler | None = None
        self._outer_dtype: torch.dtype | None = None
        self._outer_products: str | None = None

    def setup(self, device: torch.device) -> None:
        """Make tensors that user code creates have the precision's dtype; build the scaler on `device`."""
        if self.dtype != torch.float32 and self._outer_dtype is None:
            self._outer_dtype = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
        if self.name == "tf32-true" and self._outer_products is None:
            self._outer_products = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
        if self.autocast_dtype == torch.float16:
            self.scaler = LossScaler(device.type)

    def teardown(self) -> None:
        """Undo `setup`. Idempotent."""
        if self._outer_dtype is not None:
            torch.set_default_dtype(self._outer_dtype)
            self._outer_dtype = None
        if self._outer_products is not None:
            torch.set_float32_matmul_precision(self._outer_products)
            self._outer_products = None

    def convert(self, model: nn.Module) -> nn.Module:
        """Cast parameters and buffers in place if the precision asks for another dtype; complex ones stay complex."""
        if self.dtype == torch.float32:
            return model
        return model._apply(lambda tensor: tensor.to(dtype_of(tensor, self.dtype)))

    def autocast(self, device: torch.device, steps: bool = False) -> AbstractContextManager:
        """The context of a forward; with `steps` of several, between which weights change, so that each casts them."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast_dtype, cache_enabled=not steps)
