"""What a step costs beside a hand-written loop, and beside peers where they are installed.

    python benchmarks/step_overhead.py [--rounds 7] [--steps 1000] [--json FILE]
    make bench                           # every benchmark, with the peers

The work of a step is next to nothing (Linear(32, 32)-ReLU-Linear(32, 10), 8 samples, SGD, one thread), so what is
measured is the loop around it. Variants take turns in each round. A time is microseconds a step, the median over
rounds; a ratio is the median of the ratios to the hand-written loop of the same round. Expect a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import LearningRateMonitor
from trainer import Module, Trainer

WARMUP_STEPS = 50


class Clock:
    """Times the steps between the first that counts and the last one."""

    def __init__(self, num_steps: int) -> None:
        self.marks = (WARMUP_STEPS, WARMUP_STEPS + num_steps)
        self.times: list[float] = []

    def tick(self, step: int) -> None:
        """Call it at the beginning of every step."""
        if step in self.marks:
            self.times.append(time.perf_counter())

    def us_per_step(self) -> float:
        begin, end = self.times
        return (end - begin) / (self.marks[1] - self.marks[0]) * 1e6


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def loader(num_steps: int) -> DataLoader:
    num_samples = 8 * (WARMUP_STEPS + num_steps + 1)
    return DataLoader(TensorDataset(torch.randn(num_samples, 32), torch.randint(10, (num_samples,))), batch_size=8)


def by_hand(num_steps: int) -> float:
    model, clock = build(), Clock(num_steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (x, y) in enumerate(loader(num_steps)):
        clock.tick(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock.us_per_step()


def module_class(base: type) -> type:
    """The same module for Lockstep and for Lightning."""

    class Small(base):
        def __init__(self, clock: Clock, num_values: int) -> None:
            super().__init__()
            self.net, self.clock, self.num_values = build(), clock, num_values

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.clock.tick(batch_idx)
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            for i in range(self.num_values):
                self.log(f"loss{i}", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Small


BARE: dict[str, Any] = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


def lockstep(num_values: int, everything: bool = False) -> Callable[[int], float]:
    def run(num_steps: int) -> float:
        clock = Clock(num_steps)
        options = {"max_epochs": 1, "callbacks": [LearningRateMonitor()]} if everything else BARE
        Trainer(accelerator="cpu", **options).fit(module_class(Module)(clock, num_values), loader(num_steps))
        return clock.us_per_step()

    return run


def lightning(num_values: int) -> Callable[[int], float]:
    def run(num_steps: int) -> float:
        import lightning as peer

        clock = Clock(num_steps)
        trainer = peer.Trainer(accelerator="cpu", enable_model_summary=False, **BARE)
        trainer.fit(module_class(peer.LightningModule)(clock, num_values), loader(num_steps))
        return clock.us_per_step()

    return run


def accelerate(num_steps: int) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, clock = build(), Clock(num_steps)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader(num_steps))
    for step, (x, y) in enumerate(batches):
        clock.tick(step)
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return clock.us_per_step()


VARIANTS: dict[str, Callable[[int], float]] = {
    "hand-written loop": by_hand,
    "lockstep, bare": lockstep(0),
    "lockstep, 1 logged value": lockstep(1),
    "lockstep, 5 logged values": lockstep(5),
    # TensorBoard, progress bar, summary, checkpoints, learning rates
    "lockstep, everything on": lockstep(5, everything=True),
}
if importlib.util.find_spec("lightning"):
    VARIANTS |= {"lightning, bare": lightning(0), "lightning, 5 logged values": lightning(5)}
if importlib.util.find_spec("accelerate"):
    VARIANTS |= {"accelerate": accelerate}


def measure(rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Microseconds a step of each variant in each round; variants take turns, each round begins with another one."""
    names, times = list(VARIANTS), {name: [] for name in VARIANTS}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with quiet():
                times[name].append(VARIANTS[name](num_steps))
    return times


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the variants print and write away from the table and the working folder."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        os.chdir(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            os.chdir(before)


def summarise(times: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    reference = times["hand-written loop"]
    return {
        name: {
            "median_us": statistics.median(values),
            "min_us": min(values),
            "max_us": max(values),
            "ratio": statistics.median(value / base for value, base in zip(values, reference, strict=True)),
            "rounds_us": values,
        }
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a training step costs beside a hand-written loop.")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=1000, help=f"steps that count in a turn, after {WARMUP_STEPS} that do not")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    results = summarise(measure(arguments.rounds, arguments.steps))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}")
    print(f"{arguments.rounds} rounds of {arguments.steps} steps")
    print(f"{'':<27}{'us a step':>10}{'min':>8}{'max':>8}{'ratio':>8}")
    for name, row in results.items():
        print(f"{name:<27}{row['median_us']:>10.1f}{row['min_us']:>8.1f}{row['max_us']:>8.1f}{row['ratio']:>8.2f}")
    if arguments.json:
        machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(), "load": load}
        arguments.json.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "steps": arguments.steps, "results": results}, indent=1))


if __name__ == "__main__":
    main()
