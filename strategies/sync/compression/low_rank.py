"""PowerSGD: matrices of low rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.strategies.sync.compression.compressor import Compressor, Encoding


class PowerSGD(Compressor):
    """Sends a matrix as the product of two thin ones, by one power iteration from those of the step before.

    A tensor of more dimensions is the matrix of its first dimension by the others; a vector is sent whole.
    """

    linear, rounds = True, 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        if tensor.dim() < 2:
            return (tensor,) if encoding.means else ()
        matrix = _matrix(tensor)
        if not encoding.means:
            return (matrix @ self._start(matrix, encoding),)
        return (matrix.T @ torch.linalg.qr(encoding.means[0][0]).Q,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        if len(encoding.shape) < 2:
            return payload[0]
        encoding.memory["q"] = payload[0]
        product = torch.linalg.qr(encoding.means[0][0]).Q @ payload[0].T
        wide = _is_wide(encoding.shape)
        return (product if wide else product.T).reshape(encoding.shape)

    def _start(self, matrix: Tensor, encoding: Encoding) -> Tensor:
        """What to multiply with: what came out of the step before, and at first noise."""
        if "q" in encoding.memory:
            return encoding.memory["q"]
        shape = matrix.shape[1], min(self.rank, *matrix.shape)
        drawn = torch.randn(shape, generator=encoding.generator(common=True), dtype=torch.float64)
        return drawn.to(matrix.device, matrix.dtype)


def _is_wide(shape: Sequence[int]) -> bool:
    return shape[0] <= torch.Size(shape[1:]).numel()


def _matrix(tensor: Tensor) -> Tensor:
    """Not more rows than columns, so that a full rank leaves no error on any share."""
    matrix = tensor.reshape(tensor.shape[0], -1)
    return matrix if _is_wide(tensor.shape) else matrix.T
