"""A GPT-2 of 124 million parameters on one GPU, in bf16: through the Trainer, beside a hand-written loop.

    python -m benchmarks.gpu [--rounds 5] [--steps 50] [--batch 16] [--peak-tflops N] [--json FILE]

The model of examples/gpt.py with the size of GPT-2 (12 blocks of width 768, 1,024 tokens, tied embeddings of 50,304),
AdamW (fused), precision bf16-mixed, pinned batches, one logged value; in eager mode, with each block compiled, and by
hand also compiled as a whole. Tokens a second are medians over rounds; ratios are medians of those to the hand-written
loop of the same round and kind (above 1 is faster). MFU counts 6 FLOPs a parameter and token, and 12 a layer, width
and position for attention, against the dense bf16 peak of the device. `syncs` are host synchronizations a step between
two logging intervals, as torch.cuda.set_sync_debug_mode counts them in a run of its own. Expect ten minutes.
Without a CUDA device it says so and does nothing.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._rounds import Clock, Ticks, described, machine, make_parser, summarize, table, take_turns, write_json
from examples.gpt import GPT
from lockstep import Module, Trainer
from lockstep.callbacks.monitors.throughput_monitor import peak_of

LOG_EVERY = 50  # steps
WARMUP_STEPS = 10  # compiling is over by then
COUNTED_STEPS = 10
SYNC = "synchronizing CUDA operation"


class Job:
    """The work of every variant."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.width, self.depth, self.context, self.vocabulary = (
            arguments.width,
            arguments.depth,
            arguments.context,
            arguments.vocabulary,
        )
        self.batch, self.steps = arguments.batch, arguments.steps

    def gpt(self) -> GPT:
        torch.manual_seed(0)
        gpt = GPT(self.width, self.depth, head_width=64, context=self.context)
        gpt.token, gpt.head = (
            nn.Embedding(self.vocabulary, self.width),
            nn.Linear(self.width, self.vocabulary, bias=False),
        )
        nn.init.normal_(gpt.token.weight, std=0.02)
        gpt.head.weight = gpt.token.weight
        return gpt

    def loader(self, num_batches: int) -> DataLoader:
        tokens = torch.randint(
            self.vocabulary, (num_batches * self.batch, self.context + 1), generator=torch.Generator().manual_seed(0)
        )
        return DataLoader(tokens, self.batch, pin_memory=True)  # type: ignore[arg-type]

    @property
    def flops_per_token(self) -> float:
        """Of a forward and a backward."""
        gpt = self.gpt()
        num_parameters = sum(p.numel() for p in gpt.parameters()) - gpt.position.weight.numel()
        return 6 * num_parameters + 12 * self.depth * self.width * self.context


class DeviceClock(Clock):
    """Waits for the device at its marks; in between it may count host synchronizations, by the line that they come
    from."""

    def __init__(self, num_steps: int, warmup: int, counts: bool) -> None:
        super().__init__(num_steps, warmup)
        self.counts = counts
        self.peak_bytes = 0

    def tick(self, step: int) -> None:
        if step not in self.marks:
            return
        if self.counts:
            torch.cuda.set_sync_debug_mode("warn" if step == self.marks[0] else "default")
        torch.cuda.synchronize()
        if step == self.marks[0]:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.peak_bytes = torch.cuda.max_memory_allocated()
        super().tick(step)


def loss_of(gpt: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def by_hand(job: Job, clock: Clock, compiled: str) -> None:
    gpt = job.gpt().cuda()
    if compiled == "blocks":
        for block in gpt.blocks:
            block.compile()
    elif compiled == "whole":
        gpt.compile()
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=6e-4, fused=True)
    total = torch.zeros((), device="cuda")
    for step, batch in enumerate(job.loader(clock.marks[1] + 1)):
        clock.tick(step)
        batch = batch.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(gpt, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if (step + 1) % LOG_EVERY == 0:
            print(f"step {step + 1}: loss {total.item() / LOG_EVERY:.3f}")
            total.zero_()


class Text(Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self.gpt, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=6e-4, fused=True)


def lockstep(job: Job, clock: Clock, compiled: str) -> None:
    options: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "log_every_n_steps": LOG_EVERY,
    }
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        compile=compiled == "blocks",
        callbacks=Ticks(clock),
        **options,
    )
    trainer.fit(Text(job.gpt()), job.loader(clock.marks[1] + 1))


def measure(job: Job, train: Callable[[Job, Clock, str], None], compiled: str) -> dict[str, float]:
    """Tokens a second and the most bytes that were allocated on the device."""
    clock = DeviceClock(job.steps, WARMUP_STEPS, counts=False)
    fresh()
    train(job, clock, compiled)
    return {"tokens_per_s": job.batch * job.context / clock.s_per_step(), "peak_bytes": clock.peak_bytes}


def count_syncs(job: Job, train: Callable[[Job, Clock, str], None], compiled: str) -> dict[str, Any]:
    """Host synchronizations a step, in steps that end before the first logging interval, and where they come from."""
    clock = DeviceClock(COUNTED_STEPS, WARMUP_STEPS, counts=True)
    fresh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(job, clock, compiled)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{Path(item.filename).name}:{item.lineno}" for item in caught if SYNC in str(item.message))
    return {"syncs_per_step": places.total() / COUNTED_STEPS, "sync_places": dict(places)}


def fresh() -> None:
    """No variant finds what another has left on the device or compiled."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


VARIANTS: dict[str, tuple[Callable[[Job, Clock, str], None], str]] = {
    "eager, by hand": (by_hand, "no"),
    "eager, lockstep": (lockstep, "no"),
    "compiled blocks, by hand": (by_hand, "blocks"),
    "compiled blocks, lockstep": (lockstep, "blocks"),
    "compiled whole, by hand": (by_hand, "whole"),
}
REFERENCES = {name: f"{name.rpartition(', ')[0]}, by hand" for name in VARIANTS}


def main() -> None:
    parser = make_parser("Measure a GPT-2 on one GPU.", rounds=5)
    parser.add_argument(
        "--steps", type=int, default=50, help=f"steps that count in a turn, after {WARMUP_STEPS} that do not"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step")
    parser.add_argument("--width", type=int, default=768, help="of the model, a multiple of 64")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the model")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a sequence")
    parser.add_argument("--vocabulary", type=int, default=50_304, help="different tokens")
    parser.add_argument(
        "--peak-tflops", type=float, help="dense bf16 TFLOPs a second of the device, where Lockstep does not know it"
    )
    arguments = parser.parse_args()
    facts = machine()
    if not torch.cuda.is_available():
        sentence = "skipped: this benchmark needs a CUDA device, and torch sees none"
        print(sentence)
        write_json(arguments.json, facts, {}, skipped=sentence)
        return
    job = Job(arguments)
    peak = (
        peak_of(torch.cuda.get_device_name(), "bf16-mixed")
        if arguments.peak_tflops is None
        else arguments.peak_tflops * 1e12
    )
    rounds = take_turns({name: partial(measure, job, *how) for name, how in VARIANTS.items()}, arguments.rounds)
    results = summarize(
        {name: [turn["tokens_per_s"] for turn in turns] for name, turns in rounds.items()}, "per_s", REFERENCES
    )
    syncs = take_turns({name: partial(count_syncs, job, *how) for name, how in VARIANTS.items()}, 1)
    for name, row in results.items():
        row |= syncs[name][0]
        row["mfu"] = row["median_per_s"] * job.flops_per_token / peak if peak else None
        row["peak_bytes"] = max(turn["peak_bytes"] for turn in rounds[name])
        row["peak_gib"] = row["peak_bytes"] / 2**30
    for name, row in results.items():
        row["peak_ratio"] = row["peak_bytes"] / results[REFERENCES[name]]["peak_bytes"]
    elements = sum(p.numel() for p in job.gpt().parameters())
    print(
        f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps; {elements:,} parameters, "
        f"{job.batch} x {job.context} tokens a step"
    )
    columns = {
        "tokens/s": ("median_per_s", ",.0f"),
        "min": ("min_per_s", ",.0f"),
        "max": ("max_per_s", ",.0f"),
        "ratio": ("ratio", ".3f"),
        "MFU": ("mfu", ".1%"),
    }
    columns |= {"syncs": ("syncs_per_step", ".1f"), "peak GiB": ("peak_gib", ".2f"), "of peak": ("peak_ratio", ".3f")}
    print(table(results, columns))
    for name, row in results.items():
        if row["sync_places"]:
            print(
                f"{name} synchronizes at "
                + ", ".join(f"{place} ({number})" for place, number in row["sync_places"].items())
            )
    work = {
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "batch": job.batch,
        "context": job.context,
        "parameters": elements,
    }
    write_json(
        arguments.json, facts, results, columns=columns, peak_flops=peak, flops_per_token=job.flops_per_token, **work
    )


if __name__ == "__main__":
    main()
