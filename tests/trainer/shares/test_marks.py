"""What tells whether a tensor was changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.trainer.shares.marks import bits_of


class Around(Tensor):
    """Has no memory of its own, as states of eight bits that optimizers of other packages keep."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Around:
        made: Around = Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


def test_of_a_tensor_around_others_those_are_read() -> None:
    inner = torch.zeros(3, dtype=torch.uint8)
    around = Around(inner)
    before = bits_of(around)
    assert bits_of(around) == before
    inner.data[1] = 2
    assert bits_of(around) != before
