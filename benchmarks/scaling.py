"""How costs grow: with parameter tensors, logged values, callbacks, ranks, steps and samples.

    python -m benchmarks.scaling [--parts tensors values callbacks ranks memory samples] [--ranks 1 2 4 8] [--rounds 5]
    [--effort 1.0] [--json FILE]

`tensors`, `values`, `callbacks`, `ranks`: microseconds that a step takes beyond that of a hand-written loop with the
same model, which logs nothing and has no callbacks (on several ranks: one around DistributedDataParallel); medians over
rounds in which all take turns; CPU time is that of the process (of rank 0). The callbacks override nothing.
`memory`: what a process holds after 10^6 values were logged and reduced every 50, and after a fit of 10^6 steps, beyond
what it held after a tenth of them: bytes resident, and blocks of Python's allocator, which are counted one by one.
`samples`: a shuffled loader over a dataset that has only a length: seconds until the first window, at the beginning of
the epoch and in its middle as after a resume, and the most memory that this took; beside torch's DistributedSampler.
`--effort` scales the numbers of steps. Expect five minutes.
"""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks._rounds import (
    STEP_COLUMNS,
    Clock,
    described,
    machine,
    make_parser,
    quiet,
    summarize_steps,
    table,
    take_turns,
    write_json,
)
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import SingleDevice
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.launch import environment, launcher
from lockstep.strategies.launch.process_group import destroy_process_group, init_process_group
from lockstep.trainer.metrics.store import MetricStore

WARMUP_STEPS = 20
LOG_EVERY = 50
BATCH = 8
REFERENCE = "hand-written loop"
BARE: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "accelerator": "cpu",
}


# ---- what a step costs beyond a hand-written one ---------------------------------------------------------


class Small(nn.Module):
    """A perceptron and as many tensors as are asked for, each of 8 numbers and in the loss."""

    def __init__(self, num_tensors: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        self.rest = nn.ParameterList(torch.zeros(8) for _ in range(num_tensors - 4))

    def forward(self, x: Tensor) -> Tensor:
        output = self.net(x)
        return output + torch.cat(tuple(self.rest)).sum() if len(self.rest) else output


class Wrapped(Module):
    def __init__(self, num_tensors: int, num_values: int, clock: Clock | None = None) -> None:
        super().__init__()
        self.small, self.clock = Small(num_tensors), clock
        self.names = [f"value{i}" for i in range(num_values)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.clock is not None:
            self.clock.tick(batch_idx)
        loss = F.cross_entropy(self.small(batch[:, :32]), batch[:, 32].long())
        for name in self.names:
            self.log(name, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, fused=True)


class Passive(Callback):
    """Overrides nothing."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def state_key(self) -> str:
        return f"Passive{self.number}"


class Rows(Dataset):
    """32 numbers and the number of a class. Each sample is asked for: Lockstep reads batches of a plain tensor by one
    index, which would hide its own cost."""

    def __init__(self, num_samples: int) -> None:
        self.rows = torch.cat([torch.randn(num_samples, 32), torch.randint(10, (num_samples, 1))], dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def batches(num_steps: int) -> DataLoader:
    return DataLoader(Rows(num_steps * BATCH), BATCH)


def train_by_hand(model: nn.Module, clock: Clock) -> Clock:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    for step, batch in enumerate(batches(clock.marks[1] + 1)):
        clock.tick(step)
        F.cross_entropy(model(batch[:, :32]), batch[:, 32].long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock


def by_hand(num_steps: int, num_tensors: int = 4) -> Clock:
    return train_by_hand(Small(num_tensors), Clock(num_steps, WARMUP_STEPS))


def lockstep(num_steps: int, num_tensors: int = 4, num_values: int = 0, num_callbacks: int = 0) -> Clock:
    clock = Clock(num_steps, WARMUP_STEPS)
    Trainer(callbacks=[Passive(i) for i in range(num_callbacks)], **BARE).fit(
        Wrapped(num_tensors, num_values, clock), batches(clock.marks[1] + 1)
    )
    return clock


def on_ranks(num_steps: int, num_ranks: int, is_by_hand: bool) -> Clock:
    return launcher.launch(on_rank, (num_steps, num_ranks, is_by_hand), num_ranks)


def on_rank(num_steps: int, num_ranks: int, is_by_hand: bool) -> Clock:
    torch.set_num_threads(1)
    clock, world = Clock(num_steps, WARMUP_STEPS), environment.detect()
    assert world is not None
    if is_by_hand:
        init_process_group(world, "gloo")
        train_by_hand(nn.parallel.DistributedDataParallel(Small(), gradient_as_bucket_view=True), clock)
        destroy_process_group()
    else:  # every rank gets its own batches, as many as by hand
        Trainer(strategy="ddp", devices=num_ranks, **BARE).fit(
            Wrapped(4, 0, clock), batches((clock.marks[1] + 1) * num_ranks)
        )
    return clock


def tensors(effort: float, _: list[int]) -> tuple[dict[str, Callable[[], Clock]], dict[str, str]]:
    variants: dict[str, Callable[[], Clock]] = {}
    references = {}
    for number in (10, 100, 1000, 10_000):
        if number > max(100, effort * 10_000):
            break
        steps = at_least(2, effort * min(500, 50_000 / number))
        variants[f"{number:,} tensors, by hand"] = partial(by_hand, steps, number)
        variants[f"{number:,} tensors"] = partial(lockstep, steps, num_tensors=number)
        references[f"{number:,} tensors"] = f"{number:,} tensors, by hand"
    return variants, references


def values(effort: float, _: list[int]) -> tuple[dict[str, Callable[[], Clock]], dict[str, str]]:
    steps = at_least(2, effort * 400)
    variants: dict[str, Callable[[], Clock]] = {REFERENCE: partial(by_hand, steps)}
    variants |= {
        f"{number} logged values": partial(lockstep, steps, num_values=number) for number in (0, 1, 5, 20, 50, 200)
    }
    return variants, dict.fromkeys(list(variants)[1:], REFERENCE)


def callbacks(effort: float, _: list[int]) -> tuple[dict[str, Callable[[], Clock]], dict[str, str]]:
    steps = at_least(2, effort * 400)
    variants: dict[str, Callable[[], Clock]] = {REFERENCE: partial(by_hand, steps)}
    variants |= {f"{number} callbacks": partial(lockstep, steps, num_callbacks=number) for number in (0, 1, 10, 50)}
    return variants, dict.fromkeys(list(variants)[1:], REFERENCE)


def ranks(effort: float, numbers: list[int]) -> tuple[dict[str, Callable[[], Clock]], dict[str, str]]:
    variants: dict[str, Callable[[], Clock]] = {}
    references = {}
    for number in numbers:
        steps = at_least(2, effort * 400 / number**2)
        variants[f"{number} ranks, by hand"] = partial(on_ranks, steps, number, True)
        variants[f"{number} ranks"] = partial(on_ranks, steps, number, False)
        references[f"{number} ranks"] = f"{number} ranks, by hand"
    return variants, references


# ---- memory over steps -----------------------------------------------------------------------------------


def memory(effort: float) -> dict[str, dict[str, Any]]:
    return {
        "values logged": logging(at_least(10, effort * 1_000_000)),
        "steps of a fit": fitting(at_least(10, effort * 1_000_000)),
    }


class Growth:
    """What the process holds at the end of `total` steps beyond what it held after a tenth of them."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.begin = time.perf_counter()
        self.seen: list[tuple[int, int]] = []

    def tick(self, done: int) -> None:
        if done in (self.total // 10, self.total):
            gc.collect()
            (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
            self.seen.append((int(line.split()[1]) * 1024, sys.getallocatedblocks()))

    def row(self) -> dict[str, Any]:
        (early_bytes, early_blocks), (late_bytes, late_blocks) = self.seen
        seconds = time.perf_counter() - self.begin
        return {
            "total": self.total,
            "seconds": seconds,
            "resident_bytes": late_bytes - early_bytes,
            "blocks": late_blocks - early_blocks,
        }


def logging(total: int) -> dict[str, Any]:
    """`self.log` of a tensor, and what the loop does every 50 steps, without a model around it."""
    strategy = SingleDevice()
    strategy.configure(accelerator="cpu")
    strategy.setup()
    try:
        store, value, growth = MetricStore(), torch.tensor(1.0), Growth(total)
        store.in_batch = True
        for step in range(1, total + 1):
            store.log("loss", value)
            if step % LOG_EVERY == 0:
                store.reduce(strategy)
            growth.tick(step)
        return growth.row()
    finally:
        strategy.teardown()


class Watch(Callback):
    def __init__(self, growth: Growth) -> None:
        self.growth = growth

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.growth.tick(trainer.global_step)


def fitting(total: int) -> dict[str, Any]:
    """A fit that logs a value in every step."""
    growth = Growth(total)
    with quiet():
        Trainer(callbacks=Watch(growth), **{**BARE, "max_epochs": None, "max_steps": total}).fit(
            Wrapped(4, 1), batches(1000)
        )
    return growth.row()


# ---- samplers --------------------------------------------------------------------------------------------


class Indices(Dataset):
    """A dataset that has a length and its items, as one on disk would."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return index


def first_window(num_samples: int, start: int) -> Any:
    sharded = ShardedLoader(DataLoader(Indices(num_samples), 32, shuffle=True), rank=0, size=2, seed=0)
    return next(sharded.windows(epoch=0, start=start))


def first_batch(num_samples: int, start: int) -> Any:
    """The usual way: a sampler that permutes all indices; a resume reads and drops what was seen."""
    dataset = Indices(num_samples)
    found = iter(DistributedSampler(dataset, num_replicas=2, rank=0))
    for _ in range(start // 2):
        next(found)
    return next(iter(DataLoader(dataset, 32, sampler=found)))  # type: ignore[arg-type]


def samples(rounds: int, effort: float) -> dict[str, dict[str, Any]]:
    rows = {}
    for exponent in (4, 5, 6, 7, 8, 9):
        if 10**exponent <= effort * 10**9:
            rows[f"10^{exponent}"] = ready(first_window, 10**exponent, rounds)
        if 10**exponent <= effort * 10**6:
            rows[f"10^{exponent}, DistributedSampler"] = ready(first_batch, 10**exponent, rounds)
    return rows


def ready(make: Callable[[int, int], Any], num_samples: int, rounds: int) -> dict[str, Any]:
    """Milliseconds to the first batch from the beginning and from the middle, medians of the rounds; and bytes."""
    row: dict[str, Any] = {}
    for name, start in (("start", 0), ("resume", num_samples // 2 // 64 * 64)):
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            make(num_samples, start)
            times.append((time.perf_counter() - begin) * 1e3)
        row[f"{name}_ms"], row[f"{name}_rounds_ms"] = sorted(times)[len(times) // 2], times
    tracemalloc.start()
    try:
        make(num_samples, 0)
        row["peak_bytes"] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return row


# ---- all of it -------------------------------------------------------------------------------------------

STEPS = {"tensors": tensors, "values": values, "callbacks": callbacks, "ranks": ranks}
COLUMNS = {
    "memory": {
        "number": ("total", ",d"),
        "seconds": ("seconds", ".0f"),
        "resident bytes more": ("resident_bytes", ",d"),
        "blocks more": ("blocks", ",d"),
    },
    "samples": {"start ms": ("start_ms", ".2f"), "resume ms": ("resume_ms", ".2f"), "peak bytes": ("peak_bytes", ",d")},
}


def at_least(least: int, wanted: float) -> int:
    return max(least, int(wanted))


def main() -> None:
    parser = make_parser("Measure how costs grow.", rounds=5)
    parts = [*STEPS, "memory", "samples"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="what to measure")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of ranks")
    parser.add_argument("--effort", type=float, default=1.0, help="scales numbers of steps and samples")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts, results = machine(), {}
    print(f"{described(facts)}; {arguments.rounds} rounds")
    for part in arguments.parts:
        if part in STEPS:
            variants, references = STEPS[part](arguments.effort, arguments.ranks)
            results[part] = summarize_steps(take_turns(variants, arguments.rounds), references)
        else:
            results[part] = (
                memory(arguments.effort) if part == "memory" else samples(arguments.rounds, arguments.effort)
            )
        print(table(results[part], COLUMNS.get(part, STEP_COLUMNS), part), flush=True)
    columns = {part: COLUMNS.get(part, STEP_COLUMNS) for part in results}
    write_json(arguments.json, facts, results, columns=columns, rounds=arguments.rounds, effort=arguments.effort)


if __name__ == "__main__":
    main()
