"""The bubble of pipeline schedules as measured, beside what `lockstep plan` says.

    python -m benchmarks.pipeline_bubble [ranks] [parts] [milliseconds]

Layers sleep in place of computing (a forward once, the backwards for inputs and for weights once each), so that the
real schedule on real ranks is measured and not how many cores the machine has: 4 ranks fit on one core. A step is
measured with layers of that many milliseconds and with four times as many. Engine and sending cost the same in both,
so the difference of the two is the schedule alone, whose bubble must be that of the plan; the rest is the cost.
The fastest of the steps counts, as other work on the machine can only add to them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.strategies import Pipeline
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.pipeline.schedules import SCHEDULES

STEPS, WARMUP = 3, 1
LONGER = 4


class Sleep(torch.autograd.Function):
    """Sleeps `forward_s` seconds, and `backward_s` when its gradient is asked for."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        time.sleep(context.backward_s)
        return gradient, None, None


class Layer(nn.Module):
    """Takes `seconds` for a forward, as long for the gradient of its input, and again for that of its weight."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight, self.bias = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias  # so that the first stage, whose input needs no gradient, works as long as the others
        if type(x) is not Tensor:  # shape inference
            return x + self.weight
        return Sleep.apply(x, self.seconds, self.seconds) + Sleep.apply(self.weight, 0.0, self.seconds)


def measure(strategy: Pipeline, num_parts: int, seconds: float) -> float:
    """The shortest time of a step, in seconds."""
    strategy.setup()
    try:
        num_stages = strategy.num_stage_ranks * strategy.schedule.stages_per_rank
        model = nn.ModuleDict(
            {"net": nn.Sequential(*[Layer(seconds / strategy.schedule.stages_per_rank) for _ in range(num_stages)])}
        )
        wrapped = strategy.setup_module(model)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        times = []
        for _ in range(WARMUP + STEPS):
            window = Window([MicroBatch(torch.zeros(num_parts, 64), num_parts)], num_parts)
            strategy.barrier()
            started = time.perf_counter()
            strategy.forward_backward(wrapped, lambda batch, _: model["net"](batch).mean(), window)
            strategy.barrier()
            times.append(time.perf_counter() - started)
        return min(times[WARMUP:])
    finally:
        strategy.teardown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("parts", 8), ("milliseconds", 20)):
        parser.add_argument(name, type=int, nargs="?", default=default)
    given = parser.parse_args()
    num_ranks, num_parts, milliseconds = given.ranks, given.parts, given.milliseconds
    short, long = f"{milliseconds} ms", f"{LONGER * milliseconds} ms"
    print(f"{num_ranks} ranks, {num_parts} parts, {short} and {long} a forward of one rank's layers")
    print(f"{'schedule':<24}{'plan':>8}{'schedule':>10}{short:>9}{long:>9}{'cost ms a step':>16}{'formula':>34}")
    for name, schedule in SCHEDULES.items():
        if not schedule.fits(num_ranks, num_parts):
            continue
        times, works = [], [num_parts * 3 * milliseconds / 1e3 * factor for factor in (1, LONGER)]
        for factor in (1, LONGER):
            strategy = Pipeline(schedule=name, num_micro_batches=num_parts)
            strategy.configure(devices=num_ranks, accelerator="cpu")
            times.append(strategy.launch(measure, strategy, num_parts, factor * milliseconds / 1e3))
        slope = (times[1] - times[0]) / (works[1] - works[0])  # time of a step over work of a rank
        bubbles = [1 - 1 / slope, *(1 - work / time_s for work, time_s in zip(works, times, strict=True))]
        cost = (times[0] - slope * works[0]) * 1e3
        shown = "".join(f"{bubble:>{width}.1%}" for bubble, width in zip(bubbles, (10, 9, 9), strict=True))
        print(
            f"{name:<24}{schedule.bubble(num_ranks, num_parts):>8.1%}{shown}{cost:>16.0f}"
            f"{schedule.formula(num_ranks, num_parts):>34}",
            flush=True,
        )


if __name__ == "__main__":
    main()
