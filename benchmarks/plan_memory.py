"""The peak memory of a rank that a plan predicts against the one that CPU ranks reach, under every strategy.

    python -m benchmarks.plan_memory [--match TEXT] [--json FILE] [--page]

Each rank trains a small model of the same kind first, so that all code is loaded, and then the model that is measured:
the highest resident memory of the fourth step above that before this model was made, of the rank that has most. The
prediction is the plan's peak, of the rank with the most. `--page` writes the table into docs/planning.md.
Expect up to fifteen minutes on two cores.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks._rounds import make_parser
from examples.gpt import TextModel
from examples.llama import SIZES, LlamaModel, Size
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    DiLoCo,
    Federated,
    MeshParallel,
    ModelParallel,
    ParameterServer,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from lockstep.trainer.planning import plan

PAGE = Path(__file__).resolve().parents[1] / "docs" / "planning.md"
WARM_STEPS = 3  # the last of a round of two steps is measured
BUCKETS = {"zero_optimization": {"reduce_bucket_size": 500_000, "stage3_prefetch_bucket_size": 500_000}}
STRATEGIES: dict[str, tuple[int, Any]] = {
    "single": (1, SingleDevice),
    "dp": (2, DataParallel),
    "model": (2, ModelParallel),
    "ddp": (2, DDP),
    "ddp, int8": (2, lambda **options: DDP(compress="int8", **options)),
    "diloco": (2, lambda **options: DiLoCo(period=2, **options)),
    "federated": (2, lambda **options: Federated(lambda index: index % 8, fraction=0.5, **options)),
    "federated, scaffold": (
        2,
        lambda **options: Federated(lambda index: index % 8, fraction=0.5, server="scaffold", **options),
    ),
    "parameter_server": (2, lambda activation_checkpointing: ParameterServer()),  # does not take the option
    "fsdp": (2, FSDP),
    "fsdp, not resharded": (2, lambda **options: FSDP(reshard_after_forward=False, **options)),
    "fsdp, offloaded": (2, lambda **options: FSDP(cpu_offload=True, **options)),
    "fsdp=4": (4, FSDP),
    "deepspeed, stage 1": (2, lambda **options: DeepSpeed(stage=1, config=BUCKETS, **options)),
    "deepspeed, stage 2": (2, lambda **options: DeepSpeed(stage=2, config=BUCKETS, **options)),
    "deepspeed, stage 3": (2, lambda **options: DeepSpeed(stage=3, config=BUCKETS, **options)),
    "deepspeed, stage 2, offloaded": (
        2,
        lambda **options: DeepSpeed(stage=2, offload_optimizer=True, config=BUCKETS, **options),
    ),
    "deepspeed, stage 3, offloaded": (
        2,
        lambda **options: DeepSpeed(stage=3, offload_optimizer=True, config=BUCKETS, **options),
    ),
    "deepspeed, stage 3, parameters offloaded": (
        2,
        lambda **options: DeepSpeed(stage=3, offload_parameters=True, config=BUCKETS, **options),
    ),
    "deepspeed, stage 3, all offloaded": (
        2,
        lambda **options: DeepSpeed(
            stage=3, offload_optimizer=True, offload_parameters=True, config=BUCKETS, **options
        ),
    ),
    "tensor": (2, TensorParallel),
    "pipeline, gpipe": (2, lambda **options: Pipeline(schedule="gpipe", num_micro_batches=4, **options)),
    "pipeline, 1f1b": (2, lambda **options: Pipeline(num_micro_batches=4, **options)),
    "ddp=2,fsdp=2": (4, lambda **options: MeshParallel("ddp=2,fsdp=2", **options)),
    "fsdp=2,tensor=2": (4, lambda **options: MeshParallel("fsdp=2,tensor=2", **options)),
}

ONE_PROCESS = ("dp", "model")
"""Those whose devices one process has: on the CPU all of them are in its memory, and so is the prediction."""


class Gpt(TextModel):
    """Without the clock, a number of the model's own that learners would share."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def gpt(size: str) -> tuple[Module, DataLoader]:
    width, depth, batch = (256, 4, 16) if size == "large" else (32, 2, 2)
    module = Gpt(width=width, depth=depth, head_width=width // 8, context=128, sample_bytes=0)
    return module, DataLoader(torch.randint(0, 256, (batch * 4 * 8, 129)), batch)


def llama(size: str) -> tuple[Module, DataLoader]:
    batch = 4 if size == "large" else 2
    module = LlamaModel(f"planned {size}", context=128)
    return module, DataLoader(torch.randint(0, 256, (batch * 4 * 8, 129)), batch)


SIZES["planned small"] = Size(32, 2, 4, 2, 64, 256)
SIZES["planned large"] = Size(512, 4, 8, 4, 1536, 256)
MODELS = {"gpt": gpt, "llama": llama}


class Resident(Callback):
    """The highest resident memory of this process in the step after `WARM_STEPS`, in bytes."""

    highest = 0

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_STEPS:
            _reset()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM_STEPS + 1:
            self.highest = _status("VmHWM")

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """A federated round is an epoch, and its batches end on its clients, before the step."""
        if trainer.global_step == WARM_STEPS + 1 and not self.highest:
            self.highest = _status("VmHWM")


def trainer_of(name: str, recomputes: bool, steps: int, callbacks: list[Callback], devices: Any = "auto") -> Trainer:
    make = STRATEGIES[name][1]
    strategy: Strategy = make(activation_checkpointing=recomputes)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "log_every_n_steps": 1000}
    return Trainer(strategy=strategy, devices=devices, accelerator="cpu", max_steps=steps, callbacks=callbacks, **quiet)


def on_rank(model: str, name: str, recomputes: bool) -> None:
    """Print what this rank has reached, in bytes."""
    torch.manual_seed(0)  # ranks of a tensor group get the same samples
    module, data = MODELS[model]("small")
    devices = STRATEGIES[name][0] if name in ONE_PROCESS else "auto"
    trainer_of(name, recomputes, 2, [], devices).fit(module, data)
    del module, data
    loaded = MODELS[model]("large")[1]  # the data is not the model's
    _trim()
    before = _status("VmRSS")
    module, watch = MODELS[model]("large")[0], Resident()
    trainer_of(name, recomputes, WARM_STEPS + 1, [watch], devices).fit(module, loaded)
    print(f"reached {watch.highest - before}", flush=True)
    os._exit(0)


def measured(model: str, name: str, recomputes: bool) -> int:
    """Of the rank that has most."""
    world = 1 if name in ONE_PROCESS else STRATEGIES[name][0]
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # bytes; else glibc keeps what is freed
            "LOCKSTEP_INIT_METHOD": f"file://{folder}/meet",
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        alone = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # threads of dp would keep arenas each
        command = [sys.executable, "-m", "benchmarks.plan_memory", "--on-rank", model, name, str(int(recomputes))]
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **(shared if world > 1 else alone)}
                | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        texts = [rank.communicate()[0] for rank in ranks]
    return max(int(re.findall(r"reached (-?\d+)", text)[-1]) for text in texts)


def _status(key: str) -> int:
    return 1024 * int(re.findall(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def _reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _trim() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def main() -> None:
    parser = make_parser("Compare predicted with measured peaks of memory.", match="rows")
    parser.add_argument("--page", action="store_true", help="write the table into docs/planning.md")
    parser.add_argument("--on-rank", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.on_rank:
        model, name, recomputes = given.on_rank
        on_rank(model, name, recomputes == "1")
        return
    rows = []
    for model in MODELS:
        for name, (world, _) in STRATEGIES.items():
            for recomputes in (False, True):
                if given.match not in f"{model} {name}" or (recomputes and name == "parameter_server"):
                    continue
                module, data = MODELS[model]("large")
                found = plan(trainer_of(name, recomputes, 1, [], world), module, data).ranks
                predicted = max(rank.peak_of_both for rank in found)
                reached = measured(model, name, recomputes)
                rows.append((model, name, "on" if recomputes else "off", predicted, reached))
                print(*rows[-1], f"{100 * (predicted / reached - 1):+.1f} %", flush=True)
    if given.json:
        keys = ("model", "strategy", "activation_checkpointing", "predicted", "measured")
        given.json.write_text(json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2) + "\n")
    if given.page:
        PAGE.write_text(filled(PAGE.read_text(), rows))


def filled(text: str, rows: list[tuple[str, str, str, int, int]]) -> str:
    """`text` with the table between its marks."""
    lines = [
        "| model | strategy | checkpointing | predicted, MiB | measured, MiB | off by |",
        "|---|---|---|---|---|---|",
    ]
    for model, name, recomputes, predicted, reached in rows:
        off = f"{100 * (predicted / reached - 1):+.1f} %"
        lines.append(f"| {model} | `{name}` | {recomputes} | {predicted / 2**20:.1f} | {reached / 2**20:.1f} | {off} |")
    table = "\n".join(lines)
    return re.sub(
        r"(?<=<!-- plan_memory -->\n).*?(?=<!-- /plan_memory -->)", lambda _: f"{table}\n", text, flags=re.DOTALL
    )


if __name__ == "__main__":
    main()
