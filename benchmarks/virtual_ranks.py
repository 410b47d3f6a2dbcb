"""What `virtual_ranks` costs: a step with it beside a step of the same strategy without.

    python -m benchmarks.virtual_ranks [--rounds 9] [--steps 40] [--width 128] [--depth 4] [--batch 4] [--clip]
    [--json FILE]

Trains the model of examples/gpt.py under AdamW in float32 on gloo ranks: two ranks with `virtual_ranks=2` beside plain
ddp and fsdp, and one rank with `virtual_ranks=8` beside `accumulate_grad_batches=8`. A time is milliseconds a step on
rank 0, the median over rounds, beside the CPU time of its process; a ratio is the median of the ratios to the variant
without virtual ranks in the same round. Expect five minutes.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._rounds import Clock, described, machine, summarize, table, take_turns, write_json
from benchmarks.engines import WARMUP_STEPS, Job, Text
from benchmarks.step_overhead import BARE
from lockstep import Trainer
from lockstep.callbacks import Callback
from lockstep.strategies.launch import launcher

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "ddp, virtual_ranks=2": (2, {"strategy": "ddp", "virtual_ranks": 2}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, virtual_ranks=2": (2, {"strategy": "fsdp", "virtual_ranks": 2}),
    "single, accumulation 8": (1, {"strategy": "single", "accumulate_grad_batches": 8}),
    "single, virtual_ranks=8": (1, {"strategy": "single", "virtual_ranks": 8}),
}
"""By name the ranks and what the Trainer gets."""
REFERENCES = {name: name if "virtual" not in name else names[0] for names in (
    ("ddp", "ddp, virtual_ranks=2"), ("fsdp", "fsdp, virtual_ranks=2"),
    ("single, accumulation 8", "single, virtual_ranks=8"),
) for name in names}  # fmt: skip


class StepTicks(Callback):
    """Ticks once an optimizer step, however many micro-batches it has."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.last = clock, -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.last:
            self.last = trainer.global_step
            self.clock.tick(self.last)


def on_rank(name: str, job: Job, clip: bool) -> list[float]:
    """Seconds a step on rank 0, and those of its CPU time."""
    ranks, options = VARIANTS[name]
    clips = {"gradient_clip_val": 1.0} if clip else {}
    trainer = Trainer(devices=ranks, accelerator="cpu", callbacks=StepTicks(job.clock), **options, **clips, **BARE)
    trainer.fit(Text(job.gpt()), job.loader(8 if ranks == 1 else ranks))
    return [job.clock.s_per_step(), job.clock.cpu_s_per_step()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what virtual ranks cost.")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each variant")
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps in a turn, after {WARMUP_STEPS} that do not count"
    )
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each share")
    parser.add_argument("--clip", action="store_true", help="clip gradients by norm")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
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
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps")
    columns = {"ms a step": ("median_ms", ".2f"), "min": ("min_ms", ".2f"), "max": ("max_ms", ".2f")}
    columns |= {"ratio": ("ratio", ".3f"), "CPU ms": ("cpu_ms", ".2f"), "CPU ratio": ("cpu_ratio", ".3f")}
    print(table(results, columns))
    write_json(arguments.json, facts, results, columns=columns, rounds=arguments.rounds, steps=arguments.steps)


if __name__ == "__main__":
    main()
