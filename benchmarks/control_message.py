"""What the control message adds to a step of about 20 ms of two DDP ranks on CPU.

    python -m benchmarks.control_message [--steps 1000] [--width 640] [--collectives 0] [--json FILE]

Half of the steps go without it, in the same run, in turns of 20: a rank that waits in one step for the other would else
gain it back in the next. A time is the mean of a turn on rank 0; what the message costs is the median over pairs of
neighboring turns. CPU time is that of the process, all threads. With `--collectives` the module
calls so many all_reduces in its step, whose operations, types and sizes the message then compares. Expect a minute.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from benchmarks._rounds import described, machine, make_parser, write_json
from lockstep import Module, Trainer
from lockstep.strategies.base import StepResult, StepVote
from lockstep.strategies.sync.step_agreement import StepAgreement

TURN = 20
WARMUP_STEPS = 2 * TURN


class Silent(StepAgreement):
    """Agrees with everybody without asking: all ranks of this bench have losses of all their samples."""

    def __init__(self) -> None: ...

    def send(self, vote: StepVote, samples: int, count: float, finite: bool, total: float = math.nan) -> None:
        self.result = StepResult(samples, int(vote.stop), None, None)  # every loss counts its samples

    def begin(self, retrained: list[str]) -> None: ...

    def prepare(self, vote: StepVote, samples: int, lacks: bool = False) -> Callable[[float, bool, float], None]:
        return lambda count, finite, total: self.send(vote, samples, count, finite, total)

    def receive(self, in_tree: bool = False) -> StepResult:
        return self.result

    def first_rank(self, says_so: bool) -> int | None:
        return 0 if says_so else None

    def is_equal(self, number: int) -> bool:
        return True

    def gather(self, number: float) -> list[float]:
        return [number] * dist.get_world_size()

    def check(self) -> None: ...

    def close(self) -> None: ...


def is_with(turn: int) -> bool:
    """Of each two turns one is with the message: the second, then the first, and so on."""
    return (turn + turn // 2) % 2 == 1


class Timed(Module):
    def __init__(self, width: int, collectives: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(6)), torch.nn.Linear(width, 10))
        self.collectives = collectives
        self.times: list[tuple[float, float]] = []

    def on_train_start(self) -> None:
        strategy: Any = self.trainer.strategy
        assert isinstance(strategy._agreement, StepAgreement)
        self.controls = (Silent(), strategy._agreement)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % TURN == 0:
            self.trainer.strategy._agreement = self.controls[is_with(batch_idx // TURN)]  # type: ignore[attr-defined]
            self.times.append((time.perf_counter(), time.process_time()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for _ in range(self.collectives):
            dist.all_reduce(torch.ones(4))
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_end(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))
        self.trainer.strategy._agreement = self.controls[1]  # type: ignore[attr-defined]
        if self.global_rank == 0:
            Path("times.json").write_text(json.dumps(self.times))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(steps: int, width: int, collectives: int) -> dict[str, float]:
    """Medians in milliseconds: of a step without and with the message, and of what it adds in wall and CPU time."""
    number = 2 * -(-steps // TURN) * TURN + WARMUP_STEPS
    data = DataLoader(
        TensorDataset(torch.randn(number * 128, width), torch.randint(0, 10, (number * 128,))), batch_size=64
    )
    trainer = Trainer(
        strategy="ddp",
        devices=2,
        accelerator="cpu",
        max_steps=number,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        seed=0,
    )
    trainer.fit(Timed(width, collectives), data)
    path = Path("times.json")
    marks = json.loads(path.read_text())
    path.unlink()
    turns = [
        [(after - before) / TURN * 1e3 for before, after in zip(begin, end, strict=True)]
        for begin, end in pairwise(marks)
    ][WARMUP_STEPS // TURN :]
    pairs = [(turns[i + is_with(i)], turns[i + 1 - is_with(i)]) for i in range(0, len(turns), 2)]
    return {
        "without_ms": statistics.median(without[0] for without, _ in pairs),
        "with_ms": statistics.median(message[0] for _, message in pairs),
        "over_ms": statistics.median(message[0] - without[0] for without, message in pairs),
        "cpu_over_ms": statistics.median(message[1] - without[1] for without, message in pairs),
    }


def main() -> None:
    parser = make_parser("Measure what the control message adds to a step.")
    parser.add_argument("--steps", type=int, default=1000, help="of each kind")
    parser.add_argument("--width", type=int, default=640, help="of the layers; 640 makes a step of about 20 ms")
    parser.add_argument("--collectives", type=int, default=0, help="all_reduces that the module calls in a step")
    arguments = parser.parse_args()
    facts = machine()
    row = measure(arguments.steps, arguments.width, arguments.collectives)
    print(described(facts))
    print(
        f"a step of {row['without_ms']:.2f} ms takes {row['with_ms']:.2f} ms with the message: {row['over_ms']:+.3f} "
        "ms "
        f"({100 * row['over_ms'] / row['without_ms']:+.2f} %), CPU time {row['cpu_over_ms']:+.3f} ms"
    )
    write_json(arguments.json, facts, row)


if __name__ == "__main__":
    main()
