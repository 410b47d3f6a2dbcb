"""A small program for each row of "Different" in docs/migrating/lightning.md, and what it gives in both packages.

Each takes the package as `pl` and a folder, and returns what it saw; errors are the names of their classes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.trainer.lightning.projects import QUIET, classifier, loader

Probe = Callable[[Any, Path], Any]
DIFFERENCES: dict[str, tuple[Probe, Any, Any]] = {}
"""By row of the page: the program, what it gives in Lightning, and in Lockstep."""
RANKS: set[str] = set()
"""Rows whose program starts ranks."""
ELSEWHERE = {
    '`strategy="ddp"`': "tests/trainer/test_launch.py",
    "`manual_backward(loss, retain_graph=True)`": "tests/trainer/lightning/test_behavior.py",
    "a loader with `state_dict` in a `CombinedLoader`": "tests/trainer/lightning/test_behavior.py",
    "`experiment` of a WandbLogger or MLFlowLogger before a run": "tests/trainer/lightning/test_utilities.py",
    "`torch.compile(module)` given to a Trainer": "tests/trainer/lightning/test_utilities.py",
    "another number of ranks": "tests/trainer/test_exactness.py",
}
"""Rows that are not shown side by side: the file whose tests show what Lockstep does."""


def differs(row: str, theirs: Any, ours: Any, ranks: bool = False) -> Callable[[Probe], Probe]:
    def add(probe: Probe) -> Probe:
        DIFFERENCES[row] = probe, theirs, ours
        if ranks:
            RANKS.add(row)
        return probe

    return add


def seen(call: Callable[[], Any]) -> Any:
    """What `call` returns, or the name of the error that it raises."""
    try:
        return call()
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return type(error).__name__


def fit(pl: Any, module: Any, train: Any = None, val: Any = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    """The Trainer after a short fit."""
    trainer = pl.Trainer(**QUIET | arguments)
    trainer.fit(module, loader(8) if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def part(pl: Any, path: str) -> Any:
    """A module below the package."""
    return importlib.import_module(f"{pl.__name__}.{path}")


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of the only metrics.csv below a folder."""
    import csv

    (found,) = path.rglob("metrics.csv")
    with open(found, newline="") as file:
        return list(csv.DictReader(file))


def constant(pl: Any, **attributes: Any) -> Any:
    """A module whose last bias falls by 0.1 times the weight of each batch in a step."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self.net[-1].bias[0] + 0 * self(batch[0]).sum()

    return classifier(pl, **{"training_step": training_step} | attributes)


def fallen(pl: Any, module: Any, *given: Any, **arguments: Any) -> float:
    """How far a first bias has fallen."""
    before = module.net[-1].bias[0].item()
    fit(pl, module, *given, **arguments)
    return round(before - module.net[-1].bias[0].item(), 5)
