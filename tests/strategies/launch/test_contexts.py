"""What surrounds a call of `fit` and would not hold elsewhere is refused, on ranks and in slices."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from lockstep.strategies.launch.launcher import launch
from tests.trainer.toy import equal, loader, net, quiet, weights


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


CONTEXTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "precision='bf16-mixed'"),
    "autocast to float16": (lambda: torch.autocast("cpu", torch.float16), "precision='16-mixed'"),
    "function mode": (Doubling, "do not compute within the Doubling that surrounds"),
    "default device": (lambda: torch.device("meta"), "torch.set_default_device(None)"),
    "saved tensors": (torch.autograd.graph.save_on_cpu, "do not compute within the saved_tensors_hooks"),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_around_the_run_is_refused(name: str) -> None:
    context, sentence = CONTEXTS[name]
    with context(), pytest.raises(ValueError, match="ranks do not compute within") as error:
        launch(print, (), 2)
    assert sentence in str(error.value)
    module = net()
    before = weights(module)
    with context(), pytest.raises(ValueError, match="the slices of strategy 'dp' do not compute within") as error:
        quiet(strategy="dp", devices=2, max_epochs=1).fit(module, loader())
    assert sentence in str(error.value)
    assert equal(before, weights(module))


@pytest.mark.parametrize(
    ("register", "sentence"),
    [
        (nn.modules.module.register_module_forward_hook, r"register_module_forward_hook\) would be called for those"),
        (nn.modules.module.register_module_full_backward_hook, r"register_module_full_backward_hook\) would be"),
        (register_optimizer_step_post_hook, r"register_optimizer_step_post_hook of torch.optim"),
    ],
)
def test_hooks_on_all_are_refused_before_ranks_start(register: Callable[..., Any], sentence: str) -> None:
    handle = register(lambda *args: None)
    try:
        with pytest.raises(ValueError, match=sentence):
            launch(print, (), 2)
    finally:
        handle.remove()


def test_the_cpu_may_be_the_default_device() -> None:
    with torch.device("cpu"):
        quiet(strategy="dp", devices=2, accelerator="cpu").fit(net(), loader())
