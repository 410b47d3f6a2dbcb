"""What the CPU time of a step is made of, by the file whose code runs: through the Trainer, beside a loop by hand.

    python -m benchmarks.step_profile [--rounds 3] [--steps 200] [--match TEXT] [--json FILE]

The step of `benchmarks.step_overhead` with everything on, beside a loop that logs the same values, and those of
`benchmarks.engines` on two ranks, of which the last is checked. A timer of the process's CPU time interrupts it
every millisecond, and the innermost Python frame says what it was doing; kernels count for the line that calls them,
what gloo's threads do for the line that waits. Numbers are microseconds a step, medians over rounds. Files with less
than half a percent of the step are summed up. Interrupts come a little late, at the next call or loop of Python, so
small numbers are good to a few microseconds. Expect two minutes.
"""

from __future__ import annotations

import signal
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import step_overhead
from benchmarks._rounds import Clock, described, machine, make_parser, table, take_turns, write_json
from benchmarks.engines import BY_HAND, RANKS, Job, train
from lockstep.strategies.launch import environment, launcher
from lockstep.strategies.launch.process_group import destroy_process_group, init_process_group

ROOT = Path(__file__).resolve().parents[1]
OWN = tuple(f"{ROOT / 'lockstep' / package}/" for package in ("trainer", "strategies", "callbacks"))
REST, WITHOUT_DATA, SMALL = (
    "torch, the model, the loop by hand",
    "torch: fake tensors",
    "files below half a percent",
)
LEAST = 0.005
WARMUP_STEPS = 20
Profile = dict[str, float]
"""Microseconds a step by file."""


class SampledClock(Clock):
    """Counts what runs between its marks, besides."""

    def __init__(self, num_steps: int, warmup: int) -> None:
        super().__init__(num_steps, warmup)
        self.counts: Counter[str] = Counter()

    def tick(self, step: int) -> None:
        super().tick(step)
        if step == self.marks[0]:
            signal.signal(signal.SIGPROF, lambda number, frame: self.counts.update([file_of(frame)]))
            signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        elif step == self.marks[1]:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def profile(self) -> Profile:
        share = self.cpu_s_per_step() * 1e6 / sum(self.counts.values())
        return {name: count * share for name, count in self.counts.items()}


def file_of(frame: FrameType | None) -> str:
    """The file of Lockstep's whose code runs, else what runs in its place."""
    if frame is not None and frame.f_code.co_name == "noting":  # the collective call around which it lies
        return REST
    if frame is not None and frame.f_code.co_filename.startswith(OWN):
        return frame.f_code.co_filename[len(str(ROOT)) + 1 :]
    while frame is not None and not frame.f_code.co_filename.startswith(OWN):
        if frame.f_code.co_filename.endswith("fake_tensor.py"):
            return WITHOUT_DATA
        frame = frame.f_back
    return REST


def on_rank(name: str, by_hand: bool, num_steps: int) -> Profile:
    """The profile of the last rank."""
    world = environment.detect()
    assert world is not None
    job = Job(width=128, depth=4, batch=4, warmup=WARMUP_STEPS, num_steps=num_steps)
    if world.rank == RANKS - 1:
        job.clock = SampledClock(num_steps, WARMUP_STEPS)  # type: ignore[assignment]
    train(name, by_hand, job, world)
    init_process_group(world, "gloo")
    profiles: list[Any] = [None] * RANKS
    dist.all_gather_object(profiles, job.clock.profile() if isinstance(job.clock, SampledClock) else None)
    destroy_process_group()
    return profiles[-1]


def in_one_process(run: Callable[[int], Clock], num_steps: int) -> Profile:
    step_overhead.Clock = SampledClock  # type: ignore[misc]
    try:
        clock = run(num_steps)
    finally:
        step_overhead.Clock = Clock  # type: ignore[misc]
    assert isinstance(clock, SampledClock)
    return clock.profile()


def compared(by_hand: list[Profile], lockstep: list[Profile]) -> dict[str, dict[str, Any]]:
    """Rows of both, the largest first."""
    own, ours = (
        {name: statistics.median(p.get(name, 0.0) for p in profiles) for name in set().union(*profiles)}
        for profiles in (by_hand, lockstep)
    )
    whole_own, whole = (statistics.median(sum(p.values()) for p in profiles) for profiles in (by_hand, lockstep))
    rows = {}
    for name in sorted({*own, *ours}, key=lambda name: -ours.get(name, 0.0)):
        if max(ours.get(name, 0.0), own.get(name, 0.0)) >= LEAST * whole:
            rows[name] = {"by_hand_us": own.get(name), "lockstep_us": ours.get(name)}
    rows[SMALL] = {
        key: max(0.0, total - sum(row[key] or 0.0 for row in rows.values()))
        for key, total in (("by_hand_us", whole_own), ("lockstep_us", whole))
    }
    rows["all"] = {"by_hand_us": whole_own, "lockstep_us": whole}
    return rows


def main() -> None:
    parser = make_parser("Show what the time of a step is made of.", rounds=3, match="parts")
    parser.add_argument(
        "--steps", type=int, default=200, help="steps that count on two ranks; ten times as many in one process"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    everything = partial(step_overhead.lockstep, num_values=5, everything=True)
    parts: dict[str, tuple[Callable[[], Profile], Callable[[], Profile]]] = {
        "everything on": (
            partial(in_one_process, step_overhead.by_hand_logging, 10 * arguments.steps),
            partial(in_one_process, everything, 10 * arguments.steps),
        )
    }
    for name in BY_HAND:
        run = partial(launcher.launch, on_rank)
        parts[name] = (
            partial(run, (name, True, arguments.steps), RANKS),
            partial(run, (name, False, arguments.steps), RANKS),
        )
    parts = {name: both for name, both in parts.items() if arguments.match in name}
    facts = machine()
    turns = take_turns(
        {
            f"{name}, {who}": run
            for name, both in parts.items()
            for who, run in zip(("by hand", "lockstep"), both, strict=True)
        },
        arguments.rounds,
    )
    results = {name: compared(turns[f"{name}, by hand"], turns[f"{name}, lockstep"]) for name in parts}
    print(
        f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps on two ranks, "
        f"{10 * arguments.steps} in one process; CPU us a step"
    )
    columns: Mapping[str, tuple[str, str]] = {"by hand": ("by_hand_us", ",.0f"), "lockstep": ("lockstep_us", ",.0f")}
    for name, rows in results.items():
        print("\n" + table(rows, columns, name))
    write_json(
        arguments.json,
        facts,
        results,
        columns=dict.fromkeys(results, columns),
        rounds=arguments.rounds,
        steps=arguments.steps,
    )


if __name__ == "__main__":
    main()
