"""Values in the place of fake tensors, for layers that read some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lockstep.strategies.modules.parameter_hooks import copy_attributes
from lockstep.strategies.pipeline.shapes.fake_tensors import Mode


class MadeUp:
    """Tensors with values that stand for others during one call of a layer. They are the same on every rank."""

    def __init__(self, mode: Mode) -> None:
        self._mode, self._generator = mode, torch.Generator().manual_seed(0)
        self._real: dict[int, Tensor] = {}
        """By the `id` of what it stands for."""
        self._given: dict[int, tuple[Tensor, int]] = {}
        """By the `id` of one of `_real`, what it stands for, and the version that it had at first."""

    def real(self, given: Tensor) -> Tensor:
        """A tensor like `given`, which the layer may change; with its values, if it has some."""
        if id(given) not in self._real:
            real = self._drawn(given) if isinstance(given, FakeTensor) else given.detach().clone()
            if isinstance(given, nn.Parameter):
                real = nn.Parameter(real, requires_grad=given.requires_grad)
                copy_attributes(given, real)
            elif given.requires_grad:
                real = real.requires_grad_().clone()  # no leaf
            self._note(real, given)
        return self._real[id(given)]

    def fake(self, real: Tensor) -> Tensor:
        """What `real` stands for, or a fake tensor like it."""
        if id(real) not in self._given:
            with self._mode:
                self._note(real, self._mode.fake(real.detach()).requires_grad_(real.requires_grad))
        return self._given[id(real)][0]

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """While it lasts `module` holds values. What a layer has changed in place is marked as changed afterwards."""
        held = [vars(child) for child in module.modules()]
        _exchange(held, self.real)
        try:
            with unset_fake_temporarily():
                yield
        finally:
            _exchange(held, self.fake)
            for real in [*self._real.values()]:
                given, version = self._given[id(real)]
                if real._version != version:
                    torch.autograd.graph.increment_version(given)

    def _note(self, real: Tensor, given: Tensor) -> None:
        self._real[id(given)], self._given[id(real)] = real, (given, real._version)

    def _drawn(self, fake: FakeTensor) -> Tensor:
        with unset_fake_temporarily():
            values = torch.zeros(fake.shape)
            if fake.dtype.is_floating_point or fake.dtype.is_complex:
                values.uniform_(0, 0.1, generator=self._generator)
            return values.to(fake.fake_device, fake.dtype)


def _exchange(held: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change the tensors in lists and dicts."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(value, Tensor):
            held[key] = change(value)
        elif type(value) in (list, dict, OrderedDict):
            _exchange(value, change)
