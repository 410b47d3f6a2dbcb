"""A training loop of your own on a strategy of Lockstep, without a Trainer: `python examples/by_hand.py ddp 2`."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.strategies import Strategy, build


def train(strategy: Strategy, epochs: int = 3) -> list[float]:
    """Every rank runs it; returns the loss of each optimizer step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    x = torch.randn(120, 6)
    data = TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())

    strategy.setup()
    wrapped = strategy.setup_module(model)
    optimizers = strategy.setup_optimizers(wrapped, {"main": torch.optim.AdamW(model.parameters(), lr=0.02)})
    optimizer = optimizers["main"]
    loader = strategy.shard_loader(DataLoader(data, 32), seed=0, shuffle=True, split=True)  # 32 samples over all ranks

    def step(batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    losses = []
    for epoch in range(epochs):
        for window in loader.windows(epoch):
            for micro_batch in window.micro_batches:
                micro_batch.batch = strategy.to_device(micro_batch.batch)
            result = strategy.forward_backward(wrapped, step, window)
            strategy.clip_gradients(wrapped, optimizer, 1.0)
            strategy.optimizer_step(wrapped, optimizer)
            optimizer.zero_grad()
            losses.append(result.loss or 0.0)
    strategy.teardown_module(wrapped)  # `model` is plain again and has the trained weights
    strategy.teardown()
    return losses


if __name__ == "__main__":
    name, devices = (sys.argv[1:] + ["single", "1"][len(sys.argv) - 1 :])[:2]
    chosen, reason = build(name, devices=int(devices), accelerator="cpu", precision="64-true")
    print(f"{name} on {devices}: loss {chosen.launch(train, chosen)[-1]:.12f}")
