"""A collate function that leaves samples out: means are weighted by what is in the batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lockstep import Loss, Module
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.trainer.toy import Net, data, distance, quiet, weights

SAMPLES = [(x.double(), y) for x, y in data(24)]


class Plain(Net):
    """Logs a mean over each batch in both loops."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        self.log("loss", losses.mean(), on_step=False, on_epoch=True)
        return Loss(losses.sum(), len(losses)) if self.kind == "sum" else losses.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES


def positive(items: list[Any]) -> Any:
    """Of the first half of the data one rank of two gets nothing in one batch."""
    kept = [item for item in items if item[0][0] < 0.3]
    return default_collate(kept) if kept else None


def loader(dataset: Any = SAMPLES, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, **{"batch_size": 4, "collate_fn": positive} | options)


def trained(strategy: str, devices: int, make: Any = Plain, dataset: Any = SAMPLES, **options: Any) -> Any:
    torch.manual_seed(0)
    module = make()
    workers = options.pop("num_workers", 0)
    trainer = quiet(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision="32-true" if strategy == "deepspeed" else "64-true",
        max_epochs=2,
        split_batches=True,
        **options,
    )
    trainer.fit(module, loader(dataset, num_workers=workers), loader(dataset))
    return weights(module), {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_one_process_is_the_loop_by_hand() -> None:
    torch.manual_seed(0)
    module = Plain().double()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for batch in loader():
            if batch is not None:
                optimizer.zero_grad()
                F.cross_entropy(module(batch[0]), batch[1]).backward()
                optimizer.step()
    assert distance(trained("single", 1)[0], weights(module)) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "options"),
    [
        ("single", 1, {"accumulate_grad_batches": 2}),
        pytest.param("ddp", 2, {}, marks=pytest.mark.slow),
        ("ddp", 2, {"accumulate_grad_batches": 2, "num_workers": 1}),
        ("ddp", 2, {"dataset": Stream()}),
        ("dp", 2, {}),
        pytest.param("fsdp", 2, {}, marks=pytest.mark.slow),
        pytest.param("ddp", 2, {"make": Manual}, marks=pytest.mark.slow),
        ("fsdp", 2, {"make": Manual}),
        pytest.param("tensor", 2, {}, marks=pytest.mark.slow),
        ("pipeline", 2, {}),
    ],
)
def test_weights_and_means_are_those_of_one_process(strategy: str, devices: int, options: dict[str, Any]) -> None:
    want, want_metrics = trained("single", 1, **{k: v for k, v in options.items() if k in ("make", "dataset")})
    found, metrics = trained(strategy, devices, **options)
    assert distance(found, want) < 1e-12
    assert metrics == pytest.approx(want_metrics, rel=1e-12)


class Sums(Plain):
    """A buffer of sums over the ranks, which weights the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total += self.sum_over_ranks(batch[0].square().sum())
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.total)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_buffers_are_those_of_a_rank_that_had_samples(strategy: str) -> None:
    """Rank 0 has none in the second step, in which DDP lays out its buckets too."""
    firsts = [9.0 if i in (4, 5) else 0.0 for i in range(len(SAMPLES))]
    dataset = [
        (torch.cat([torch.tensor([first]), x[1:]]).double(), y) for first, (x, y) in zip(firsts, SAMPLES, strict=True)
    ]
    want, _ = trained("single", 1, Sums, dataset)
    found, _ = trained(strategy, 2, Sums, dataset)
    assert distance(found, want) < 1e-12


SHOWN = [(torch.cat([torch.tensor([9.0]), x[1:]]).double(), y) for x, y in data(4)]
"""Samples that `positive` drops."""
KEPT = [(torch.cat([torch.tensor([0.0]), x[1:]]).double(), y) for x, y in data(6)]


class Items(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "make"),
    [("ddp", Sums), ("fsdp", Sums), ("ddp", Manual), pytest.param("fsdp", Manual, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    "dataset",
    [KEPT[:4] + SHOWN[:1], Items(KEPT[:2] + SHOWN[:2] + KEPT), Items(SHOWN + KEPT), SHOWN + KEPT],
    ids=["last batch", "first of a stream on a rank", "first of a stream", "first batch"],
)
def test_a_rank_without_samples_has_a_batch_to_meet_the_others_with(strategy: str, make: Any, dataset: Any) -> None:
    """Of one sample that is dropped the second rank is to get nothing; the batch of a rank in the first step has no
    earlier one to stand in for it."""
    want, metrics = trained("single", 1, make, dataset)
    found, others = trained(strategy, 2, make, dataset)
    assert distance(found, want) < 1e-12
    assert others == pytest.approx(metrics, rel=1e-12)


def late(items: list[int]) -> list[int] | None:
    return [item for item in items if item > 2500] or None


def test_padding_is_looked_for_up_to_the_first_sample_that_is_kept() -> None:
    numbers = DataLoader(range(3000), 2, collate_fn=late)  # type: ignore[arg-type]
    windows = ShardedLoader(numbers, rank=0, size=2, seed=0, split=True).windows(0, start=2500)
    assert [part.batch for part in next(windows).micro_batches] == [[2501]]


@pytest.mark.ranks
@pytest.mark.slow
def test_deepspeed_trains_as_one_process() -> None:
    pytest.importorskip("deepspeed")
    want, _ = trained("single", 1)
    single = [(x.float(), y) for x, y in SAMPLES]
    assert distance([w.double() for w in trained("deepspeed", 2, dataset=single)[0]], want) < 1e-5


class Packed(Plain):
    """Its batches show no number of samples: all rows of all samples in one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self(batch[0].double()).square().mean(1)
        return Loss(losses.sum(), len(losses)) if self.kind == "sum" else losses.mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", self(batch[0].double()).square().mean(), batch_size=batch.shape[1])


class PackedLosses(Packed):
    """With a loss for each of two optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"one": loss, "two": loss}

    def configure_optimizers(self) -> Any:
        one, two = ({"params": [p]} for p in [*self.parameters()][:2])
        return {"one": torch.optim.SGD([one], lr=0.1), "two": torch.optim.SGD([two], lr=0.1)}


class PackedLog(Packed):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rows", self(batch[0].double()).square().mean())


def packed(items: list[Any]) -> torch.Tensor:
    return torch.cat([x.expand(1 + int(y), 8) for x, y in items])[None]


def packed_fit(module: Module, devices: int, **options: Any) -> None:
    train = DataLoader(SAMPLES, 4, collate_fn=packed)  # type: ignore[arg-type]
    quiet(devices=devices, accelerator="cpu", precision="64-true", split_batches=True, **options).fit(
        module, train, train
    )


@pytest.mark.long
@pytest.mark.ranks
def test_a_mean_over_a_batch_that_does_not_show_its_samples_is_refused_where_it_is_weighted() -> None:
    packed_fit(PackedLog(), 1)
    packed_fit(Packed("sum"), 2)
    with pytest.raises(
        ValueError, match=r"was given 2 samples, and batch 0 does not show .*return Loss\(total, count\)"
    ):
        packed_fit(Packed(), 2)
    with pytest.raises(ValueError, match=r"return Loss\(total, count\)"):
        packed_fit(Packed(), 1, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"self.log\('rows'\) cannot weigh .*give batch_size="):
        packed_fit(PackedLog("sum"), 2)


def test_losses_of_several_optimizers_are_means_too() -> None:
    with pytest.raises(ValueError, match=r"was given 2 samples, and batch 0 does not show .*return Loss"):
        packed_fit(PackedLosses(), 1, accumulate_grad_batches=2)


def none_left(items: list[Any]) -> Any:
    return default_collate([item for item in items if item[0][0] > 90])


@pytest.mark.parametrize(
    ("dataset", "samples"), [(SAMPLES, r"samples \[0, 1, 2, 3\] of list"), (Stream(), "samples of batch 0 of Stream")]
)
def test_default_collate_without_samples_is_one_sentence(dataset: Any, samples: str) -> None:
    with pytest.raises(ValueError, match=f"the collate function drops all {samples}.*; return None if no sample"):
        quiet(accelerator="cpu").fit(Plain(), loader(dataset, collate_fn=none_left))


def test_an_index_error_of_a_collate_function_stays_its_own() -> None:
    with pytest.raises(IndexError, match="list index out of range"):
        quiet(accelerator="cpu").fit(Plain(), loader(collate_fn=lambda items: items[9]))


def two_views(items: list[Any]) -> Any:
    batch = positive(items)
    return None if batch is None else [torch.cat([batch[0], 0.1 - batch[0] / 2]), torch.cat([batch[1], batch[1]])]


@pytest.mark.long
@pytest.mark.ranks
def test_two_rows_of_one_sample_have_no_weight_beside_two_of_each() -> None:
    loader = DataLoader(SAMPLES, 4, collate_fn=two_views)  # type: ignore[arg-type]
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu", precision="64-true", split_batches=True)
    with pytest.raises(ValueError, match="does not show how many samples its collate function left in it"):
        trainer.fit(Plain(), loader)


class Indices(Plain):
    """Its steps see the number of a sample in each of its rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = batch["crops"] if isinstance(batch, dict) else batch
        x = batch.double()[:, None].expand(-1, 8)
        return super().training_step((x, batch % 2), batch_idx)

    validation_step = training_step


def crops(items: list[int]) -> Any:
    """Two of even numbers, three of odd ones."""
    return torch.tensor([item for item in items for _ in range(2 + item % 2)])


@pytest.mark.ranks
def test_ranks_that_make_other_numbers_of_rows_of_a_sample_are_refused_in_the_first_step() -> None:
    """Each rank by itself sees equally many in all of its batches."""
    numbers, options = (
        DataLoader(range(12), 1, collate_fn=crops),
        {"strategy": "ddp", "devices": 2, "accelerator": "cpu"},
    )  # type: ignore[arg-type]
    said = "makes 2 rows of a sample on one rank and 3 on another, so the mean over a batch cannot be weighted"
    with pytest.raises(ValueError, match=said):
        quiet(max_steps=1, precision="64-true", **options).fit(Indices(), numbers)
    several = {"crops": numbers, "plain": DataLoader(range(12), 1)}  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        quiet(max_steps=1, precision="64-true", **options).fit(Indices(), several)
    with pytest.raises(ValueError, match=said):
        quiet(**options).validate(Indices().double(), numbers)
