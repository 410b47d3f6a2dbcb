"""What owners of parameters cost: `python -m benchmarks.optimizers --price [--traffic]`.

Trains a GPT of eight blocks under `fsdp` in float32 with Muon for its matrices and AdamW for the rest. Measured are the
time of the optimizer step beside one process's, the optimizer state of a rank, and how often a matrix is
orthogonalized. `--traffic` counts the bytes that all ranks send in a training step as well, beside those of AdamW for
all parameters. Each rank computes with one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer, _muon

from benchmarks._rounds import described, machine, report, take_turns
from benchmarks.engines import WARMUP_STEPS, Job, Text
from benchmarks.step_overhead import BARE
from benchmarks.virtual_ranks import loopback_bytes
from lockstep import Trainer, split_parameters
from lockstep.callbacks import Callback
from lockstep.strategies.launch import launcher
from lockstep.strategies.sync.collectives import local


def variants(numbers: list[int]) -> dict[str, tuple[str, int, str]]:
    """By name the strategy, its ranks, and what steps the matrices."""
    return (
        {"1 rank": ("single", 1, "muon")}
        | {f"{n} ranks": ("fsdp", n, "muon") for n in numbers}
        | {f"{n} ranks, AdamW alone": ("fsdp", n, "adamw") for n in numbers}
    )


class Turn(NamedTuple):
    """What a run measured; times are seconds of one optimizer step, all optimizers together."""

    wall: float
    cpu: float
    """Of the busiest rank's process."""
    orthogonalizing: float
    """The part of `cpu` that the busiest rank computes Newton-Schulz iterations for."""
    state: float
    """Bytes of optimizer state of the rank that has most."""
    calls: float
    """Newton-Schulz iterations of a step, of all ranks."""
    matrices: float
    sent: float
    """Bytes on the loopback device in a whole training step."""


class SplitText(Text):
    """Trains with Muon and AdamW, or with AdamW alone."""

    def __init__(self, gpt: Any, kind: str) -> None:
        super().__init__(gpt)
        self.kind, self.num_matrices = kind, 0

    def configure_optimizers(self) -> Any:
        matrices, others = split_parameters(self.gpt, besides=["head"])
        self.num_matrices = len(matrices)
        if self.kind == "adamw":
            return AdamW(self.parameters())
        return {"muon": Muon(matrices, lr=1e-3), "adamw": AdamW(others)}


class Meter(Callback):
    """Measures the steps between the marks of `job.clock`, and leaves a `Turn` in `found`."""

    def __init__(self, job: Job) -> None:
        self.marks, self.num_steps = job.clock.marks, job.clock.marks[1] - job.clock.marks[0]
        self.times = torch.zeros(4, dtype=torch.float64)
        """Seconds of optimizer steps, of their CPU time, of that of Newton-Schulz iterations, and calls of these."""
        self.sent, self.counts, self.found = 0, False, None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        step, orthogonalize = trainer.strategy.optimizer_step, _muon._zeropower_via_newtonschulz

        def timed_step(*arguments: Any, **options: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = step(*arguments, **options)
            if self.counts:
                self.times[:2] += torch.tensor([time.perf_counter() - wall, time.process_time() - cpu])
            return result

        def timed_orthogonalize(*arguments: Any, **options: Any) -> Tensor:
            cpu = time.process_time()
            result = orthogonalize(*arguments, **options)
            if self.counts:
                self.times[2:] += torch.tensor([time.process_time() - cpu, 1])
            return result

        trainer.strategy.optimizer_step = timed_step
        _muon._zeropower_via_newtonschulz = timed_orthogonalize

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.marks:
            self.counts = batch_idx == self.marks[0]
            self.sent = loopback_bytes() - self.sent

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = sum(map(state_bytes, trainer.optimizers))
        mine = torch.cat([self.times / self.num_steps, torch.tensor([state], dtype=torch.float64)])
        ranks = trainer.strategy.all_gather(mine).view(-1, 5)
        wall, cpu, orthogonalizing, _, state = ranks.amax(0).tolist()
        sent = self.sent / self.num_steps
        self.found = Turn(wall, cpu, orthogonalizing, state, float(ranks[:, 3].sum()), module.num_matrices, sent)


def state_bytes(optimizer: Optimizer) -> int:
    """What this rank holds of its state."""
    state = getattr(optimizer.state, "held", optimizer.state)  # of one whose state is spread over the ranks
    return sum(local(t).nbytes for entry in state.values() for t in entry.values() if isinstance(t, Tensor))


def on_rank(strategy: str, ranks: int, kind: str, job: Job) -> Turn:
    """What rank 0 has gathered."""
    torch.set_num_threads(1)
    meter = Meter(job)
    trainer = Trainer(strategy=strategy, devices=ranks, accelerator="cpu", callbacks=meter, **BARE)
    trainer.fit(SplitText(job.gpt(), kind), job.loader(ranks))
    assert meter.found is not None
    return meter.found


def rows_of(
    turns: dict[str, list[Turn]], variants: dict[str, tuple[str, int, str]], with_traffic: bool
) -> dict[str, dict[str, Any]]:
    """The table: medians over rounds, and ratios of the same round to one process, or to AdamW alone."""
    rows: dict[str, dict[str, Any]] = {}
    for name, own in turns.items():
        _, ranks, kind = variants[name]
        rows[name] = row = {"rounds_ms": [turn.wall * 1e3 for turn in own]}
        for key in ("wall", "cpu", "orthogonalizing"):
            row[f"{key}_ms"] = statistics.median(getattr(turn, key) for turn in own) * 1e3
        if with_traffic and ranks > 1:
            row["sent_mb"] = statistics.median(turn.sent for turn in own) / 1e6
        if kind == "adamw":
            continue
        row["calls"], row["matrices"] = own[0].calls, own[0].matrices
        alone = turns["1 rank"]
        row["state"] = max(turn.state for turn in own) / (alone[0].state / ranks)
        for key in ("wall", "cpu", "orthogonalizing"):
            pairs = zip(own, alone, strict=True)
            row[key] = statistics.median(getattr(turn, key) / getattr(base, key) for turn, base in pairs)
        if with_traffic and ranks > 1:
            pairs = zip(own, turns[f"{name}, AdamW alone"], strict=True)
            row["sent"] = statistics.median(turn.sent / base.sent for turn, base in pairs)
    return rows


COLUMNS = {
    "wall ms": ("wall_ms", ".1f"), "ratio": ("wall", ".2f"), "CPU ms": ("cpu_ms", ".1f"), "CPU ratio": ("cpu", ".2f"),
    "Newton-Schulz": ("orthogonalizing_ms", ".1f"), "its ratio": ("orthogonalizing", ".2f"),
    "state x N": ("state", ".3f"), "calls": ("calls", ".0f"), "matrices": ("matrices", ".0f"),
    "MB sent": ("sent_mb", ".1f"), "of AdamW's": ("sent", ".3f"),
}  # fmt: skip


def price(options: argparse.Namespace) -> None:
    """Print the table, and write it to `options.json`."""
    facts = machine()

    job = Job(options.width, 8, 4, WARMUP_STEPS, options.steps)
    measured = {name: each for name, each in variants(options.ranks).items() if each[2] == "muon" or options.traffic}
    runs = {name: partial(launcher.launch, on_rank, (*each, job), each[1]) for name, each in measured.items()}
    turns = take_turns(runs, options.rounds)
    rows = rows_of(turns, measured, options.traffic)
    print(f"{described(facts)}; {options.rounds} rounds of {options.steps} steps; width {options.width}, 8 blocks")
    report(options, facts, rows, COLUMNS)
