"""A user's sampler decides the order on every rank, so ranks on which it differs are noticed in the epoch."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler, default_collate

from lockstep.strategies import DDP, LocalSGD, ParameterServer
from lockstep.strategies.data.order import hash_of
from tests.trainer.toy import Net, data, distance, net, quiet, weights

pytestmark = pytest.mark.ranks

N = 24


class OfThisProcess(Sampler[int]):
    """Shuffles by something that only its process knows, from epoch `begins` on."""

    def __init__(self, begins: int = 0) -> None:
        self.begins, self.epoch = begins, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        indices = list(range(N))
        random.Random(os.getpid() if self.epoch >= self.begins else 0).shuffle(indices)
        return iter(indices)


class Batches(OfThisProcess):
    def __iter__(self) -> Iterator[Any]:
        return iter(batch for batch in zip(*[super().__iter__()] * 8, strict=True))

    def __len__(self) -> int:
        return N // 8


def fit(loader: Any, strategy: Any = "ddp", devices: int = 2, module: Any = None, **options: Any) -> Any:
    module = module or net()
    options = {"max_epochs": 2, "precision": "64-true"} | options
    quiet(strategy=strategy, devices=devices, accelerator="cpu", **options).fit(module, loader)
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    ("loader", "options", "step"),
    [
        (DataLoader(data(N), 4, sampler=OfThisProcess(begins=1)), {}, 3),
        (DataLoader(data(N), batch_sampler=Batches()), {}, 0),  # type: ignore[arg-type]
        (DataLoader(data(N), 4, sampler=OfThisProcess(), num_workers=1), {"strategy": "tensor"}, 0),
        pytest.param(DataLoader(data(N), None, sampler=OfThisProcess()), {}, 0, marks=pytest.mark.slow),
        pytest.param(DataLoader(data(N), 4, sampler=OfThisProcess()), {"strategy": "fsdp"}, 0, marks=pytest.mark.slow),
        pytest.param(
            DataLoader(data(N), 4, sampler=OfThisProcess()),
            {"strategy": LocalSGD(period=2)},
            0,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_read_in_other_orders_are_refused(loader: Any, options: dict[str, Any], step: int) -> None:
    sampler = "Batches" if isinstance(loader.batch_sampler, Batches) else "OfThisProcess"
    said = f"different things in step {step} .as {sampler} has yielded other indices .* must seed it equally"
    with pytest.raises(RuntimeError, match=said):
        fit(loader, **options)


@pytest.mark.long
def test_evaluations_and_asynchronous_workers_are_compared_too() -> None:
    """A step compares nothing there."""
    loader = DataLoader(data(N), 4, sampler=OfThisProcess())
    said = r"OfThisProcess of the {} data has yielded other indices on rank 1 than on rank 0"
    with pytest.raises(RuntimeError, match=said.format("test")):
        quiet(strategy="ddp", devices=2, accelerator="cpu").test(Evaluated(), loader)
    module, said = Net(optimizer="SGD"), r"OfThisProcess of the training data .* on rank \d than on rank \d"
    with pytest.raises(RuntimeError, match=said):  # before a batch of the first step is computed on both
        fit(loader, ParameterServer(staleness=1), module=module, max_steps=1)
    quiet(strategy="ddp", devices=2, accelerator="cpu").test(Evaluated(), DataLoader(data(N), 4, sampler=range(5)))


class Evaluated(Net):
    test_step = Net.validation_step


class Pairs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["one"], batch_idx) + super().training_step(batch["other"], batch_idx)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_several_loaders_too(num_workers: int) -> None:
    def loaders(sampler: Any) -> dict[str, Any]:
        return {
            "one": DataLoader(data(N), 4, shuffle=True, num_workers=num_workers),
            "other": DataLoader(data(N), 4, sampler=sampler, num_workers=num_workers),
        }

    fit(loaders(WeightedRandomSampler([1.0] * N, N)), module=Pairs())
    with pytest.raises(RuntimeError, match=r"in step 0 .as OfThisProcess has yielded"):
        fit(loaders(OfThisProcess()), module=Pairs())


def large(items: list[Any]) -> Any:
    """Of most batches one rank of two gets nothing."""
    kept = [item for item in items if item[0][0] > 1.0]
    return default_collate(kept) if kept else None


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_equal_orders_are_those_of_one_process(num_workers: int) -> None:
    def trained(**layout: Any) -> Any:
        sampler = WeightedRandomSampler([1.0 + i for i in range(N)], 2000)
        loader = DataLoader(data(N), 8, sampler=sampler, collate_fn=large, num_workers=num_workers)
        return weights(fit(loader, split_batches=True, limit_train_batches=140, max_epochs=1, **layout))

    assert distance(trained(), trained(strategy="single", devices=1)) < 1e-10


def test_what_of_an_index_is_compared(run_ranks: Any) -> None:
    assert hash_of([1, 2], 0) == 0, "on one process"
    assert run_ranks(hashes_on_a_rank, 2) == [True, True, True]


def hashes_on_a_rank() -> Any:
    strategy = DDP()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    one, other = hash_of([[1, 2], [object()]], 0), hash_of([[1, 2], [object()]], 0)
    found = one == other, one != hash_of([[2, 1], [object()]], 0), hash_of([3], one) != hash_of([3], one + 1)
    strategy.teardown()
    return list(found)
