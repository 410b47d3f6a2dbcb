"""Errors of torch about sharded tensors become a sentence that says what to do instead."""

from __future__ import annotations

import pytest

from lockstep.strategies.modules.sharded_errors import explanation


@pytest.mark.parametrize(
    "text",
    [
        "aten.mul.Tensor: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        "Cannot run aten.add.Tensor on inputs with different meshes: got DeviceMesh((fsdp=2, tensor=2)) and "
        "DeviceMesh((fsdp=2))\n\nSharding propagation failed",
    ],
)
def test_an_error_about_sharded_tensors_names_the_code_and_the_way_out(text: str) -> None:
    found = str(explanation(RuntimeError(text), "OneNorm"))
    assert found.startswith("OneNorm computes (aten.") and found.endswith("use strategy='ddp'") and "\n" not in found


def test_other_errors_stay_as_they_are() -> None:
    assert explanation(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "OneNorm") is None
    assert explanation(KeyError("same mesh"), "OneNorm") is None
