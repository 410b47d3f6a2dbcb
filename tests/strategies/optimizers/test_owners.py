"""Optimizers that need whole parameters, where ranks hold shards of them: each parameter is stepped on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer, Rprop
from torch.optim.lr_scheduler import StepLR

from lockstep.callbacks import ModelCheckpoint
from tests.strategies.mesh.perceptrons import STRATEGIES, Perceptron, exact, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.strategies.optimizers.test_probe import (
    CASES,
    Rule,
    TakesTheModel,
    at_once,
    by_count,
    by_distance,
    by_global_norm,
    by_rows,
    by_trust_ratio,
)
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


class Stepped(Perceptron):
    """Trains with the optimizer that `make` builds."""

    make: Callable[[nn.Module], Any]

    def configure_optimizers(self) -> Any:
        return type(self).make(self)


def with_muon(module: nn.Module) -> dict[str, Optimizer]:
    matrices = [p for p in module.parameters() if p.dim() == 2]
    return {"muon": Muon(matrices, lr=0.05), "adamw": AdamW([p for p in module.parameters() if p.dim() != 2])}


def scheduled(module: nn.Module) -> Any:
    optimizer = Rule(module.parameters(), by_trust_ratio)
    return [optimizer], [StepLR(optimizer, 1, 0.5)]


def fails_without_parameters(module: nn.Module) -> Optimizer:
    """One rank owns none of the second group."""

    def rule(params: list[Tensor], group: dict[str, Any]) -> None:
        at_once(params, group)
        by_rows(params, group)

    return Rule([{"params": [p]} for p in module.parameters()], rule)


def counts_steps(params: list[Tensor], group: dict[str, Any]) -> None:
    group["steps"] = group.get("steps", 0) + 1
    for p in params:
        p -= 0.1 / group["steps"] * p.grad / p.grad.norm()


def with_scales(params: list[Tensor], group: dict[str, Any]) -> None:
    """Keeps a tensor in the group that depends on all of its gradients."""
    group["scale"] = torch.stack([p.grad.norm() for p in params]).amax()
    for p in params:
        p -= 0.1 * p.grad / group["scale"]


def trains(module: nn.Module) -> Optimizer:
    optimizer = TakesTheModel(module, "x", momentum=0.9)
    optimizer.train()
    return optimizer


MAKES: dict[str, Callable[[nn.Module], Any]] = {
    "muon": with_muon,
    "adafactor": lambda m: Adafactor(m.parameters()),
    "rprop": lambda m: Rprop(m.parameters(), lr=1e-3),
    "rows": lambda m: Rule(m.parameters(), by_rows),
    "scheduled": scheduled,
    "one group each": fails_without_parameters,
    "counts steps": lambda m: Rule([{"params": [p]} for p in m.parameters()], counts_steps),
    "global norm": lambda m: Rule(m.parameters(), by_global_norm),
    "number of parameters": lambda m: Rule(m.parameters(), by_count),
    "number in a group": lambda m: Rule(m.parameters(), by_distance),
    "tensor in a group": lambda m: Rule(m.parameters(), with_scales),
    "closure": lambda m: LBFGS(m.parameters(), lr=0.1, max_iter=3),
    "state made at once": lambda m: Adagrad(m.parameters(), lr=0.1),
    "odd constructor": trains,
}


def modules(*names: str) -> list[Callable[[], Perceptron]]:
    return [type(name, (Stepped,), {"make": staticmethod(MAKES[name])}) for name in names or MAKES]


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_an_optimizer_gives_the_weights_of_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, *modules(), n=20, gradient_clip_val=1.0, accumulate_grad_batches=2, max_epochs=1)


def test_state_made_at_once_of_a_parameter_with_one_element() -> None:
    class Scaled(Stepped):
        make = staticmethod(MAKES["state made at once"])

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step([batch[0] * self.scale, batch[1]], batch_idx)

    exact("fsdp", 2, Scaled)


def rows_that_have_gradients(params: list[Tensor], group: dict[str, Any]) -> None:
    by_rows([p for p in params if p.grad is not None], group)


def test_what_changes_during_a_run() -> None:
    class GrowsAndFreezes(Stepped):
        make = staticmethod(lambda m: Rule(m.net[:4].parameters(), rows_that_have_gradients))

        def __init__(self) -> None:
            super().__init__()
            self.net[4].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                (optimizer,) = self.trainer.optimizers
                self.net[4].requires_grad_(True)
                optimizer.add_param_group({"params": list(self.net[4].parameters()), "lr": 0.05})
                self.net[2].bias.requires_grad_(False)
                optimizer.state.clear()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.net[0].weight.mul_(0.99)

    exact("fsdp", 2, GrowsAndFreezes)


def test_each_parameter_is_stepped_on_one_rank_and_state_is_balanced(run_ranks: Callable[..., Any]) -> None:
    steps, numel, total = run_ranks(work_of_ranks, 4)
    assert sum(steps) == 8 * 4 and max(numel) <= 1.15 * total / 4


def work_of_ranks() -> tuple[list[int], list[int], int]:
    """By rank how many matrices a step of Muon works on, and how many numbers it remembers, of eight blocks."""
    from lockstep.strategies import FSDP

    strategy = FSDP()
    strategy.configure(devices=4, accelerator="cpu")
    strategy.setup()
    sizes = [(48, 16), (16, 16), (64, 16), (16, 64)]
    model = nn.Sequential(*(nn.Linear(n, m, bias=False) for _ in range(8) for m, n in sizes))
    wrapped = strategy.setup_module(model)
    stepped: list[int] = []

    class Momentum(Muon):
        def step(self, closure: Any = None) -> Any:
            stepped.append(sum(len(group["params"]) for group in self.param_groups))
            return super().step(closure)

    optimizer = strategy.setup_optimizers(wrapped, {"muon": Momentum(model.parameters(), lr=0.1)})["muon"]
    stepped.clear()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    strategy.optimizer_step(wrapped, optimizer)
    state = strategy.state_dict(wrapped, {"muon": optimizer})
    numel = sum(s.tensor.numel() for name, s in state.tensors.items() if name.endswith("momentum_buffer"))
    both = strategy.all_gather(torch.tensor([stepped[-1], numel]))
    strategy.teardown()
    return both[:, 0].tolist(), both[:, 1].tolist(), sum(p.numel() for p in model.parameters())


class ReadsState(Stepped):
    make = staticmethod(with_muon)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with pytest.raises(RuntimeError, match="the state of Muon is spread over the ranks"):
            self.trainer.optimizers[0].state_dict()


def with_a_hook(model: nn.Module) -> Optimizer:
    optimizer = Muon([p for p in model.parameters() if p.dim() == 2])
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def refusals(makes: dict[str, Callable[[nn.Module], Optimizer]]) -> dict[str, str]:
    """The error of each optimizer when FSDP sets it up."""
    from lockstep.strategies import FSDP

    found = {}
    for name, make in makes.items():
        strategy = FSDP()
        strategy.configure(devices=dist.get_world_size() if dist.is_initialized() else 2, accelerator="cpu")
        strategy.setup()
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        wrapped = strategy.setup_module(model)
        try:
            strategy.setup_optimizers(wrapped, {"main": make(model)})
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
        finally:
            strategy.teardown()
    return found


def test_what_cannot_be_stepped_exactly_is_refused_by_name(run_ranks: Callable[..., Any]) -> None:
    names = ("list by place", "noise", "python's noise", "replaced step", "closure")
    found = run_ranks(refusals, 2, {**{name: CASES[name][0] for name in names}, "hook": with_a_hook})
    for name, error in found.items():
        assert error.startswith("optimizer 'main' (") and "cannot be stepped by FSDP" in error, (name, error)
    assert "draws random numbers" in found["noise"] and "has a step hook" in found["hook"]
    assert "outside of param_groups and state" in found["list by place"]


class Sparse(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("tensor", marks=pytest.mark.slow)])
def test_sparse_gradients_are_refused_by_name(strategy: str) -> None:
    with pytest.raises(ValueError, match="table has sparse=True, and .* cannot shard a sparse gradient"):
        fit(strategy, 2, Sparse(), labeled())


def test_state_is_not_read_in_part() -> None:
    fit("fsdp", 2, ReadsState(), labeled(), max_epochs=1)


LAYOUTS = [("fsdp", 4), ("fsdp", 2), ("single", 1), ("tensor", 2)]


class Square(Stepped):
    """Gradients of full rank: where they have no direction, SOAP divides rounding by rounding, on any strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch[0]), batch[0].flip(1).tanh())


class OfMuon(Square):
    make = staticmethod(with_muon)


class OfSoap(Square):
    @staticmethod
    def make(module: nn.Module) -> Any:
        return pytest.importorskip("pytorch_optimizer").SOAP(module.parameters(), lr=1e-3, precondition_frequency=2)


def resumed_over(layouts: list[tuple[str, int]], make: Callable[[], Perceptron], folder: Path) -> list[Tensor]:
    """The weights of a run that continues with each layout for an epoch."""
    path = None
    for epoch, (strategy, devices) in enumerate(layouts, 1):
        module = make()
        saver = ModelCheckpoint(folder / str(epoch), save_last=True)
        fit(strategy, devices, module, labeled(96, 32), max_epochs=epoch, ckpt_path=path, callbacks=[saver],
            enable_checkpointing=True)  # fmt: skip
        path = Path(saver.last_model_path)
    return weights(module)


@pytest.mark.parametrize("make", [OfMuon, pytest.param(OfSoap, marks=pytest.mark.slow)])
def test_a_run_resumes_on_other_layouts(make: type[Square], tmp_path: Path) -> None:
    layouts = LAYOUTS[1:] if make is OfMuon else LAYOUTS
    alone = resumed_over([("single", 1)] * len(layouts), make, tmp_path / "alone")
    assert distance(resumed_over(layouts, make, tmp_path / "several"), alone) < 1e-12


def test_sgd_keeps_its_shards() -> None:
    """What treats elements one by one is stepped where it is: no state is hidden."""

    class Reads(Stepped):
        make = staticmethod(lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert len(self.trainer.optimizers[0].state) == len(list(self.parameters()))

    fit("fsdp", 2, Reads(), labeled(), max_epochs=1)
