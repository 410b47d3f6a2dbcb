"""DDP, FSDP, tensor and pipeline parallelism through the Trainer, beside a hand-written use of the same engine of
torch.

    python -m benchmarks.engines [--rounds 9] [--steps 40] [--width 128] [--depth 4] [--batch 4] [--match TEXT] [--json
    FILE]

Two gloo ranks train the model of examples/gpt.py under AdamW in float32. The ranks of all variants are started alike,
so only what runs in them differs. A time is milliseconds a step on rank 0, the median over rounds, beside the CPU time
of its process, which other programs on the machine hardly change and which waiting does not count in; a ratio is the
median of the ratios to the hand-written loop of the same round. `peak` is the most that torch's allocator had handed
out on a rank at any moment of the second step, in bytes as torch's profiler counts them: parameters, gradients,
optimizer state, activations and buckets; what gloo holds for a transfer is not in it. The profiler does not see what
gloo's threads free, so a count can only be too high, and the least of several runs is taken. Expect five minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, DistributedSampler

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
from benchmarks.step_overhead import BARE
from examples.gpt import GPT, VOCABULARY
from lockstep import Module, Trainer
from lockstep.strategies.launch import environment, launcher
from lockstep.strategies.launch.process_group import destroy_process_group, init_process_group

RANKS, CONTEXT, WARMUP_STEPS = 2, 64, 3
MARK = "measured steps begin or end"


class Job:
    """The work of every variant: `step` calls on batches of `batch` sequences, of which `clock` times some."""

    def __init__(self, width: int, depth: int, batch: int, warmup: int, num_steps: int) -> None:
        self.width, self.depth, self.batch = width, depth, batch
        self.clock = Marks(num_steps, warmup)
        self.num_batches = warmup + num_steps + 1

    def gpt(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.width, self.depth, head_width=self.width // 4, context=CONTEXT)

    def loader(self, shards: int) -> DataLoader:
        """`batch` sequences a batch for this rank, where `shards` ranks see different ones; the Trainer cuts by
        itself."""
        tokens = torch.randint(
            VOCABULARY,
            (self.num_batches * self.batch * shards, CONTEXT + 1),
            generator=torch.Generator().manual_seed(0),
        )
        sampler: Any = None
        if shards > 1 and dist.is_initialized():
            sampler = DistributedSampler(tokens, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(tokens, self.batch, sampler=sampler)  # type: ignore[arg-type]


class Marks(Clock):
    """Leaves marks in a profile as well."""

    def tick(self, step: int) -> None:
        super().tick(step)
        if step in self.marks:
            with record_function(MARK):
                pass


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- by hand -------------------------------------------------------------------------------------------


def train_by_hand(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> None:
    for step, batch in enumerate(batches):
        job.clock.tick(step)
        loss_of(model(batch[:, :-1]), batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_by_hand(job: Job, rank: int) -> None:
    model = nn.parallel.DistributedDataParallel(job.gpt(), gradient_as_bucket_view=True)
    train_by_hand(job, model, torch.optim.AdamW(model.parameters(), fused=True), job.loader(RANKS))


def fsdp_by_hand(job: Job, rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = job.gpt()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    train_by_hand(job, model, torch.optim.AdamW(model.parameters(), fused=True), job.loader(RANKS))


def tensor_by_hand(job: Job, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    model, mesh = job.gpt(), init_device_mesh("cpu", (RANKS,))
    plan = {
        "attention": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),  # one sum of gradients for the three
        **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
        "attention.o": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    parameters: list[list[nn.Parameter]] = [[], []]
    for parameter in model.parameters():
        parameters[isinstance(parameter, DTensor)].append(parameter)
    train_by_hand(job, model, torch.optim.AdamW([{"params": group} for group in parameters], fused=True), job.loader(1))


class Half(nn.Module):
    """The first or the second half of the model."""

    def __init__(self, gpt: GPT, rank: int) -> None:
        super().__init__()
        middle = len(gpt.blocks) // 2
        self.blocks = gpt.blocks[middle:] if rank else gpt.blocks[:middle]
        self.token, self.position = (None, None) if rank else (gpt.token, gpt.position)
        self.norm, self.head = (gpt.norm, gpt.head) if rank else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipeline_by_hand(job: Job, rank: int) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = Half(job.gpt(), rank)
    stage = PipelineStage(half, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=RANKS, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(half.parameters(), fused=True)
    for step, batch in enumerate(job.loader(1)):
        job.clock.tick(step)
        if rank == 0:
            schedule.step(batch[:, :-1])
        else:
            schedule.step(target=batch[:, 1:], losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()


BY_HAND: dict[str, Callable[[Job, int], None]] = {
    "ddp": ddp_by_hand,
    "fsdp": fsdp_by_hand,
    "tensor": tensor_by_hand,
    "pipeline": pipeline_by_hand,
}


# ---- through the Trainer -------------------------------------------------------------------------------


class Text(Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.gpt(batch[:, :-1]), batch[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def train(name: str, by_hand: bool, job: Job, world: environment.World) -> None:
    """Train under the engine of that name, by hand or through the Trainer. On every rank; no group is left."""
    if by_hand:
        init_process_group(world, "gloo")
        BY_HAND[name](job, world.rank)
        destroy_process_group()
    else:
        lockstep(job, name)


def lockstep(job: Job, name: str) -> None:
    trainer = Trainer(strategy=name, devices=RANKS, accelerator="cpu", callbacks=Ticks(job.clock), **BARE)
    trainer.fit(Text(job.gpt()), job.loader(RANKS if name in ("ddp", "fsdp") else 1))


# ---- measuring -----------------------------------------------------------------------------------------


def on_rank(name: str, by_hand: bool, job: Job, counts_bytes: bool) -> list[float]:
    """Seconds a step on rank 0, those of its CPU time and, where they are counted, the most bytes that each rank
    held."""
    world = environment.detect()
    assert world is not None
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        if counts_bytes
        else record_function("not counted") as profiled
    ):
        train(name, by_hand, job, world)
    init_process_group(world, "gloo")
    peaks = [torch.zeros((), dtype=torch.long) for _ in range(RANKS)]
    dist.all_gather(peaks, torch.tensor(peak_bytes(profiled) if counts_bytes else 0))
    destroy_process_group()
    return [job.clock.s_per_step(), job.clock.cpu_s_per_step(), *map(float, peaks)]


def peak_bytes(profiled: Any) -> int:
    """The most bytes that were allocated at once between the two marks. The profile begins with the process's first
    tensors."""
    held = peak = marks = 0
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        marks += event.name() == MARK
        held += event.nbytes() if event.name() == "[memory]" else 0
        peak = max(peak, held) if marks == 1 else peak
    if marks != 2:
        raise RuntimeError(f"the profile has {marks} marks in place of 2")
    return peak


def main() -> None:
    parser = make_parser(
        "Measure strategies beside a hand-written use of the same engine.", rounds=9, match="strategies"
    )
    parser.add_argument(
        "--steps", type=int, default=40, help=f"steps that count in a turn, after {WARMUP_STEPS} that do not"
    )
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    parser.add_argument("--batch", type=int, default=4, help="sequences of each rank in a step")
    arguments = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler says on the terminal when it begins
    facts = machine()

    def run(name: str, by_hand: bool, counts_bytes: bool) -> list[float]:
        warmup, num_steps = (1, 1) if counts_bytes else (WARMUP_STEPS, arguments.steps)
        job = Job(arguments.width, arguments.depth, arguments.batch, warmup, num_steps)
        return launcher.launch(on_rank, (name, by_hand, job, counts_bytes), RANKS)

    names = {
        f"{name}, {who}": (name, who == "by hand")
        for name in BY_HAND
        if arguments.match in name
        for who in ("by hand", "lockstep")
    }
    references = {full: f"{name}, by hand" for full, (name, _) in names.items()}
    times = take_turns({full: partial(run, *what, False) for full, what in names.items()}, arguments.rounds)
    results, cpu = (
        summarize({full: [turn[i] * 1e3 for turn in turns] for full, turns in times.items()}, "ms", references)
        for i in (0, 1)
    )
    for full, runs in take_turns(
        {full: partial(run, *what, True) for full, what in names.items()}, arguments.rounds
    ).items():
        results[full]["peak_bytes"] = max(int(min(peaks)) for peaks in list(zip(*runs, strict=True))[2:])
    for full, row in results.items():
        row["peak_ratio"] = row["peak_bytes"] / results[references[full]]["peak_bytes"]
        row["peak_mib"] = row["peak_bytes"] / 2**20
        row |= {
            "cpu_ms": cpu[full]["median_ms"],
            "cpu_ratio": cpu[full]["ratio"],
            "cpu_rounds_ms": cpu[full]["rounds_ms"],
        }
    elements = sum(p.numel() for p in GPT(arguments.width, arguments.depth, arguments.width // 4, CONTEXT).parameters())
    print(
        f"{described(facts)}; {arguments.rounds} rounds of {arguments.steps} steps on {RANKS} ranks; "
        f"{elements:,} parameters"
    )
    columns = {
        "ms a step": ("median_ms", ".2f"),
        "min": ("min_ms", ".2f"),
        "max": ("max_ms", ".2f"),
        "ratio": ("ratio", ".3f"),
    }
    columns |= {"CPU ms": ("cpu_ms", ".2f"), "CPU ratio": ("cpu_ratio", ".3f")}
    columns |= {"peak MiB": ("peak_mib", ".2f"), "of peak": ("peak_ratio", ".3f")}
    model = {
        "width": arguments.width,
        "depth": arguments.depth,
        "batch": arguments.batch,
        "context": CONTEXT,
        "parameters": elements,
    }
    report(arguments, facts, results, columns, ranks=RANKS, model=model)


if __name__ == "__main__":
    main()
