"""Numbers and modes of torch's own layers, and buffers that are not in the state dict, are as they were when a run is
resumed, and are in the caller's module after a run on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.callbacks import Callback
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.kept.changes import Changes
from tests.trainer.toy import Net, equal, loader, quiet, weights


class Block(nn.Module):
    """A layer of the user's, with a cache of its own."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.mask


class Scheduled(Net):
    """Sets by the epoch what its layers compute."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.1, optimizer="SGD", lr=0.5)
        self.net.insert(1, Block())
        self.net.insert(2, nn.LeakyReLU(0.1))
        self.frozen = nn.Linear(16, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def on_fit_start(self) -> None:
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.ones(()), persistent=False)

    def on_train_epoch_start(self) -> None:
        self.net[2].negative_slope = 0.1 + 0.2 * self.current_epoch
        self.net[4].p = 0.1 * self.current_epoch
        self.net[1].norm.momentum = 0.5 ** (1 + self.current_epoch)
        if self.current_epoch == 1:
            self.net[1].eval()
            self.net[1].norm.weight.requires_grad_(False)
            self.net[1].mask[3] = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale * self.late  # type: ignore[has-type]

    def on_train_epoch_end(self) -> None:
        self.scale *= 0.5
        self.late = self.late * 0.9


class Save(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / str(trainer.global_step))

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        assert not module.training
        trainer.save_checkpoint(self.folder / f"validation {trainer.global_step}")


def fit(path: Path | None = None, evaluating: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Scheduled()
    module.train(not evaluating)
    settings = {"max_epochs": 3, "accelerator": "cpu", "split_batches": True} | options
    quiet(**settings).fit(module, loader(24), loader(8), ckpt_path=path)
    return module


def state(module: Any) -> tuple[Any, ...]:
    numbers = module.net[2].negative_slope, module.net[4].p, module.net[1].norm.momentum
    modes = [layer.training for layer in module.modules()], [p.requires_grad for p in module.parameters()]
    return numbers, modes, float(module.scale), float(module.late), module.net[1].mask.tolist()


LAYOUTS = [
    pytest.param({}, id="single"),
    *(
        pytest.param({"strategy": name, "devices": 2}, id=name, marks=(pytest.mark.ranks, pytest.mark.slow))
        for name in ("ddp", "pipeline")
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_has_them(tmp_path: Path, layout: dict[str, Any]) -> None:
    whole = fit(callbacks=[Save(tmp_path)], **layout)
    for step in ("1", "4", "validation 6", "8"):
        resumed = fit(tmp_path / step, **layout)
        assert equal(weights(resumed), weights(whole)) and state(resumed) == state(whole), step
        assert equal([*resumed.buffers()], [*whole.buffers()]), step


@pytest.mark.ranks
@pytest.mark.slow
def test_buffers_of_all_stages_are_there_without_them(tmp_path: Path) -> None:
    """On as many ranks too, of which each had saved what it held."""
    whole = fit(callbacks=[Save(tmp_path)], strategy="pipeline", devices=2)
    for layout in ({"strategy": "ddp", "devices": 2}, {}):
        assert state(fit(tmp_path / "4", **layout)) == state(whole)


def test_a_module_that_was_evaluated_before(tmp_path: Path) -> None:
    """Its modes as the run begins are those of training: a checkpoint names no layer, and a resumed run has them."""
    whole = fit(evaluating=True, callbacks=[Save(tmp_path)])
    saved = Checkpoint.open(str(tmp_path / "1")).rank_state(0) or {}
    assert "training" not in repr(saved["attributes"])
    for step in ("1", "4"):
        resumed = fit(tmp_path / step, evaluating=True)
        assert equal(weights(resumed), weights(whole)) and state(resumed) == state(whole), step


def test_layers_that_nobody_has_changed_are_not_saved() -> None:
    module = nn.Sequential(
        nn.LSTM(2, 2), nn.Dropout(0.1), nn.MultiheadAttention(4, 2), nn.utils.spectral_norm(nn.Linear(2, 2))
    )
    changes = Changes(module)
    changes.begin([])
    module[0](torch.ones(1, 1, 2))
    module[3](torch.ones(1, 2))
    assert changes.state_dict() == {}
    module[1].p = 0.2
    assert changes.state_dict()["values"] == {"1": {"p": 0.2}}


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_they_are_returned_from_ranks(strategy: str) -> None:
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 2}
    alone, home = fit(**options), fit(strategy=strategy, devices=2, **options)
    numbers, *rest = state(alone)
    assert state(home) == (numbers, *rest)
    held = home.scale
    for module in (alone, home):  # a second fit begins with them
        settings = options | ({"strategy": strategy, "devices": 2} if module is home else {})
        quiet(accelerator="cpu", split_batches=True, **settings).fit(module, loader(24))
    assert home.scale is held and state(home) == state(alone)


class Aliasing(nn.Linear):
    """A layer of the user's that also reads its weight by another name, a table that stays, and a running mean."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.view, self.table, self.mean = self.weight.detach(), torch.ones(8), torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1
        return super().forward(x) + 0.1 * (x @ self.view) + self.table * self.mean


@pytest.mark.ranks
def test_tensors_of_a_layer_are_returned_but_not_those_that_follow_weights_or_stay() -> None:
    module = Net(optimizer="SGD")
    module.net.insert(0, Aliasing())
    layer: Any = module.net[0]
    view, table = layer.view, layer.table
    quiet(strategy="ddp", devices=2, accelerator="cpu", max_epochs=1).fit(module, loader(32))
    assert layer.view is view and layer.table is table and torch.equal(view, layer.weight)
    assert layer.mean[0] > 0.1


@pytest.mark.parametrize("after", [True, False], ids=["after fit", "in on_train_end"])
def test_modes_after_training_are_not_those_of_a_resumed_run(after: bool, tmp_path: Path) -> None:
    class Ends(Net):
        modes: list[bool]

        def on_train_start(self) -> None:
            self.modes = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.modes.append(self.training and self.net[2].training)

        def on_train_end(self) -> None:
            if not after:
                self.eval()
                self.trainer.save_checkpoint(tmp_path / "c")

    trainer, module = quiet(max_epochs=1), Ends()
    trainer.fit(module, loader(16))
    if after:
        module.eval()
        trainer.save_checkpoint(tmp_path / "c")
    resumed = Ends()
    quiet(max_epochs=2).fit(resumed, loader(16), ckpt_path=tmp_path / "c")
    assert resumed.modes and all(resumed.modes)
