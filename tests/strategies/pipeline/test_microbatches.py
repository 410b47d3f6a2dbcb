"""Batches of any container are split by samples, and microbatches without a loss have no weight."""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict
from pathlib import Path
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
from lockstep.strategies.data.sample_axis import ROWS, SampleCutter, Shown
from lockstep.strategies.data.sharded_loader import ShardedLoader
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
        match=r"a batch of class Movable cannot be split, as the first dimension of batch\[0\].x \(shape \[3, 8\]\)",
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


class Weighted(Base):
    """Scales logits by a vector of the batch with one number a class, and as many classes as samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch["x"]) * batch["scale"], batch["y"])


def with_scale(items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    return {"x": x, "y": y, "scale": torch.arange(1.0, 5.0, dtype=x.dtype)}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_as_long_as_the_batch_that_is_not_of_samples_stays_whole(workers: int) -> None:
    how = {"loader": {"batch_size": 4, "collate_fn": with_scale, "num_workers": workers}, "n": 8}
    four = Pipeline(num_micro_batches=4)  # microbatches of one sample: a vector cut to one number would broadcast
    expected = fit(Weighted(), "single", 1, **how)
    assert difference(fit(Weighted(), four, 2, **how), expected) < 1e-12


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (
            lambda xs: {"x": torch.stack(xs, 1), "y": torch.ones(len(xs))},
            r"batch\['x'\] \(of shape \[4, 4\]\) has the"
            " samples in another dimension",
        ),
        (lambda xs: {"x": torch.cat(xs), "y": torch.ones(len(xs))}, r"batch\['x'\] .* has the samples joined"),
        (lambda xs: {"x": [x for x in xs for _ in "ab"], "y": torch.ones(len(xs))}, "a list of 8.* joined"),
    ],
    ids=["another dimension", "joined", "joined list"],
)
def test_tensors_whose_samples_are_elsewhere_are_refused(collate_fn: Any, message: str) -> None:
    shown = Shown()
    batch = shown.collating(collate_fn)([torch.full((4,), float(i)) for i in range(4)])
    with pytest.raises(ValueError, match=message):
        batch_slices.cut(batch, 4, 2, batch_slices.Rows(shown))


@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
def test_lists_that_a_collate_function_makes_are_split_by_items_or_not_at_all(strategy: str) -> None:
    shown, x = Shown(), [torch.ones(length) for length in (2, 4, 4, 1)]
    batch = shown.collating(lambda xs: {"x": xs, "pairs": [(x, "name") for x in xs], "classes": ["a", "b", "c", "d"]})(
        x
    )
    rows = batch_slices.Rows(shown)
    assert rows.any_in({"x": x[:3]}, 3)
    parts = SampleCutter(shown=shown).cut(batch, 4, 2) if strategy == "dp" else batch_slices.cut(batch, 4, 2, rows)
    assert [len(part["x"]) for part, _ in parts] == [len(part["pairs"]) for part, _ in parts] == [2, 2]
    assert all(part["classes"] == ["a", "b", "c", "d"] for part, _ in parts)


def test_what_a_collate_function_keeps_is_as_if_it_had_been_called_once() -> None:
    class Counting:
        calls, generator = 0, None

        def __call__(self, items: list[list[int]]) -> Any:
            self.calls += 1
            return torch.tensor([item.pop() for item in items]), torch.ones(len(items), 2), torch.rand(())

        def drawing(self, items: list[list[int]]) -> Any:
            return torch.rand(len(items), generator=self.generator)

    own, shown, state = Counting(), Shown(), torch.get_rng_state()
    batch = shown.collating(own)([[1], [2], [3]])
    expected = torch.random.fork_rng()
    assert batch[0].tolist() == [1, 2, 3] and own.calls == 1 and shown.of("batch[1]", batch[1]) == ROWS
    with expected:
        torch.set_rng_state(state)
        assert torch.equal(batch[2], torch.rand(()))
    del own.calls
    own.generator = torch.Generator().manual_seed(0)
    drawn = shown.collating(own.drawing)([[1], [2], [3]])  # which cannot be called again: its generator is its own
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_a_later_worker_does_not_make_batches_again_to_learn_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "sizes"  # a list would be put back

    def noting(items: list[int]) -> Tensor:
        with file.open("a") as sizes:
            sizes.write(f"{len(items)} ")
        return torch.tensor(items)

    shown = Shown()
    for _ in range(2):
        shown.collating(noting)([1, 2, 3])
    assert file.read_text().split() == ["2", "1", "3", "3"]


def test_batches_that_no_collate_function_makes_are_compared() -> None:
    rows, x, scale = batch_slices.Rows(), torch.rand(4, 2), torch.arange(4.0)
    chance = [torch.arange(4), torch.arange(4), torch.arange(4), torch.tensor([0, 1, 2, 0])]  # labels of few samples
    for number, labels in enumerate(chance[:-1]):
        batch_slices.cut({"x": x + number, "labels": labels, "scale": scale}, 4, 2, rows)
    with pytest.warns(UserWarning, match=r"^batch\['scale'\] had the same values in the first 4 batches"):
        batch_slices.cut({"x": x, "labels": chance[-1], "scale": scale}, 4, 2, rows)
    with pytest.raises(ValueError, match=r"batch\['scale'\] had as many rows as samples in an earlier batch"):
        batch_slices.cut({"x": x[:3], "scale": scale}, 3, 2, rows)
    (part, _), _ = batch_slices.cut((x[:3], scale), 3, 2, rows := batch_slices.Rows())
    (later, _), _ = batch_slices.cut((x, scale), 4, 2, rows)
    assert len(part[1]) == len(later[1]) == 4  # seen to be of no samples in a batch of another size


def test_a_collate_function_that_is_given_ready_batches_shows_nothing() -> None:
    ready = [[torch.rand(2, 8), torch.rand(2)]] * 2
    sharded = ShardedLoader(DataLoader(ready, batch_size=None), rank=0, size=1, seed=0)
    shown = sharded.learn_samples()
    for window in sharded.windows(0):
        batch = window.micro_batches[0].batch
        assert shown.of("batch", batch) is None
        assert [len(part[0]) for part, _ in batch_slices.cut(batch, 2, 2, batch_slices.Rows(shown))] == [1, 1]


def test_steps_that_change_what_all_parts_share_are_refused() -> None:
    class Doubling(Base):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["scale"].mul_(2)
            return F.cross_entropy(self.net(batch["x"]) * batch["scale"], batch["y"])

    with pytest.raises(RuntimeError, match="changes a tensor of the batch in place that has no row a sample"):
        fit(Doubling(), "pipeline", 2, n=8, loader={"batch_size": 8, "collate_fn": with_scale})


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
