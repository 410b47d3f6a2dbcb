"""Shares as the microbatches of a pipeline: what its stages take along, and what is refused there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.strategies.virtual.stage_links import _copied, _refuse_overlap
from lockstep.strategies.virtual.streams import Streams

_made = torch.Generator().manual_seed(1)
X, Y = torch.randn(100, 8, generator=_made), torch.randint(3, (100,), generator=_made)


def test_streams_continue_where_another_rank_left_them() -> None:
    streams, others = Streams(), Streams()
    streams.named["augment"] = torch.Generator().manual_seed(3)
    random.gauss(0, 1)  # leaves the second of a pair
    np.random.randn()

    def drawn(held: Streams) -> list[float]:
        numbers = [random.gauss(0, 1), random.random(), *np.random.randn(3), float(torch.rand(()))]
        return [*numbers, float(torch.rand((), generator=held.named["augment"]))]

    state = streams.state()
    expected = drawn(streams)
    assert not torch.equal(streams.state(), state)
    others.named["unknown there"] = torch.Generator()
    others.restore(state)
    assert torch.equal(others.state(), state) and drawn(others) == expected


def test_tensors_get_their_strides_back() -> None:
    whole = torch.arange(24.0).reshape(2, 3, 4)
    views = [whole, whole.transpose(0, 2), whole.contiguous().as_strided((2, 3), (12, 4)), whole[:1].expand(5, 3, 4)]
    views += [whole.sum().expand(3, 2), whole[..., None], whole.permute(1, 0, 2)[:, :1]]
    for tensor in views:
        _refuse_overlap(tensor)
        found = _copied(tensor.contiguous(), tensor.stride())
        assert found.stride() == tensor.stride() and torch.equal(found, tensor)
    with pytest.raises(RuntimeError, match="overlaps itself"):
        _refuse_overlap(torch.arange(9.0).unfold(0, 3, 1))


class Flipped(nn.Module):
    """A linear layer whose input, output or both are transposed in memory."""

    def __init__(self, width: int, out: int, before: bool, after: bool) -> None:
        super().__init__()
        self.linear, self.before, self.after = nn.Linear(width, out), before, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x.t() if self.before else x)
        return x.t() if self.after else x


class Summed(nn.Module):
    """Its gradient repeats one element."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) + self.bias


class Sometimes(nn.Module):
    """Skips itself at random, by Python, and draws from numpy and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            return x
        return x + F.dropout(self.linear(x * (1 + 0.1 * float(np.random.randn()))), 0.3, self.training)


class Four(nn.Module):
    """Four linear layers; `order` names those that are called, of which "b", "c" share their weights with "a"."""

    def __init__(self, order: str = "abcd", tied: str = "", noise: bool = False, skip: bool = False) -> None:
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(8, 8))
        for name in tied:
            getattr(self, name).weight = self.a.weight
        self.order, self.noise, self.skip = order, noise, skip

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for name in self.order:
            noise = torch.rand(8) if self.noise else 1.0
            x = getattr(self, name)(F.relu(x) * noise)
            first = x if name == "a" else first
        return (x + first if self.skip else x)[:, :3]


class Tracking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.linear(x)


def noisy_backward() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] + 0.01 * torch.randn_like(inputs[0]),))
    return nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 3))


def linears(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 3))


SAME: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "strided": (lambda: nn.Sequential(Flipped(8, 16, False, True), Flipped(16, 8, True, False), *linears()()), 4),
    "summed": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Summed()), 2),
    "stochastic depth": (lambda: nn.Sequential(nn.Linear(8, 8), *(Sometimes() for _ in range(3)), nn.Linear(8, 3)), 4),
    "tied on three stages": (lambda: Four(tied="bc"), 4),
    "called twice": (lambda: Four("abbcd"), 2),
    "a frozen stage": (lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), *linears()()), 2),
}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "noise between layers": (lambda: Four(noise=True), "draws random numbers between layers of a stage"),
    "tied and called twice": (lambda: Four("aabcd", tied="c"), "share is used several times on one of them"),
    "skip": (lambda: Four(skip=True), "is used on a later stage than the next layer's"),
    "a buffer": (lambda: nn.Sequential(Tracking(), nn.Linear(8, 3)), "changes net.0.mean in place"),
    "noise in backward": (noisy_backward, "a backward, or on_after_backward, draws random numbers"),
}


class Run(Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if random.random() < 0.2:
            return None
        loss = F.cross_entropy(self.net(batch[0]) + 0.01 * torch.randn(3), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WithHook(Run):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(batch_idx))


def trained(
    make: Callable[[], nn.Module], strategy: str, devices: int, kind: type[Run] = Run
) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    module = kind(make())
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        virtual_ranks=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        seed=3,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(X, Y), 3, shuffle=True))
    return {name: value.clone() for name, value in module.state_dict().items()}, float(trainer.callback_metrics["loss"])


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", SAME)
def test_stages_have_the_bits_of_one_process(case: str) -> None:
    make, devices = SAME[case]
    weights, loss = trained(make, "single", 1)
    others, also = trained(make, "pipeline", devices)
    assert also == loss
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []


@pytest.mark.ranks
def test_users_hooks_of_a_batch_run_beside_optimizers_of_stages() -> None:
    (weights, loss), (others, also) = (
        trained(SAME["summed"][0], strategy, devices, WithHook)
        for strategy, devices in (("single", 1), ("pipeline", 2))
    )
    assert also == loss and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pipeline_cannot_repeat_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(RuntimeError, match=message):
        trained(make, "pipeline", 2)
