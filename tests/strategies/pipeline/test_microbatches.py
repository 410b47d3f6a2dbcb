"""Batches of any container are split by samples, and microbatches without a loss have no weight."""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep import Loss
from lockstep.strategies import Pipeline
from lockstep.strategies.data import batch_slices
from tests.strategies.pipeline.classifiers import ALL, TWO, Base, difference, exact, fit, layers, samples

pytestmark = pytest.mark.ranks


class Sometimes(Base):
    """Returns None for what it finds empty: the first part, another part, all parts, all parts on one data rank."""

    level = 0.4
    late = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = batch[0][:, 0] > self.level
        if not chosen.any() and not self.late:
            return None
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return Loss((losses * chosen).sum(), chosen.sum()) if chosen.any() else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Seldom(Sometimes):
    level = 1.2


class Late(Seldom):
    """Decides after it has called the net."""

    late = True


@pytest.mark.parametrize("make", [Sometimes, Seldom, Late])
def test_parts_without_a_loss_leave_the_others_alone(make: type[Sometimes]) -> None:
    exact(make, ALL if make is Seldom else TWO, accumulate_grad_batches=2)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Any
    size: int = 0


class Named(NamedTuple):
    pair: Pair
    names: list[str]


class Movable:
    """Neither a mapping nor a dataclass: it moves itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.names = x, {"labels": y}, [f"sample {i}" for i in range(len(x))]

    def to(self, device: Any) -> Movable:
        self.x = self.x.to(device)
        return self


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping with attributes, whose constructor asks for more than the data."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind

    def to(self, device: Any) -> Encoding:
        return self


def collate(kind: str, items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    if kind == "dataclass":
        return Pair(x, [y, {"same": y}])
    if kind == "named tuple":
        return Named(Pair(x, y), [f"sample {i}" for i in range(len(x))])
    if kind == "object":
        return Movable(x, y)
    return Encoding({"x": x, "y": y}, "encoding")


class AnyBatch(Base):
    """Takes each kind of batch; the net takes the object itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Unpacking()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Named):
            assert len(batch.names) == len(batch.pair.x)
            batch = batch.pair
        if isinstance(batch, Movable):
            assert len(batch.names) == len(batch.x)
            return F.cross_entropy(self.net(batch), batch.y["labels"])
        if isinstance(batch, Encoding):
            assert batch.kind == "encoding"
            return F.cross_entropy(self.net(Pair(batch["x"], None)), batch["y"])
        y = batch.y[0] if isinstance(batch.y, list) else batch.y
        return F.cross_entropy(self.net(batch), y)


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()

    def forward(self, batch: Any) -> Tensor:
        return self.blocks(batch.x)


@pytest.mark.parametrize("kind", ["dataclass", "named tuple", "object", "mapping"])
def test_batches_of_any_container_are_split_by_samples(kind: str) -> None:
    expected = fit(AnyBatch(), "single", 1, loader={"collate_fn": functools.partial(collate, kind)})
    assert (
        difference(fit(AnyBatch(), "pipeline", 2, loader={"collate_fn": functools.partial(collate, kind)}), expected)
        < 1e-12
    )


def test_an_object_whose_tensors_are_not_one_row_a_sample_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"a batch of class Movable cannot be split, as the first dimension of its x \(shape \[3, 8\]\)",
    ):
        batch_slices.cut([Movable(torch.ones(3, 8), torch.ones(4)), torch.ones(4)], 4, 2)
    first, second = (part for part, _ in batch_slices.cut(Movable(torch.ones(4, 8), torch.arange(4)), 4, 2))
    assert (
        first.x.shape == (2, 8) and second.y["labels"].tolist() == [2, 3] and second.names == ["sample 2", "sample 3"]
    )
    assert (
        batch_slices.signature(first)
        == batch_slices.signature(second)
        != batch_slices.signature(Movable(torch.ones(3, 8), torch.ones(3)))
    )


def test_arrays_are_split_as_tensors_are() -> None:
    batch = {"x": np.arange(8).reshape(4, 2), "scale": np.ones(3)}
    (first, _), (second, _) = batch_slices.cut(batch, 4, 2)
    assert first["x"].tolist() == [[0, 1], [2, 3]] and second["x"].tolist() == [[4, 5], [6, 7]]
    assert second["scale"] is batch["scale"]


def test_ragged_samples_of_which_one_has_a_batchs_rows_are_refused() -> None:
    ragged = [torch.ones(length) for length in (3, 4, 5, 2)]
    with pytest.raises(ValueError, match=r"a list of 4 tensors whose first dimensions differ cannot be split into 4"):
        batch_slices.cut({"tokens": ragged, "y": torch.ones(4)}, 4, 2)
    one, other = (part for part, _ in batch_slices.cut([torch.ones(2), torch.ones(2, 3)], 2, 2))
    assert [len(t) for t in (*one, *other)] == [1] * 4  # a pair


def test_a_second_run_of_a_strategy_draws_from_its_own_seed() -> None:
    strategy = Pipeline()
    for seed in (5, 0):
        strategy.configure(devices=1, accelerator="cpu")
        strategy.setup()
        strategy.shard_loader(DataLoader(samples(), 8), seed=seed)
        strategy.shard_loader(DataLoader(samples(), 8), seed=9)
        assert strategy._seed == seed
        strategy.teardown()


class ChangesBatch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0] = batch[0] * 2 - 1
        return super().training_step(batch, batch_idx)


def test_a_batch_to_which_a_step_assigns_is_that_of_the_loader_on_each_stage() -> None:
    exact(ChangesBatch, {"pipeline": 2}, max_epochs=1)


class Both(NamedTuple):
    features: Tensor
    rate: float


class Returns(Base):
    """Returns beside its loss what hooks may read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        x = batch[0].detach()
        names = [f"{value:.6f}" for value in x[:, 0]]
        held = {"pair": (x, x.mean()), "both": Both(x, 0.5), "names": names, "n": len(x), "number": float(x.mean())}
        held |= {"rows": [x, 2 * x], "of_each": [row.sum() for row in x]}
        return {"loss": loss, "held": held, "large": [i for i in names if float(i) > 0], "flag": True}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.trainer.strategy.topology.is_reporting_rank:
            assert outputs is None
            return
        held, x, parted = outputs["held"], batch[0], outputs["flag"]
        assert torch.equal(held["pair"][0], x) and torch.allclose(held["pair"][1], x.mean())
        assert isinstance(held["both"], Both) and torch.equal(held["both"].features, x) and held["both"].rate == 0.5
        assert held["names"] == [f"{value:.6f}" for value in x[:, 0]] and parted is True
        assert all(map(torch.equal, held["rows"], (x, 2 * x))) and held["of_each"] == [row.sum() for row in x]
        assert outputs["large"] == [name for name in held["names"] if float(name) > 0]
        assert held["n"] == len(x) and abs(held["number"] - float(x.mean())) < 1e-12


@pytest.mark.parametrize("strategy", ["single", "dp", "pipeline"])
def test_what_a_step_returns_in_parts_is_that_of_the_batch(strategy: str) -> None:
    fit(Returns(), strategy, 1 if strategy == "single" else 2)
