"""How long until it runs: imports of lockstep beside `import torch`, and process start to the end of the first step.

    python -m benchmarks.start [--rounds 5] [--match TEXT] [--json FILE]

The first step is that of examples/digits.py, on one and on two CPU ranks, beside a script that does the same by hand
and has the same metric (two ranks: `torch.multiprocessing.spawn` and DistributedDataParallel). Every measurement is a
fresh process; all of them take turns in each round. A time is seconds, the median over rounds; a ratio is the median of
those to `import torch`, or to the script on one rank, of the same round. Expect two minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# torch, trainer and examples are imported where the measured process needs them: that is what is measured.

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a run takes to begin.")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement")
    parser.add_argument("--match", default="", metavar="TEXT", help="only measurements whose name contains it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "RANKS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, ranks = arguments.child
        CHILDREN[what](int(ranks))
        return
    from benchmarks._rounds import described, machine, report, summarize, take_turns

    facts = machine()
    chosen = {name: how for name, (how, _) in MEASUREMENTS.items() if arguments.match in name}
    times = take_turns(chosen, arguments.rounds)
    references = {name: MEASUREMENTS[name][1] for name in chosen if MEASUREMENTS[name][1] in chosen}
    results = summarize(times, "s", references)
    print(f"{described(facts)}; {arguments.rounds} rounds")
    columns = {
        "seconds": ("median_s", ".2f"),
        "min": ("min_s", ".2f"),
        "max": ("max_s", ".2f"),
        "ratio": ("ratio", ".2f"),
    }
    report(arguments, facts, results, columns)


def import_s(statement: str) -> float:
    """Seconds that an import takes in a new interpreter."""
    return float(
        run(
            [
                sys.executable,
                "-c",
                f"import time; begin = time.perf_counter(); {statement}; print(time.perf_counter() - begin)",
            ]
        )
    )


def help_s() -> float:
    """Seconds from starting `lockstep fit --help` to its end."""
    begin = time.perf_counter()
    run([sys.executable, "-m", "lockstep", "fit", "--help"])
    return time.perf_counter() - begin


def first_step_s(what: str, ranks: int) -> float:
    """Seconds from starting the process until its rank 0 has done an optimizer step."""
    begin = time.time()
    return float(run([sys.executable, __file__, "--child", what, str(ranks)])) - begin


def run(command: list[str]) -> str:
    """The last line that `command` prints, run in an empty folder with one thread a process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return result.stdout.splitlines()[-1]


# ---- what is measured ----------------------------------------------------------------------------------


def lockstep(ranks: int) -> None:
    from examples.digits import Digits, DigitsData
    from lockstep import Trainer
    from lockstep.callbacks import Callback

    class Report(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.is_global_zero:
                print(time.time(), flush=True)

    options: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    strategy = "single" if ranks == 1 else "ddp"
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=1,
        split_batches=True,
        seed=0,
        callbacks=[Report()],
        **options,
    )
    trainer.fit(Digits(), datamodule=DigitsData())


def by_hand(ranks: int) -> None:
    if ranks == 1:
        train_by_hand(0, 1, "")
        return
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_by_hand, args=(ranks, f"{folder}/store"), nprocs=ranks)


def train_by_hand(rank: int, ranks: int, store: str) -> None:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split
    from torchmetrics.classification import MulticlassAccuracy

    torch.manual_seed(0)
    MulticlassAccuracy(num_classes=10, average="micro")  # of the validation, as the example has it
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    train, _ = random_split(TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels), [0.8, 0.2])
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 16, 10))
    sampler = None
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.FileStore(store, ranks), rank=rank, world_size=ranks
        )
        model, sampler = nn.parallel.DistributedDataParallel(model), DistributedSampler(train)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = DataLoader(train, batch_size=32 // ranks, sampler=sampler, shuffle=sampler is None)
    x, y = next(iter(batches))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(time.time(), flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


CHILDREN = {"lockstep": lockstep, "by_hand": by_hand}
MEASUREMENTS: dict[str, tuple[Callable[[], float], str]] = {
    "import torch": (partial(import_s, "import torch"), "import torch"),
    "import lockstep": (partial(import_s, "import lockstep"), "import torch"),
    "from lockstep import Trainer, Module": (partial(import_s, "from lockstep import Trainer, Module"), "import torch"),
    "lockstep fit --help": (help_s, "import torch"),
    "first step, by hand, 1 rank": (partial(first_step_s, "by_hand", 1), "first step, by hand, 1 rank"),
    "first step, lockstep, 1 rank": (partial(first_step_s, "lockstep", 1), "first step, by hand, 1 rank"),
    "first step, by hand with spawn, 2 ranks": (partial(first_step_s, "by_hand", 2), "first step, by hand, 1 rank"),
    "first step, lockstep, 2 ranks": (partial(first_step_s, "lockstep", 2), "first step, by hand, 1 rank"),
}
"""What is measured, and what it is compared with."""
if importlib.util.find_spec("lightning"):
    MEASUREMENTS["import lightning (and so torch)"] = (partial(import_s, "import lightning"), "import torch")

if __name__ == "__main__":
    main()
