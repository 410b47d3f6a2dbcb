"""What a careful engineer adds to a loop by hand and Lockstep takes as one argument: a step without and with each of
them.

    python -m benchmarks.additions [--rounds 5] [--steps 20] [--width 128] [--depth 4] [--batch 4] [--match TEXT]
    [--json FILE]

Through the Trainer, one process with one thread on the CPU, or on the GPU where there is one; in float32. "GPT" is the
model of examples/gpt.py on `batch` sequences of 64 tokens. "Small operations" are as many blocks of half its width with
a norm and a gate written out, on 1,024 x `batch` rows. "1,000 tensors" is a perceptron with as many parameter tensors
of 8 numbers. The convolutions are three, each with a batch norm and a ReLU, on 4 x `batch` images of 3 x 32 x 32.
Accumulation runs on two gloo ranks of the CPU, beside DistributedDataParallel by hand, with micro-batches of a quarter
of
`batch`; its step is a window of 8. Tensor parallelism cuts the GPT over two such ranks. Activation checkpointing is
what
`benchmarks.recompute` measures, its time that of the fastest forward and backward. A time is milliseconds a step, the
median over rounds; a ratio is the median of the ratios to the first variant of the addition in the same round, in time
and in CPU time of the process. What is compiled has new processes in each round: `first s` are the seconds of its first
step in the first round, when nothing is in torch's cache on the disk, `cached s` in later rounds. `kept` are the bytes
between forward and backward, `exchanges` the collective calls of a step.
Expect three and a half minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import recompute
from benchmarks._rounds import (
    Clock,
    Ticks,
    described,
    machine,
    make_parser,
    report,
    summarize,
    take_turns,
)
from benchmarks.engines import CONTEXT, RANKS, Job, loss_of
from benchmarks.scaling import Small
from benchmarks.step_overhead import BARE
from lockstep import Module, Trainer
from lockstep.callbacks import Callback, ChannelsLast
from lockstep.strategies.launch import environment, launcher
from lockstep.strategies.launch.process_group import destroy_process_group, init_process_group

WARMUP_STEPS, WARMUP_WINDOWS = 3, 17  # in 16 steps ranks look whether an optimizer draws
ACCUMULATE = 8
EACH, NO_SYNC, LOCKSTEP = "by hand, exchanges in each backward", "by hand, no_sync", "lockstep"
NUM_TENSORS = 1000
ON_GPU = torch.cuda.is_available()

Turn: TypeAlias = "dict[str, float | None]"
"""What a variant measured in a round, by name and unit."""


# ---- what is trained -------------------------------------------------------------------------------------


class Task(Module):
    """A network, the loss of a batch, and the options of its AdamW."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], **adamw: Any) -> None:
        super().__init__()
        self.net, self.loss, self.adamw = net, loss, adamw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **self.adamw)


class Gate(nn.Module):
    """A norm and a gate in operations that torch has no kernel of its own for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.up, self.down = (
            nn.Parameter(torch.ones(width)),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale).chunk(2, -1)
        return x + self.down(F.silu(left) * right)


def convolutions(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, width // 2), (width // 2, width), (width, width)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def text_loss(net: nn.Module, batch: Tensor) -> Tensor:
    return loss_of(net(batch[:, :-1]), batch[:, 1:])


def square(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()


def image_loss(net: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


# ---- one process -----------------------------------------------------------------------------------------


class Steps(Clock):
    """Times the first step as well, and waits for the device."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps, WARMUP_STEPS)
        self.first: list[float] = []

    def tick(self, step: int) -> None:
        if ON_GPU and (step < 2 or step in self.marks):
            torch.cuda.synchronize()
        if step < 2:
            self.first.append(time.perf_counter())
        super().tick(step)


class Work:
    """The tasks of every variant in one process; each returns what a run took, in ms and s, and the loss of its last
    step."""

    def __init__(self, arguments: argparse.Namespace, cache: str) -> None:
        self.cache = cache
        self.steps, self.width, self.depth, self.batch = (
            arguments.steps,
            arguments.width,
            arguments.depth,
            arguments.batch,
        )
        self.num_batches = WARMUP_STEPS + self.steps + 1

    def fit(
        self,
        task: Task,
        batches: DataLoader,
        callbacks: Sequence[Callback] = (),
        strategy: str = "single",
        **options: Any,
    ) -> Turn:
        clock = Steps(self.steps)
        alone = strategy == "single"
        place: dict[str, Any] = {"devices": 1 if alone else RANKS, "accelerator": "gpu" if ON_GPU and alone else "cpu"}
        trainer = Trainer(strategy=strategy, callbacks=[Ticks(clock), *callbacks], **place, **BARE, **options)
        trainer.fit(task, batches)
        times = {
            "ms": clock.s_per_step() * 1e3,
            "cpu_ms": clock.cpu_s_per_step() * 1e3,
            "first_s": clock.first[1] - clock.first[0],
        }
        return {**times, "loss": trainer._run.last_loss}

    def gpt(self, adamw: dict[str, Any] | None = None, **options: Any) -> Turn:
        job = Job(self.width, self.depth, self.batch, WARMUP_STEPS, self.steps)
        return self.fit(
            Task(job.gpt(), text_loss, **({"fused": True} if adamw is None else adamw)), job.loader(1), **options
        )

    def cut_gpt(self, **options: Any) -> Turn:
        return self.gpt(strategy="tensor", **options)

    def gates(self, **options: Any) -> Turn:
        torch.manual_seed(0)
        width, rows = self.width // 2, 1024 * self.batch
        net = nn.Sequential(*(Gate(width) for _ in range(self.depth)))
        return self.fit(
            Task(net, square, fused=True), DataLoader(torch.randn(self.num_batches * rows, width), rows), **options
        )  # type: ignore[arg-type]

    def tensors(self, adamw: dict[str, Any]) -> Turn:
        return self.fit(
            Task(Small(NUM_TENSORS), square, **adamw),
            DataLoader(torch.randn(self.num_batches * self.batch, 32), self.batch),
        )  # type: ignore[arg-type]

    def images(self, callbacks: Sequence[Callback]) -> Turn:
        torch.manual_seed(0)
        num = self.num_batches * 4 * self.batch
        data = TensorDataset(torch.randn(num, 3, 32, 32), torch.randint(10, (num,)))
        return self.fit(
            Task(convolutions(self.width // 2), image_loss, fused=True), DataLoader(data, 4 * self.batch), callbacks
        )

    def compiled(self, task: Callable[..., Turn], compile: bool | dict[str, Any], num_ranks: int = 1) -> Turn:
        """In new processes; on the disk is what earlier rounds of `task` have compiled."""
        return launcher.launch(compiled_on_rank, (task, compile, f"{self.cache}/{task.__name__}"), num_ranks)

    def recomputed(self, on: bool) -> Turn:
        kept, seconds = recompute.measure(on, self.width, self.depth, max(1, self.steps // 4))
        return {"ms": seconds * 1e3, "kept_bytes": kept}

    def accumulated(self, how: str) -> Turn:
        num_windows = max(1, self.steps // 4)
        job = Job(
            self.width, self.depth, max(1, self.batch // 4), WARMUP_WINDOWS * ACCUMULATE, num_windows * ACCUMULATE
        )
        return launcher.launch(on_rank, (how, job, num_windows), RANKS)


# ---- processes that are started --------------------------------------------------------------------------


def compiled_on_rank(task: Callable[..., Turn], compile: bool | dict[str, Any], cache: str) -> Turn:
    """With the number of graphs that were compiled."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return {**task(compile=compile), "graphs": counters["stats"]["unique_graphs"]}


class Counts(Clock):
    """Notes at its marks how many collectives this rank has called."""

    def __init__(self, num_steps: int, warmup: int) -> None:
        super().__init__(num_steps, warmup)
        self.calls: list[int] = []

    def tick(self, step: int) -> None:
        if step in self.marks:
            self.calls.append(dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]
        super().tick(step)


def on_rank(how: str, job: Job, num_windows: int) -> Turn:
    """Of an optimizer step of rank 0, which is a window of micro-batches."""
    torch.set_num_threads(1)
    task, world = Task(job.gpt(), text_loss, fused=True), environment.detect()
    clock = Counts(num_windows * ACCUMULATE, job.clock.marks[0])
    assert world is not None
    if how == LOCKSTEP:
        trainer = Trainer(
            strategy="ddp",
            devices=RANKS,
            accelerator="cpu",
            accumulate_grad_batches=ACCUMULATE,
            callbacks=Ticks(clock),
            **BARE,
        )
        trainer.fit(task, job.loader(RANKS))
    else:
        init_process_group(world, "gloo")
        model = nn.parallel.DistributedDataParallel(task.net, gradient_as_bucket_view=True)
        optimizer = task.configure_optimizers()
        for i, batch in enumerate(job.loader(RANKS)):
            clock.tick(i)
            last = (i + 1) % ACCUMULATE == 0
            with model.no_sync() if how == NO_SYNC and not last else nullcontext():
                (text_loss(model, batch) / ACCUMULATE).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        destroy_process_group()
    times = {"ms": clock.s_per_step() * ACCUMULATE * 1e3, "cpu_ms": clock.cpu_s_per_step() * ACCUMULATE * 1e3}
    return {**times, "exchanges": (clock.calls[1] - clock.calls[0]) / num_windows}


# ---- measuring -------------------------------------------------------------------------------------------


def additions(work: Work) -> dict[str, dict[str, Callable[[], Turn]]]:
    """The variants of each addition, the one without it first."""
    fused: tuple[dict[str, Any], dict[str, Any]] = ({"foreach": True}, {}) if ON_GPU else ({}, {"fused": True})
    compiles: dict[str, Any] = {"off": False, "on": True} | (
        {"with CUDA graphs": {"mode": "reduce-overhead"}} if ON_GPU else {}
    )
    return {
        "compile=True, GPT": {how: partial(work.compiled, work.gpt, given) for how, given in compiles.items()},
        "compile=True, small operations": {
            how: partial(work.compiled, work.gates, given) for how, given in compiles.items()
        },
        f"compile=True, GPT under tensor on {RANKS} ranks": {
            how: partial(work.compiled, work.cut_gpt, how == "on", RANKS) for how in ("off", "on")
        },
        "fused optimizer, GPT": {"off": partial(work.gpt, fused[0]), "on": partial(work.gpt, fused[1])},
        "fused optimizer, 1,000 tensors": {
            "off": partial(work.tensors, fused[0]),
            "on": partial(work.tensors, fused[1]),
        },
        "activation_checkpointing=True": {"off": partial(work.recomputed, False), "on": partial(work.recomputed, True)},
        f"accumulate_grad_batches={ACCUMULATE}": {
            how: partial(work.accumulated, how) for how in (EACH, NO_SYNC, LOCKSTEP)
        },
        "ChannelsLast()": {"off": partial(work.images, []), "on": lambda: work.images([ChannelsLast()])},
        'precision="tf32-true"': {"off": work.gpt, "on": partial(work.gpt, precision="tf32-true")},
        "deterministic=True": {"off": work.gpt, "on": partial(work.gpt, deterministic=True)},
    }


def main() -> None:
    parser = make_parser(
        "Measure what each argument for speed, memory or exactness brings.", rounds=5, match="additions"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help="that count in a turn, after some that do not; a quarter as many where a step is long",
    )
    parser.add_argument("--width", type=int, default=128, help="of the GPT; the other models follow it")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the GPT")
    parser.add_argument(
        "--batch", type=int, default=4, help="sequences in a step of the GPT; the other batches follow it"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()
    with tempfile.TemporaryDirectory() as cache:
        wanted = {
            name: variants for name, variants in additions(Work(arguments, cache)).items() if arguments.match in name
        }
        names = {f"{name}, {how}": (name, how) for name, variants in wanted.items() for how in variants}
        references = {full: f"{name}, {next(iter(wanted[name]))}" for full, (name, _) in names.items()}
        turns = take_turns({full: wanted[name][how] for full, (name, how) in names.items()}, arguments.rounds)
    results = summarize({full: [turn["ms"] for turn in own] for full, own in turns.items()}, "ms", references)
    cpu = {full: [turn["cpu_ms"] for turn in own] for full, own in turns.items() if "cpu_ms" in own[0]}
    for full, row in summarize(cpu, "ms", {full: references[full] for full in cpu}).items():
        results[full] |= {"cpu_ms": row["median_ms"], "cpu_ratio": row["ratio"], "cpu_rounds_ms": row["rounds_ms"]}
    for full, own in turns.items():
        row = results[full]
        row |= {key: own[0][key] for key in ("loss", "graphs", "kept_bytes", "exchanges") if key in own[0]}
        if "graphs" in row:
            firsts = [turn["first_s"] for turn in own]
            row |= {
                "first_s": firsts[0],
                "cached_s": statistics.median(firsts[1:]) if row["graphs"] and firsts[1:] else None,
            }
        if "kept_bytes" in row:
            row["kept_mib"] = row["kept_bytes"] / 2**20
    print(f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps")
    columns = {"ms a step": ("median_ms", ".2f"), "min": ("min_ms", ".2f"), "max": ("max_ms", ".2f")}
    columns |= {"ratio": ("ratio", ".2f"), "CPU ratio": ("cpu_ratio", ".2f")}
    columns |= {
        "first s": ("first_s", ".2f"),
        "cached s": ("cached_s", ".2f"),
        "kept MiB": ("kept_mib", ".1f"),
        "exchanges": ("exchanges", ".0f"),
    }
    sizes = {"width": arguments.width, "depth": arguments.depth, "batch": arguments.batch, "context": CONTEXT}
    report(arguments, facts, results, columns, ranks=RANKS, model=sizes)


if __name__ == "__main__":
    main()
