"""Slices in one process: what a user's run sees of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Module
from lockstep.strategies.data.batch_slices import cut
from tests.trainer.toy import Net, distance, equal, loader, quiet, weights


class Counting(Net):
    """Takes the batch alone, logs a torchmetrics object, and has a layer without random numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout=dropout)
        self.acc = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        x, y = batch
        logits = self.net(x)
        self.acc(logits, y)
        loss = F.cross_entropy(logits, y)
        self.log("train/acc", self.acc, on_step=False, on_epoch=True)
        self.log("train/loss", loss, on_epoch=True, on_step=True)
        return loss


def fit(strategy: str, devices: int, dropout: float = 0.0, **options: Any) -> tuple[Net, dict[str, float]]:
    torch.manual_seed(0)
    model = Counting(dropout)
    trainer = quiet(
        strategy=strategy, devices=devices, max_epochs=2, precision="64-true", log_every_n_steps=1, **options
    )
    trainer.fit(model, loader(50, 8, shuffle=True), loader(20))
    return model, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}],
    ids=["plain", "accumulation and clipping"],
)
def test_a_run_has_the_numbers_of_one_device(options: dict[str, Any]) -> None:
    expected, expected_metrics = fit("single", 1, **options)
    found, metrics = fit("dp", 3, **options)
    assert distance(weights(found), weights(expected)) < 1e-12
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)


def test_runs_repeat_bit_by_bit_also_with_dropout() -> None:
    one, metrics = fit("dp", 2, dropout=0.4)
    other, again = fit("dp", 2, dropout=0.4)
    assert equal(weights(one), weights(other)) and metrics == again


def test_slices_run_one_after_the_other_with_parameters_of_their_own() -> None:
    seen: list[tuple[int, int]] = []
    running: list[int] = []

    class Watching(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            running.append(batch_idx)
            assert len(running) == 1 and threading.current_thread() is threading.main_thread()
            weight = next(self.parameters())
            seen.append((id(self), weight.data_ptr()))
            loss = super().training_step(batch, batch_idx)
            running.clear()
            return loss

    module = Watching()
    first = next(module.parameters())
    quiet(strategy="dp", devices=2, accelerator="cpu").fit(module, loader(32))
    assert {owner for owner, _ in seen} == {id(module)} and next(module.parameters()) is first
    # what a step changes in place must change once, not once a slice
    assert all(one[1] != other[1] == first.data_ptr() for other, one in zip(seen[::2], seen[1::2], strict=True))


class Drawing(Net):
    """Scales its loss by a random number."""

    def __init__(self, draw: Callable[[Drawing], float]) -> None:
        super().__init__()
        self.draw = draw
        self.rng = np.random.default_rng(0) if draw is of_its_own else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        IN_THREADS.append(threading.current_thread() is not threading.main_thread())
        return super().training_step(batch, batch_idx) * (1 + self.draw(self))


IN_THREADS: list[bool] = []


def of_its_own(module: Drawing) -> float:
    return module.rng.random()  # type: ignore[union-attr]


@pytest.mark.parametrize("draw", [lambda _: random.random(), lambda _: np.random.rand(), of_its_own])
def test_steps_that_draw_from_any_stream_run_slice_after_slice(draw: Any) -> None:
    IN_THREADS.clear()
    quiet(strategy="dp", devices=2).fit(Drawing(draw), loader(32))
    assert len(IN_THREADS) == 8 and not any(IN_THREADS)


@pytest.mark.parametrize("draw", [lambda: torch.rand(1).item(), np.random.rand], ids=["torch", "numpy"])
def test_a_run_repeats_whose_step_begins_to_draw_after_the_first(draw: Any) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        module = Drawing(lambda m: draw() if m.global_step else 0.0)
        quiet(strategy="dp", devices=2, seed=0).fit(module, loader(32))
        states.append(weights(module))
    assert equal(*states)


def test_nested_batches_are_split_along_their_rows() -> None:
    batch = {
        "x": torch.arange(10).reshape(5, 2),
        "names": ["a", "b", "c", "d", "e"],
        "scale": torch.tensor(2.0),
        "pair": (torch.arange(5), 7),
    }
    slices = cut(batch, 5, 2)
    assert [n for _, n in slices] == [3, 2]
    assert (
        slices[1][0]["names"] == ["d", "e"]
        and slices[1][0]["pair"][0].tolist() == [3, 4]
        and slices[1][0]["pair"][1] == 7
    )
    assert torch.cat([part["x"] for part, _ in slices]).equal(batch["x"]) and slices[0][0]["scale"].item() == 2.0
    assert len(cut(torch.zeros(1, 3), 1, 4)) == 1


def test_manual_optimization_is_refused() -> None:
    class Manual(Module):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def training_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.raises(ValueError, match="needs automatic optimization with one optimizer; use strategy='ddp'"):
        quiet(strategy="dp", devices=2).fit(Manual(), loader(8))
