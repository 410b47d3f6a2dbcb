"""Freezing and unfreezing by epoch, under every strategy and over a restart."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR
from torch.optim.swa_utils import SWALR

import lockstep.lightning.pytorch as pl
from lockstep.callbacks import BackboneFinetuning, BaseFinetuning, Callback, LambdaCallback, ModelCheckpoint
from tests.trainer.toy import Net, distance, equal, loader, quiet, weights


class Pretrained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])


def fit(callback: Callback, *others: Callback, ckpt_path: Any = None, **options: Any) -> Pretrained:
    torch.manual_seed(0)
    module = Pretrained()
    options = {"precision": "64-true", "split_batches": True, "max_epochs": 4} | options
    quiet(**options, callbacks=[callback, *others]).fit(module, loader(), ckpt_path=ckpt_path)
    return module


def backbone() -> BackboneFinetuning:
    return BackboneFinetuning(1, backbone="net.0", backbone_initial_ratio_lr=0.2)


def by_hand() -> Pretrained:
    torch.manual_seed(0)
    module = Pretrained().double()
    module.net[0].requires_grad_(False)
    optimizer = module.configure_optimizers()
    for epoch in range(4):
        if epoch == 1:
            module.net[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module.net[0].parameters()), "lr": 2e-3})
        elif epoch > 1:
            optimizer.param_groups[1]["lr"] = min(2 * optimizer.param_groups[1]["lr"], 1e-2)
        for x, y in loader():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module.net(x.double()), y).backward()
            optimizer.step()
    return module


def test_a_backbone_joins_at_its_epoch() -> None:
    rates = Rates()
    module = fit(backbone(), rates)
    assert rates.rates == [[1e-2], [1e-2, 2e-3], [1e-2, 4e-3], [1e-2, 8e-3]]
    assert distance(weights(module), weights(by_hand())) <= 1e-13


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_a_strategy_changes_nothing(strategy: str) -> None:
    assert distance(weights(fit(backbone(), strategy=strategy, devices=2)), weights(by_hand())) <= 1e-12


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_resumed_run_is_the_whole_run(epochs: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    fit(backbone(), saving, enable_checkpointing=True, max_epochs=epochs)
    assert equal(weights(fit(backbone(), ckpt_path=tmp_path / "last")), weights(fit(backbone())))


class Beside(Pretrained):
    """A second optimizer has a group of the index of the backbone's, which it sets the rate of."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        for optimizer, of in zip(self.optimizers(), (logits, self.extra(logits.detach())), strict=True):
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.cross_entropy(of, batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.extra.weight]}, {"params": [self.extra.bias], "lr": 1e-3}]
        return [torch.optim.SGD([*self.net[2:].parameters()], lr=0.1), torch.optim.SGD(groups, lr=0.1)]


@pytest.mark.parametrize("epochs", [2, 4])
def test_the_rates_of_another_optimizer_stay(epochs: int, tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path, save_last=True, save_top_k=0)
    trainers = []
    for last, ckpt_path in ((epochs, None), (4, tmp_path / "last")):
        trainers.append(quiet(max_epochs=last, enable_checkpointing=True, callbacks=[backbone(), saving]))
        trainers[-1].fit(Beside(), loader(), ckpt_path=ckpt_path)
    first, second = ([group["lr"] for group in each.param_groups] for each in trainers[-1].optimizers)
    assert first == pytest.approx([0.1, 0.08]) and second == [0.1, 1e-3]


def test_batch_norm_may_stay_trainable() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    BaseFinetuning.freeze(layers)
    assert [p.requires_grad for p in layers.parameters()] == [False, False, True, True]
    BaseFinetuning.freeze(layers, train_bn=False)
    assert not any(p.requires_grad for p in layers.parameters())


def test_a_schedule_of_one_s_own() -> None:
    class LayerByLayer(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze([module.net[0], module.net[2]])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch in (1, 2):
                self.unfreeze_and_add_param_group(module.net[4 - 2 * epoch], optimizer)

    torch.manual_seed(0)
    start = weights(Pretrained().double())
    moved = [
        [not torch.equal(a, b) for a, b in zip(weights(fit(LayerByLayer(), max_epochs=n)), start, strict=True)][::2]
        for n in (1, 2, 3)
    ]
    assert moved == [[False, False, True], [False, True, True], [True, True, True]]


class FromNothing(BaseFinetuning):
    """Freezes all layers; one more joins in each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 0:
            self.make_trainable(module.net[4])
        elif epoch == 1:
            self.unfreeze_and_add_param_group(module.net[2], optimizer)


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("LambdaLR", lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch)),
        ("SWALR", lambda optimizer: SWALR(optimizer, 0.01)),
        ("LambdaLR", lambda optimizer: ChainedScheduler([LambdaLR(optimizer, lambda epoch: 0.9**epoch)])),
    ],
)
def test_a_scheduler_that_knows_no_rate_of_an_added_group_is_named(kind: str, make: Callable[[Any], Any]) -> None:
    class Scheduled(Pretrained):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.net[4].parameters(), lr=0.1)
            return [optimizer], [make(optimizer)]

    with pytest.raises(RuntimeError, match=f"{kind} has rates for 1 parameter groups, but its optimizer has 2"):
        quiet(max_epochs=3, callbacks=[FromNothing()]).fit(Scheduled(), loader())


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.ranks) for name in ("ddp", "fsdp")] + ["single"]
)
def test_a_model_that_is_frozen_at_first(strategy: str) -> None:
    class Last(Pretrained):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net[4].parameters(), lr=1e-2)

    torch.manual_seed(0)
    expected, module = Last().double(), Last()
    module.load_state_dict(expected.state_dict())
    options = {"precision": "64-true", "split_batches": True, "max_epochs": 2, "callbacks": [FromNothing()]}
    quiet(**options, strategy=strategy, devices=1 if strategy == "single" else 2).fit(module, loader())
    for frozen in (expected.net[0], expected.net[2]):
        frozen.requires_grad_(False)
    optimizer = expected.configure_optimizers()
    for epoch in range(2):
        if epoch == 1:
            expected.net[2].requires_grad_(True)
            optimizer.add_param_group({"params": list(expected.net[2].parameters()), "lr": 1e-3})
        for x, y in loader():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(expected.net(x.double()), y).backward()
            optimizer.step()
    assert distance(weights(module), weights(expected)) <= 1e-13


def test_a_function_of_a_lambda_callback_may_unfreeze() -> None:
    def unfreeze(trainer: Any, module: Any) -> None:
        module.net[4].requires_grad_(True)

    class Whole(Pretrained):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Whole().requires_grad_(False)
    before = weights(module)
    quiet(max_epochs=1, callbacks=[LambdaCallback(on_train_epoch_start=unfreeze)]).fit(module, loader())
    assert [not torch.equal(a, b) for a, b in zip(weights(module), before, strict=True)] == [False] * 4 + [True] * 2


def test_an_unknown_backbone_is_named() -> None:
    with pytest.raises(ValueError, match="Pretrained has no submodule 'encoder' to unfreeze"):
        fit(BackboneFinetuning(1, backbone="encoder"))


@pytest.mark.parametrize("base", [BaseFinetuning, pl.callbacks.BaseFinetuning])
def test_an_optimizer_that_holds_the_frozen_layers_is_named(base: Any) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)).requires_grad_(False)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="SGD already holds 2 of the parameters that are unfrozen now, so they get no"):
        base.unfreeze_and_add_param_group(layers[:2], optimizer, 0.01)
    layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(layers[1:].parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base.unfreeze_and_add_param_group(layers[:2], optimizer, 0.01)
        base.unfreeze_and_add_param_group(layers[:2], optimizer, 0.01)  # which are trained by now
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]


def test_a_callback_freezes_and_unfreezes_again_in_another_run() -> None:
    one = backbone()
    assert equal(weights(fit(one)), weights(fit(one)))


class Stepwise(BaseFinetuning):
    """Unfreezes a layer at one epoch only."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=2e-3)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [backbone, Stepwise])
@pytest.mark.parametrize("max_steps", [None, 10])  # of 7 in an epoch
@pytest.mark.parametrize("devices", [1, 2])
def test_a_second_fit_trains_what_had_joined(kind: Any, max_steps: int | None, devices: int) -> None:
    torch.manual_seed(0)
    module, rates = Pretrained(), Rates()
    trainer = quiet(max_epochs=2, callbacks=[kind(), rates], devices=devices, accelerator="cpu")
    trainer.max_steps = max_steps
    trainer.fit(module, loader())
    before = module.net[0].weight.detach().clone()
    trainer.max_epochs, trainer.max_steps = 4, None
    trainer.fit(module, loader())
    assert not torch.equal(module.net[0].weight, before)
    assert rates.rates[-1] == [1e-2, 8e-3 if kind is backbone else 2e-3]
