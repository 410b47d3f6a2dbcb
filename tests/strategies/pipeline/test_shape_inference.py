"""Tensors without data: what is looked up is what torch's fake mode answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lockstep.strategies.pipeline.shapes.fake_tensors import Blank, Mode

REAL = torch.tril(torch.ones(6, 6))
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum of two": lambda x, y: x + y,
    "with a plain number": lambda x, y: x * 2.0,
    "with a number of a larger kind": lambda x, y: x.long() * 2.0,
    "comparison": lambda x, y: x > 0,
    "with a tensor that has data": lambda x, y: REAL @ x,
    "of a list": lambda x, y: torch.cat([x, y, x], dim=-1),
    "strided result": lambda x, y: x.transpose(0, 2) * 1.5,
    "reduction": lambda x, y: x.mean(dim=(0, 2), keepdim=True),
    "another dtype": lambda x, y: x.to(torch.float16) + 1,
    "made alike": lambda x, y: torch.zeros_like(x, dtype=torch.int32),
    "module's": lambda x, y: F.layer_norm(F.gelu(x), (8,)),
    "noise": lambda x, y: F.dropout(x, 0.3),
    "view": lambda x, y: x[:, 1:].flatten(1),
    "in place": lambda x, y: x.clone().add_(y),
    "several results": lambda x, y: x.topk(2)[1],
}


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        type(tensor.grad_fn),
        tensor._is_view(),
        tensor._version,
    )


def blank(mode: Mode) -> Blank:
    with mode:
        tensor = torch.empty(4, 6, 8)
    return Blank(tensor)  # type: ignore[arg-type]


@pytest.fixture
def blanks() -> tuple[Mode, Blank, Blank]:
    mode = Mode()
    return mode, blank(mode), blank(mode)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_results_are_those_of_the_fake_mode(blanks: tuple[Mode, Blank, Blank], name: str, requires_grad: bool) -> None:
    plain = FakeTensorMode(allow_non_fake_inputs=True)
    with plain:
        expected = OPERATIONS[name](*(torch.empty(4, 6, 8, requires_grad=requires_grad) for _ in range(2)))
    _, x, y = blanks
    for _ in range(3):
        result = OPERATIONS[name](x.tensor().requires_grad_(requires_grad), y.tensor().requires_grad_(requires_grad))
        assert isinstance(result, FakeTensor)
        assert facts(result) == facts(expected)


def test_what_was_asked_before_is_not_asked_again(
    blanks: tuple[Mode, Blank, Blank], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(self: Any, func: Any, *args: Any) -> Any:
        asked.append(func)
        return dispatch(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    _, x, y = blanks
    first = x.tensor() + y.tensor()
    assert len(asked) == 1
    again = x.tensor() + y.tensor()
    assert len(asked) == 1
    assert again is not first, "each differs from that of another micro-batch"
    _ = again * 2.0 + x.tensor()
    _ = again * 2 + x.tensor()
    assert len(asked) == 3, "a product by another kind of number is another question, the sum is not"
    _ = x.tensor().sum(0), y.tensor().sum(0), x.tensor().sum(1)
    assert len(asked) == 5, "another argument is another question, another tensor of that shape is not"
    _ = x.tensor().transpose(0, 1), x.tensor().transpose(0, 1)
    assert len(asked) == 7, "views are made each time"


def test_models_do_not_share_what_they_know(blanks: tuple[Mode, Blank, Blank]) -> None:
    mode, x, _ = blanks
    other = Mode()
    for known, tensor in ((mode, x.tensor()), (other, blank(other).tensor())):
        assert (tensor + 1).fake_mode is known  # type: ignore[attr-defined]
    assert len(mode.known) == len(other.known) == 1


def test_errors_are_those_of_the_operation(blanks: tuple[Mode, Blank, Blank]) -> None:
    _, x, _ = blanks
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broadcast"):
            _ = x.tensor() + torch.ones(5)
