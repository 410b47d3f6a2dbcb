"""Number formats of a run: which dtype parameters have, which dtype the forward computes in, loss scaling."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
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
    """Torch's, which takes the scale out of gradients once in a step, and gives those that are kept the scale of the
    next backward."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._optimizers: Collection[Optimizer] = ()
        self._parameters: list[nn.Parameter] = []
        self._unscaled: set[int] = set()
        """By `id` the optimizers whose gradients have lost their scale since the last backward."""
        self._done: set[int] = set()
        """Those of them that have stepped."""
        self._skipped: Callable[[], str | None] | None = None
        self._steps_on_host = self._cut = False
        self._unseen: set[int] = set()
        """By `id` the parameters without a gradient from a backward of a scaled loss, as a step has begun or since."""
        self._reached: set[int] = set()
        """Those to which such a backward has come within the step: what the step keeps of it has the scale."""

    def watch(
        self,
        optimizers: Collection[Optimizer],
        parameters: list[nn.Parameter],
        device: torch.device,
        on_host: bool,
        cut: bool,
    ) -> None:
        """Take the gradients of these; `on_host` if some parameters are there, of a model on a GPU, and `cut` if ranks
        hold different parts of them, and agree."""
        self.end_step()
        self._optimizers, self._parameters = optimizers, parameters
        self._steps_on_host, self._cut = on_host, cut
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._mark_step)
        super().scale(torch.ones((), device=device))  # before a loss has been, a step may want the scale

    def scale(self, outputs: Any) -> Any:
        self.end_step()
        return super().scale(outputs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._forget()

    def _forget(self) -> None:
        self._per_optimizer_states.clear()
        self._unscaled.clear()
        self._done.clear()

    @torch.no_grad()
    def end_step(self) -> None:
        """Choose the scale of the next backward, if some optimizer has stepped, and give it to gradients that are kept.
        What was infinite before it was clipped is infinite again, so that no later step takes it."""
        if not self._unscaled:
            return
        now: Any = self._scale
        before, without = now.clone(), dict[int, Tensor | None]()
        for each in self._optimizers:
            if id(each) in self._unscaled:
                found = None if id(each) in self._done else self._found_in(each)
                without |= dict.fromkeys(map(id, _stepped(each)), found)
        if self._done:
            self.update()
        kept = [(id(p), p.grad) for p in self._all_parameters() if p.grad is not None]
        if kept:
            change = now / before
            for key, gradient in kept:
                found = without.get(key)
                _multiply(gradient, change if key not in without else now if found is None else now / (1 - found))
        self._forget()

    @contextmanager
    def at_next_step(self) -> Iterator[None]:
        """While it lasts all is as after `end_step`, for a save, which is to change nothing that hooks see."""
        if not self._unscaled:
            yield
            return
        given = [(p, p.grad) for p in self._all_parameters() if p.grad is not None]
        names = "_scale", "_growth_tracker", "_per_optimizer_states", "_unscaled", "_done"
        own = {name: vars(self)[name] for name in names}
        try:
            for parameter, gradient in given:
                parameter.grad = gradient.clone()
            vars(self).update({name: copy.deepcopy(value) for name, value in own.items()})
            self.end_step()
            yield
        finally:
            vars(self).update(own)
            for parameter, gradient in given:
                parameter.grad = gradient

    def _all_parameters(self) -> Iterable[nn.Parameter]:
        return dict.fromkeys([*self._parameters, *chain(*map(_stepped, self._optimizers))])

    def begin_step(self) -> None:
        """A step of the user's begins."""
        self._reached.clear()
        self.note_dropped()

    def note_dropped(self) -> None:
        """The step has dropped gradients."""
        self._unseen |= {id(p) for p in self._parameters if p.grad is None} - self._reached

    def note_backward(self) -> None:
        """A backward of a scaled loss has ended."""
        self._reached |= {id(p) for p in self._parameters if p.grad is not None}
        self._unseen -= self._reached

    def _found_in(self, optimizer: Optimizer) -> Tensor:
        """1 where a gradient of `optimizer` was not finite as it lost its scale, else 0."""
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        device = next(iter(found)).device
        return torch.stack([each.to(device).reshape(()) for each in found]).amax()

    def unscale_once(self, optimizer: Optimizer) -> bool:
        """Divide the gradients of `optimizer` by the scale, once in a step. False if it has none on any rank. Every
        rank calls it. Raises RuntimeError if another optimizer has taken it out of one of them."""
        if id(optimizer) in self._done:  # it steps by the same gradient again
            self.end_step()
        if id(optimizer) in self._unscaled:
            return True
        if not self._cut and all(p.grad is None for p in _stepped(optimizer)):
            return False
        if self._unscaled:
            self._refuse_shared(optimizer)
        if self._unseen:
            self._refuse_written(optimizer)
        self.unscale_(optimizer)
        self._unscaled.add(id(optimizer))
        return True

    def _refuse_shared(self, optimizer: Optimizer) -> None:
        others = (each for each in self._optimizers if id(each) in self._unscaled)
        taken = {id(p): each for each in others for p in _stepped(each) if p.grad is not None}
        for parameter in _stepped(optimizer):
            if (other := taken.get(id(parameter))) is not None:
                raise RuntimeError(
                    "precision='16-mixed' takes the scale out of each gradient once, but a parameter of shape "
                    f"{tuple(parameter.shape)} is stepped by two optimizers ({type(other).__name__} and "
                    f"{type(optimizer).__name__}); give it to one, or use precision='bf16-mixed'"
                )

    def _refuse_written(self, optimizer: Optimizer) -> None:
        for parameter in _stepped(optimizer):
            if id(parameter) in self._unseen and parameter.grad is not None and _mine(parameter.grad).any():
                raise RuntimeError(
                    "precision='16-mixed' divides gradients by the scale of the loss, but the step has written that of "
                    f"a parameter of shape {tuple(parameter.shape)} by itself, without the scale; call "
                    "self.manual_backward(loss), or use precision='bf16-mixed'"
                )

    def has_stepped(self, optimizer: Optimizer) -> bool:
        """Step unless a gradient is not finite; whether `optimizer` was called. One that gets `found_inf` may skip the
        step by itself, on the device, and then it has not."""
        self._skipped = None
        self._done.add(id(optimizer))
        self.step(optimizer)
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


def _stepped(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _multiply(gradient: Tensor, by: Tensor) -> None:
    _mine(gradient).mul_(by.to(gradient.device))


def _mine(gradient: Tensor) -> Tensor:
    return getattr(gradient, "_local_tensor", gradient)


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
