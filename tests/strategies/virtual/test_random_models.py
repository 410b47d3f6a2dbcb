"""Models, data and windows drawn at random: the same bits under every strategy that takes virtual ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer


class Drawn(Module):
    """Layers of random kinds and widths; the loss is a mean, or counts samples by weights."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.counts, self.sgd = draw.random() < 0.5, draw.random() < 0.5
        width, layers = 7, []
        for _ in range(draw.randint(1, 4)):
            out = draw.randint(1, 40)
            layers.append(nn.Linear(width, out, bias=draw.random() < 0.7))
            norm = draw.choice(["batch", "layer", "none"])
            layers += {"batch": [nn.BatchNorm1d(out)], "layer": [nn.LayerNorm(out)], "none": []}[norm]
            layers += [draw.choice([nn.ReLU, nn.GELU, nn.Tanh])(), nn.Dropout(draw.choice([0.0, 0.3]))]
            width = out
        self.net = nn.Sequential(*layers, nn.Linear(width, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("loss", losses.mean())
        if not self.counts:
            return losses.mean()
        weights = torch.rand(len(losses), dtype=losses.dtype)
        return Loss((losses * weights).sum(), weights.sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.sgd:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run(seed: int, strategy: str, devices: int) -> tuple[dict[str, Tensor], float]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = Drawn(draw)
    precision = draw.choice(["32-true", "64-true", "bf16-mixed"])
    shares, size, accumulate = draw.choice([4, 8]), draw.randint(2, 5), draw.randint(1, 3)
    x = torch.randn(draw.randint(100, 200), 7, dtype=torch.float64 if precision == "64-true" else torch.float32)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        virtual_ranks=shares,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=draw.choice([None, 0.1]),
        seed=seed,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = TensorDataset(x, torch.randint(3, (len(x),)))
    trainer.fit(module, DataLoader(data, size, shuffle=True, drop_last=True))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, float(trainer.callback_metrics["loss"])


def num_layers(seed: int) -> int:
    """How many stages the model of this seed can have."""
    return sum(any(True for _ in layer.parameters()) for layer in Drawn(random.Random(seed)).net)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(10))
def test_every_layout_has_the_bits_of_one_rank(seed: int) -> None:
    weights, loss = run(seed, "single", 1)
    layouts = [("ddp", 2), ("fsdp", 2), ("ddp", 4), ("ddp=2,fsdp=2", 4), ("pipeline", 2), ("ddp=2,pipeline=2", 4)]
    for strategy, devices in layouts + [("pipeline", 4)] * (num_layers(seed) > 3):
        found, also = run(seed, strategy, devices)
        assert also == loss, strategy
        assert [name for name in weights if not torch.equal(weights[name], found[name])] == [], strategy
