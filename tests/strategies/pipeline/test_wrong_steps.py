"""Steps that a pipeline cannot run are refused with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import Module
from lockstep.strategies import Pipeline
from lockstep.strategies.base import StepHooks
from tests.trainer.toy import loader, quiet

pytestmark = pytest.mark.ranks


class Wrong(Module):
    """A step that breaks one rule of pipelines."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = Wronged(how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.how == "never":
            return x.sum()
        if self.how == "layer by itself":
            return self.net.last(self.net.first(x)).mean()
        if self.how == "twice":
            return (self.net(x) + self.net(x)).mean()
        if self.how == "checkpoint":
            return checkpoint(self.net, x, use_reentrant=False).mean()
        return self.net(x).mean()

    def configure_optimizers(self) -> Any:
        if self.how == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wronged(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(8) if how == "order" else nn.Identity()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self._end(x)

    def _end(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


def refused(hows: list[str]) -> dict[str, str]:
    """The error of each wrong step, on ranks that continue with the next."""
    found = {}
    for how in hows:
        strategy = Pipeline()
        strategy.configure(devices=2, accelerator="cpu")
        strategy.setup()
        strategy.barrier()  # a rank that is refused at once must not close what the other still connects to
        module = Wrong(how)
        try:
            wrapped = strategy.setup_module(module)
            strategy.setup_optimizers(wrapped, {"main": module.configure_optimizers()})
            batch = [object()] if how == "batch" else torch.ones(4, 8)
            window = next(strategy.shard_loader([(batch,)], seed=0).windows(0))
            window.micro_batches[0].num_samples = window.num_samples = 4
            strategy.forward_backward(wrapped, module.training_step, window, StepHooks(automatic=how != "manual"))
        except Exception as error:
            found[how] = f"{type(error).__name__}: {error}"
        finally:
            strategy.teardown()
    return found


@pytest.mark.long
def test_errors_of_wrong_steps_say_what_is_wrong(run_ranks: Callable[..., Any]) -> None:
    expected = {
        "never": (
            "ValueError: a pipelined module is called once a step, but the step returned a loss without calling net"
        ),
        "layer by itself": "RuntimeError: net.first is on another rank of the pipeline",
        "order": "ValueError: net.norm is called after layers of stage 1, but is on stage 0",
        "lbfgs": "ValueError: optimizer 'main' (LBFGS) cannot be stepped in a pipeline",
        "manual": "ValueError: a pipeline runs backward by its schedule",
        "batch": (
            "ValueError: a pipeline cuts batches along the first dimension of their tensors, but none in this tuple "
            "has the batch's 4 samples there"
        ),
    }
    found = run_ranks(refused, 2, [*expected])
    for how, message in expected.items():
        if how == "layer by itself":  # the first layer is on rank 0
            assert "net.last is on another rank" in found[how]
        else:
            assert found[how].startswith(message), found[how]


def test_a_module_within_a_checkpoint_is_refused() -> None:
    """Its recomputation would wait for the other ranks forever."""
    with pytest.raises(RuntimeError, match=r"training_step or a model calls torch.utils.checkpoint around layers"):
        quiet(strategy="pipeline", devices=2).fit(Wrong("checkpoint"), loader())


def test_a_second_call_of_the_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the step calls net a second time"):
        quiet(strategy="pipeline", devices=2).fit(Wrong("twice"), loader())
