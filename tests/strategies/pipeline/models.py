"""A model whose blocks share values and which has a forward of its own, and its training under a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lockstep import Module, Trainer
from tests.trainer.toy import quiet

WIDTH, LENGTH, TOKENS = 8, 6, 11


class Block(nn.Module):
    """Takes what goes from layer to layer, what all layers share, and what follows from the inputs alone."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.film = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, c: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * mask[..., None] + self.film(c)


class Net1(nn.Module):
    """All that a forward of its own may do: parameters beside layers, values that every block shares, a dict as
    output."""

    def __init__(self, blocks: int = 5, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.position, self.shift = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH))
        self.token, self.condition = nn.Embedding(TOKENS, WIDTH), nn.Linear(3, WIDTH)
        self.register_buffer("window", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, *, condition: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.token(tokens)
        x += self.position[: tokens.shape[1]]
        _, _, width = x.shape
        assert width == WIDTH and x.device == tokens.device
        c = self.condition(condition)[:, None] + self.shift
        mask = mask @ self.window.T / LENGTH
        for block in self.blocks:
            x = checkpoint(block, x, c, mask, use_reentrant=False) if self.checkpointed else block(x, c, mask)
            x = x * 0.9
        return {"logits": self.head(F.relu(self.norm(x))), "size": x.pow(2).mean()}


class Model(Module):
    """Batches are dicts of lists of dicts; layers are named in `configure_optimizers`; a frozen layer and a buffer lie
    outside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": Net1(**options)})
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def run(self, batch: Any) -> Any:
        assert len(batch["names"]) == len(batch["tokens"])
        return self.inner["net"](batch["tokens"], condition=batch["nested"][0], mask=batch["nested"][1]["mask"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", float(len(batch["tokens"])), reduce_fx="sum", on_epoch=True, on_step=False)
        output = self.run(batch)
        loss = F.cross_entropy(output["logits"].flatten(0, 1), batch["tokens"].flatten()) + 0.01 * output["size"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch["names"])), reduce_fx="sum", on_epoch=True, on_step=False)
        return {"loss": loss, "logits": output["logits"]}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["logits"].shape == (len(batch["tokens"]), LENGTH, TOKENS) and outputs["loss"].dim() == 0
        self.log("hook", float(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.run(batch)["logits"].pow(2).mean())

    def on_validation_epoch_end(self) -> None:
        batch = self.trainer.strategy.to_device(next(iter(data())))
        self.log("outside of a step", self.run(batch)["logits"][0].sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run(batch)["logits"]

    def configure_optimizers(self) -> Any:
        net = self.inner["net"]
        rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
        groups = [
            {"params": [p for p in rest if p.dim() > 1]},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
            {"params": net.head.parameters(), "lr": 1e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


class Items(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, TOKENS, (22, LENGTH), generator=generator)
        self.conditions, self.masks = (
            torch.randn(22, 3, generator=generator),
            (torch.rand(22, LENGTH, generator=generator) > 0.2).float(),
        )

    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> Any:
        return {"tokens": self.tokens[i], "nested": [self.conditions[i], {"mask": self.masks[i]}], "names": f"item {i}"}


def data(shuffle: bool = False) -> DataLoader:
    return DataLoader(Items(), 8, shuffle=shuffle)


def train(
    strategy: Any,
    devices: int,
    ckpt_path: Path | None = None,
    save_to: Path | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Model, Trainer]:
    """Two epochs of three windows, the last of 6 samples."""
    torch.manual_seed(0)
    module = Model(**(model or {}))
    trainer = quiet(
        **{
            "strategy": strategy,
            "devices": devices,
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "precision": "64-true",
            "seed": 1,
            "gradient_clip_val": 1.0,
        }
        | options
    )
    if save_to is not None:
        module.on_train_end = SaveAtEnd(save_to, module)  # type: ignore[method-assign,assignment]
    trainer.fit(module, data(shuffle=True), data(), ckpt_path=ckpt_path)
    return module, trainer


class SaveAtEnd:
    """A hook that travels to the ranks."""

    def __init__(self, path: Path, module: Module) -> None:
        self.path, self.module = path, module

    def __call__(self) -> None:
        self.module.trainer.save_checkpoint(self.path)
