"""What user code does to a model under a pipeline has the effect of one process, or is refused by name."""

from __future__ import annotations

import copy
import io
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


# ---- layers on other ranks ------------------------------------------------------------------------------


class Clipping(Base):
    """Writes to all weights in a hook, reads none, and freezes and unfreezes layers by the clock."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)
            self.net[0].bias.zero_()
            self.net[4].weight[0] *= 0.5
            self.net[2].weight.data[1:].fill_(0.1)


class InPlace(Base):
    """Starts the layers anew in the middle of the run and loads part of a state dict."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with torch.no_grad():
                for layer in (self.net[0], self.net[4]):
                    layer.weight.normal_(generator=torch.Generator().manual_seed(5))  # type: ignore[operator]
            self.load_state_dict({"net.2.weight": torch.eye(16, dtype=torch.float64)}, strict=False)
            self.zero_grad()


class Facts(Base):
    """What does not depend on values is answered on every rank."""

    def on_train_epoch_end(self) -> None:
        assert sum(p.numel() for p in self.parameters()) == 484 and len(self.state_dict()) == 6
        p = next(self.parameters())
        assert p.device.type == "cpu" and p.dtype == torch.float64 and p.requires_grad and p.is_floating_point()
        assert isinstance(p, nn.Parameter) and p.shape == (16, 8) and p.detach().T.shape == (8, 16) and p.is_leaf
        assert {n: tuple(v.shape) for n, v in self.state_dict().items()}["net.4.weight"] == (4, 16)
        assert torch.zeros_like(self.net[4].weight).sum() == 0 and repr(self.net[0].weight)
        self.to("cpu")


def exact(make: Callable[[], Module], strategies: dict[Any, int], **options: Any) -> None:
    expected = fit(make(), "single", 1, **options)
    for strategy, devices in strategies.items():
        found = fit(make(), strategy() if callable(strategy) else strategy, devices, **options)
        assert difference(found, expected) < 1e-12, strategy


TWO = {"pipeline": 2}
ALL = {"pipeline": 2, "ddp=2,pipeline=2": 4, "fsdp=2,pipeline=2": 4}


@pytest.mark.parametrize("make", [Clipping, InPlace, Facts])
def test_what_writes_to_layers_of_other_ranks_or_asks_for_facts_is_exact(make: type[Module]) -> None:
    exact(make, TWO)


def told(uses: dict[str, Callable[[nn.Module], Any]]) -> dict[str, list[str]]:
    """What each use of the model is told, by rank."""
    strategy = Pipeline()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    found = {}
    try:
        model = nn.ModuleDict({"net": layers()})
        strategy.place(model)
        for name, use in uses.items():
            try:
                use(model)
                message = ""
            except RuntimeError as error:
                message = str(error)
            texts = strategy.all_gather(torch.tensor(list(message.encode().ljust(400))[:400]))
            found[name] = [bytes(text.tolist()).decode().strip() for text in texts]
    finally:
        strategy.teardown()
    return found


def test_what_needs_values_of_another_rank_is_refused_by_name(run_ranks: Callable[..., Any]) -> None:
    uses: dict[str, Callable[[nn.Module], Any]] = {
        "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
        "norm": lambda m: torch.nn.utils.get_total_norm(list(m.parameters())),
        "gradients": lambda m: [p.grad for p in m.parameters()],
        "clip": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        "copy": lambda m: copy.deepcopy(m["net"]),  # type: ignore[index]
        "clone": lambda m: {name: value.clone() for name, value in m.state_dict().items()},
        "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
        "average": lambda m: [torch.zeros_like(p).lerp_(p.detach(), 0.5) for p in m.parameters()],
        "numpy": lambda m: [p.detach().numpy() for p in m.parameters()],
        "list": lambda m: [p.tolist() for p in m.parameters()],
        "number": lambda m: [p.flatten()[0].item() for p in m.parameters()],
        "compare": lambda m: [torch.equal(p, p) for p in m.parameters()],
        "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
        "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
        "histogram": lambda m: [torch.histc(p.detach()) for p in m.parameters()],
        "other dtype": lambda m: m.half(),
        "first layer": lambda m: m["net"][0].weight.sum() + m["net"][4].weight.sum(),  # type: ignore[index]
    }
    found = run_ranks(told, 2, uses)
    for name, (first, second) in found.items():
        assert first.startswith("net.2.weight lies on stage 1 of the pipeline") or name == "first layer", (name, first)
        assert second.startswith("net.0.weight lies on stage 0 of the pipeline"), (name, second)
        assert "trainer.whole(module)" in first


class Freezing(Base):
    """Layers by the epoch in which they learn; the optimizer holds all of them."""

    plan: dict[int, tuple[int, ...]] = {0: (2, 4), 1: (0, 2, 4), 2: (0,), 3: (4,), 4: (0, 2)}

    def __init__(self) -> None:
        super().__init__()
        self._freeze(0)

    def _freeze(self, epoch: int) -> None:
        for index in (0, 2, 4):
            self.net[index].requires_grad_(index in self.plan[epoch])

    def on_train_epoch_start(self) -> None:
        self._freeze(self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipeline", 2),
        ("ddp=2,pipeline=2", 4),
        ("fsdp=2,pipeline=2", 4),
        (lambda: Pipeline(schedule="gpipe", split=["net.4"]), 2),
    ],
)
def test_layers_frozen_and_unfrozen_during_a_run_are_exact(strategy: Any, devices: int) -> None:
    exact(Freezing, {strategy: devices}, max_epochs=5)
