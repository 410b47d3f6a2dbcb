"""What surrounds a call of `fit` and would not hold elsewhere is refused, on ranks and in threads."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
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
    with context(), pytest.raises(ValueError, match="the threads of strategy 'dp' do not compute within") as error:
        quiet(strategy="dp", devices=2, max_epochs=1).fit(module, loader())
    assert sentence in str(error.value)
    assert equal(before, weights(module))


def test_hooks_on_all_modules_are_refused_before_ranks_start() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None)
    try:
        with pytest.raises(ValueError, match=r"register_module_forward_hook\) would be called for those that strat"):
            launch(print, (), 2)
    finally:
        handle.remove()
