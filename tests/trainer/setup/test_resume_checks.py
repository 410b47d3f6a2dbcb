"""Resuming with other code than the saved run had: what then holds is said, and what would be lost is refused or
continued."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, OneCycleLR

from lockstep import CheckpointError, Module
from lockstep.callbacks import Callback, EarlyStopping, LearningRateMonitor
from tests.trainer.run.test_resume_bitwise import SavesAt
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

# ---- optimizers and schedulers -------------------------------------------------------------------


class Asks(Net):
    """A net whose optimizer is made by a function, as a program that is edited between two runs."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.save_hyperparameters(ignore="make")
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def adam(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), **{"lr": 1e-2} | options)


def two_groups(module: Any, second: float) -> torch.optim.Optimizer:
    groups = [{"params": module.net[0].parameters()}, {"params": module.net[3].parameters(), "weight_decay": second}]
    return torch.optim.Adam(groups, lr=1e-2)


def scheduled(module: nn.Module, scheduler: Callable[[Any], Any], **options: Any) -> Any:
    optimizer = adam(module, **options)
    return [optimizer], [{"scheduler": scheduler(optimizer), "interval": "step"}]


def cycle(optimizer: Any, total: int = 20) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=total)


def run(make: Callable[[Any], Any], *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> Any:
    module = Asks(make)
    defaults: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "seed": 0, "callbacks": list(callbacks)}
    quiet(**defaults | options).fit(module, loader(32), ckpt_path=ckpt_path)
    return module


REFUSED: dict[str, tuple[Callable, Callable, str]] = {
    "SGD for Adam": (
        adam,
        lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
        "of Adam for optimizer '0'.* returned SGD",
    ),
    "AdamW for Adam": (adam, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), "returned AdamW"),
    "another rate": (adam, lambda m: adam(m, lr=0.1), r"with lr=0\.01, but configure_optimizers gives lr=0\.1 now"),
    "other betas": (
        adam,
        lambda m: adam(m, betas=(0.8, 0.999)),
        r"betas=\[0\.9, 0\.999\].* gives betas=\[0\.8, 0\.999\]",
    ),
    "a flag": (adam, lambda m: adam(m, amsgrad=True), "amsgrad=False"),
    "an option of one group": (
        lambda m: two_groups(m, 0.0),
        lambda m: two_groups(m, 0.1),
        "parameter group 1 with weight_decay",
    ),
    "another rate under a scheduler": (
        lambda m: scheduled(m, lambda o: CosineAnnealingLR(o, 8)),
        lambda m: scheduled(m, lambda o: CosineAnnealingLR(o, 8), lr=0.5),
        r"with lr=0\.01",
    ),
    "another scheduler": (
        lambda m: scheduled(m, lambda o: CosineAnnealingLR(o, 8)),
        lambda m: scheduled(m, lambda o: ExponentialLR(o, 0.5)),
        "scheduler CosineAnnealingLR, but configure_optimizers returned ExponentialLR",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_optimizer_or_scheduler_than_the_saved_one_is_refused_by_name(tmp_path: Path, case: str) -> None:
    first, second, message = REFUSED[case]
    run(first, SavesAt(tmp_path, 3))
    with pytest.raises(CheckpointError, match=message):
        run(second, ckpt_path=tmp_path / "3")


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_rates_that_schedulers_have_moved_are_not_a_difference(tmp_path: Path, devices: int) -> None:
    """What is compared is what the code gives, warm-up and kernels (fused, foreach) not counted."""

    def make(module: Any, **options: Any) -> Any:
        return scheduled(module, lambda o: LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)), **options)

    strategy = "single" if devices == 1 else "ddp"
    whole = run(make, SavesAt(tmp_path, 1), strategy=strategy, devices=devices)
    resumed = run(lambda m: make(m, foreach=False), ckpt_path=tmp_path / "1", strategy=strategy, devices=devices)
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(weights(whole), weights(resumed), strict=True))


def test_an_option_of_a_scheduler_that_differs_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(lambda m: scheduled(m, cycle), SavesAt(tmp_path, 3))
    run(lambda m: scheduled(m, lambda o: cycle(o, 40)), ckpt_path=tmp_path / "3")
    said = [line for line in capfd.readouterr().err.splitlines() if "total_steps" in line]
    assert len(said) == 1 and "OneCycleLR) continues with the checkpoint's total_steps=20" in said[0]


@pytest.mark.ranks
def test_on_another_number_of_ranks_the_saved_rate_holds_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A program may scale its rate by the number of ranks, while a resumed run keeps its global batches."""
    seen: dict[str, float] = {}

    class Sees(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen["lr"] = trainer.optimizers[0].param_groups[0]["lr"]

    run(lambda m: adam(m, lr=1e-2 * m._running().world_size), SavesAt(tmp_path, 1), strategy="ddp", devices=2)
    run(lambda m: adam(m, lr=1e-2 * m._running().world_size), Sees(), ckpt_path=tmp_path / "1")
    said = [line for line in capfd.readouterr().err.splitlines() if "continues with the checkpoint's values" in line]
    assert seen["lr"] == 2e-2 and len(said) == 1 and "lr began at 0.02, not 0.01" in said[0]


# ---- parameter groups and freezing in the run --------------------------------------------------------


class Unfreezes(Module):
    """Trains its head; after some steps its body too, in a group of its own."""

    def __init__(self, at: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.at = nn.Linear(8, 8), nn.Linear(8, 3), at
        self.body.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.body(batch[0]).tanh()), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.at:
            self.body.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.body.parameters()), "lr": 1e-3})

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class FreezesLater(Unfreezes):
    """The same, frozen where the optimizer is made."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.body.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        self.body.requires_grad_(False)
        return super().configure_optimizers()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Unfreezes, FreezesLater])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_groups_added_and_layers_unfrozen_in_the_run_are_resumed_to_the_bit(
    tmp_path: Path, strategy: str, devices: int, kind: type[Unfreezes]
) -> None:
    def fit(ckpt_path: Path | None, *callbacks: Callback) -> Module:
        module = kind(at=3)
        trainer = quiet(
            strategy=strategy, devices=devices, accelerator="cpu", callbacks=list(callbacks), max_epochs=3, seed=0
        )
        trainer.fit(module, loader(32, 4), ckpt_path=ckpt_path)
        return module

    whole = fit(None, SavesAt(tmp_path, 2, 3, 5))
    before = weights(Unfreezes(3))
    assert not any(torch.equal(a, b) for a, b in zip(weights(whole), before, strict=True))
    for step in (2, 5):
        assert equal(weights(whole), weights(fit(tmp_path / str(step)))), step


# ---- what hooks keep in a checkpoint -----------------------------------------------------------------


class Averaged(Net):
    """Evaluates with an average of its weights that is in the checkpoint alone, and builds a layer by what it finds
    there."""

    average: dict[str, torch.Tensor] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = {name: value.detach().clone() for name, value in self.net.state_dict().items()}
        old = self.average or now
        self.average = {name: 0.5 * old[name].to(value.device) + 0.5 * value for name, value in now.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = self.average

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.order.append("load")
        self.average = checkpoint["average"]

    def configure_optimizers(self) -> Any:
        self.order.append("configure")
        return super().configure_optimizers()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        average = self.average or self.net.state_dict()
        logits = torch.func.functional_call(self.net, average, (batch[0],))
        self.log("val/loss", F.cross_entropy(logits, batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.func.functional_call(self.net, self.average or self.net.state_dict(), (batch[0],))


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_what_a_module_keeps_in_a_checkpoint_is_there_in_evaluation(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    torch.manual_seed(0)
    trained = Averaged()
    quiet(callbacks=[SavesAt(tmp_path, 4)]).fit(trained, loader(32))
    expected = quiet().validate(copy.deepcopy(trained), loader(16), verbose=False)[0]["val/loss"]
    plain = quiet().validate(_without(trained), loader(16), verbose=False)[0]["val/loss"]
    assert expected != plain
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "accelerator": "cpu"}
    for verb in ("validate", "test"):
        found = getattr(quiet(**options), verb)(Averaged(), loader(16), ckpt_path=tmp_path / "4", verbose=False)
        assert found[0]["val/loss"] == pytest.approx(expected, rel=1e-6)
    if devices == 1:
        loaded = Averaged.load_from_checkpoint(tmp_path / "4")
        assert loaded.order == ["load"] and set(loaded.average or ()) == set(trained.average or ())
        (predicted,) = quiet().predict(Averaged(), loader(8), ckpt_path=tmp_path / "4")
        batch = next(iter(loader(8)))
        assert torch.equal(predicted, trained.predict_step(batch, 0).detach())


def _without(trained: Averaged) -> Averaged:
    other = copy.deepcopy(trained)
    other.average = None
    return other


def test_hooks_see_a_checkpoint_before_optimizers_are_made(tmp_path: Path) -> None:
    class Hears(Callback):
        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            module.order.append("callback")

    first = Averaged()
    quiet(callbacks=[SavesAt(tmp_path, 4)]).fit(first, loader(32))
    resumed = Averaged()
    quiet(callbacks=[Hears()], max_epochs=2).fit(resumed, loader(32), ckpt_path=tmp_path / "4")
    assert first.order == ["configure"] and resumed.order == ["load", "callback", "configure"]


def test_the_state_of_a_callback_that_is_not_given_again_is_dropped_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = EarlyStopping("train/loss_epoch", patience=9)
    quiet(callbacks=[stopping, LearningRateMonitor(), SavesAt(tmp_path, 4)]).fit(net(), loader(32))
    capfd.readouterr()
    quiet(max_epochs=2, callbacks=[EarlyStopping("train/loss_epoch", patience=9)]).fit(
        net(), loader(32), ckpt_path=tmp_path / "4"
    )
    assert "dropped" not in capfd.readouterr().err
    quiet(max_epochs=2).fit(net(), loader(32), ckpt_path=tmp_path / "4")
    said = [line for line in capfd.readouterr().err.splitlines() if "dropped" in line]
    assert (
        len(said) == 1 and "EarlyStopping[monitor=train/loss_epoch, mode=min]" in said[0] and "SavesAt" not in said[0]
    )
