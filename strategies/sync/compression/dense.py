"""Compressors that send each element in fewer bits, rounded to the nearest number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding


class Half(Compressor):
    """Rounds to 16 bits, float16 or bfloat16. What float16 cannot hold is sent as its largest number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        largest = torch.finfo(self.dtype).max
        return (tensor.clamp(-largest, largest).to(self.dtype),)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0].to(encoding.dtype)


class Int8(Compressor):
    """Rounds to 255 steps of a scale for each block of elements: their largest magnitude."""

    block = 256

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        rows = blocks(tensor, self.block)
        scale = rows.abs().amax(1, keepdim=True) / 127
        steps = torch.where(scale > 0, rows / scale, 0.0).round_().clamp_(-127, 127)
        return steps.to(torch.int8).reshape(-1)[: tensor.numel()], scale.reshape(-1)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        steps, scale = payload
        rows = blocks(steps.to(encoding.dtype), self.block) * scale.unsqueeze(1)
        return rows.reshape(-1)[: steps.numel()].view(encoding.shape)


class Sign(Compressor):
    """One bit an element: its sign, times the mean magnitude of the tensor (EF-signSGD)."""

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return pack_bits((tensor >= 0).reshape(-1).to(torch.uint8), 1), tensor.abs().mean().reshape(1)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        bits, scale = payload
        numel = torch.Size(encoding.shape).numel()
        signs = unpack_bits(bits, 1, numel).to(encoding.dtype).mul_(2).sub_(1)
        return (signs * scale).view(encoding.shape)


def blocks(tensor: Tensor, size: int) -> Tensor:
    """The elements in rows of `size`, the last one filled with zeros."""
    flat = tensor.reshape(-1)
    missing = -flat.numel() % size
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, size)


def pack_bits(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2**bits (uint8, flat) in as few bytes as hold them; `bits` is 1, 2, 4 or 8."""
    rows = blocks(numbers, 8 // bits)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=numbers.device)
    return (rows << shifts).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Undo `pack_bits`: `numel` numbers, uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & (2**bits - 1)).reshape(-1)[:numel]
