"""Code that writes to, freezes, hooks or reads layers of other ranks is exact or refused by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Module
from lockstep.strategies import Pipeline
from tests.strategies.pipeline.classifiers import TWO, Base, exact, layers, refusals

pytestmark = pytest.mark.ranks


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
    """Starts the layers again in the middle of the run and loads part of a state dict."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with torch.no_grad():
                for layer in (self.net[0], self.net[4]):
                    layer.weight.normal_(generator=torch.Generator().manual_seed(5))
            self.load_state_dict({"net.2.weight": torch.eye(16, dtype=torch.float64)}, strict=False)
            self.zero_grad()


class ByData(Base):
    """Past torch's notes, before the net runs and before the optimizer steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.mul_(0.9)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.3, 0.3)


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


@pytest.mark.parametrize("make", [Clipping, InPlace, ByData, Facts])
def test_what_writes_to_layers_of_other_ranks_or_asks_for_facts_is_exact(make: type[Module]) -> None:
    exact(make, TWO)


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
    found = run_ranks(refusals, 2, uses)
    for name, (first, second) in found.items():
        assert first.startswith("net.2.weight is on stage 1 of the pipeline") or name == "first layer", (name, first)
        assert second.startswith("net.0.weight is on stage 0 of the pipeline"), (name, second)
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


class Hooked(Base):
    """Five layers, of which hooks change what runs backward, and a penalty on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *layers()[:3], nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), *layers()[3:]
        )
        self.net.double()
        for index in (0, 2, 4, 6):
            self.net[index].register_forward_hook(scales_gradient)
        self.net[2].register_full_backward_hook(clamps_gradient)


def scales_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    if type(output) is Tensor and output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) * 2)


def clamps_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient.clamp(-1e-3, 1e-3) for gradient in inputs)


class FrozenBeginning(Hooked):
    """Nothing of the first stages learns, then everything does."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch == 1)
        self.net[5:].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Base.training_step(self, batch, batch_idx) + 0.1 * self.net[-1].weight.square().sum()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_zero_bubble"])
def test_hooks_and_frozen_layers_are_exact_where_a_schedule_splits_the_backward(schedule: str) -> None:
    exact(FrozenBeginning, {lambda: Pipeline(schedule=schedule): 2})
