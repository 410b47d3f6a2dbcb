"""BatchNorm whose statistics are those of the samples of all ranks, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.strategies.losses import has_loss
from lockstep.strategies.sync.collectives import all_gather

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_FORWARDS = (_BATCH_NORM.forward, nn.SyncBatchNorm.forward)


class SyncedBatchNorm(nn.Module):
    """What `synchronize` puts before the class of a BatchNorm layer.

    In place of torch's SyncBatchNorm, which runs on CUDA only, and counts the batch that a rank without samples runs to
    stay in step. Made of differentiable operations, so that gradients of gradients are exact too.
    """

    counts = True
    """Whether this rank's samples are part of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self
        if not self.training or not dist.is_initialized():  # a run that failed may have left the layer so
            return _BATCH_NORM.forward(layer, x)
        layer._check_input_dim(x)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        dims, shape = [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]
        channels, number = x.shape[1], float(self.counts) * x.numel() / x.shape[1]
        mean = wide.mean(dims) if x.numel() else wide.sum(dims)  # without rows zeros, which do not count
        centered = wide - mean.view(shape)
        squares = centered.square().sum(dims) * float(self.counts)
        means, squares, numbers = _Gather.apply(torch.cat([mean, squares, wide.new_full((1,), number)])).split(
            [channels, channels, 1], 1
        )
        total = numbers.sum()
        if x.is_cpu and not torch.compiler.is_compiling() and total.item() < 2:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        of_all = (means * numbers).sum(0) / total
        variance = (squares + numbers * (means - of_all).square()).sum(0) / total
        _update(layer, of_all.detach(), variance.detach(), total.detach())
        scale = torch.rsqrt(variance + layer.eps)
        scale = scale if layer.weight is None else scale * layer.weight
        shift = (mean - of_all) * scale
        shift = shift if layer.bias is None else shift + layer.bias
        return (centered * scale.view(shape) + shift.view(shape)).to(x.dtype)


class _Gather(torch.autograd.Function):
    """The ranks' rows, a row each."""

    @staticmethod
    def forward(ctx: Any, row: Tensor) -> Tensor:
        return all_gather(row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Sum.apply(gradients[0])[dist.get_rank()]


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Sum.apply(gradients[0])


def synchronize(model: nn.Module) -> list[nn.Module]:
    """Let the BatchNorm layers of `model` compute their statistics over all ranks; return these layers.

    A layer stays the object that it is, with its hooks and parameters. Every rank calls it, and in training the same
    layers in the same order. Raises ValueError for a BatchNorm with a forward of its own, or no running statistics.
    """
    restore([layer for layer in model.modules() if isinstance(layer, SyncedBatchNorm)])  # of a run that failed
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BATCH_NORM)}
    own = [name for name, layer in layers.items() if type(layer).forward not in _FORWARDS]
    if own:
        raise ValueError(
            f"sync_batchnorm=True replaces the forward of BatchNorm layers, but {', '.join(own)} has a forward of its "
            "own; derive it from nn.Module, or give sync_batchnorm=False"
        )
    measured = [name for name, layer in layers.items() if not layer.track_running_stats]
    if measured:
        raise ValueError(
            f"sync_batchnorm=True needs running statistics for evaluation, in which ranks may have no samples, but "
            f"{', '.join(measured)} has track_running_stats=False"
        )
    for layer in layers.values():
        kind = type(layer)
        layer.__class__ = type(kind.__name__, (SyncedBatchNorm, kind), {"__module__": kind.__module__})
    return list(layers.values())


def restore(layers: Sequence[nn.Module]) -> None:
    """Undo `synchronize`."""
    for layer in layers:
        layer.__class__ = type(layer).__mro__[2]


@contextmanager
def without_samples(layers: Sequence[nn.Module]) -> Iterator[None]:
    """For a rank whose samples do not count: it takes part, and keeps the statistics of the others."""
    for layer in layers:
        layer.counts = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            del layer.counts


def with_loss(step_fn: Callable[..., Any], layers: Sequence[nn.Module]) -> Callable[..., Any]:
    """`step_fn`, which then raises RuntimeError if it returns no loss while `layers` are in training mode: the other
    ranks wait for them in the forward or the backward."""

    def step(*args: Any) -> Any:
        output = step_fn(*args)
        if not has_loss(output) and any(layer.training for layer in layers):
            raise RuntimeError(
                "training_step returned no loss, but sync_batchnorm=True has the BatchNorm layers of all ranks wait "
                "for each other, forward and backward; call the model for every batch, and return a loss without "
                "weight: Loss(loss * 0, 0)"
            )
        return output

    return step


def statistics(layers: Sequence[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """The buffers of `layers`, each with a copy of its value."""
    return [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]


@torch.no_grad()
def _update(layer: Any, mean: Tensor, variance: Tensor, total: Tensor) -> None:
    """Move the running statistics, as torch does: by the unbiased variance."""
    layer.num_batches_tracked.add_(1)
    factor = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_((variance * total / (total - 1)).to(layer.running_var.dtype), factor)
