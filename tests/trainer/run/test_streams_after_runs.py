"""What a program draws after a run: the same under every strategy, however its ranks are started."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.trainer import seeding
from tests.trainer.toy import Net, equal, loader, quiet, weights

pytestmark = pytest.mark.ranks


class Drawing(Net):
    """Draws from each stream in hooks, and in validation."""

    fails = False

    def on_train_start(self) -> None:
        torch.rand(2), random.random(), np.random.rand()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.fails:
            torch.rand(3), random.random(), np.random.rand()
            raise ValueError("a batch is broken")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(2), random.random(), np.random.rand()
        super().validation_step(batch, batch_idx)


class Failing(Drawing):
    fails = True


def draw() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def drawn_after(what: str, **options: Any) -> list[tuple[float, ...]]:
    """What a program draws after two runs, each of a model of its own."""
    seeding.seed_everything(7)
    found = []
    for _ in range(2):
        model = Failing() if what == "failed fit" else Drawing()
        trainer = quiet(**{"num_sanity_val_steps": 2, "split_batches": True} | options)
        if what == "validation":
            trainer.validate(model, loader(16, 4), verbose=False)
        elif what == "fit":
            trainer.fit(model, loader(16, 4, shuffle=True), loader(8, 4))
        else:
            with pytest.raises(ValueError, match="a batch is broken"):
                trainer.fit(model, loader(16, 4))
        found.append(draw())
    return found


RANKS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "devices": 2},
    "fsdp": {"strategy": "fsdp", "devices": 2},
    "one rank": {"max_restarts": 1},
}


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("what", ["fit", "validation", "failed fit"])
@pytest.mark.parametrize(
    "ranks", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "one rank"))]
)
def test_a_program_draws_on_as_after_a_run_on_one_process(ranks: str, what: str, seed: int | None) -> None:
    assert drawn_after(what, seed=seed, **RANKS[ranks]) == drawn_after(what, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["fit", "validation"])
def test_with_virtual_ranks_too(what: str) -> None:
    options = {"virtual_ranks": 2, "seed": 0}
    assert drawn_after(what, **options, **RANKS["ddp"]) == drawn_after(what, **options)


def test_a_failed_run_leaves_the_streams_as_it_found_them() -> None:
    seeding.seed_everything(7)
    Failing()
    expected = draw()
    seeding.seed_everything(7)
    model = Failing()
    with pytest.raises(ValueError, match="a batch is broken"):
        quiet(seed=0).fit(model, loader(16, 4))
    assert draw() == expected


@pytest.mark.parametrize("options", [RANKS["ddp"], RANKS["one rank"]], ids=["ddp", "one rank"])
def test_a_second_fit_without_a_seed_has_other_noise(options: dict[str, Any]) -> None:
    """The second of two fits continues the streams of the first."""
    seen = []
    for own in ({}, options):
        torch.manual_seed(0)
        model = FirstDraws()
        trainer = quiet(split_batches=True, **own)
        trainer.fit(model, loader(16, 4))
        trainer.max_epochs = 2
        trainer.fit(model, loader(16, 4))
        seen.append(model.seen)
    assert seen[0] == seen[1] and len(set(seen[0])) == 2


class FirstDraws(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_start(self) -> None:
        self.seen.append(torch.rand(1).item())


SCRIPT = """
from tests.trainer.run import test_streams_after_runs as here
import os
options = dict(strategy="ddp", devices=2) if "RANK" in os.environ else {}
found = [here.drawn_after(what, seed=0, **options) for what in ("fit", "validation", "failed fit")]
open("drawn" + os.environ.get("RANK", ""), "w").write(repr(found))
"""


@pytest.mark.slow
def test_ranks_of_a_launcher_draw_alike_after_a_run() -> None:
    """Each is the program, whose later code makes models and splits data."""
    Path("train.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    for start in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]):
        done = subprocess.run([sys.executable, *start, "train.py"], env=environment, capture_output=True, timeout=100)
        assert done.returncode == 0, done.stderr.decode()
    first, *others = (Path(name).read_text() for name in ("drawn", "drawn0", "drawn1"))
    assert others == [first, first]


def test_models_of_folds_begin_with_the_same_weights() -> None:
    begun = []
    for options in ({}, RANKS["ddp"]):
        torch.manual_seed(7)
        for _ in range(2):
            model = Net()
            begun.append(weights(model))
            quiet(seed=0, **options).fit(model, loader(16, 4))
    assert equal(begun[1], begun[3]) and not equal(begun[0], begun[1])
