"""What loaders, steps, hooks, schedulers and callbacks of users do, with virtual ranks: the same bits on two ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lockstep import Loss, Module, Trainer, split_parameters
from lockstep.callbacks import CSVLogger, EarlyStopping, GradientAccumulationScheduler, GradientNorm, WeightAveraging
from tests.strategies.optimizers.test_probe import Rule, by_global_norm

_made = torch.Generator().manual_seed(1)
X, Y = torch.randn(61, 6, generator=_made), torch.randint(3, (61,), generator=_made)
VAL = TensorDataset(torch.randn(29, 6, generator=_made), torch.randint(3, (29,), generator=_made))


class Scale(nn.Module):
    """A scalar parameter, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Net(Module):
    """`habit`: what it does that others do not."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit = habit
        self.net = nn.Sequential(
            nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Dropout(0.2), nn.ReLU(), nn.Linear(11, 3), Scale()
        )
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("last", torch.zeros(3), persistent=False)
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
        self.ranking = torchmetrics.AUROC(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.habit == "random and numpy":
            x = x * (1 + 0.1 * random.random()) + 0.01 * float(np.random.randn())
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, reduce_fx="max", on_epoch=True)
        self.log("samples", float(len(y)), reduce_fx="sum", on_epoch=True)
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        if self.habit == "buffers":
            self.center = 0.9 * self.center + 0.1 * logits.mean(0).detach() + 0.01 * self.last
            self.last.copy_(logits[0].detach())
        if self.habit == "no loss" and batch_idx % 3 == 1:
            return None
        if self.habit == "a loss each":
            return {"body": loss, "head": 2 * loss}
        if self.habit == "counts that are not whole":
            weights = torch.rand(len(y))
            return Loss((F.cross_entropy(logits, y, reduction="none") * weights).sum(), weights.sum())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.ranking.update(logits.softmax(-1), batch[1])
        self.log("ranking", self.ranking)
        self.log("val_loss", F.cross_entropy(logits, batch[1]) + 1e-3 * torch.rand(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.habit == "hooks":
            self.log("noise", torch.rand(()))
        if self.habit == "rates in tensors":
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.9
                group["betas"][0] *= 0.9

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.habit == "hooks":
            self.log("norm", self.grad_norm())

    def configure_optimizers(self) -> Any:
        if self.habit == "two optimizers":
            optimizers = [torch.optim.SGD(self.net[:-1].parameters(), lr=0.1)]
            return [*optimizers, torch.optim.Adam(self.net[-1].parameters(), lr=1e-2)]
        if self.habit == "a loss each":
            body, head = self.net[:4].parameters(), self.net[4:].parameters()
            return {"body": torch.optim.AdamW(body, lr=1e-2), "head": torch.optim.SGD(head, lr=0.1)}
        if self.habit == "muon":
            matrices, others = split_parameters(self)
            return {"muon": torch.optim.Muon(matrices, lr=0.05), "sgd": torch.optim.SGD(others, lr=0.1)}
        if self.habit == "global norm":
            return Rule(self.parameters(), normalized)
        if self.habit == "rates in tensors":
            groups = [{"params": self.parameters(), "betas": [0.9, 0.99]}]
            return torch.optim.AdamW(groups, lr=torch.tensor(1e-2), foreach=False)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.habit == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        return optimizer


class Hooked(Net):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.75)


def normalized(params: list[Tensor], group: dict[str, Any]) -> None:
    by_global_norm([p for p in params if p.grad is not None], group)


class Augmented(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + 0.1 * torch.randn(6) + random.random(), Y[index]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return ((x + 0.01 * torch.randn(6), y) for x, y in zip(X, Y, strict=True))


def some(samples: list[Any]) -> Any:
    """A collate function that skips some samples."""
    return torch.utils.data.default_collate([s for s in samples if s[1] != 2 or random.random() < 0.5] or samples[:2])


def shuffled(**options: Any) -> DataLoader:
    return DataLoader(TensorDataset(X, Y), **({"batch_size": 3, "shuffle": True, "drop_last": True} | options))


def weighted() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, 62.0), 64)


CASES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "augmented": ("random and numpy", lambda: DataLoader(Augmented(), 4, shuffle=True, drop_last=True), {}),
    "workers": ("", lambda: DataLoader(Augmented(), 4, shuffle=True, drop_last=True, num_workers=2), {}),
    "stream": ("", lambda: DataLoader(Stream(), 4, drop_last=True), {}),
    "stream in workers": ("", lambda: DataLoader(Stream(), 4, drop_last=True, num_workers=2), {}),
    "sampler": ("", lambda: DataLoader(Augmented(), 4, sampler=weighted()), {}),
    "batch sampler": ("", lambda: DataLoader(Augmented(), batch_sampler=BatchSampler(weighted(), 4, False)), {}),
    "batches": ("", lambda: [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 60, 4)], {}),
    "some samples": ("", lambda: DataLoader(Augmented(), 7, collate_fn=some, drop_last=True), {}),
    "split": ("", lambda: shuffled(batch_size=32), {"split_batches": True, "accumulate_grad_batches": 2}),
    "clipped by value": ("", shuffled, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "no loss": ("no loss", shuffled, {}),
    "counts": ("counts that are not whole", shuffled, {"gradient_clip_val": 0.3}),
    "plateau": ("plateau", shuffled, {"val_check_interval": 2}),
    "limits": ("", shuffled, {"limit_train_batches": 3, "limit_val_batches": 2}),
    "overfit": ("", shuffled, {"overfit_batches": 2}),
    "two optimizers": ("two optimizers", shuffled, {}),
    "a loss each": ("a loss each", shuffled, {}),
    "muon": ("muon", shuffled, {}),
    "global norm": ("global norm", shuffled, {}),
    "hooks": ("hooks", lambda: DataLoader(TensorDataset(X[:58], Y[:58]), 4), {"gradient_clip_val": 0.3}),
    "buffers": ("buffers", shuffled, {}),
    "rates in tensors": ("rates in tensors", shuffled, {}),
    "averaged": ("", shuffled, {"callbacks": WeightAveraging}),
    "norms": ("", shuffled, {"callbacks": GradientNorm}),
    "growing windows": ("", shuffled, {"callbacks": lambda: GradientAccumulationScheduler({0: 1, 1: 2})}),
    "stopped early": ("", shuffled, {"callbacks": lambda: EarlyStopping(monitor="val_loss", patience=0)}),
}
DAILY = [
    ("split", "ddp"),
    ("hooks", "fsdp"),
    ("a loss each", "fsdp"),
    ("augmented", "pipeline"),
    ("muon", "fsdp"),
    ("buffers", "fsdp"),
    ("rates in tensors", "ddp"),
]


def run(case: str, strategy: str, devices: int, folder: Path) -> tuple[dict[str, Tensor], str]:
    habit, loader, options = CASES[case]
    options = dict(options)
    torch.manual_seed(0)
    module = (Hooked if habit == "hooks" else Net)(habit)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        virtual_ranks=4,
        seed=3,
        max_epochs=2,
        logger=CSVLogger(),
        callbacks=[options.pop("callbacks")()] if "callbacks" in options else [],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader(), DataLoader(VAL, 3))
    (logged,) = folder.rglob("metrics.csv")
    return {name: value.clone() for name, value in module.state_dict().items()}, logged.read_text()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        pytest.param(case, strategy, marks=[] if (case, strategy) in DAILY else pytest.mark.slow)
        for case in CASES
        for strategy in ("ddp", "fsdp", "pipeline")
        if strategy != "pipeline"
        or case not in ("buffers", "global norm", "a loss each", "hooks")  # stages hold their own
    ],
)
def test_two_ranks_have_the_bits_of_one(case: str, strategy: str, tmp_path: Path) -> None:
    weights, logged = run(case, "single", 1, tmp_path / "one")
    others, also_logged = run(case, strategy, 2, tmp_path / "two")
    assert also_logged == logged
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.ranks
def test_stages_that_call_hooks_after_another_has_sent_its_message_continue(tmp_path: Path) -> None:
    """The last share of a step has no loss: one stage calls its hooks before the message of the step, one after it."""
    test_two_ranks_have_the_bits_of_one("no loss", "pipeline", tmp_path)
