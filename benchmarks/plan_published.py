"""What `lockstep plan` says of runs whose memory and throughput others have published, beside what they measured.

    python -m benchmarks.plan_published [--write] [--match TEXT]

Predicts each dense row of torchtitan's tables that a layout of Lockstep can run, with a model and options as its source
describes them, on fake tensors: no device is needed. `--write` puts the tables into docs/planning.md.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from examples.llama import SIZES, Attention, Llama, LlamaModel, RMSNorm, Size
from lockstep import Trainer
from lockstep.callbacks._support.tables import columns
from lockstep.strategies import FSDP, MeshParallel, Strategy
from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device, find_device
from lockstep.strategies.planning.plan import Plan, RankPlan, Work
from lockstep.trainer.planning import plan, without_memory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- published: begin (python -m benchmarks.plan_published --write) -->", "<!-- published: end -->"

SOURCES = {
    "2024-12": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md",
    "2024-07": "pytorch/torchtitan, docs/performance.md at 0413364",
    "qwen3": "pytorch/torchtitan, pull request 1690",
}
H100_96 = find_device("h100-80,memory=95,bandwidth=2.4e12")
"""Of torchtitan's tables: HBM2e of 96 GB and 2.4 TB/s, of which its logs show 95 GiB. Its power is limited to 500 W, so
its real peak is below the data sheet's."""
A100_80 = find_device("a100-80")

LLAMA2 = {"13B": Size(5120, 40, 40, 40, 13_824, 32_000), "70B": Size(8192, 80, 64, 8, 28_672, 32_000)}
QWEN3 = Size(5120, 64, 64, 8, 25_600, 151_936)


class Row(NamedTuple):
    """One published measurement."""

    source: str
    table: str
    label: str
    size: Size
    context: int
    batch: int
    """Samples of a data rank in one step."""
    axes: str
    checkpointing: str
    """no, op (every second matrix product and attention are kept), layer (every second block) or full."""
    tokens_per_s: float | None
    """Of a device."""
    gib: float | None
    """Reserved at the peak; infinite if the run was out of memory; None if it is not published."""
    device: Device
    compiled: bool = False
    float8: bool = False
    calibrates: bool = False


def _rows() -> list[Row]:
    eight, seventy = SIZES["8B"], SIZES["70B"]
    found = []
    for name, devices, figures in (
        ("1: 8B, 8 GPUs", 8, ((5762, 82.4), (6667, 77.0), (8532, 76.8))),
        ("3: 8B, 128 GPUs", 128, ((5605, 67.0), (6514, 62.0), (8380, 61.8))),
    ):
        for number, (speed, gib) in enumerate(figures):
            label = ("FSDP", "FSDP, compiled", "FSDP, compiled, float8")[number]
            row = Row("2024-12", name, label, eight, 8192, 2, f"fsdp={devices}", "op", speed, gib, H100_96)
            found.append(row._replace(compiled=number > 0, float8=number > 1))
    for i in (0, 1, 3):  # the efficiency, what compiled code saves, and how devices differ
        found[i] = found[i]._replace(calibrates=True)
    long = Row(
        "2024-12", "2: 8B, long context", "FSDP 8, CP 1", eight, 32_768, 1, "fsdp=8", "full", 3890, 83.9, H100_96
    )
    found.append(long._replace(compiled=True, float8=True))
    mesh = Row("2024-12", "4: 70B, 256 GPUs", "2D", seventy, 8192, 16, "fsdp=32,tensor=8", "full", 829, 71.9, H100_96)
    found.append(mesh._replace(compiled=True, float8=True))
    a100 = partial(Row, "2024-07", axes="fsdp=64", gib=None, device=A100_80)
    for label, size, context, batch, how, speed in (
        ("3 8B, selective layer", eight, 8192, 1, "layer", 2904),
        ("3 8B, selective op", eight, 8192, 1, "op", 2973),
        ("3 70B, full", seventy, 8192, 1, "full", 331),
        ("2 13B, none", LLAMA2["13B"], 4096, 2, "no", 2162),
        ("2 13B, selective layer", LLAMA2["13B"], 4096, 2, "layer", 1914),
        ("2 13B, selective op", LLAMA2["13B"], 4096, 2, "op", 1904),
        ("2 70B, selective op", LLAMA2["70B"], 4096, 1, "op", 355),
        ("2 70B, full", LLAMA2["70B"], 4096, 2, "full", 353),
        ("2 70B, selective op, batch 2", LLAMA2["70B"], 4096, 2, "op", None),
    ):
        row = a100(
            table="64 A100",
            label=label,
            size=size,
            context=context,
            batch=batch,
            checkpointing=how,
            tokens_per_s=speed,
            compiled=True,
        )
        found.append(row if speed else row._replace(gib=math.inf))
    qwen = partial(Row, "qwen3", "Qwen3-32B", size=QWEN3, context=4096, checkpointing="full", device=H100_96)
    for label, axes, batch, speed, gib in (
        ("fsdp 8, batch 2, compiled", "fsdp=8", 2, 1874, 81.85),
        ("fsdp 4, tp 8, batch 16", "fsdp=4,tensor=8", 16, 876, 43.45),
        ("fsdp 4, tp 8, batch 32", "fsdp=4,tensor=8", 32, 883, 70.79),
        ("fsdp 8, tp 8, batch 32", "fsdp=8,tensor=8", 32, 873, 63.27),
        ("fsdp 4, tp 8, batch 64", "fsdp=4,tensor=8", 64, None, math.inf),
    ):
        found.append(qwen(label=label, axes=axes, batch=batch, tokens_per_s=speed, gib=gib, compiled="comp" in label))
    return found


# ---- the model of a row ------------------------------------------------------------------------------------


class WideAttention(Attention):
    """Qwen3's: heads of 128 features, whatever the width of the model, and a norm of each head."""

    def __init__(self, size: Size):
        super().__init__(size)
        self.head_dim = 128
        self.q, self.o = (
            nn.Linear(size.width, size.heads * 128, bias=False),
            nn.Linear(size.heads * 128, size.width, bias=False),
        )
        self.k, self.v = (nn.Linear(size.width, size.kv_heads * 128, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = RMSNorm(128, eps=1e-6), RMSNorm(128, eps=1e-6)

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotated(self.q_norm(q), self.k_norm(k), cos, sin)


class Published(LlamaModel):
    """The model of a row, which recomputes as torchtitan does where Lockstep's option does not."""

    def __init__(self, row: Row):
        super().__init__(context=row.context)
        self.row = row

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.llama = Llama(self.row.size)
            if self.row.size is QWEN3:
                self.llama.head_dim = 128
                for block in self.llama.blocks:
                    block.attention = WideAttention(QWEN3)
        if self.row.checkpointing == "op":
            for block in self.llama.blocks:
                block.__class__ = _Selective


class _Selective(type(Llama(SIZES["debug"]).blocks[0])):  # type: ignore[misc]
    """A block that keeps attention and every second matrix product, as torchtitan's selective_ac_option = 'op'."""

    def forward(self, *args: Any) -> Any:
        run = super().forward
        return checkpoint(run, *args, use_reentrant=False, context_fn=_keeps, preserve_rng_state=False)


def _keeps() -> Any:
    counts = {False: 0, True: 0}
    ops = torch.ops.aten
    kept = (ops._scaled_dot_product_flash_attention_for_cpu.default, ops._scaled_dot_product_flash_attention.default)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is ops.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _strategy(row: Row) -> Strategy:
    blocks = [f"llama.blocks.{i}" for i in range(0, row.size.depth, 2)]
    rule: Any = {"full": True, "layer": blocks}.get(row.checkpointing, False)
    if "tensor" not in row.axes:
        return FSDP(activation_checkpointing=rule, low_precision_gather="all")
    return MeshParallel(
        row.axes,
        activation_checkpointing=rule,
        low_precision_gather="all",
        sequence_parallel=True,
        loss_parallel=True,
    )


def planned(row: Row) -> Plan:
    """The plan of a row."""
    sizes = dict(part.split("=") for part in row.axes.split(","))
    devices = math.prod(map(int, sizes.values()))
    loader = DataLoader([torch.zeros(row.context + 1, dtype=torch.long)] * row.batch * int(sizes["fsdp"]), row.batch)
    with without_memory():
        module = Published(row)
    options: dict[str, Any] = {"max_steps": 1, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy=_strategy(row),
        devices=devices,
        accelerator="cpu",
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        **options,
    )
    return plan(trainer, module, loader)


# ---- what of it is compared --------------------------------------------------------------------------------


def predicted_gib(row: Row, found: Plan) -> float:
    """Reserved at the peak: the plan's peak and the one allowance. Compiled blocks that no checkpointing recomputes
    keep what torch's partitioner saves."""
    share = kept_by_compiled_code() if row.compiled and row.checkpointing == "no" else 1.0
    peaks = [rank.peak - (1 - share) * sum(block.activations for block in rank.blocks) for rank in found.ranks]
    return max(peaks) * (1 + timing.ALLOCATOR) / 2**30


@functools.cache
def kept_by_compiled_code() -> float:
    """Bytes that the forward of a small block keeps for its backward as torch's partitioner of compiled graphs chooses
    them, over what it keeps as written; in bf16 autocast, weights not included. The share is that of Llama's shapes."""
    size = Size(512, 1, 4, 4, 1382, 256)
    block: Any = type(Llama(SIZES["debug"]).blocks[0])(size)
    x = torch.randn(1, 384, size.width, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(x.shape[1], 64)
    weights = sum(2 * p.numel() for p in block.parameters() if p.dim() == 2)  # as autocast has cast them
    own = {t.untyped_storage().data_ptr() for t in (*block.parameters(), angles)}

    def kept(run: Any) -> int:
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16),
        ):
            alive = run(x, angles, angles)
        del alive
        return sum(found.values()) - weights

    return kept(torch.compile(block, backend="aot_eager_decomp_partition")) / kept(block)


def predicted_speed(row: Row, found: Plan) -> float:
    """Tokens/s of a device. Compiled code is taken to halve the traffic of operators without FLOPs, which it fuses, and
    float8 to have its peak for matrix products, all but those of the head."""
    ranks = tuple(_as_compiled(rank) for rank in found.ranks) if row.compiled else found.ranks
    if row.float8:
        size = row.size
        head_dim = size.width // size.heads
        block = size.width * (2 * size.width + 2 * size.kv_heads * head_dim + 3 * size.inner)
        ranks = tuple(_in_float8(rank, size.depth * block, size.vocabulary * size.width) for rank in ranks)
    estimate = timing.estimate(replace(found, ranks=ranks), row.device)
    assert estimate.tokens_per_s is not None
    return estimate.tokens_per_s / found.world_size * row.context / (row.context + 1)


def _as_compiled(rank: RankPlan) -> RankPlan:
    def halved(each: Work) -> Work:
        return each if each.flops or each.phase == "optimizer" else replace(each, bytes=each.bytes // 2)

    return replace(rank, work=tuple(map(halved, rank.work)))


def _in_float8(rank: RankPlan, blocks: int, head: int) -> RankPlan:
    share = blocks / (blocks + head)
    work = []
    for each in rank.work:
        if each.op.startswith("aten.mm") and each.dtype == "bfloat16":
            work.append(replace(each, dtype="float8", flops=each.flops * share, bytes=0))
            each = replace(each, flops=each.flops * (1 - share))
        work.append(each)
    return replace(rank, work=tuple(work))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the orders of two lists."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [
            sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values
        ]

    a, b = torch.tensor(ranks(first)), torch.tensor(ranks(second))
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@dataclass
class Result:
    row: Row
    gib: float
    speed: float
    seconds: float


def report(results: Sequence[Result]) -> str:
    """The tables as Markdown, and what they come to."""
    lines = []
    for source, place in SOURCES.items():
        mine = [result for result in results if result.row.source == source]
        if not mine:
            continue
        lines += [
            f"Source: {place}.",
            "",
            "| table | row | reserved GiB | published | error | tokens/s a device | published | error |",
        ]
        lines.append("|---|---|---|---|---|---|---|---|")
        for result in mine:
            row = result.row
            memory = ["-", "-"] if row.gib is None else _compared(result.gib, row.gib, row.device.memory / 2**30)
            speed = ["-", "-"] if row.tokens_per_s is None else _compared(result.speed, row.tokens_per_s)
            label = row.label + (" (calibrates)" if row.calibrates else "")
            cells = [row.table, label, f"{result.gib:.1f}", *memory, f"{result.speed:,.0f}", *speed]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    judged = [result for result in results if not result.row.calibrates]
    known = [r for r in judged if r.row.gib is not None and math.isfinite(r.row.gib)]
    near = sum(abs(r.gib / (r.row.gib or 1) - 1) <= 0.1 for r in known)
    right = sum((r.gib <= r.row.device.memory / 2**30) == (r.row.tokens_per_s is not None) for r in judged)
    lines.append(
        f"Memory within 10 %: {near} of {len(known)} rows. Fits or not as published: {right} of {len(judged)}."
    )
    for table in dict.fromkeys(r.row.table for r in judged):
        mine = [r for r in judged if r.row.table == table and r.row.tokens_per_s is not None]
        if len(mine) > 2:
            order = spearman([r.speed for r in mine], [r.row.tokens_per_s or 0 for r in mine])
            lines.append(f"Order of throughput in {table}: Spearman {order:.2f} over {len(mine)} rows.")
    return "\n".join(lines)


def _compared(value: float, published: float, limit: float = math.inf) -> list[str]:
    if math.isinf(published):
        return ["out of memory", "same" if value > limit else "predicted to fit"]
    return [f"{published:,.4g}", f"{value / published - 1:+.0%}"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/planning.md")
    parser.add_argument("--match", default="", help="only rows whose source, table and label contain this")
    given = parser.parse_args(words)
    results = []
    plans: dict[Any, Plan] = {}
    for row in _rows():
        if given.match not in f"{row.source} {row.table} {row.label}":
            continue
        started = time.monotonic()
        key = row.size, row.context, row.batch, row.axes, row.checkpointing
        found = plans[key] = plans.get(key) or planned(row)
        results.append(Result(row, predicted_gib(row, found), predicted_speed(row, found), time.monotonic() - started))
        last = results[-1]
        shown = (
            row.table,
            row.label,
            f"{last.gib:.1f} ({row.gib}) GiB",
            f"{last.speed:.0f} ({row.tokens_per_s}) tokens/s",
        )
        print(*columns([(*shown, f"{last.seconds:.0f} s")]), file=sys.stderr, flush=True)
    text = report(results)
    print(text)
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
