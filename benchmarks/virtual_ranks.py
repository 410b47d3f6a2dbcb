"""What `virtual_ranks` costs: a step with it beside a step of the same strategy without.

    python -m benchmarks.virtual_ranks [--rounds 9] [--steps 40] [--width 128] [--depth 4] [--batch 4] [--clip]
    [--traffic] [--json FILE]

Trains the model of examples/gpt.py under AdamW in float32 on gloo ranks: two ranks with `virtual_ranks=2` beside plain
ddp and fsdp, one rank with `virtual_ranks=8` beside `accumulate_grad_batches=8`, and a pipeline of two stages with
`virtual_ranks=8` beside one with 8 microbatches. A time is milliseconds a step on
rank 0, the median over rounds, beside the CPU time of its process; a ratio is the median of the ratios to the variant
without virtual ranks in the same round. Expect five minutes.

`--traffic` counts what the ranks send each other as well: the bytes that the kernel sees on the loopback device of a
network namespace of their own (Linux, `unshare`; needs no root where user namespaces are allowed).
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks._rounds import Clock, described, machine, make_parser, report, summarize, take_turns
from benchmarks.engines import Job, Text
from benchmarks.step_overhead import BARE
from lockstep import Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import Pipeline
from lockstep.strategies.launch import launcher
from lockstep.strategies.virtual.step import LOOKS

WARMUP_STEPS = LOOKS + 5
"""After the first ones, in which the bits of parameters are compared around each share."""
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, virtual_ranks=2": (2, {"strategy": "ddp", "virtual_ranks": 2}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, virtual_ranks=2": (2, {"strategy": "fsdp", "virtual_ranks": 2}),
    "single, accumulation 8": (1, {"strategy": "single", "accumulate_grad_batches": 8}),
    "single, virtual_ranks=8": (1, {"strategy": "single", "virtual_ranks": 8}),
    "pipeline, 8 microbatches": (2, {}),
    "pipeline, virtual_ranks=8": (2, {"strategy": "pipeline", "virtual_ranks": 8}),
}
"""By name the ranks and what the Trainer gets."""
REFERENCES = {name: name if "virtual" not in name else names[0] for names in (
    ("ddp", "ddp, virtual_ranks=2"), ("fsdp", "fsdp, virtual_ranks=2"),
    ("single, accumulation 8", "single, virtual_ranks=8"), ("pipeline, 8 microbatches", "pipeline, virtual_ranks=8"),
) for name in names}  # fmt: skip


class StepTicks(Callback):
    """Ticks once an optimizer step, however many micro-batches or shares it has."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.bytes: list[int] = []
        """What the loopback device had carried at the marks of the clock."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.clock.tick(trainer.global_step)
        if trainer.global_step in self.clock.marks:
            self.bytes.append(loopback_bytes())


def loopback_bytes() -> int:
    """What the loopback device has received so far, in this network namespace."""
    found = re.search(r"^\s*lo:\s*(\d+)", Path("/proc/net/dev").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def enter_own_network(module: str) -> None:
    """Run `module` again with the same arguments, in a network namespace of its own; returns if this is one."""
    if "LOCKSTEP_BENCHMARK_ALONE" not in os.environ:
        inside = ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$0" "$@"', sys.executable]
        os.environ["LOCKSTEP_BENCHMARK_ALONE"] = "1"
        os.execvp(inside[0], [*inside, "-m", module, *sys.argv[1:]])


def on_rank(name: str, job: Job, clip: bool) -> list[float]:
    """Seconds a step on rank 0, those of its CPU time, and bytes a step on the loopback device."""
    ranks, options = VARIANTS[name]
    clips = {"gradient_clip_val": 1.0} if clip else {}
    ticks, loader = StepTicks(job.clock), job.loader(8 if ranks == 1 or "pipeline" in name else ranks)
    if not options:
        options = {"strategy": Pipeline(num_micro_batches=8)}
        loader = DataLoader(loader.dataset, 8 * job.batch)
    trainer = Trainer(devices=ranks, accelerator="cpu", callbacks=ticks, **options, **clips, **BARE)
    trainer.fit(Text(job.gpt()), loader)
    before, after = ticks.bytes
    sent = (after - before) / (job.clock.marks[1] - job.clock.marks[0])
    return [job.clock.s_per_step(), job.clock.cpu_s_per_step(), sent]


def main() -> None:
    parser = make_parser("Measure what virtual ranks cost.", rounds=9)
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps in a turn, after {WARMUP_STEPS} that do not count"
    )
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each share")
    parser.add_argument("--clip", action="store_true", help="clip gradients by norm")
    parser.add_argument("--traffic", action="store_true", help="count bytes, in a network namespace of their own")
    arguments = parser.parse_args()
    if arguments.traffic:
        enter_own_network("benchmarks.virtual_ranks")
    facts = machine()

    def run(name: str) -> list[float]:
        job = Job(arguments.width, arguments.depth, arguments.batch, WARMUP_STEPS, arguments.steps)
        return launcher.launch(on_rank, (name, job, arguments.clip), VARIANTS[name][0])

    times = take_turns({name: partial(run, name) for name in VARIANTS}, arguments.rounds)
    results, cpu = (
        summarize({name: [turn[i] * 1e3 for turn in turns] for name, turns in times.items()}, "ms", REFERENCES)
        for i in (0, 1)
    )
    for name, row in results.items():
        row |= {"cpu_ms": cpu[name]["median_ms"], "cpu_ratio": cpu[name]["ratio"]}
        if arguments.traffic and VARIANTS[name][0] > 1:
            mine, plain = (
                sum(turn[2] for turn in times[other]) / arguments.rounds for other in (name, REFERENCES[name])
            )
            row |= {"kilobytes": mine / 1e3, "traffic_ratio": mine / plain}
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps")
    columns = {"ms a step": ("median_ms", ".2f"), "min": ("min_ms", ".2f"), "max": ("max_ms", ".2f")}
    columns |= {"ratio": ("ratio", ".3f"), "CPU ms": ("cpu_ms", ".2f"), "CPU ratio": ("cpu_ratio", ".3f")}
    if arguments.traffic:
        columns |= {"kB a step": ("kilobytes", ".1f"), "ratio of traffic": ("traffic_ratio", ".3f")}
    report(arguments, facts, results, columns)


if __name__ == "__main__":
    main()
