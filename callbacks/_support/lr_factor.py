"""Factors of the learning rate that exist only while an optimizer steps.

`group["lr"]` is multiplied just before `optimizer.step` and put back, bit for bit, right after it. So
every scheduler, also one that computes the next rate from `group["lr"]`, and every checkpoint sees the
rate as it would be without factors; whoever shows the rate shows `group["lr"] * lr_factor(optimizer)`.
Factors of several callbacks multiply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class LRFactor(Callback):
    """Base of callbacks that multiply the learning rates of a run: they call `_multiply` in `on_fit_start`."""

    def __init__(self) -> None:
        self._removers: list[Callable[[], None]] = []

    def _multiply(self, trainer: Trainer, factor: Callable[[], float]) -> None:
        self._removers = [add_lr_factor(optimizer, factor) for optimizer in trainer.optimizers]

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self.teardown(trainer, module, "fit")  # a step that raised has left its rates multiplied

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        while self._removers:
            self._removers.pop()()


def add_lr_factor(optimizer: Optimizer, factor: Callable[[], float]) -> Callable[[], None]:
    """Multiply the rate of every group of `optimizer` by `factor()`, asked before each step; return what ends that.

    Every rank calls it and must ask for the same factor. Groups added later are included; tensor rates
    are replaced for the step by a product on their own device, without a host sync.
    """
    scaled = _scaled.get(optimizer)
    if scaled is None:
        scaled = _Scaled()
        scaled.attach(optimizer)
    scaled.factors.append(factor)

    def remove() -> None:
        scaled.restore()
        scaled.factors.remove(factor)

    return remove


def share_lr_factors(optimizer: Optimizer, others: Iterable[Optimizer]) -> None:
    """Let `others`, which take the place of `optimizer`, have its factors, until these end."""
    scaled = _scaled.get(optimizer)
    if scaled is None:
        return
    for other in others:
        if other not in _scaled:
            scaled.attach(other)


def lr_factor(optimizer: Optimizer) -> float:
    """What the next step of `optimizer` multiplies its rates by: 1.0 where nothing was added."""
    scaled = _scaled.get(optimizer)
    return scaled.product() if scaled else 1.0


class _Scaled:
    """The factors of one optimizer. One pair of hooks applies them all: pairs of several owners would not nest."""

    def __init__(self) -> None:
        self.factors: list[Callable[[], float]] = []
        self.unscaled: list[tuple[dict[str, Any], float | Tensor]] = []

    def attach(self, optimizer: Optimizer) -> None:
        _scaled[optimizer] = self
        optimizer.register_step_pre_hook(self.multiply)
        optimizer.register_step_post_hook(self.restore)

    def product(self) -> float:
        return math.prod((factor() for factor in self.factors), start=1.0)

    def multiply(self, optimizer: Optimizer, *_: Any) -> None:
        self.restore()  # a step that raised has not come to its post hook
        product = self.product()
        if product != 1.0:
            for group in optimizer.param_groups:
                self.unscaled.append((group, group["lr"]))
                group["lr"] = group["lr"] * product  # a new tensor: groups may share one

    def restore(self, *_: Any) -> None:
        for group, lr in self.unscaled:
            group["lr"] = lr
        self.unscaled.clear()


_scaled: WeakKeyDictionary[Optimizer, _Scaled] = WeakKeyDictionary()
