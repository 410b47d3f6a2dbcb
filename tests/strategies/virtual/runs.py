"""Runs whose every bit is compared: weights, optimizer state, logged values, predictions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import Loss, Module, Trainer
from lockstep.callbacks import CSVLogger, ModelCheckpoint
from lockstep.trainer.checkpoint.store import Checkpoint

VIRTUAL_RANKS = 4


class Noisy(Dataset):
    """Samples that draw noise where they are read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn_like(self.x[index]), self.y[index]


class Classifier(Module):
    """BatchNorm, dropout, noise in the step, losses that count, metrics in training and validation."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(),
            nn.Linear(80, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Dropout(0.3), nn.Linear(13, 3),
        )  # fmt: skip
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.mean = torchmetrics.MeanMetric()
        self.ranking = torchmetrics.AUROC(task="multiclass", num_classes=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + 0.1 * torch.randn(x.shape, generator=self.random_stream("augment"), dtype=x.dtype)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.mean(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if batch_idx % 2:
            kept = y < 2
            return Loss(F.cross_entropy(logits[kept], y[kept], reduction="sum"), int(kept.sum()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.ranking.update(logits.float().softmax(-1), batch[1])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        self.log("val_ranking", self.ranking)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Writer(Module):
    """A transformer with dropout and tied embeddings, whose loss counts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(17, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        tokens, counted = batch
        logits = self(tokens[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * counted
        self.log("loss", losses.sum() / counted.sum(), batch_size=float(counted.sum()))
        return Loss(losses.sum(), counted.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def images(precision: str) -> tuple[Noisy, TensorDataset]:
    made = torch.Generator().manual_seed(5)
    x = torch.randn(57 + 22, 1, 6, 6, generator=made, dtype=torch.float64 if precision == "64-true" else torch.float32)
    y = torch.randint(3, (len(x),), generator=made)
    return Noisy(x[:57], y[:57]), TensorDataset(x[57:], y[57:])


def texts(precision: str) -> TensorDataset:
    made = torch.Generator().manual_seed(6)
    counted = (torch.rand(45, 7, generator=made) < 0.8).to(torch.float64 if precision == "64-true" else torch.float32)
    return TensorDataset(torch.randint(17, (45, 8), generator=made), counted)


def train(
    strategy: str,
    devices: int,
    folder: Path,
    *,
    net: str = "classifier",
    precision: str = "32-true",
    accumulate: int = 1,
    max_steps: int = 7,
    resume: str | None = None,
    virtual_ranks: int = VIRTUAL_RANKS,
    **options: Any,
) -> dict[str, str]:
    """Train for some steps of about five an epoch; return a digest of each kind of what came out."""
    torch.manual_seed(0)
    model = Writer() if net == "writer" else Classifier("sgd" if accumulate > 1 else "adamw")
    data = texts(precision) if net == "writer" else images(precision)[0]
    validated = None if net == "writer" else DataLoader(images(precision)[1], 3)
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, monitor=None)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        virtual_ranks=virtual_ranks,
        precision=precision,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        seed=3,
        logger=CSVLogger(),
        log_every_n_steps=2,
        callbacks=[saver],
        default_root_dir=folder,
        enable_progress_bar=False,
        num_sanity_val_steps=1,
        **options,
    )
    loader = DataLoader(data, 3, shuffle=True, drop_last=False)
    trainer.fit(model, loader, validated, ckpt_path=resume)
    last = folder / "last"
    trainer.save_checkpoint(last)
    saved = Checkpoint.open(last)
    found = {"weights": hashlib.sha256(), "optimizer": hashlib.sha256()}
    for name in sorted(saved.names()):
        if not name.startswith("ranks/"):
            found["weights" if name.startswith("model") else "optimizer"].update(
                name.encode() + saved.read(name).reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    digests = {kind: digest.hexdigest() for kind, digest in found.items()}
    digests["epoch"] = repr(sorted((name, float(value)) for name, value in trainer.callback_metrics.items()))
    if resume is None:
        (logged,) = folder.rglob("metrics.csv")
        digests["logged"] = logged.read_text()
    if validated is not None:
        predicted = trainer.predict(model, DataLoader(images(precision)[1], 3))
        digests["predicted"] = hashlib.sha256(torch.cat(predicted).float().numpy().tobytes()).hexdigest()
    return digests
