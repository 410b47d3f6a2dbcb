"""A module whose parameters and buffers have shapes and no data."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map_only

from lockstep.strategies.modules.casts import converting_by
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, copy_attributes
from lockstep.strategies.planning.known import mode_of
from lockstep.strategies.planning.trial_mode import TrialMode
from lockstep.strategies.planning.user_code import ValueUnknownError, user_line

M = TypeVar("M", bound=nn.Module)


@contextmanager
def without_memory() -> Iterator[None]:
    """While it lasts modules are built without memory for their parameters, whatever draws their values."""
    with TrialMode(lambda *_: None), converting_in_place():
        yield


def fake_copy(model: M, mode: FakeTensorMode) -> M:
    """A copy of `model`, built in memory, on the meta device or without memory, with parameters and buffers of
    `mode`."""
    memo: dict[int, Any] = {}
    tensors = list(_tensors(model))
    with mode:
        for tensor in tensors:
            memo[id(tensor)] = _fake(mode, tensor)
    made = copy.deepcopy(model, memo)
    for tensor in tensors:
        for name in ATTRIBUTES:
            if hooks := getattr(tensor, name):
                setattr(memo[id(tensor)], name, copy.deepcopy(hooks, memo))
    return made


def make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace in place what parameters and buffers of `model` are not of `mode`."""
    known: dict[int, Tensor] = {}
    with mode:
        for module in model.modules():
            holders: list[dict[str, Any]] = [module._parameters, module._buffers]
            for held in holders:
                for name, tensor in held.items():
                    if tensor is None or (mode_of(tensor) is mode and tensor.device.type == "cpu"):
                        continue
                    if id(tensor) not in known:
                        known[id(tensor)] = _fake(mode, tensor)
                    held[name] = known[id(tensor)]


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """`batch` with fake tensors in its tuples, lists and dicts; other objects are as they were."""
    with mode:
        return tree_map_only(Tensor, functools.partial(_fake, mode), batch)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor
        for value in vars(module).values():
            if isinstance(value, FakeTensor):
                yield value


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided:
        raise ValueError(f"a plan takes dense tensors, but this one is {tensor.layout}; measure the run on a device")
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(made, FakeTensor):  # a small one, which the mode leaves real
        made = mode.from_tensor(made)
    if isinstance(tensor, nn.Parameter):
        parameter = nn.Parameter(made, requires_grad=tensor.requires_grad)
        copy_attributes(tensor, parameter)
        return parameter
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def converting_in_place() -> Iterator[None]:
    """While it lasts `Module.to` and the like give fake parameters other data, where torch would swap the objects,
    which it cannot do for tensors that something refers to."""
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Any, recurse: bool = True) -> nn.Module:
        held = [*module._parameters.values(), *module._buffers.values()]
        if not any(isinstance(tensor, FakeTensor) for tensor in held):
            return original(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for tensor in held:
            if tensor is not None:
                with torch.no_grad():
                    converted = fn(tensor)
                if converted is not tensor:
                    tensor.data = converted
                    if isinstance(tensor, FakeTensor):
                        tensor.fake_device = converted.device
        return module

    with converting_by(apply):
        yield


@contextmanager
def metrics_without_values(mode: TrialMode) -> Iterator[None]:
    """While it lasts a torchmetrics object whose `update` needs values of tensors counts nothing, which a note says."""
    metrics = sys.modules.get("torchmetrics")
    if metrics is None:
        yield
        return
    wrap_update, wrap_compute = metrics.Metric._wrap_update, metrics.Metric._wrap_compute

    def guarded(metric: nn.Module, method: Callable[..., Any], instead: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if id(metric) in unknown:
                return instead()
            try:
                return method(*args, **kwargs)
            except ValueUnknownError:
                unknown[id(metric)] = metric
                mode.notes.setdefault(
                    f"{user_line()} counts with {type(metric).__name__}, whose work depends on values of tensors: "
                    "neither that nor what it keeps is in the plan"
                )
                return instead()

        return call

    def update(metric: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        return guarded(metric, wrap_update(metric, method), lambda: None)

    def compute(metric: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        return guarded(metric, wrap_compute(metric, method), lambda: torch.zeros((), device=str(metric.device)))

    unknown: dict[int, nn.Module] = {}
    metrics.Metric._wrap_update, metrics.Metric._wrap_compute = update, compute
    try:
        yield
    finally:
        metrics.Metric._wrap_update, metrics.Metric._wrap_compute = wrap_update, wrap_compute
