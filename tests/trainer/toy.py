"""A small classifier and its data, shared by the tests of the Trainer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer


class Net(Module):
    """A perceptron with optional dropout; logs loss and counts."""

    def __init__(self, width: int = 16, dropout: float = 0.0, lr: float = 1e-2, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits, y))
        self.log("val/acc", (logits.argmax(1) == y).to(logits.dtype).mean())

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=self.hparams.lr)


def data(n: int = 50, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator))


def loader(n: int = 50, batch_size: int = 8, shuffle: bool = False, **options: Any) -> DataLoader:
    return DataLoader(data(n), batch_size=batch_size, shuffle=shuffle, **options)


def net(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def quiet(**options: Any) -> Trainer:
    """A Trainer that writes and shows nothing unless asked."""
    return Trainer(
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
        }
        | options
    )


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bitwise."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Largest difference relative to the largest weight."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(one, other, strict=True))
