"""How long a resume takes: from the call of `fit` until every rank has verified and loaded the checkpoint.

    python -m benchmarks.resume [--megabytes 1000] [--ranks 1 2 4] [--strategy ddp] [--rounds 7] [--cold]
                                [--against CHECKOUT] [--folder FOLDER] [--json FILE]

One process saves a checkpoint of AdamW, a third of the bytes each for parameters and two moments, and runs resume it in
turns on 1, 2 and 4 ranks; the first is the reference. A time is seconds, the median over rounds, and holds the start of
the ranks. "CPU s" is the processor time of all processes until then, which other programs on the machine hardly change.
"read by one" are the most bytes that one process reads by system calls until then, which is what it
verifies, and "read by all" those of all of them; what ranks load comes through memory maps and is not counted. With
`--against` the same runs are done by the code of another checkout of this repository too, in turns with these, and a
ratio is that to its time on as many ranks in the same round. `--cold` drops the files from the page cache before each
run. Expect two minutes, and three times the bytes of memory a rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Module, Trainer
from lockstep.callbacks import Callback

ROOT = Path(__file__).resolve().parents[1]


class Matrices(Module):
    """Eight matrices of `num_bytes` in all, made on the ranks."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.num_bytes = num_bytes
        self.matrices: Any = None

    def configure_model(self) -> None:
        if self.matrices is None:
            self.matrices = nn.ParameterList(torch.ones(self.num_bytes // 4 // 8 // 64, 64) for _ in range(8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum((matrix.mean() for matrix in self.matrices), torch.zeros(()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Notes(Callback):
    """Leaves the time at which a rank has loaded the checkpoint, and what it has read by system calls before."""

    def __init__(self, folder: str) -> None:
        self.folder, self.process = folder, os.getpid()

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.read = bytes_read()

    def on_train_start(self, trainer: Any, module: Any) -> None:
        note = {"time": time.monotonic(), "cpu": time.process_time(), "read": self.read, "process": os.getpid()}
        Path(self.folder, f"{trainer.global_rank}.json").write_text(json.dumps(note))


def bytes_read() -> int:
    if not os.path.exists("/proc/self/io"):
        return 0
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def fit(checkpoint: Path, num_bytes: int, ranks: int, strategy: str, *callbacks: Callback, resumes: bool) -> Trainer:
    """One step, or none of a run that is resumed after it."""
    trainer = Trainer(
        strategy="single" if ranks == 1 else strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        split_batches=True,
        callbacks=list(callbacks),
        default_root_dir=checkpoint.parent,
    )
    data = DataLoader(torch.zeros(64), 64)  # type: ignore[arg-type]
    trainer.fit(Matrices(num_bytes), data, ckpt_path=checkpoint if resumes else None)
    return trainer


def serve(checkpoint: Path, num_bytes: int, strategy: str, cold: bool) -> None:
    """For each number of ranks that comes on standard input, resume and answer with what it took."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(Path(sys.modules["lockstep"].__file__ or "").resolve().parents[1], file=answers, flush=True)
    for line in sys.stdin:
        ranks = int(line)
        for file in checkpoint.iterdir() if cold else ():
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with tempfile.TemporaryDirectory() as folder:
            gc.collect()  # the model of the run before
            before, cpu, began = bytes_read(), time.process_time(), time.monotonic()
            fit(checkpoint, num_bytes, ranks, strategy, Notes(folder), resumes=True)
            notes = [json.loads(file.read_text()) for file in Path(folder).iterdir()]
        assert len(notes) == ranks
        read = [note["read"] - (before if note["process"] == os.getpid() else 0) for note in notes]
        used = sum(note["cpu"] for note in notes) - cpu
        if ranks > 1:  # the process that starts them
            read.append(bytes_read() - before)
            used += time.process_time()
        seconds = max(note["time"] for note in notes) - began
        answer = {"s": seconds, "cpu": used, "one": max(read) / 1e6, "all": sum(read) / 1e6}
        print(json.dumps(answer), file=answers, flush=True)


def started(stack: ExitStack, checkout: Path, arguments: list[str]) -> Callable[[int], dict[str, float]]:
    """A process with the code of a checkout that serves; what asks it for one resume."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    )
    assert process.stdin is not None and process.stdout is not None
    questions, answers = process.stdin, process.stdout
    stack.callback(questions.close)
    found = answers.readline().strip()
    if Path(found) != checkout:
        raise RuntimeError(f"the process with the code of {checkout} has imported {found or 'nothing'}")

    def ask(ranks: int) -> dict[str, float]:
        print(ranks, file=questions, flush=True)
        answer: dict[str, float] = json.loads(answers.readline())
        return answer

    return ask


def measure(given: argparse.Namespace) -> None:
    from benchmarks._rounds import described, machine, quiet, report, summarize, take_turns

    facts = machine()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, ExitStack() as stack:
        checkpoint, num_bytes = Path(folder).absolute() / "saved", given.megabytes * 10**6 // 3
        with quiet():
            fit(checkpoint, num_bytes, 1, given.strategy, resumes=False).save_checkpoint(checkpoint)
        whole = sum(file.stat().st_size for file in checkpoint.iterdir()) / 1e6
        options = ["--serve", str(checkpoint), "--megabytes", str(given.megabytes), "--strategy", given.strategy]
        options += ["--cold"] if given.cold else []
        checkouts = {"": ROOT} | ({", against": given.against.resolve()} if given.against else {})
        asks = {label: started(stack, checkout, options) for label, checkout in checkouts.items()}
        names = {
            (ranks, label): f"{ranks} rank{'s' if ranks > 1 else ''}{label}" for ranks in given.ranks for label in asks
        }
        for ask in asks.values():
            ask(max(given.ranks))  # starts what later runs find
        found = take_turns({name: partial(asks[key[1]], key[0]) for key, name in names.items()}, given.rounds)
    references = {
        name: names[ranks, ", against"] if given.against else names[given.ranks[0], ""]
        for (ranks, _), name in names.items()
    }
    results = summarize({name: [one["s"] for one in own] for name, own in found.items()}, "s", references)
    cpu = summarize({name: [one["cpu"] for one in own] for name, own in found.items()}, "s", references)
    for name, row in results.items():
        row["cpu_s"], row["cpu_ratio"] = cpu[name]["median_s"], cpu[name]["ratio"]
        row["read_by_one_mb"], row["read_by_all_mb"] = (max(one[key] for one in found[name]) for key in ("one", "all"))
    where = "from the disk" if given.cold else "from the page cache"
    print(f"{described(facts)}; {whole:,.0f} MB {where}, {given.strategy}, {given.rounds} rounds")
    columns = {"s": ("median_s", ".3f"), "min": ("min_s", ".3f"), "max": ("max_s", ".3f"), "ratio": ("ratio", ".3f")}
    columns |= {"CPU s": ("cpu_s", ".2f"), "CPU ratio": ("cpu_ratio", ".3f")}
    columns |= {"MB read by one": ("read_by_one_mb", ",.0f"), "by all": ("read_by_all_mb", ",.0f")}
    report(given, facts, results, columns, megabytes=whole)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a resume takes.")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the checkpoint")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of CPU ranks")
    parser.add_argument("--strategy", default="ddp", help="of several ranks")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each run")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to compare with")
    parser.add_argument("--folder", type=Path, help="where to save (default: the folder of temporary files)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--serve", type=Path, metavar="CHECKPOINT", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.megabytes * 10**6 // 3, given.strategy, given.cold)
    else:
        measure(given)


if __name__ == "__main__":
    main()
