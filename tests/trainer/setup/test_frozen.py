"""The number by which frozen weights are known: the same for any shards, another one for any other value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.setup import frozen
from lockstep.trainer.setup.frozen import _number


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def shards(tensor: Tensor, dim: int, at: int) -> list[TensorShard]:
    first, second = tensor.narrow(dim, 0, at), tensor.narrow(dim, at, tensor.shape[dim] - at)
    offsets = tuple(at if d == dim else 0 for d in range(tensor.dim()))
    whole = tuple(tensor.shape)
    return [TensorShard(first, whole, (0,) * tensor.dim()), TensorShard(second, whole, offsets)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize(("shape", "dim", "at"), [((7,), 0, 3), ((6, 5), 0, 0), ((6, 5), 1, 2), ((3, 4, 5), 2, 1)])
def test_the_number_does_not_depend_on_shards(dtype: torch.dtype, shape: tuple[int, ...], dim: int, at: int) -> None:
    tensor = values(shape, dtype)
    assert _number(TensorShard.whole(tensor)) == sum(map(_number, shards(tensor, dim, at))) % 2**64


def test_it_does_not_depend_on_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values((9, 4))
    expected = _number(TensorShard.whole(tensor))
    monkeypatch.setattr(frozen, "_AT_ONCE", 8)
    assert _number(TensorShard.whole(tensor)) == expected


def test_it_is_the_same_in_any_precision_that_holds_the_values() -> None:
    tensor = values((3, 3), torch.bfloat16)
    numbers = {_number(TensorShard.whole(tensor.to(dtype))) for dtype in (torch.bfloat16, torch.float32, torch.float64)}
    assert len(numbers) == 1


def test_other_values_and_other_places_have_other_numbers() -> None:
    tensor = values((4, 4))
    nudged = tensor.clone()
    nudged[2, 3] = torch.nextafter(nudged[2, 3], torch.tensor(9.0))
    others = [tensor, nudged, tensor.t(), tensor.flip(0), tensor.flatten().roll(1).view(4, 4), tensor * 0, -tensor]
    assert len({_number(TensorShard.whole(other.contiguous())) for other in others}) == len(others)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)], ids=str)
def test_numbers_and_empty_tensors_have_one(shape: tuple[int, ...]) -> None:
    assert _number(TensorShard.whole(values(shape))) == _number(TensorShard.whole(values(shape)))
