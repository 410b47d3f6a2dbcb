"""What user code does to a model under a pipeline has the effect of one process, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from strategies import Pipeline
from tests.strategies.test_optimizer_probe import (
    CASES,
    Rule,
    at_once,
    by_global_norm,
    by_trust_ratio,
)
from tests.trainer.toy import quiet
from trainer import Module


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples(n: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(n, 8, generator=generator, dtype=torch.float64), torch.randint(0, 4, (n,), generator=generator)
    )


class Base(Module):
    """A classifier that a pipeline cuts in two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(module: Module, strategy: Any, devices: int, n: int = 22, **options: Any) -> dict[str, Tensor]:
    """Two epochs in double precision, the last batch smaller; the state of the module afterwards."""
    options = {"max_epochs": 2, "seed": 0, "split_batches": True, "precision": "64-true"} | options
    loader = DataLoader(samples(n), 8, **options.pop("loader", {}))
    quiet(strategy=strategy, devices=devices, **options).fit(module, loader)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ---- optimizers -----------------------------------------------------------------------------------------


def attached(mesh: str | None, cases: dict[str, Callable[[nn.Module], Optimizer]]) -> dict[str, str]:
    """What each optimizer is told when a pipeline takes it."""
    found = {}
    for name, make in cases.items():
        strategy = Pipeline(mesh=mesh)
        strategy.configure(devices=4 if mesh else 2, accelerator="cpu")
        strategy.setup()
        model = nn.ModuleDict({"net": layers()})
        try:
            strategy.attach(strategy.place(model), {"main": make(model)})
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
        finally:
            strategy.teardown()
    return found


def with_a_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def in_groups_by_layer(model: nn.Module) -> Optimizer:
    return Rule([{"params": layer.parameters()} for layer in model["net"] if isinstance(layer, nn.Linear)], at_once)  # type: ignore[index]


def test_optimizers_that_look_at_other_parameters_are_refused_by_name(run_ranks: Callable[..., Any]) -> None:
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


def test_a_mesh_that_shards_refuses_optimizers_that_look_at_whole_tensors(run_ranks: Callable[..., Any]) -> None:
    cases: dict[str, Callable[[nn.Module], Optimizer]] = {
        "by tensor": lambda model: Rule(model.parameters(), by_trust_ratio),
        "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    }
    found = run_ranks(attached, 4, "fsdp=2,pipeline=2", cases)
    assert found["adamw"] == "" and "other elements of its tensor; use an optimizer that treats" in found["by tensor"]


class TrustRatio(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_trust_ratio)


def test_an_optimizer_that_looks_at_whole_tensors_is_exact_in_a_pipeline() -> None:
    expected = fit(TrustRatio(), "single", 1)
    assert difference(fit(TrustRatio(), "pipeline", 2), expected) < 1e-12


class GlobalNorm(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_global_norm)


def test_a_refused_optimizer_has_changed_nothing() -> None:
    module = GlobalNorm()
    with pytest.raises(ValueError, match=r"\(Rule\) cannot be stepped in a pipeline"):
        fit(module, "pipeline", 2)
    assert difference(module.state_dict(), GlobalNorm().state_dict()) == 0.0
