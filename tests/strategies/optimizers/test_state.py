"""State of optimizers in all forms that torch saves, in checkpoints too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks import ModelCheckpoint
from tests.strategies.optimizers.test_attributes import Stepped, fit
from tests.trainer.toy import distance, equal, loader, quiet, weights


class Momentum(Optimizer):
    """The state of a parameter is a tensor, without a dict around it."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter] = gradient + 0.9 * self.state[parameter] if parameter in self.state else gradient.clone()
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.moved(parameter, parameter.grad), alpha=-group["lr"])


class Numbered(Momentum):
    """The state of a parameter has numbers for keys."""

    def moved(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        self.state[parameter][1] = gradient + 0.9 * self.state[parameter].get(1, torch.zeros_like(gradient))
        return self.state[parameter][1]


class Counting(torch.optim.SGD):
    """A part of the state is of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        counted = self.state.get("all", {"steps": 0, "rate": torch.ones(())})
        self.state["all"] = {"steps": counted["steps"] + 1, "rate": counted["rate"] * 0.9}
        for group in self.param_groups:
            group["lr"] = 0.05 * float(self.state["all"]["rate"]) / self.state["all"]["steps"]
        return super().step(closure)


@pytest.mark.parametrize("kind", [Momentum, Numbered, Counting])
def test_a_resumed_run_has_the_state_of_the_one_that_was_saved(kind: type[Optimizer], tmp_path: Path) -> None:
    whole, trainer = fit(kind, tmp_path)
    resumed, again = fit(kind, tmp_path, ckpt=tmp_path / "step=3")
    assert equal(resumed, whole)
    if kind is Counting:
        assert again.optimizers[0].state["all"] == trainer.optimizers[0].state["all"]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Momentum, Numbered, Counting])
def test_another_strategy_reads_it(kind: type[Optimizer], tmp_path: Path) -> None:
    whole, _ = fit(kind, tmp_path, precision="64-true")
    module = Stepped(kind)
    save = ModelCheckpoint(tmp_path / "sharded", save_last=True)
    options = {"precision": "64-true", "split_batches": True, "enable_checkpointing": True, "callbacks": [save]}
    run = quiet(strategy="fsdp", devices=2, **options)
    run.fit(module, loader(48), ckpt_path=tmp_path / "step=3")
    assert distance(weights(module), whole) < 1e-12


REFUSED = {
    "of no parameter in a pipeline": (
        "pipeline",
        Counting,
        r"the state_dict of optimizer '0' \(Counting\) has state\['all",
    ),
    "of no parameter": (
        "deepspeed_stage_2",
        Counting,
        r"the state_dict of optimizer '0' \(Counting\) has state\['all'",
    ),
    "with a number": (
        "deepspeed_stage_2",
        Numbered,
        r"optimizer '0' \(Numbered\) keeps state of a parameter without a",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("what", REFUSED)
def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name(what: str, tmp_path: Path) -> None:
    strategy, kind, message = REFUSED[what]
    if strategy != "pipeline":
        pytest.importorskip("deepspeed")
    run = quiet(strategy=strategy, devices=2, enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=message):
        run.fit(Stepped(kind), loader(48))
