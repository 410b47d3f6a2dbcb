"""What a save costs: how long the training waits and how long until the checkpoint is on the disk.

    python -m benchmarks.checkpoint [--megabytes 240] [--rounds 7] [--folder FOLDER] [--json FILE]

A fit with AdamW on one process, a third of the bytes each for parameters and two moments, stops after its first step
and saves in every way in turn: at once, at once without checksums (they are replaced by nothing, for this measurement
only), in the place of an older checkpoint, and asynchronously; beside a copy of the same tensors in memory, and a
raw write of their bytes to one file, flushed to the disk. A time is milliseconds, the median over rounds; ratios are
medians of those to the copy and to the raw write of the same round. At last the checkpoint is verified, from the page
cache, by one thread and by as many as a resume takes. Expect a minute.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks._rounds import described, machine, make_parser, quiet, report, summarize, take_turns
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.trainer.checkpoint import files
from lockstep.trainer.checkpoint.reader import read_manifest

COPY, RAW, SAVE, UNCHECKED, BESIDE = (
    "memory copy of the state",
    "raw write and fsync",
    "save",
    "save, no checksums",
    "asynchronous save",
)
CHUNK_BYTES = 4 << 20


class Tensors(Module):
    """Eight matrices of `num_bytes` in all."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(num_bytes // 4 // 8 // 64, 64) for _ in range(8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum((matrix.mean() for matrix in self.matrices), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Measure(Callback):
    """Saves in every way, in turn, at the end of the first step."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = trainer.strategy.state_dict(trainer._run.wrapped, trainer._run.optimizers)
        tensors = [shard.tensor for shard in state.tensors.values()]
        self.num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        trainer.save_checkpoint(self.folder / "old")
        ways: dict[str, Callable[[], Any]] = {
            COPY: partial(copy, tensors),
            RAW: partial(write, tensors, self.folder / "new"),
            SAVE: partial(trainer.save_checkpoint, self.folder / "new"),
            UNCHECKED: partial(unchecked, partial(trainer.save_checkpoint, self.folder / "new")),
            "save that replaces an older one": partial(trainer.save_checkpoint, self.folder / "old"),
            BESIDE: partial(trainer.save_checkpoint, self.folder / "new", wait=False),
            "verify, one thread": partial(verify, self.folder / "old", 1),
            "verify, as a resume does": partial(verify, self.folder / "old", None),
        }
        self.times = take_turns(
            {name: partial(self.timed, way, trainer._run.finish_saving) for name, way in ways.items()}, self.rounds
        )

    def timed(self, way: Callable[[], Any], finish: Callable[[], Any]) -> tuple[float, float]:
        """Milliseconds that it blocks and until it is done, from an empty place."""
        new = self.folder / "new"
        shutil.rmtree(new) if new.is_dir() else new.unlink(missing_ok=True)
        begin = time.perf_counter()
        way()
        blocked = time.perf_counter() - begin
        finish()
        return blocked * 1e3, (time.perf_counter() - begin) * 1e3


def copy(tensors: list[Tensor]) -> None:
    copies = [tensor.detach().clone() for tensor in tensors]
    assert len(copies) == len(tensors)


def write(tensors: list[Tensor], path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), CHUNK_BYTES):
                file.write(data[start : start + CHUNK_BYTES])
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def verify(path: Path, threads: int | None) -> None:
    files.verify(path, read_manifest(path)["files"], threads)


def unchecked(save: Callable[[], Any]) -> None:
    with patch.object(files, "crc32", lambda data, value=0: 0):
        save()


def main() -> None:
    parser = make_parser("Measure what a save costs.", rounds=21, turns="way")
    parser.add_argument("--megabytes", type=int, default=240, help="of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder of temporary files)")
    arguments = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, quiet():
        measure = Measure(Path(folder).absolute(), arguments.rounds)
        options: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "accelerator": "cpu",
        }
        loader = DataLoader(torch.zeros(1), 1)  # type: ignore[arg-type]
        Trainer(max_steps=1, callbacks=measure, **options).fit(Tensors(arguments.megabytes * 10**6 // 3), loader)
    blocked, done = ({name: [time_ms[i] for time_ms in times] for name, times in measure.times.items()} for i in (0, 1))
    results = summarize(done, "ms", dict.fromkeys(done, RAW))
    for name, row in results.items():
        row["blocked_ms"], row["blocked_rounds_ms"] = statistics.median(blocked[name]), blocked[name]
        row["blocked_ratio"] = statistics.median(
            own / base for own, base in zip(blocked[name], done[COPY], strict=True)
        )
        row["mb_per_s"] = measure.num_bytes / 1e3 / row["median_ms"]
    share = statistics.median(1 - without / whole for whole, without in zip(done[SAVE], done[UNCHECKED], strict=True))
    print(f"{described(facts)}; {measure.num_bytes / 1e6:,.0f} MB, {arguments.rounds} rounds")
    columns = {
        "blocked ms": ("blocked_ms", ".1f"),
        "to copy": ("blocked_ratio", ".2f"),
        "done ms": ("median_ms", ".1f"),
        "min": ("min_ms", ".1f"),
    }
    columns |= {"max": ("max_ms", ".1f"), "to raw": ("ratio", ".2f"), "MB/s": ("mb_per_s", ",.0f")}
    report(arguments, facts, results, columns, num_bytes=measure.num_bytes, checksum_share=share)
    print(f"checksums are {share:.1%} of a save")


if __name__ == "__main__":
    main()
