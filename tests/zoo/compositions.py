"""Random compositions of what users do to a model, a loader and a Trainer, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Loss, Module, Trainer
from lockstep.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, WeightAveraging

HABITS = (
    *("shared", "frozen", "unfreezes", "freezes", "gradient hook", "forward hook", "metric", "by step", "by epoch"),
    *("logs", "weighted", "dict", "norm", "scales gradients", "clamps", "halves rates", "groups", "noise"),
)
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True, eps=1e-3),
}
LOADERS = ("in order", "shuffled", "without the rest", "weighted", "own batches")


@dataclass(frozen=True)
class Composition:
    seed: int
    habits: frozenset[str]
    optimizer: str
    scheduler: str | None
    loader: str
    batch_size: int
    samples: int
    callbacks: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Outcome:
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    steps: int

    def differences(self, other: Outcome, bound: float) -> list[str]:
        """What differs by more than `bound`, by name."""
        found = [] if self.steps == other.steps else [f"steps {self.steps} {other.steps}"]
        for name, value in self.weights.items():
            difference = float((value - other.weights[name]).abs().max())
            found += [f"{name} {difference:.1e}"] * (difference > bound)
        if self.metrics.keys() != other.metrics.keys():
            found.append(f"logged {sorted(self.metrics.keys() ^ other.metrics.keys())}")
        for name in self.metrics.keys() & other.metrics.keys():
            one, two = self.metrics[name], other.metrics[name]
            found += [f"{name} {one} {two}"] * (abs(one - two) > bound * 10)
        return found


def draw(seed: int) -> Composition:
    draws = random.Random(seed)
    habits = {habit for habit in HABITS if draws.random() < 0.15}
    options: dict[str, Any] = {"max_epochs": draws.choice([2, 3])}
    if draws.random() < 0.5:
        options["accumulate_grad_batches"] = draws.choice([2, 3])
    if draws.random() < 0.4:
        options |= {"gradient_clip_val": 0.3, "gradient_clip_algorithm": draws.choice(["norm", "value"])}
    if draws.random() < 0.25:
        options["limit_train_batches"] = draws.choice([3, 0.7])
    if draws.random() < 0.5:
        options["val_check_interval"] = draws.choice([1, 2, 0.5])
    callbacks = [name for name in ("average", "mean", "stopping") if draws.random() < 0.15]
    if draws.random() < 0.15 and "accumulate_grad_batches" not in options:
        callbacks.append("accumulation")
    return Composition(
        seed,
        frozenset(habits - ({"freezes"} if "unfreezes" in habits else set())),
        draws.choice(list(OPTIMIZERS)),
        draws.choice([None, "step", "epoch", "plateau"]),
        draws.choice(LOADERS),
        draws.choice([4, 5, 6, 8]),
        draws.choice([24, 30, 37, 41, 52]),
        tuple(callbacks),
        tuple(options.items()),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Composed(Module):
    """Validation draws random numbers; with `dropout` training does, too."""

    def __init__(self, composition: Composition, dropout: float) -> None:
        super().__init__()
        self.composition, self.habits = composition, composition.habits
        torch.manual_seed(composition.seed)
        blocks = [Block() for _ in range(4)]
        if "shared" in self.habits:
            blocks[2] = blocks[1]
        self.net = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Dropout(dropout), nn.Linear(16, 3))
        self.accuracy = MulticlassAccuracy(3) if "metric" in self.habits else None
        if "frozen" in self.habits:
            self.net[1].requires_grad_(False)
        if "unfreezes" in self.habits:
            self.net[2].requires_grad_(False)
        if "gradient hook" in self.habits:
            self.net[-1].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        if "forward hook" in self.habits:
            self.net[2].register_forward_hook(lambda module, args, output: output * 1.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        loss = F.cross_entropy(output, batch[1])
        loss = loss * (1 + 0.1 * (self.global_step % 3)) if "by step" in self.habits else loss
        loss = loss * (1 + 0.1 * self.current_epoch) if "by epoch" in self.habits else loss
        if "logs" in self.habits:
            self.log("train/loss", loss, on_step=True, on_epoch=True)
            self.log("train/max", output.max(), reduce_fx="max", on_step=False, on_epoch=True)
        if self.accuracy is not None:
            self.accuracy(output, batch[1])
            self.log("train/accuracy", self.accuracy, on_step=False, on_epoch=True)
        if "weighted" in self.habits:
            weight = (batch[1] > 0).double()
            return Loss((F.cross_entropy(output, batch[1], reduction="none") * weight).sum(), weight.sum())
        return {"loss": loss, "number": len(batch[1])} if "dict" in self.habits else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.randn(2)
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.habits & {"unfreezes", "freezes"}:
            self.net[2].requires_grad_("unfreezes" in self.habits)
        if self.current_epoch == 1 and "halves rates" in self.habits:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if "norm" in self.habits:
            self.log("norm", self.grad_norm())
        if self.habits & {"scales gradients", "noise"}:
            with self.trainer.whole(self):
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        noise = torch.randn_like(parameter.grad) * 0.01 if "noise" in self.habits else 0.0
                        parameter.grad.mul_(0.9).add_(noise)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if "clamps" in self.habits:
            with self.trainer.whole(self), torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": list(self.net[:-1].parameters())}]
        if "groups" in self.habits:
            groups.append({"params": list(self.net[-1].parameters()), "lr": 1e-2})
        else:
            groups[0]["params"] += self.net[-1].parameters()
        optimizer, kinds = OPTIMIZERS[self.composition.optimizer](groups), torch.optim.lr_scheduler
        if self.composition.scheduler is None:
            return optimizer
        schedule: dict[str, Any] = {"scheduler": kinds.ExponentialLR(optimizer, 0.7)}
        if self.composition.scheduler == "step":
            schedule = {"scheduler": kinds.CosineAnnealingLR(optimizer, 12), "interval": "step"}
        if self.composition.scheduler == "plateau":
            schedule = {"scheduler": kinds.ReduceLROnPlateau(optimizer, patience=0), "monitor": "val/loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def samples(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def loader_of(composition: Composition) -> DataLoader:
    data, size, kind = samples(composition.samples), composition.batch_size, composition.loader
    if kind == "own batches":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), size, False))
    if kind == "weighted":
        weights = [1.0 + i % 3 for i in range(composition.samples)]
        return DataLoader(data, size, sampler=WeightedRandomSampler(weights, composition.samples))
    return DataLoader(data, size, shuffle=kind != "in order", drop_last=kind == "without the rest")


def callbacks_of(composition: Composition) -> list[Callback]:
    kinds: dict[str, Callback] = {
        "average": WeightAveraging(decay=0.9),
        "mean": WeightAveraging(decay=None),
        "stopping": EarlyStopping("val/loss", patience=2),
        "accumulation": GradientAccumulationScheduler({0: 1, 1: 2}),
    }
    names = composition.callbacks
    return [kinds[name] for name in names if name != "mean" or "average" not in names]


def train(
    composition: Composition,
    folder: Path,
    strategy: str = "single",
    devices: int = 1,
    dropout: float = 0.0,
    ckpt_path: Path | None = None,
) -> Outcome:
    """Train with a checkpoint after each step, for compositions of odd seeds, or after each validation."""
    every = 1 if composition.seed % 2 else None
    saves = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=every)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision="64-true",
        split_batches=True,
        seed=composition.seed,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks_of(composition), saves],
        **dict(composition.options),
    )
    module = Composed(composition, dropout)
    trainer.fit(module, loader_of(composition), DataLoader(samples(19), 4), ckpt_path=ckpt_path)
    weights = {name: value.detach().double().clone() for name, value in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Outcome(weights, metrics, trainer.global_step)
