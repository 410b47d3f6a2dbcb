"""A small regression whose losses count unevenly, and the papers' algorithms on it in plain Python."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer


class Regression(Module):
    """Records the batches that it gets: with several learners on one rank theirs in turn."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.make = make
        self.seen: list[Any] = []
        self.at_steps: list[list[Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        self.seen.append(batch)
        return loss(self.net, batch)

    def on_validation_start(self) -> None:
        self.at_steps.append([p.detach().clone() for p in self.parameters()])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


class Fading(torch.optim.SGD):
    """Keeps a rate in its groups and a count in an attribute, which its steps change."""

    def __init__(self, parameters: Any, lr: float = 0.7) -> None:
        super().__init__(parameters, lr)
        self.number = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.number += 1
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.9 / self.number


class Strange(Fading):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] = {"number": 1}  # type: ignore[index]
        super().step()


def loss(net: nn.Module, batch: Any) -> Loss:
    x, y, weight = batch
    return Loss(((net(x) - y).square() * weight).sum(), weight.sum())


def data(samples: int = 48) -> TensorDataset:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=made, dtype=torch.float64)
    weight = torch.randint(1, 7, (samples, 1), generator=made).double()
    return TensorDataset(x, x.sum(1, keepdim=True).sin(), weight)


def train(strategy: Any, make: Callable[[Any], Any], *, batch_size: int = 8, **options: Any) -> Regression:
    module = Regression(make)
    settings = {"devices": 1, "max_steps": 12, "logger": False, "enable_checkpointing": False} | options
    trainer = Trainer(
        strategy=strategy, **settings, split_batches=True, precision="64-true", seed=1, accelerator="cpu",
        enable_progress_bar=False, num_sanity_val_steps=0,
    )  # fmt: skip
    validated = DataLoader(data(2), 2) if "val_check_interval" in options else None
    trainer.fit(module, DataLoader(data(), batch_size, shuffle=True), validated)
    return module


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(one, other, strict=True))


def simulate(
    batches: Sequence[Any],
    learners: int,
    make: Callable[[Any], torch.optim.Optimizer],
    make_outer: Callable[[Any], torch.optim.Optimizer],
    period: int,
    *,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
    start: int = 0,
    ends: Sequence[int] = (),
) -> list[list[Tensor]]:
    """DiLoCo and Streaming DiLoCo in one process: the common weights at each of `ends`, which end a round early:
    by the mean of the learners' weights, without the outer optimizer.

    The first `start` steps are those of one learner on all samples, from whose weights and optimizer all then start.
    `batches` are those of step 0 of all learners, then of step 1, and so on. A fragment is a list of parameters.
    """
    common = Regression(make).net
    nets = [copy.deepcopy(common) for _ in range(learners)]
    inner = [make(net.parameters()) for net in nets]
    weights = list(common.parameters())
    outer = make_outer(weights)
    sizes, seen, parts = [p.numel() for p in weights], 0, [[] for _ in range(fragments)]  # type: ignore[var-annotated]
    for i, size in enumerate(sizes):
        parts[seen * fragments // sum(sizes)].append(i)
        seen += size
    counted = [[0.0] * learners for _ in range(fragments)]
    flying: list[tuple[int, int, list[Tensor] | None]] = []
    found, position = [], 0

    def send(part: int) -> list[Tensor] | None:
        total, mine = sum(counted[part]), counted[part]
        counted[part] = [0.0] * learners
        moved = [[weights[i] - list(net.parameters())[i] for i in parts[part]] for net in nets]
        if not total:
            return None
        weighted = [[c / total * tensor for tensor in tensors] for c, tensors in zip(mine, moved, strict=True)]
        return [torch.stack(tensors).sum(0) for tensors in zip(*weighted, strict=True)]

    def apply(part: int, means: list[Tensor] | None, keep: float, early: bool = False) -> None:
        outer.zero_grad()
        for i, mean in zip(parts[part], means or (), strict=False):
            if early:
                weights[i] -= mean
            else:
                weights[i].grad = mean
        outer.step()
        for net in nets:
            for i in parts[part]:
                own = list(net.parameters())[i]
                own.copy_(keep * own + (1 - keep) * weights[i])

    for step in range(start):
        inner[0].zero_grad()
        losses = [loss(nets[0], batch) for batch in batches[step * learners : (step + 1) * learners]]
        (sum(total for total, _ in losses) / sum(count for _, count in losses)).backward()
        inner[0].step()
        if step + 1 in ends:
            found.append([p.detach().clone() for p in nets[0].parameters()])
    for net, optimizer in zip([common, *nets[1:]], [None, *inner[1:]], strict=True):
        net.load_state_dict(nets[0].state_dict())
        if optimizer is not None:
            optimizer.load_state_dict(copy.deepcopy(inner[0].state_dict()))
    for step in range(start, len(batches) // learners):
        for learner, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            optimizer.zero_grad()
            total, count = loss(net, batches[step * learners + learner])
            (total / count).backward()
            optimizer.step()
            for part in range(fragments):
                counted[part][learner] += float(count)
        position += 1
        with torch.no_grad():
            while flying and flying[0][0] == step:
                apply(*flying.pop(0)[1:], mixing)
            for part in range(fragments):
                if (position - (part + 1) * period // fragments) % period == 0:
                    flying.append((step + delay, part, send(part)))
                    if not delay:
                        apply(*flying.pop()[1:], 0.0)
            if step + 1 in ends:
                while flying:
                    apply(*flying.pop(0)[1:], mixing)
                for part in range(fragments):
                    apply(part, send(part), 0.0, early=True)
                position = 0
                found.append([p.detach().clone() for p in weights])
    return found


@torch.no_grad()
def simulate_error_reset(
    batches: Sequence[Any],
    learners: int,
    make: Callable[[Any], torch.optim.Optimizer],
    period: int,
    share: float,
    ends: Sequence[int],
) -> list[list[Tensor]]:
    """Local SGD with Top-K and error reset in one process: the common weights at each of `ends`, which end a round.

    A learner starts each round from the common weights less what was not sent of it.
    """
    common = list(Regression(make).net.parameters())
    nets = [Regression(make).net for _ in range(learners)]
    inner = [make(net.parameters()) for net in nets]
    begun = [[p.clone() for p in common] for _ in nets]
    unsent = [[torch.zeros_like(p) for p in common] for _ in nets]
    counted, position, found = [0.0] * learners, 0, []
    for step in range(len(batches) // learners):
        for learner, (net, optimizer) in enumerate(zip(nets, inner, strict=True)):
            optimizer.zero_grad()
            with torch.enable_grad():
                total, count = loss(net, batches[step * learners + learner])
                (total / count).backward()
            optimizer.step()
            counted[learner] += float(count)
        position += 1
        if (position % period == 0 or step + 1 in ends) and any(counted):
            for i, weight in enumerate(common):
                sent = []
                for learner, net in enumerate(nets):
                    moved = begun[learner][i] - list(net.parameters())[i]
                    waiting = unsent[learner][i] + counted[learner] / sum(counted) * learners * moved
                    sent.append(_largest(waiting, share))
                    unsent[learner][i] = waiting - sent[-1]
                weight -= sum(sent) / learners
            counted = [0.0] * learners
            for learner, net in enumerate(nets):
                for i, parameter in enumerate(net.parameters()):
                    begun[learner][i] = common[i] - unsent[learner][i]
                    parameter.copy_(begun[learner][i])
        if step + 1 in ends:
            position = 0
            found.append([p.clone() for p in common])
    return found


def _largest(tensor: Tensor, share: float) -> Tensor:
    if tensor.dim() < 2:
        return tensor
    places = tensor.abs().flatten().topk(math.ceil(share * tensor.numel())).indices
    return torch.zeros_like(tensor).flatten().index_copy_(0, places, tensor.flatten()[places]).view_as(tensor)
