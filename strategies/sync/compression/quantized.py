"""Compressors that round at random, so that what is sent is on average the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding
from lockstep.strategies.sync.compression.dense import blocks, pack_bits, unpack_bits


class QSGD(Compressor):
    """Rounds to 2 ** (bits - 1) - 1 levels of a scale for each bucket, its largest magnitude, up or down at random.

    `bits`: 2 to 48 for a number with its sign; 2, 4, 8, 16, 32 or 64 are sent. `bucket`: elements with one scale; None
    for the whole tensor.
    """

    feedback = False

    def __init__(self, bits: int, bucket: int | None = 512) -> None:
        self.bits, self.bucket = bits, bucket

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        rows = blocks(tensor, self.bucket or tensor.numel()).double()
        scale = rows.abs().amax(1, keepdim=True)
        drawn = torch.rand(tensor.numel(), generator=encoding.generator(), dtype=torch.float64).to(tensor.device)
        level = torch.where(scale > 0, rows / scale * self.levels, 0.0)
        level = (level + blocks(drawn, rows.shape[1])).floor_().clamp_(-self.levels, self.levels)
        numbers = level.reshape(-1)[: tensor.numel()]
        if self.bits > 4:
            return numbers.to(_integer(self.bits)), scale.reshape(-1).to(tensor.dtype)
        bits = 2 if self.bits == 2 else 4
        return pack_bits((numbers + self.levels).to(torch.uint8), bits), scale.reshape(-1).to(tensor.dtype)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        numbers, scale = payload
        numel = math.prod(encoding.shape)
        if self.bits > 4:
            levels = numbers.double()
        else:
            levels = unpack_bits(numbers, 2 if self.bits == 2 else 4, numel).double() - self.levels
        rows = blocks(levels, self.bucket or numel) / self.levels * scale.double().unsqueeze(1)
        return rows.reshape(-1)[:numel].to(encoding.dtype).view(encoding.shape)


class TernGrad(QSGD):
    """Sends -1, 0 or 1 times the tensor's largest magnitude, drawn so that the mean is the gradient."""

    def __init__(self) -> None:
        super().__init__(bits=2, bucket=None)


def _integer(bits: int) -> torch.dtype:
    sizes = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    return next(dtype for size, dtype in sizes.items() if bits <= size)
