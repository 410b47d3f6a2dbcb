"""Gradients that manual optimization keeps from batch to batch are part of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.callbacks import Callback
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.trainer.toy import distance, equal, loader, quiet, weights


class ByHand(Module):
    """Two optimizers: one steps in each batch, the other every second one."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.often, self.seldom = nn.Linear(8, 3), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        often, seldom = self.optimizers()
        self.toggle_optimizer(often)
        often.zero_grad()
        self.manual_backward(F.cross_entropy(self.often(x), y))
        often.step()
        self.untoggle_optimizer(often)
        self.toggle_optimizer(seldom)
        self.manual_backward(F.cross_entropy(self.seldom(x), y))
        if batch_idx % 2:
            seldom.step()
            seldom.zero_grad()
        self.untoggle_optimizer(seldom)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.often, self.seldom)]


class NeverZeroed(ByHand):
    """Each step moves by all gradients so far."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self.often(batch[0]), batch[1]))
        self.optimizers()[0].step()


class Stale(ByHand):
    """Steps with the gradients of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.often(batch[0]), batch[1]))


class Zeroed(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self.often(batch[0]), batch[1]))
        self.optimizers()[0].step()
        self.optimizers()[0].zero_grad()


class Sparse(Module):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(9, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self.table(batch[0]), batch[1]))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.batches += 1
        if self.batches == 3:
            trainer.save_checkpoint(self.path)


def fit(module: Module, data: Any = None, path: Path | None = None, **options: Any) -> list[torch.Tensor]:
    data = data or loader(40, 8, shuffle=True)
    options = {"accelerator": "cpu", "precision": "64-true", "seed": 0, "split_batches": True, **options}
    quiet(**options).fit(module, data, ckpt_path=path)
    return weights(module)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", [ByHand, NeverZeroed, Stale])
def test_a_resumed_run_continues_with_the_gradients_that_were_kept(
    kind: type[ByHand], strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    whole = fit(kind(), strategy=strategy, callbacks=[Save(tmp_path / "ck")])
    assert equal(fit(kind(), path=tmp_path / "ck", strategy=strategy), whole)


@pytest.mark.long
@pytest.mark.ranks
def test_gradients_are_saved_as_shards_and_read_by_another_layout(tmp_path: Path) -> None:
    whole = fit(ByHand(), strategy="fsdp", devices=2, callbacks=[Save(tmp_path / "ck")])
    assert distance(fit(ByHand(), path=tmp_path / "ck", strategy="single"), whole) < 1e-12


def test_sparse_gradients_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = torch.randint(0, 9, (40,), generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(rows, rows % 3), batch_size=8)
    whole = fit(Sparse(), data, callbacks=[Save(tmp_path / "ck")])
    assert equal(fit(Sparse(), data, tmp_path / "ck"), whole)


def test_a_checkpoint_without_gradients_holds_none(tmp_path: Path) -> None:
    whole = fit(Zeroed(), callbacks=[Save(tmp_path / "ck")])
    assert sorted(Checkpoint.open(tmp_path / "ck").state["strategy"]["optimizers"]) == ["0", "1"]
    assert equal(fit(Zeroed(), path=tmp_path / "ck"), whole)


class Clips(ByHand):
    """Clips in each batch what it steps with in every second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(F.cross_entropy(self.often(batch[0]), batch[1]))
        self.clip_gradients(self.optimizers()[0], 0.1)
        if batch_idx % 2:
            self.optimizers()[0].step()
            self.optimizers()[0].zero_grad()


@pytest.mark.parametrize("kind", [ByHand, NeverZeroed, Stale, Clips])
def test_gradients_are_kept_with_their_scale(kind: type[ByHand], tmp_path: Path) -> None:
    whole = fit(kind(), precision="16-mixed", callbacks=[Save(tmp_path / "ck")])
    assert equal(fit(kind(), path=tmp_path / "ck", precision="16-mixed"), whole)
    exact = fit(kind(), precision="32-true", callbacks=[Save(tmp_path / "unscaled")])
    assert distance(whole, exact) < 1e-2
    for path, precision in (("ck", "32-true"), ("unscaled", "16-mixed")):
        assert distance(fit(kind(), path=tmp_path / path, precision=precision), exact) < 1e-2
