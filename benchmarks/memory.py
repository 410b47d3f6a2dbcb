"""What each rank holds under every strategy: bytes of parameters, gradients and optimizer state, and its peak memory.

    python -m benchmarks.memory [--ranks 1 2 4] [--width 128] [--depth 4] [--match TEXT] [--json FILE]

The model is that of examples/gpt.py under AdamW in float32, driven by a hand-written loop. Bytes are exact: of every
floating point tensor that a rank holds between a backward and the optimizer's step. `other` is what the engine keeps
besides (DeepSpeed: a second copy of a rank's part of the parameters, and a bucket). Numbers are those of the rank that
holds most. The last columns are how far resident memory rose above where it stood before the model was made, in MiB:
at most until it was wrapped, and at most in the steps; they include activations and what engines hold for a moment.
Expect three minutes.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.data import DataLoader

from benchmarks._rounds import machine, make_parser, write_json
from examples.gpt import GPT, VOCABULARY
from lockstep.strategies import DeepSpeed, Strategy
from lockstep.strategies.launch import launcher
from lockstep.strategies.registry import STRATEGIES

CONTEXT, BATCH = 128, 8  # of all ranks
COLUMNS = ("parameters", "gradients", "optimizer", "other", "total")
PEAKS = ("placing", "steps")
VARIANTS: dict[str, Callable[[], Strategy]] = {
    **{name: make for name, make in STRATEGIES.items() if name != "deepspeed"},  # which is stage 2
    # DeepSpeed keeps parameters of up to 100,000 elements whole, which the example's all are.
    "deepspeed_stage_3, all cut": lambda: DeepSpeed(
        stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    ),
}
ONE_PROCESS = ("single", "dp", "model")


def main() -> None:
    parser = make_parser("Measure what a rank holds under each strategy.", match="strategies")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--depth", type=int, default=4, help="blocks of the model")
    arguments = parser.parse_args()
    os.environ.setdefault(
        "MALLOC_MMAP_THRESHOLD_", "65536"
    )  # bytes; else glibc keeps what engines free, and sharding does not show in the peak
    elements = sum(p.numel() for p in Model(arguments.width, arguments.depth).parameters())
    print(
        f"torch {torch.__version__}, AdamW, float32; {elements:,} parameters, {4 * elements:,} bytes; bytes a rank, "
        "peaks in MiB"
    )
    print(
        f"{'':<28}{'ranks':>6}"
        + "".join(f"{column:>13}" for column in COLUMNS)
        + "".join(f"{column:>9}" for column in PEAKS)
    )
    rows = []
    for name in VARIANTS:
        if arguments.match not in name or ("deepspeed" in name and importlib.util.find_spec("deepspeed") is None):
            continue
        for ranks in arguments.ranks:
            if name == "single" and ranks > 1:
                continue
            row = measure(name, ranks, arguments.width, arguments.depth)
            rows.append(row)
            print(
                f"{name:<28}{ranks:>6}"
                + "".join(f"{row[column]:>13,}" for column in COLUMNS)
                + "".join(f"{row[column] / 2**20:>9.0f}" for column in PEAKS),
                flush=True,
            )
    sizes = {"width": arguments.width, "depth": arguments.depth, "context": CONTEXT, "batch": BATCH}
    write_json(arguments.json, machine(), rows, model={**sizes, "parameters": elements})


class Model(nn.Module):
    """The example's model and its loss, without a Trainer."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.gpt = GPT(width, depth, head_width=width // 4, context=CONTEXT)

    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def measure(name: str, ranks: int, width: int, depth: int) -> dict[str, Any]:
    """The numbers of the rank that holds most; of the one process for the strategies that have one."""
    strategy = VARIANTS[name]()
    strategy.configure(devices=ranks, accelerator="cpu")
    num_processes = 1 if name in ONE_PROCESS else ranks
    table = launcher.launch(on_rank, (strategy, width, depth), num_processes)
    heaviest = max(table, key=lambda row: row[COLUMNS.index("total")])
    peaks = [max(column) for column in list(zip(*table, strict=True))[len(COLUMNS) :]]
    return {
        "strategy": name,
        "ranks": ranks,
        "processes": num_processes,
        **dict(zip(COLUMNS + PEAKS, [*heaviest[: len(COLUMNS)], *peaks], strict=True)),
    }


def on_rank(strategy: Strategy, width: int, depth: int) -> list[list[int]]:
    """Numbers by rank, in bytes: `COLUMNS` and `PEAKS`."""
    warnings.simplefilter("ignore")  # of engines; nothing is trained here
    train(strategy, width=32, depth=4)  # what is imported and set up once is not counted
    return train(strategy, width, depth)


def train(strategy: Strategy, width: int, depth: int) -> list[list[int]]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (3 * BATCH, CONTEXT + 1))
    strategy.setup()
    try:
        before, resident = live_bytes(), reset_peak()
        model = Model(width, depth)
        wrapped = strategy.setup_module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = strategy.shard_loader(DataLoader(tokens, BATCH), seed=0, split=True)  # type: ignore[arg-type]
        optimizers = strategy.setup_optimizers(wrapped, {"main": optimizer})
        placing = memory("VmHWM") - resident
        reset_peak()
        parameters = gradients = total = 0
        for window in loader.windows(0):
            strategy.forward_backward(wrapped, model.step, window)
            for micro_batch in window.micro_batches:
                micro_batch.output = None
            parameters = bytes_of(
                [getattr(p, "ds_tensor", p) for p in model.parameters()]
            )  # ZeRO-3 leaves an empty tensor where a parameter was
            # the one name that all engines have for them
            gradients = bytes_of(strategy.local_gradients(wrapped))  # type: ignore[attr-defined]
            total = live_bytes() - before
            strategy.optimizer_step(wrapped, optimizers["main"])
            optimizers["main"].zero_grad()
        optimizer_bytes = bytes_of(
            [
                value
                for entry in optimizers["main"].state.values()
                for value in entry.values()
                if isinstance(value, Tensor)
            ]
        )
        other = total - parameters - gradients - optimizer_bytes
        row = [parameters, gradients, optimizer_bytes, other, total, placing, memory("VmHWM") - resident]
        return strategy.all_gather(torch.tensor(row)).tolist()
    finally:
        strategy.teardown()


def live_bytes() -> int:
    """Of all floating point tensors that this process holds; batches are whole numbers here."""
    gc.collect()
    return bytes_of(
        [
            found
            for item in gc.get_objects()
            if issubclass(type(item), Tensor)
            for found in (item, item.grad if item.is_leaf else None)
        ]
    )


def bytes_of(tensors: list[Tensor | None]) -> int:
    """Of what is on this rank; memory that several share counts once."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        if local is not None and local.is_floating_point() and not local.is_meta and not isinstance(local, FakeTensor):
            found[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(found.values())


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Let the peak of the resident memory begin again from what it is now; returns that in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


if __name__ == "__main__":
    main()
