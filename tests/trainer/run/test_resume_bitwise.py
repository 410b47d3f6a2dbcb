"""A resumed run is the undisturbed one to the last bit at the same number of ranks, also where sums depend on their
order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module
from lockstep.callbacks import Callback
from lockstep.strategies import DDP
from tests.trainer.toy import data, equal, quiet, weights

pytestmark = pytest.mark.ranks


class Backwards(Module):
    """Layers that are registered in another order than they are used in, so that gradients come in another one too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(17, 3)
        self.scale = nn.Parameter(torch.ones(5))
        self.middle = nn.ModuleList([nn.Linear(17, 17), nn.Linear(17, 17)])
        self.norm = nn.BatchNorm1d(17)
        self.first = nn.Linear(8, 17)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.norm(self.first(batch[0]).tanh()) * self.scale.mean()
        for layer in reversed(self.middle):
            x = F.dropout(layer(x).tanh(), 0.1)
        return F.cross_entropy(self.head(x), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SavesAt(Callback):
    """Saves after the given steps of a run."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if 0 in self.steps:
            trainer.save_checkpoint(self.folder / "0")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.steps and not trainer._run.window_is_open:
            trainer.save_checkpoint(self.folder / str(trainer.global_step))


def trainer_of(strategy: Any, devices: int, *callbacks: Callback, **options: Any) -> Any:
    defaults = {"max_epochs": 2, "seed": 0, "precision": "64-true"}
    return quiet(strategy=strategy, devices=devices, accelerator="cpu", callbacks=list(callbacks), **defaults | options)


def loader() -> Any:
    return torch.utils.data.DataLoader(data(72), batch_size=3, shuffle=True)


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "ddp on 3": (lambda: "ddp", 3, {}),
    "ddp on 4, several buckets": (lambda: DDP(bucket_cap_mb=0.001), 4, {"precision": "32-true"}),
    "ddp on 4, accumulating": (lambda: DDP(gradient_as_bucket_view=True), 4, {"accumulate_grad_batches": 2}),
    "ddp on 4, a look for unused parameters": (lambda: DDP(find_unused_parameters=True), 4, {}),
    "fsdp on 3": (lambda: "fsdp", 3, {}),
}


DAILY = ("ddp on 3", "ddp on 4, accumulating", "fsdp on 3")


@pytest.mark.parametrize(
    "case", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_from_any_step_a_resumed_run_is_the_undisturbed_one_to_the_bit(tmp_path: Path, case: str) -> None:
    make, devices, options = CASES[case]
    steps = {"ddp on 3": (0, 3), "ddp on 4, accumulating": (1, 3)}.get(case, (2,))
    whole = Backwards()
    trainer_of(make(), devices, SavesAt(tmp_path, *steps), **options).fit(whole, loader())
    for step in steps:
        resumed = Backwards()
        trainer_of(make(), devices, **options).fit(resumed, loader(), ckpt_path=tmp_path / str(step))
        assert equal(weights(whole), weights(resumed)), (case, step)


@pytest.mark.long
def test_a_second_fit_is_resumed_to_the_bit(tmp_path: Path) -> None:
    whole = Backwards()
    trainer = trainer_of("ddp", 3, SavesAt(tmp_path, 9, 12), max_epochs=1)
    trainer.fit(whole, loader())
    trainer.max_epochs = 2
    trainer.fit(whole, loader())
    for step in (9, 12):
        resumed = Backwards()
        trainer_of("ddp", 3).fit(resumed, loader(), ckpt_path=tmp_path / str(step))
        assert equal(weights(whole), weights(resumed)), step
