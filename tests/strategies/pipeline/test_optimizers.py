"""Optimizers that a pipeline runs exactly, those it refuses by name, and reads of their state."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR

from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import Pipeline
from tests.strategies.optimizers.test_probe import (
    CASES,
    Rule,
    at_once,
    by_global_norm,
    by_rows,
    by_trust_ratio,
)
from tests.strategies.pipeline.classifiers import Base, difference, fit, layers

pytestmark = pytest.mark.ranks


def attached(mesh: str | None, cases: dict[str, Callable[[nn.Module], Optimizer]]) -> dict[str, str]:
    """The error of each optimizer when a pipeline sets it up."""
    found = {}
    for name, make in cases.items():
        strategy = Pipeline(mesh=mesh)
        strategy.configure(devices=4 if mesh else 2, accelerator="cpu")
        strategy.setup()
        model = nn.ModuleDict({"net": layers()})
        try:
            strategy.setup_optimizers(strategy.setup_module(model), {"main": make(model)})
            found[name] = ""
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
        finally:
            strategy.teardown()
    return found


def with_a_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def in_groups_by_layer(model: nn.Module) -> Optimizer:
    return Rule([{"params": layer.parameters()} for layer in model["net"] if isinstance(layer, nn.Linear)], at_once)


@pytest.mark.long
def test_optimizers_that_read_other_parameters_are_refused_by_name(run_ranks: Callable[..., Any]) -> None:
    cases: dict[str, Callable[[nn.Module], Optimizer]] = {
        "coupled": lambda model: Rule(model.parameters(), by_global_norm),
        "by tensor": lambda model: Rule(model.parameters(), by_trust_ratio),
        "hooked": with_a_hook,
        "empty groups": in_groups_by_layer,
        "adamw": lambda model: torch.optim.AdamW(model.parameters()),
        **{name: CASES[name][0] for name in ("lbfgs", "estimate in a group", "list by place", "noise", "closure")},
    }
    found = run_ranks(attached, 2, None, cases)
    assert [name for name in found if not found[name]] == ["by tensor", "adamw"]
    assert found["coupled"].startswith("optimizer 'main' (Rule) cannot be stepped in a pipeline, where each rank holds")
    assert "depends on the gradients of others; use an optimizer that treats parameters one by one" in found["coupled"]
    assert "optimizer 'main' (SGD) has a step hook" in found["hooked"]
    assert "fails on a parameter group without parameters" in found["empty groups"]


class CountedMuon(Muon):
    matrices = 0
    """Of this rank, so not on the object: that belongs into a checkpoint, if it is the same on all."""

    def step(self, closure: Any = None) -> Any:
        CountedMuon.matrices += sum(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step(closure)


class WithMuon(Base):
    """Muon, of matrices of uneven shards of which the first and the last stage share one, beside another optimizer of
    whole tensors; a schedule, weights that are changed in hooks, a layer that is frozen for an epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        sizes = [(8, 8), (8, 7), (7, 5), (5, 8), (8, 8)]
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(n, m), nn.Tanh()) for n, m in sizes)).double()
        self.net[4][0].weight = self.net[0][0].weight

    def configure_optimizers(self) -> Any:
        muon = CountedMuon([p for p in self.parameters() if p.dim() == 2], lr=0.05)
        rest = Rule([p for p in self.parameters() if p.dim() != 2], by_rows)
        schedule = {"scheduler": StepLR(muon, 1, 0.9), "interval": "step"}
        return [{"optimizer": muon, "lr_scheduler": schedule}, {"optimizer": rest}]

    def on_train_epoch_start(self) -> None:
        self.net[2][0].weight.requires_grad_(self.current_epoch != 1)
        CountedMuon.matrices, self.first = 0, self.global_step

    def on_train_epoch_end(self) -> None:
        matrices = self.trainer.strategy.all_reduce(torch.tensor(CountedMuon.matrices))
        of_step = 4 - (self.current_epoch == 1) + (self.trainer.world_size == 4)  # each stage steps what it shares
        assert int(matrices) == of_step * (self.global_step - self.first)

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        with torch.no_grad():
            self.net[0][0].weight.mul_(0.99)
            self.net[3][0].weight.mul_(0.99)


class TrustRatio(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_trust_ratio)


def test_an_optimizer_that_needs_whole_tensors_is_exact_in_a_pipeline() -> None:
    expected = fit(TrustRatio(), "single", 1)
    assert difference(fit(TrustRatio(), "pipeline", 2), expected) < 1e-12


@pytest.mark.long
def test_each_matrix_is_stepped_on_one_rank_of_a_sharded_stage(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "enable_checkpointing": True}
    layouts = [("fsdp=2,pipeline=2", 4), ("single", 1), ("fsdp=2,pipeline=2", 4)]
    weights, saved = [], dict[str, Any]()
    for place, layout in enumerate(layouts):
        for name, (strategy, devices) in (("alone", ("single", 1)), ("sharded", layout)):
            saver = ModelCheckpoint(tmp_path / f"{name}{place}", save_last=True)
            found = fit(WithMuon(), strategy, devices, n=26, max_epochs=place + 1, ckpt_path=saved.get(name),
                        callbacks=[saver], **options)  # fmt: skip
            saved[name] = saver.last_model_path
            weights.append(found)
        assert difference(weights[-1], weights[-2]) < 1e-12
    assert difference(weights[0], weights[-1]) > 1e-3


class GlobalNorm(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_global_norm)


def test_a_refused_optimizer_has_changed_nothing() -> None:
    module = GlobalNorm()
    with pytest.raises(ValueError, match=r"\(Rule\) cannot be stepped in a pipeline"):
        fit(module, "pipeline", 2)
    assert difference(module.state_dict(), GlobalNorm().state_dict()) == 0.0


def momenta(optimizer: Optimizer) -> list[Any]:
    return [entry["momentum_buffer"] for entry in optimizer.state.values()]


READS: dict[str, Callable[[Optimizer], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "values": momenta,
    "by parameter": lambda optimizer: [optimizer.state[p] for p in optimizer.param_groups[0]["params"]],
    "length": lambda optimizer: len(optimizer.state),
    "copy": lambda optimizer: copy.deepcopy(optimizer.state),
}


class ReadsState(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for read in READS.values():
            with pytest.raises(
                RuntimeError, match="the state of SGD is spread over the ranks, and each has only that of"
            ):
                read(self.trainer.optimizers[0])


class ForgetsState(Base):
    """Begins each second batch without momentum, in two ways."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        if batch_idx == 1:
            optimizer.state.clear()
        if batch_idx == 2:
            optimizer.state = defaultdict(dict)


def test_the_optimizers_state_is_not_read_in_part() -> None:
    fit(ReadsState(), "pipeline", 2, max_epochs=1)
    expected = fit(ForgetsState(), "single", 1)
    assert difference(fit(ForgetsState(), "pipeline", 2), expected) < 1e-14
    assert difference(fit(Base(), "single", 1), expected) > 1e-4


class OwnStep(Base):
    """Asks for the loss itself, of an optimizer of the first layer and of one of the others, which are on other stages,
    and skips steps."""

    def configure_optimizers(self) -> Any:
        return [SGD(self.net[0].parameters(), lr=0.1), SGD(self.net[2:].parameters(), lr=0.1, momentum=0.9)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        assert float(closure()) > 0
        if batch_idx % 2 == 0:
            optimizer.step()


@pytest.mark.long
def test_an_own_step_may_ask_for_the_loss() -> None:
    expected = fit(OwnStep(), "single", 1)
    assert difference(fit(OwnStep(), "pipeline", 2), expected) < 1e-14
    assert difference(fit(Base(), "single", 1), expected) > 1e-4
