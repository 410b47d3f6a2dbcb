"""The contract of a Strategy as a hand-written loop sees it: what each strategy must pass, in one place.

`run(strategy, folder, …)` drives a strategy through its life on real ranks, without the Trainer, and
leaves a checkpoint in `folder`; what a test compares is read back from there, so it is canonical
whatever wrapped or sharded the model. `run_each` does so for several, one after the other on the same ranks,
as a start of ranks takes longer than a training. The reference is plain torch on one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.strategies import Loss, Strategy
from lockstep.strategies.precision import Precision
from lockstep.trainer.checkpoint import store as checkpoint
from lockstep.trainer.checkpoint.store import Checkpoint


class Block(nn.Module):
    """A residual block whose two linear layers a tensor-parallel plan may split."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Body(nn.Sequential):
    """An embedding, four blocks and a head, in a row: what a pipeline may cut anywhere."""

    def __init__(self, dim: int = 8, hidden: int = 16, classes: int = 4) -> None:
        super().__init__(nn.Linear(6, dim), *[Block(dim, hidden) for _ in range(4)], nn.Linear(dim, classes))


class Model(nn.Module):
    """The user's module: `step` is its training step, `body` holds every trainable parameter and is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.body(x), y)

    def token_step(self, batch: Any, batch_idx: int) -> Any:
        """Counts differ between micro-batches; some have none."""
        x, y = batch
        weight = (x[:, 0] > 0.3).to(x.dtype)
        return Loss((F.cross_entropy(self.body(x), y, reduction="none") * weight).sum(), weight.sum())

    def sometimes_step(self, batch: Any, batch_idx: int) -> Any:
        """Every third batch has no weight."""
        return None if batch_idx % 3 == 2 else self.step(batch, batch_idx)

    def predict(self, batch: Any, batch_idx: int) -> Any:
        return self.body(batch[0])


@dataclass(frozen=True)
class Plan:
    """One training of the contract's model."""

    step: str = "step"
    num_samples: int = 40
    global_batch: int = 16
    accumulate: int = 1
    epochs: int = 2
    clip: float | None = None
    clip_algorithm: str = "norm"
    optimizer: str = "AdamW"
    precision: str = "64-true"
    start_from: str | None = None
    """Checkpoint to load before training."""


def dataset(n: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(n, 6, generator=generator, dtype=torch.float32).to(dtype),
        torch.randint(0, 4, (n,), generator=generator),
    )


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def run(strategy: Strategy, devices: int, plan: Plan, folder: Path, accelerator: str = "cpu") -> dict[str, Any]:
    """Train under `strategy` and leave the final checkpoint in `folder`; return rank 0's losses and facts."""
    strategy = strategy.configure(devices=devices, accelerator=accelerator, precision=plan.precision)
    return (
        strategy.launch(on_rank, strategy, plan, str(folder))
        if strategy.starts_ranks
        else on_rank(strategy, plan, str(folder))
    )


def run_each(runs: Mapping[str, tuple[Strategy, Plan]], devices: int, folder: Path) -> dict[str, dict[str, Any]]:
    """What `run` gives for each of `runs`, with its checkpoint in `folder` under its name; one after the other on the
    same ranks."""
    runs = {
        name: (strategy.configure(devices=devices, accelerator="cpu", precision=plan.precision), plan)
        for name, (strategy, plan) in runs.items()
    }
    first, _ = next(iter(runs.values()))
    return first.launch(each_on_rank, runs, str(folder)) if first.starts_ranks else each_on_rank(runs, str(folder))


def each_on_rank(runs: Mapping[str, tuple[Strategy, Plan]], folder: str) -> dict[str, dict[str, Any]]:
    return {name: on_rank(strategy, plan, f"{folder}/{name}") for name, (strategy, plan) in runs.items()}


def on_rank(strategy: Strategy, plan: Plan, folder: str) -> dict[str, Any]:
    model = build()  # before set-up, as a user's module is: in torch's default dtype
    strategy.setup()
    try:
        wrapped = strategy.setup_module(model)
        optimizer = getattr(torch.optim, plan.optimizer)(model.parameters(), lr=0.02)
        optimizers = strategy.setup_optimizers(wrapped, {"main": optimizer})
        if plan.start_from is not None:
            strategy.load_state_dict(wrapped, optimizers, Checkpoint.open(plan.start_from))
        optimizer = optimizers["main"]
        loader = strategy.shard_loader(
            DataLoader(dataset(plan.num_samples), plan.global_batch),
            seed=0,
            shuffle=True,
            accumulate=plan.accumulate,
            split=True,
        )
        counts, norms = [], []
        for epoch in range(plan.epochs):
            done = 0
            for window in loader.windows(epoch):
                for micro_batch in window.micro_batches:
                    micro_batch.batch, micro_batch.batch_idx = strategy.to_device(micro_batch.batch), done
                    done += 1
                result = strategy.forward_backward(wrapped, getattr(model, plan.step), window)
                counts.append(result.count)
                if plan.clip is not None:
                    norm = strategy.clip_gradients(wrapped, optimizer, plan.clip, plan.clip_algorithm)
                    norms += [] if norm is None else [float(norm)]
                strategy.optimizer_step(wrapped, optimizer)
                optimizer.zero_grad()

        outputs = []
        model.eval()
        with torch.no_grad():
            for window in strategy.shard_loader(
                DataLoader(dataset(plan.num_samples), plan.global_batch), seed=0, shuffle=False, split=True
            ).windows(0):
                (micro_batch,) = window.micro_batches
                micro_batch.batch = strategy.to_device(micro_batch.batch)
                output = strategy.evaluate(wrapped, model.predict, micro_batch, 0)
                sums = torch.zeros(4, dtype=torch.float64) if output is None else output.double().sum(0)
                outputs.append(strategy.all_reduce(sums if strategy.topology.is_reporting_rank else sums * 0).tolist())
        state = strategy.state_dict(wrapped, optimizers)
        checkpoint.save(
            folder,
            rank=strategy.topology.rank,
            world_size=strategy.topology.world_size,
            tensors=state.tensors,
            state={"strategy": state.meta, "progress": {"global_step": len(counts)}},
            barrier=strategy.barrier,
            broadcast=strategy.broadcast,
        )
        return {
            "counts": counts,
            "norms": norms,
            "outputs": outputs,
            "world_size": strategy.topology.world_size,
            "data_size": strategy.topology.data_size,
        }
    finally:
        strategy.teardown()
        strategy.teardown()  # idempotent


def reference(plan: Plan, model: Model | None = None, optimizer: Any = None) -> tuple[Model, dict[str, Any]]:
    """The same training in plain torch on one process, each global batch in one piece."""
    from lockstep.strategies.data.sharded_loader import ShardedLoader

    dtype = Precision(plan.precision).dtype
    model = build().to(dtype) if model is None else model
    optimizer = optimizer or getattr(torch.optim, plan.optimizer)(model.parameters(), lr=0.02)
    source = ShardedLoader(
        DataLoader(dataset(plan.num_samples, dtype), plan.global_batch),
        rank=0,
        size=1,
        seed=0,
        shuffle=True,
        split=True,
    )
    counts, norms = [], []
    for epoch in range(plan.epochs):
        for window in source.windows(epoch):
            output = getattr(model, plan.step)(window.micro_batches[0].batch, 0)
            loss, count = (
                (output.total / output.count, float(output.count))
                if isinstance(output, Loss)
                else (output, float(window.num_samples))
            )
            loss.backward()
            counts.append(count)
            if plan.clip is not None and plan.clip_algorithm == "norm":
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), plan.clip)))
            elif plan.clip is not None:
                nn.utils.clip_grad_value_(model.parameters(), plan.clip)
            optimizer.step()
            optimizer.zero_grad()
    outputs = []
    x = dataset(plan.num_samples, dtype).tensors[0]
    with torch.no_grad():
        for part in x.split(plan.global_batch):
            outputs.append(model.body(part).double().sum(0).tolist())
    return model, {"counts": counts, "norms": norms, "outputs": outputs, "optimizer": optimizer}


def saved_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint by their canonical names."""
    opened = Checkpoint.open(folder)
    return {name.removeprefix("model/"): opened.read(name) for name in opened.names("model/")}


def difference(saved: dict[str, torch.Tensor], model: Model) -> float:
    """Largest difference of a weight relative to the largest weight of its tensor."""
    expected = model.state_dict()
    assert sorted(saved) == sorted(expected)
    return max(
        ((saved[name] - value).abs().max() / value.abs().max().clamp(min=1e-3)).item()
        for name, value in expected.items()
    )
