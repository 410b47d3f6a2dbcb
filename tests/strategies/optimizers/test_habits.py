"""What users do around an optimizer whose parameters have owners: the weights of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lockstep import Loss
from lockstep.callbacks import Guard, ModelCheckpoint, WeightAveraging
from lockstep.strategies import FSDP
from tests.strategies.mesh.perceptrons import Perceptron, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.strategies.optimizers.test_owners import Stepped, with_muon
from tests.strategies.optimizers.test_probe import Rule, by_global_norm, by_trust_ratio
from tests.trainer.toy import distance, weights

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Base(Stepped):
    make = staticmethod(with_muon)


class Edits(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self):
            for p in self.parameters():
                p.data.mul_(0.99)


class Manual(Base):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.net[2].weight = self.net[0].weight


class GradientHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient * 0.5)


class EveryStep(Base):
    def configure_optimizers(self) -> Any:
        return [
            {"optimizer": each, "lr_scheduler": {"scheduler": OneCycleLR(each, 0.1, 20), "interval": "step"}}
            for each in with_muon(self).values()
        ]


class Scalar(Stepped):
    make = staticmethod(lambda m: Rule(m.parameters(), by_trust_ratio))

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])


class Counts(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        kept = batch[1] < 3
        return Loss(F.cross_entropy(self.net(batch[0])[kept], batch[1][kept], reduction="sum"), int(kept.sum()))


class OwnStep(Base):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        optimizer.step(closure)


class NotFiniteOnce(Base):
    def on_fit_start(self) -> None:
        self.failed = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step == 2 and not self.failed:
            self.failed = True
            return loss * float("nan")
        return loss


HABITS: dict[str, tuple[type[Perceptron], dict[str, Callable[[], Any]]]] = {
    **{kind.__name__: (kind, {}) for kind in (Edits, Manual, Tied, GradientHook, EveryStep, Scalar, Counts, OwnStep)},
    "averaged": (Base, {"callbacks": lambda: [WeightAveraging(decay=0.9)]}),
    "accumulated": (Base, {"accumulate_grad_batches": lambda: 3}),
    "rolled back": (NotFiniteOnce, {"callbacks": lambda: rolling_back(), "enable_checkpointing": lambda: True}),
}


def rolling_back() -> list[Any]:
    return [Guard(non_finite="roll_back"), ModelCheckpoint(tempfile.mkdtemp(), every_n_train_steps=1)]


def trained(habit: str, strategy: Any, devices: int) -> list[Tensor]:
    make, options = HABITS[habit]
    module = make()
    fit(strategy, devices, module, labeled(21), **{name: made() for name, made in options.items()})
    return weights(module)


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), ("tensor", 2), ("ddp=2,fsdp=2", 4)])
@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_has_the_effect_of_one_process(habit: str, strategy: str, devices: int) -> None:
    assert distance(trained(habit, strategy, devices), trained(habit, "single", 1)) < 1e-12


OPTIONS = {
    "offload": {"cpu_offload": True},
    "kept": {"reshard_after_forward": False},
    "unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_fsdp_changes_no_number(option: str) -> None:
    found = trained("accumulated", FSDP(**OPTIONS[option]), 2)
    assert distance(found, trained("accumulated", "single", 1)) < 1e-12


def test_a_mesh_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trained("accumulated", "single", 1)
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    assert distance(trained("accumulated", "fsdp", 1), alone) < 1e-12


class GlobalNorm(Stepped):
    make = staticmethod(lambda m: Rule(m.parameters(), by_global_norm))


def test_loss_scaling() -> None:
    """Muon amplifies what float16 rounds, so two ranks are compared with two."""
    found = []
    for strategy in ("ddp", "fsdp"):
        module = Base()
        fit(strategy, 2, module, labeled(21), precision="16-mixed", gradient_clip_val=0.5)
        found.append(weights(module))
    assert distance(*found) < 1e-6
    with pytest.raises(ValueError, match="precision='16-mixed' scales the gradients of each rank, and not every rank"):
        fit("fsdp", 2, GlobalNorm(), labeled(21), precision="16-mixed")
