"""Errors of torch about sharded tensors become a sentence that says what to do instead."""

from __future__ import annotations

import pytest
import torch

from lockstep.strategies.mesh.tensor_plan.first_call import FirstCall
from lockstep.strategies.modules.sharded_errors import explanation


@pytest.mark.parametrize(
    "text",
    [
        "aten.mul.Tensor: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        "Cannot run aten.add.Tensor on inputs with different meshes: got DeviceMesh((fsdp=2, tensor=2)) and "
        "DeviceMesh((fsdp=2))\n\nSharding propagation failed",
        "Sharding propagation failed for aten.index.Tensor(Spec(f32[88](R)))",
        "Cannot flatten unevenly sharded tensor: dimension 0\n\nSharding propagation failed for aten.view.default",
    ],
)
def test_an_error_about_sharded_tensors_names_the_code_and_the_way_out(text: str) -> None:
    found = str(explanation(RuntimeError(text), "OneNorm"))
    assert found.startswith("OneNorm computes (aten.") and found.endswith("use strategy='ddp'") and "\n" not in found


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Cannot flatten unevenly sharded tensor: dimension 0 (size 3) is not evenly divisible by mesh"),
        RuntimeError("Attempted to unbind along the sharded dimension 0. ", "It cannot be performed without redistri"),
        RuntimeError(".tolist() is not supported for tensor subclasses, got DTensor"),
    ],
)
def test_what_torch_does_not_do_with_one_sharded_tensor_names_the_way_out(error: RuntimeError) -> None:
    found = str(explanation(error, "on_train_batch_end"))
    assert found.startswith("on_train_batch_end takes apart or flattens") and "trainer.whole(module)" in found


def test_other_errors_stay_as_they_are() -> None:
    assert explanation(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "OneNorm") is None
    assert explanation(KeyError("same mesh"), "OneNorm") is None


def test_an_error_of_lockstep_that_quotes_torch_stays_as_it_is() -> None:
    class Uncopied(torch.nn.Linear):
        def __deepcopy__(self, memo: object) -> None:
            raise RuntimeError("aten.mul.Tensor: got mixed torch.Tensor and DTensor")

    with pytest.raises(
        ValueError, match="with a copy, which cannot be made .*mixed torch.Tensor and DTensor"
    ) as raised:
        FirstCall(Uncopied(2, 2), "net", ["layer"])
    assert explanation(raised.value, "configure_model") is None
    cause = raised.value.__cause__
    assert cause is not None and explanation(cause, "configure_model") is not None


def test_transforms_of_sharded_layers_are_explained_but_not_those_of_others() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    with pytest.raises(RuntimeError) as raised:
        torch.func.grad(lambda x: Own.apply(x).sum())(torch.ones(2))
    assert explanation(raised.value, "training_step") is None
    within = compile("call()", "/lockstep/strategies/mesh/tensor_plan/styles.py", "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(within, {"call": lambda: torch.func.grad(lambda x: Own.apply(x).sum())(torch.ones(2))})
    assert "training_step differentiates a layer that is sharded" in str(explanation(raised.value, "training_step"))
