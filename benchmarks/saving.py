"""What a save costs: to a new path, in the place of an older one, with the check for finite numbers, beside the training.

    python benchmarks/saving.py [--megabytes 240] [--rounds 5] [--folder FOLDER] [--json FILE]

A model and the state of AdamW on one process, a third of the bytes each. `blocked` is how long the caller waits, `done` how long
until the checkpoint is on the disk. Expect half a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from strategies.state import Shard
from trainer.checkpoint import begin, save


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a save costs.")
    parser.add_argument("--megabytes", type=int, default=240, help="of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind, in turns")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder of temporary files)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        results = measure(Path(folder), given.megabytes, given.rounds)
    print(f"{given.megabytes} MB, median of {given.rounds}; torch {torch.__version__}, {platform.machine()}")
    for name, row in results.items():
        print(f"{name:<28} blocked {row['blocked_s'] * 1e3:7.0f} ms   done {row['done_s'] * 1e3:7.0f} ms   of the plain save {row['share']:5.2f}")
    if given.json:
        given.json.write_text(json.dumps({"results": results, "megabytes": given.megabytes}, indent=2) + "\n")


def measure(folder: Path, megabytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians in seconds by kind of save."""
    each = megabytes * 1_000_000 // (4 * 24)
    names = [f"{group}/layer{i}{key}" for i in range(8) for group, key in (("model", ""), ("optimizer", "/exp_avg"), ("optimizer", "/exp_avg_sq"))]
    tensors = {name: Shard.whole(torch.randn(each)) for name in names}
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "tensors": tensors, "state": {}}

    def plain() -> None:
        save(folder / "new", **options)

    def replacing() -> None:
        save(folder / "old", **options)

    def checking() -> None:
        save(folder / "new", finite=set(names), **options)

    def beside() -> Callable[[], None]:
        saving = begin(folder / "new", finite=set(names), **options)
        return lambda: saving.finish(None, None)

    kinds: dict[str, Callable[[], Any]] = {
        "plain": plain,
        "in an older one's place": replacing,
        "checked to be finite": checking,
        "beside the training": beside,
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    save(folder / "old", **options)
    for _ in range(rounds):
        for name, kind in kinds.items():
            shutil.rmtree(folder / "new", ignore_errors=True)
            start = time.perf_counter()
            finish = kind()
            blocked = time.perf_counter() - start
            if finish is not None:
                finish()
            times[name].append((blocked, time.perf_counter() - start))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    whole = medians["plain"][1]
    return {name: {"blocked_s": blocked, "done_s": done, "share": blocked / whole} for name, (blocked, done) in medians.items()}


if __name__ == "__main__":
    main()
