"""The largest batch of a GPT-2 of 124 million parameters that fits one GPU: as planned, and as found by trying.

    python -m benchmarks.plan_gpu [--step 8] [--most 256] [--memory GIB] [--json FILE]
    python -m benchmarks.plan_gpu --speed h200    # tokens per second as planned for a batch of 16; needs no GPU

The model and precision of `benchmarks.gpu`, in eager mode. Batches are multiples of `--step` sequences. The plan is for
the memory that the device reports, or for `--memory`, which torch's allocator is then held to. A batch fits if three
optimizer steps end; the largest is found by bisection. For each batch that was tried and fits, the bytes allocated and
reserved at the peak of the third step are beside the plan's peak. Without a CUDA device it says so and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks._rounds import described, machine, make_parser, table, write_json
from benchmarks.gpu import Job, Text, fresh
from lockstep import Trainer
from lockstep.callbacks import Callback
from lockstep.strategies.planning.devices import find_device
from lockstep.strategies.planning.timing import estimate, fits
from lockstep.trainer.planning import plan

STEPS, BATCH = 3, 16


class Peak(Callback):
    """Bytes at the peak of the last step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.allocated, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def trainer_of(callback: Callback, accelerator: str) -> Trainer:
    return Trainer(
        strategy="single",
        accelerator=accelerator,
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        callbacks=callback,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def loader(job: Job, batch: int) -> DataLoader:
    job.batch = batch
    return job.loader(STEPS)


def planned(job: Job, batch: int) -> Any:
    return plan(trainer_of(Callback(), "cpu"), Text(job.gpt()), loader(job, batch))


def measured(job: Job, batch: int) -> dict[str, int] | None:
    """Bytes at the peak, or None if the device has not enough."""
    fresh()
    peak = Peak()
    try:
        trainer_of(peak, "gpu").fit(Text(job.gpt()), loader(job, batch))
    except torch.OutOfMemoryError:
        return None
    return {"allocated": peak.allocated, "reserved": peak.reserved}


def largest(holds: Callable[[int], bool], step: int, most: int) -> int:
    """The largest multiple of `step` up to `most` for which `holds`, 0 if it does for none."""
    low, high = 0, most // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * step) else (low, middle)
    return low * step


def main() -> None:
    parser = make_parser("Find the largest batch that fits a GPU, and what the plan says of it.")
    parser.add_argument("--step", type=int, default=8, help="batches are multiples of this many sequences")
    parser.add_argument("--most", type=int, default=256, help="sequences of the largest batch that is tried")
    parser.add_argument("--memory", type=float, help="GiB that the model may have, in place of the device's")
    parser.add_argument("--width", type=int, default=768, help="of the model, a multiple of 64")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the model")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--vocabulary", type=int, default=50_304, help="different tokens")
    parser.add_argument("--speed", metavar="NAME", help="only say how fast that device is planned to be")
    arguments = parser.parse_args()
    arguments.batch, arguments.steps = arguments.step, STEPS
    job, facts = Job(arguments), machine()
    if arguments.speed is not None:
        found_speed = estimate(planned(job, BATCH), find_device(arguments.speed))
        print(f"{found_speed.tokens_per_s:,.0f} tokens/s planned, MFU {found_speed.mfu:.1%}")
        return
    if not torch.cuda.is_available():
        sentence = "skipped: this benchmark needs a CUDA device, and torch sees none"
        print(sentence)
        write_json(arguments.json, facts, {}, skipped=sentence)
        return
    found: dict[int, dict[str, int] | None] = {}

    def ran(batch: int) -> bool:
        found[batch] = measured(job, batch)
        return found[batch] is not None

    memory = total = torch.cuda.get_device_properties(0).total_memory
    if arguments.memory is not None:
        memory = min(total, int(arguments.memory * 2**30))
        torch.cuda.set_per_process_memory_fraction(memory / total)
    device = find_device(f"memory={memory / 2**30}")
    tried = largest(ran, arguments.step, arguments.most)
    plan_of = cache(partial(planned, job))
    said = largest(lambda batch: fits(plan_of(batch), device), arguments.step, arguments.most)
    rows = {
        f"batch {batch}": {
            "batch": batch,
            "planned_bytes": plan_of(batch).ranks[0].peak,
            "planned": plan_of(batch).ranks[0].peak / 2**30,
            **{name: value / 2**30 for name, value in peak.items()},
            "error": plan_of(batch).ranks[0].peak / peak["allocated"] - 1,
            "reserve": peak["reserved"] / peak["allocated"] - 1,
        }
        for batch, peak in sorted(found.items())
        if peak
    }
    columns = {"planned GiB": ("planned", ".2f"), "allocated": ("allocated", ".2f"), "error": ("error", "+.1%")}
    columns |= {"reserved": ("reserved", ".2f"), "above allocated": ("reserve", ".1%")}
    print(f"{described(facts)}; {memory / 2**30:.2f} GiB")
    print(table(rows, columns))
    print(f"largest batch: {said} planned, {tried} found, in steps of {arguments.step}")
    write_json(arguments.json, facts, rows, columns=columns, rounds=1, planned=said, found=tried, memory=memory)


if __name__ == "__main__":
    main()
