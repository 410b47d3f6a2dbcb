"""What the tests of the parameter server train, and the algorithm in plain Python."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import Loss, Module, Trainer
from lockstep.strategies.methods.parameter_server.schedule import Schedule


class Rows(Dataset[Any]):
    """Samples that know their number."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(number, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 4, (number,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


class Toy(Module):
    """`slow`: seconds that the last rank takes more for a batch. `seen` has (clock, sample) of this rank."""

    def __init__(
        self, optimizer: str = "AdamW", slow: float = 0.0, tokens: bool = False, drop: float = 0.0, norm: bool = False
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 4))
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.register_buffer("steps", torch.zeros(()))
        self.optimizer, self.slow, self.tokens = optimizer, slow, tokens
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        if self.slow and self.trainer.global_rank == self.trainer.world_size - 1:
            time.sleep(self.slow)
        self.steps = self.steps + 1  # another tensor in each step
        self.seen += [[self.trainer.global_step, i] for i in index.tolist()]
        losses = F.cross_entropy(self.net(self.norm(x)), y, reduction="none")
        self.log("loss", losses.mean())
        if self.tokens:
            return Loss((losses * (x[:, 0] > 0)).sum(), (x[:, 0] > 0).sum())
        return losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(self.norm(batch[0])), batch[1]))

    def configure_optimizers(self) -> Any:
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        made = getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.05, **options)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 7, 0.7)
        return {"optimizer": made, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def fit(strategy: Any, folder: Path, devices: int = 2, samples: int = 90, **options: Any) -> tuple[Toy, Trainer]:
    model = {k: options.pop(k) for k in ("optimizer", "slow", "tokens", "drop", "norm") if k in options}
    ckpt_path = options.pop("ckpt_path", None)
    torch.manual_seed(0)
    module = Toy(**model)
    options = {"max_epochs": 2, "precision": "64-true", "enable_checkpointing": False, **options}
    trainer = Trainer(
        strategy=strategy, devices=devices, seed=3, enable_progress_bar=False, default_root_dir=str(folder), **options
    )
    loaders = DataLoader(Rows(samples), 4, shuffle=True), DataLoader(Rows(30), 4)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return module, trainer


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())


def plain(schedule: Schedule, windows: list[list[list[int]]], clip: float) -> Toy:
    """Stale-synchronous SGD with momentum by the paper: every version of the parameters is kept, each batch of a clock
    computed on the one that the schedule says, and the mean over the clock applied. For one server."""
    torch.manual_seed(0)
    model = Toy("SGD").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data, versions = Rows(150), [[p.detach().clone() for p in model.parameters()]]
    for clock, batches in enumerate(windows):
        total, sums = sum(map(len, batches)), [torch.zeros_like(p) for p in model.parameters()]
        for share, samples in enumerate(batches):
            if not samples:
                continue
            old = versions[schedule.of(clock * schedule.workers + share)[0]]
            gradients = _gradients(model, old, data.x[samples], data.y[samples])
            for into, gradient in zip(sums, gradients, strict=True):
                into += gradient * len(samples) / total
        for parameter, newest, gradient in zip(model.parameters(), versions[-1], sums, strict=True):
            parameter.data.copy_(newest)
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.param_groups[0]["lr"] = 0.05 * 0.7 ** (clock // 7)
        optimizer.step()
        versions.append([p.detach().clone() for p in model.parameters()])
    return model


def _gradients(model: Toy, weights: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    for parameter, value in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(value)
    return torch.autograd.grad(F.cross_entropy(model.net(x), y), list(model.parameters()))
