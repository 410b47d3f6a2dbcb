"""Optimizers that train other weights than those to evaluate: schedule-free ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks import ModelCheckpoint
from tests.strategies.mesh.perceptrons import Perceptron, labeled
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, equal, quiet, weights

schedulefree = pytest.importorskip("schedulefree", reason="needs schedulefree, which the test extra installs")
pytestmark = pytest.mark.ranks


class ScheduleFree(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics.get("loss", 0.0)))

    def configure_optimizers(self) -> Any:
        return schedulefree.AdamWScheduleFree(self.parameters(), lr=0.02)


class RowsWithModes(Optimizer):
    """Needs whole rows, and evaluates an average of its steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "steps": 0, "trains": False})

    def _swap(self, trains: bool) -> None:
        for group in self.param_groups:
            if group["trains"] != trains:
                for p in (p for p in group["params"] if p in self.state):
                    current = p.detach().clone()
                    p.data.copy_(self.state[p]["other"])
                    self.state[p]["other"].copy_(current)
            group["trains"] = trains

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["trains"]
            group["steps"] += 1
            for p in group["params"]:
                p -= group["lr"] * p.grad / (p.grad.abs().amax(-1, keepdim=True) + 1e-8)
                average = self.state[p].setdefault("other", torch.zeros_like(p))
                average.lerp_(p, 1 / group["steps"])


class GroupEach(ScheduleFree):
    """A group for each parameter: a stage of a pipeline has none of some groups, whose modes it switches too."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(self.parameters())]
        return schedulefree.AdamWScheduleFree(groups)


class RowsOfGroups(ScheduleFree):
    def configure_optimizers(self) -> Any:
        return RowsWithModes([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(self.parameters())])


class OfRows(ScheduleFree):
    def configure_optimizers(self) -> Any:
        return RowsWithModes(self.parameters())


def by_hand(module: ScheduleFree, epochs: int) -> tuple[list[Tensor], list[float]]:
    """The weights to evaluate, and the loss with them after each epoch."""
    module.double()
    optimizer, losses = module.configure_optimizers(), []
    for _ in range(epochs):
        optimizer.train()
        for x, y in labeled():
            optimizer.zero_grad()
            F.cross_entropy(module.net(x.double()), y).backward()
            optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            losses.append(torch.stack([F.cross_entropy(module.net(x.double()), y) for x, y in labeled()]).mean().item())
    return weights(module), losses


def trained(strategy: str, devices: int, module: ScheduleFree, **options: Any) -> tuple[list[Tensor], list[float]]:
    fit(strategy, devices, module, labeled(), labeled(), max_epochs=3, num_sanity_val_steps=0, **options)
    return weights(module), module.losses


def test_an_evaluation_after_a_failed_fit_leaves_the_weights() -> None:
    class Fails(ScheduleFree):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 2:
                raise KeyError("stop")

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    torch.manual_seed(0)
    module, trainer = Fails(), quiet(max_epochs=4)
    with pytest.raises(KeyError):
        trainer.fit(module, labeled())
    before = [weight.clone() for weight in weights(module)]
    trainer.validate(module, labeled(), verbose=False)
    assert equal(before, weights(module))


def test_training_and_validation_are_those_of_the_loop_by_hand() -> None:
    found, losses = trained("single", 1, ScheduleFree())
    expected, by_epoch = by_hand(ScheduleFree(), 3)
    assert distance(found, expected) < 1e-14
    assert losses == pytest.approx(by_epoch, abs=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_a_strategy_changes_no_number(strategy: str) -> None:
    found, losses = trained(strategy, 2, ScheduleFree())
    expected, alone = trained("single", 1, ScheduleFree())
    assert distance(found, expected) < 1e-12 and losses == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("tensor", marks=pytest.mark.slow)])
def test_an_optimizer_that_needs_whole_parameters_too(strategy: str) -> None:
    expected, alone = trained("single", 1, OfRows())
    found, losses = trained(strategy, 2, OfRows())
    assert distance(found, expected) < 1e-12 and losses == pytest.approx(alone, abs=1e-12)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("pipeline", GroupEach),
        pytest.param("fsdp", GroupEach, marks=pytest.mark.slow),
        pytest.param("tensor", RowsOfGroups, marks=pytest.mark.slow),
        pytest.param("fsdp", RowsOfGroups, marks=pytest.mark.slow),
        pytest.param("pipeline", RowsOfGroups, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_have_nothing_of_a_group_switch_its_mode_too(strategy: str, kind: type[ScheduleFree]) -> None:
    expected, alone = trained("single", 1, kind())
    found, losses = trained(strategy, 2, kind())
    assert distance(found, expected) < 1e-12 and losses == pytest.approx(alone, abs=1e-12)


class FailsInValidation(OfRows):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 1:
            raise KeyError("on one rank")


@pytest.mark.timeout(60)
def test_a_rank_that_fails_in_validation_waits_for_nobody() -> None:
    """To switch the weights back would take a collective, which the others do not call."""
    with pytest.raises(KeyError, match="on one rank"):
        trained("fsdp", 2, FailsInValidation())


def test_validation_and_saving_leave_every_bit_of_training(tmp_path: Path) -> None:
    quiet = ScheduleFree()
    fit("single", 1, quiet, labeled(), max_epochs=3)
    busy = ScheduleFree()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    fit("single", 1, busy, labeled(), labeled(), max_epochs=3, val_check_interval=1, callbacks=[saver],
        enable_checkpointing=True)  # fmt: skip
    assert all(map(torch.equal, weights(quiet), weights(busy)))


def test_a_checkpoint_of_the_best_validation_resumes_bit_for_bit(tmp_path: Path) -> None:
    """It is saved while the weights to evaluate are in the model."""
    saver = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=-1)
    whole = ScheduleFree()
    fit("single", 1, whole, labeled(), labeled(), max_epochs=3, callbacks=[saver], enable_checkpointing=True)
    first = min(saver.best_k_models, key=lambda path: int(path.split("step=")[1].split("-")[0].split("/")[0]))
    resumed = ScheduleFree()
    fit("single", 1, resumed, labeled(), labeled(), max_epochs=3, ckpt_path=Path(first))
    assert all(map(torch.equal, weights(resumed), weights(whole)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("single", "single", ScheduleFree),
        ("single", "single", OfRows),
        ("fsdp", "pipeline", OfRows),
        pytest.param("pipeline", "fsdp", GroupEach, marks=pytest.mark.slow),
        pytest.param("fsdp", "pipeline", RowsOfGroups, marks=pytest.mark.slow),
        ("tensor", "fsdp", ScheduleFree),
        pytest.param("fsdp", "pipeline", ScheduleFree, marks=pytest.mark.slow),
        pytest.param("tensor", "fsdp", OfRows, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_has_the_weights_to_evaluate_and_those_to_train(
    kind: type[ScheduleFree], first: str, then: str, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, save_last=True)
    short = kind()
    sizes = {"single": 1}
    fit(first, sizes.get(first, 2), short, labeled(), max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    loaded = kind.load_from_checkpoint(saver.last_model_path)
    assert distance(weights(short), by_hand(kind(), 1)[0]) < 1e-12
    assert distance(weights(loaded.double()), weights(short)) < 1e-6  # built in float32
    resumed, whole = kind(), kind()
    fit(then, sizes.get(then, 2), resumed, labeled(), max_epochs=3, ckpt_path=Path(saver.last_model_path))
    fit("single", 1, whole, labeled(), max_epochs=3)
    assert distance(weights(resumed), weights(whole)) <= (0.0 if first == then else 1e-12)


@pytest.mark.long
def test_a_checkpoint_of_weights_alone_has_those_to_evaluate(tmp_path: Path) -> None:
    class Saves(ScheduleFree):
        def on_train_epoch_end(self) -> None:
            self.trainer.save_checkpoint(tmp_path / "weights", weights_only=True)

    fit("fsdp", 2, Saves(), labeled(), max_epochs=1)
    expected, _ = by_hand(ScheduleFree(), 1)
    assert distance(weights(Saves.load_from_checkpoint(tmp_path / "weights").double()), expected) < 1e-6


@pytest.mark.long
def test_zero_refuses_it() -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed, which the extra deepspeed installs")
    with pytest.raises(ValueError, match="AdamWScheduleFree switches the weights between train"):
        fit("deepspeed_stage_2", 2, ScheduleFree(), labeled(), max_epochs=1, precision="32-true")
