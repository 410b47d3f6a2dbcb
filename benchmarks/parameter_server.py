"""What a parameter server brings if one worker is slow, and what an update costs.

    python -m benchmarks.parameter_server [--rounds 3] [--steps 60] [--json FILE]

*One slow worker*: four CPU ranks, a perceptron of 5,000 weights, batches of 8 samples. Each batch sleeps 20 ms in place
of computing, on the last rank 80 ms. Samples a second from the tenth step until the end of training, when all steps are
done, by `ddp`, by a parameter server with a staleness of 8, and by one with 0; a step is a clock of four batches under
each, so the ratio of samples a second is that of optimizer steps a second too.

*An update of 4 MB*: two ranks, one server on rank 0, 1,048,576 float32 weights, SGD, a batch of one sample that costs
little, on rank 0 with a sleep of 10 ms; staleness 4. Milliseconds of wall time between the updates (batches applied) of
both workers together; for which rank 1, whose updates all pass between processes, works on one of its own; and of CPU
time that both processes use for an update, the model's forward and backward included. Medians over rounds, with the
smallest and largest. Expect a minute and a half.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._rounds import described, machine, make_parser, write_json
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import ParameterServer
from lockstep.strategies.base import Strategy

WARMUP = 10
"""Steps before the time is taken."""


class Sleeps(Module):
    """A perceptron whose batches take `fast` seconds, on the last rank `slow`."""

    def __init__(self, width: int, fast: float, slow: float) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
        self.fast, self.slow = fast, slow

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.slow if self.trainer.global_rank == self.trainer.world_size - 1 else self.fast)
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Vector(Sleeps):
    """1,048,576 weights, whose gradient is computed by one operation. Rank 0 is the slow one."""

    def __init__(self, fast: float, slow: float) -> None:
        super().__init__(1, fast, slow)
        self.net = torch.nn.Identity()  # type: ignore[assignment]
        self.weight = torch.nn.Parameter(torch.zeros(1024, 1024))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.trainer.global_rank == 0:
            time.sleep(self.slow)
        return (self.weight * float(batch[0].mean())).sum()


class Times(Callback):
    """When the steps began to count, and when all were done."""

    def __init__(self) -> None:
        self.began = self.ended = self.cpu = 0.0

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        if trainer.global_step == WARMUP:
            self.began, self.cpu = time.perf_counter(), time.process_time()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self.ended = time.perf_counter()
        used = torch.tensor(time.process_time() - self.cpu, dtype=torch.float64)
        self.cpu = float(trainer.strategy.all_reduce(used))


def measure(strategy: str | Strategy, module: Module, ranks: int, batch: int, steps: int, folder: str) -> Any:
    """Seconds for `steps` optimizer steps, those of CPU time of all ranks, and what part of the batches each rank
    computed."""
    times = Times()
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=WARMUP + steps,
        max_epochs=-1,
        callbacks=[times],
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        seed=0,
    )
    samples = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    trainer.fit(module, DataLoader(samples, batch_size=batch))
    record = Path(str(trainer.log_dir)) / "schedule.jsonl"
    lines = record.read_text().splitlines()[1:] if record.exists() else []
    workers = [json.loads(line)["worker"] for line in lines]
    return times.ended - times.began, times.cpu, [workers.count(rank) / max(1, len(workers)) for rank in range(ranks)]


def main() -> None:
    parser = make_parser("Measure a parameter server with a slow worker, and its updates.", rounds=3)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of a measurement")
    arguments = parser.parse_args()
    facts, steps = machine(), arguments.steps
    slow: dict[str, list[float]] = {"ddp": [], "staleness 8": [], "staleness 0": []}
    updates: dict[str, list[float]] = {"both": [], "own": [], "cpu": []}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        for _ in range(arguments.rounds):
            for name, rates in slow.items():
                strategy: Any = "ddp" if name == "ddp" else ParameterServer(int(name.split()[1]))
                seconds, *_ = measure(strategy, Sleeps(64, 0.02, 0.08), 4, 8, steps, folder)
                rates.append(4 * 8 * steps / seconds)
            seconds, cpu, parts = measure(ParameterServer(4, servers=1), Vector(0.0, 0.01), 2, 1, 2 * steps, folder)
            updates["both"].append(1e3 * seconds / (4 * steps))
            updates["own"].append(1e3 * seconds / (4 * steps * parts[1]))
            updates["cpu"].append(1e3 * cpu / (4 * steps))
    print(described(facts))
    base = statistics.median(slow["ddp"])
    for name, rates in slow.items():
        middle = statistics.median(rates)
        print(
            f"one of four workers 4 x slower, {name}: {middle:.0f} samples/s ({min(rates):.0f} to {max(rates):.0f}), "
            f"{middle / base:.2f} x ddp"
        )
    kinds = {"both": "between updates of both workers", "own": "for each of rank 1's own", "cpu": "of CPU an update"}
    for name, who in kinds.items():
        values = updates[name]
        print(f"4 MB: {statistics.median(values):.1f} ms ({min(values):.1f} to {max(values):.1f}) {who}")
    results = {"samples_per_s": slow, "update_ms": updates}
    write_json(arguments.json, facts, results, ratio=statistics.median(slow["staleness 8"]) / base)


if __name__ == "__main__":
    main()
