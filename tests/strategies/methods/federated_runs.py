"""A population of uneven clients, a run on it, and the methods in plain Python."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer
from lockstep.strategies import Federated

SIZES = (1, 9, 4, 30, 2, 7, 1, 12)


def data(sizes: tuple[int, ...] = SIZES) -> TensorDataset:
    """Inputs, targets and the client of each sample, in float64; the samples of a client are not neighbors."""
    random = torch.Generator().manual_seed(1)
    clients = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    clients = clients[torch.randperm(len(clients), generator=random)]
    x = torch.randn(len(clients), 3, generator=random, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin() + clients[:, None] / 4, clients)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class Regression(Module):
    def __init__(self, lr: float = 0.1, momentum: float = 0.0, layers: nn.Module | None = None, weighted: bool = False):
        super().__init__()
        self.net = net() if layers is None else layers
        self.lr, self.momentum, self.weighted = lr, momentum, weighted
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, client = batch
        squares = (self.net(x) - y).square()
        self.log("loss", squares.mean())
        if self.weighted:  # of each sample as much as its client's number
            return Loss((squares[:, 0] * (client + 1)).sum(), (client + 1).sum())
        return squares.mean()

    def on_train_epoch_end(self) -> None:
        if self.trainer.world_size == 1:
            self.weights.append(flat(self.net))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.lr, momentum=self.momentum)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().clone().reshape(-1) for p in model.parameters()])


def bits(model: nn.Module) -> str:
    values = (value.contiguous().view(-1).view(torch.uint8).numpy() for value in model.state_dict().values())
    return hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()


def fit(
    model: Module, devices: int = 1, *, epochs: int = 4, batch_size: int = 4, resume: Any = None, **options: Any
) -> Trainer:
    """A federated run on `data()`; all other options are the Trainer's."""
    names = ("clients", "fraction", "local_epochs", "server", "server_lr", "state_dir")
    federated = {"clients": 2, "fraction": 0.5} | {name: options.pop(name) for name in names if name in options}
    shuffle, dataset = options.pop("shuffle", True), options.pop("dataset", None) or data()
    quiet = {
        "seed": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    trainer = Trainer(strategy=Federated(**federated), devices=devices, max_epochs=epochs, **(quiet | options))
    trainer.fit(model, DataLoader(dataset, batch_size, shuffle=shuffle), ckpt_path=resume)
    return trainer


def simulated(server: str, rounds: list[list[int]], lr: float, momentum: float, epochs: int) -> Iterator[Tensor]:
    """The papers' algorithms on `data()`, in batches of 4 in the dataset's order: the weights after each round."""
    name, _, mu = server.partition("=")
    x, y, owner = data().tensors
    model, loss = net(), nn.MSELoss()
    weights, size = flat(model), 4
    zeros = torch.zeros_like(weights)
    m, v, control, controls = zeros, zeros + 1e-3**2, zeros, dict.fromkeys(range(len(SIZES)), zeros)

    def gradient(at: Tensor, rows: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at, model.parameters())
        return torch.cat(
            [g.reshape(-1) for g in torch.autograd.grad(loss(model(x[rows]), y[rows]), model.parameters())]
        )

    for participants in rounds:
        moved, total, changes = zeros, 0, {}
        for client in participants:
            samples = (owner == client).nonzero()[:, 0]
            local, velocity, steps = weights, None, 0
            for rows in [rows for _ in range(epochs) for rows in samples.split(size)]:
                g = gradient(local, rows)
                if name == "fedprox":
                    g = g + float(mu) * (local - weights)
                if name == "scaffold":
                    g = g - controls[client] + control
                velocity = g if velocity is None else momentum * velocity + g
                local, steps = local - lr * velocity, steps + 1
            if name == "scaffold":  # option II
                changes[client] = -control + (weights - local) / (steps * lr)
            moved, total = moved + len(samples) * (local - weights), total + len(samples)
        mean = moved / total
        if name == "fedadam":
            m, v = 0.9 * m + 0.1 * mean, 0.99 * v + 0.01 * mean**2
            weights = weights + 0.01 * m / (v.sqrt() + 1e-3)
        else:
            weights = weights + mean
        for client, change in changes.items():
            control = control + change * SIZES[client] / sum(SIZES)
            controls[client] = controls[client] + change
        yield weights
