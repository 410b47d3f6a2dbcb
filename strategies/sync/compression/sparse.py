"""Compressors that send some of the elements as they are, and no others; vectors, such as biases, whole."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding


class TopK(Compressor):
    """Sends the elements of the largest magnitude, and where they are; of equal ones the first. Vectors are sent whole,
    as they are few numbers.

    `warmup`: gradients at the beginning, after the first `start`, of which more is sent, as in Lin et al., "Deep
    Gradient Compression" (2018): 1/4 of the elements, then 1/16, and so on down to `share`, each for as long.
    """

    def __init__(self, share: float, warmup: int = 0) -> None:
        self.share, self.warmup = share, warmup

    def share_of(self, step: int) -> float:
        """What is sent of gradient number `step`."""
        step -= self.start
        stages = math.ceil(-math.log(self.share, 4)) - 1  # with more than `share`
        if step >= self.warmup or stages < 1:
            return self.share
        return 4.0 ** -(1 + step * stages // self.warmup)

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        if tensor.dim() < 2:
            return (tensor,)
        flat = tensor.reshape(-1)
        count = kept(flat.numel(), self.share_of(encoding.step))
        if count == flat.numel():
            return (tensor,)
        magnitude = flat.abs()
        if dist.is_initialized() and dist.get_backend() == "fake":  # of a planned run, in which none is the largest
            places = magnitude.topk(count, sorted=False).indices
        else:
            least = smallest_of_largest(magnitude, count)
            above, equal = magnitude > least, (magnitude == least).nonzero().squeeze(1)
            above[equal[: count - int(above.sum())]] = True
            places = above.nonzero().squeeze(1)
        return flat[places], places.to(torch.int32 if flat.numel() < 2**31 else torch.int64)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        if len(payload) == 1:
            return payload[0]
        values, places = payload
        return scattered(values, places.long(), encoding)

    def places(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor | None:
        return payload[1].long() if len(payload) == 2 else None


class RandomK(Compressor):
    """Sends elements drawn in each step, the same of every share, so that where they are need not be sent. Vectors are
    sent whole."""

    linear = True

    def __init__(self, share: float) -> None:
        self.share = share

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor if tensor.dim() < 2 else tensor.reshape(-1)[self._places(encoding)],)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0] if len(encoding.shape) < 2 else scattered(payload[0], self._places(encoding), encoding)

    def _places(self, encoding: Encoding) -> Tensor:
        numel = math.prod(encoding.shape)
        drawn = torch.randperm(numel, generator=encoding.generator(common=True))
        return drawn[: kept(numel, self.share)].to(encoding.device)


def smallest_of_largest(magnitude: Tensor, count: int) -> Tensor:
    """The `count`-th largest of a flat tensor; of a large one sought among what a sample says is large."""
    numel = magnitude.numel()
    if numel >= 2**16 and 8 * count < numel:
        sample = magnitude[:: numel >> 14]
        place = 2 * count * sample.numel() // numel + 16
        found = magnitude[magnitude >= sample.topk(place, sorted=False).values.amin()]
        magnitude = found if found.numel() >= count else magnitude
    return magnitude.topk(count, sorted=False).values.amin()


def kept(numel: int, share: float) -> int:
    """How many of so many elements are sent: at least one."""
    return max(1, math.ceil(share * numel))


def scattered(values: Tensor, places: Tensor, encoding: Encoding) -> Tensor:
    """Zeros but for these values at these places of the flat tensor."""
    flat = torch.zeros(math.prod(encoding.shape), dtype=encoding.dtype, device=values.device)
    flat[places] = values
    return flat.view(encoding.shape)
