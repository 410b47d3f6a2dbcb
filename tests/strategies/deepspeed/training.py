"""A training that DeepSpeed's stages are compared with one process in, and its losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, LRWarmup
from lockstep.strategies import DeepSpeed, Strategy
from tests.strategies.odd import Odd, tokens
from tests.trainer.toy import quiet

CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""ZeRO-3 cuts the smallest parameters too, which it keeps whole by default."""
STAGES = {1: lambda: DeepSpeed(stage=1), 2: DeepSpeed, 3: lambda: DeepSpeed(stage=3, config=CUT_ALL)}


class Losses(Callback):
    """The loss of every step over all ranks, brought back to the caller."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > len(self.seen):
            self.seen.append(
                float(
                    trainer.callback_metrics[
                        "train/loss_step" if "train/loss_step" in trainer.callback_metrics else "train/loss"
                    ]
                )
            )

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Scheduled(Odd):
    """Two groups with rates and decays of their own, and a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.core.temperature = nn.Parameter(torch.full((1,), 1.5))  # DeepSpeed sends no parameter without dimensions

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() < 2], "lr": 0.01, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.02, eps=1e-6)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
                "interval": "step",
            },
        }


def scheduled() -> Scheduled:
    torch.manual_seed(0)
    return Scheduled()


def train(strategy: str | Strategy, module: Module, devices: int = 2, **options: Any) -> tuple[list[float], Trainer]:
    """Uneven micro-batches, a rank of padding at the end, warmup, schedule, clipping and validation."""
    losses, path = Losses(), options.pop("ckpt_path", None)
    options = {
        "max_epochs": 2,
        "seed": 1,
        "split_batches": True,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
    } | options
    trainer = quiet(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        callbacks=[losses, LRWarmup(steps=3), *options.pop("callbacks", [])],
        **options,
    )
    trainer.fit(module, tokens(21, batch_size=8), tokens(7), ckpt_path=path)
    return losses.seen, trainer
