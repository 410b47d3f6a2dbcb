"""StopIteration out of user code is an error like any other: it ends no epoch in silence, and no rank waits for
another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.trainer.toy import Net, data, loader, net, quiet

pytestmark = pytest.mark.ranks


def exhausted() -> Any:
    return next(iter([]))


class Map(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return exhausted() if index == 21 else data(32)[index]


class InBulk(Map):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [exhausted() if index == 21 else data(32)[index] for index in indices]


class Stream(IterableDataset):
    """Opens nothing where it should open a file."""

    def __iter__(self) -> Iterator[Any]:
        return iter([exhausted()])


class Endless(IterableDataset):
    """Its iteration ends as it should; what transforms a sample does not."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data(32))


class Order(Sampler):
    def __iter__(self) -> Iterator[int]:
        return iter([exhausted()])

    def __len__(self) -> int:
        return 32


class Lists(Sampler):
    """Makes its batches only when they are read."""

    def __iter__(self) -> Iterator[Any]:
        yield [0, 1, 2, 3]
        yield Late()

    def __len__(self) -> int:
        return 8


class Late(list):
    def __iter__(self) -> Iterator[int]:
        return iter([exhausted()])


def collate(samples: Any) -> Any:
    return exhausted()


def start_worker(number: int) -> None:
    exhausted()


LOADERS: dict[str, Callable[[], Any]] = {
    "dataset": lambda: DataLoader(Map(), batch_size=4),
    "dataset in bulk": lambda: DataLoader(InBulk(), batch_size=4),
    "ready batches": lambda: DataLoader(Map(), batch_size=None),
    "collate function": lambda: DataLoader(data(32), batch_size=4, collate_fn=collate),
    "sampler": lambda: DataLoader(data(32), batch_size=4, sampler=Order()),
    "batch sampler": lambda: DataLoader(data(32), batch_sampler=Lists()),
    "iterable dataset": lambda: DataLoader(Stream(), batch_size=4),
    "collate function of an iterable": lambda: DataLoader(Endless(), batch_size=4, collate_fn=collate),
    "a function for a loader": lambda: exhausted,
    "dataset in a worker": lambda: DataLoader(Map(), batch_size=4, num_workers=1),
    "iterable dataset in a worker": lambda: DataLoader(Stream(), batch_size=4, num_workers=1),
    "start of a worker": lambda: DataLoader(data(32), batch_size=4, num_workers=1, worker_init_fn=start_worker),
}


@pytest.mark.parametrize("what", LOADERS)
def test_a_loader_that_raises_stop_iteration_is_an_error_that_names_the_code(what: str) -> None:
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        quiet().fit(net(), LOADERS[what]())
    text = str(caught.value)
    assert "exhausted (" in text or "generator raised" in text or "start_worker" in text, text


def test_validation_data_that_raise_stop_iteration_are_an_error() -> None:
    for what in ("dataset", "collate function", "iterable dataset", "dataset in a worker"):
        for call in ("fit", "validate"):
            loaders = (loader(8), LOADERS[what]()) if call == "fit" else (LOADERS[what](),)
            with pytest.raises(RuntimeError, match="StopIteration while reading"):
                getattr(quiet(), call)(net(), *loaders)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_ranks_name_the_code_and_none_hangs(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WATCHDOG_S", "20")
    for what in ("dataset", "collate function", "iterable dataset", "dataset in a worker")[
        : 4 if strategy == "ddp" else 1
    ]:
        with pytest.raises(RuntimeError, match="exhausted .* raised StopIteration while reading"):
            quiet(strategy=strategy, devices=2).fit(net(), LOADERS[what]())


def test_iterable_datasets_end_as_they_did() -> None:
    class Counts(Net):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += len(batch[0])
            return super().training_step(batch, batch_idx)

    class Own(IterableDataset):
        """An iterator by hand, whose end is that of what it reads."""

        def __iter__(self) -> Iterator[Any]:
            self.inner = iter(data(30))
            return self

        def __next__(self) -> Any:
            return next(self.inner)

    for workers in (0, 2):
        for dataset in (Endless(), Own()):
            module = Counts()
            quiet().fit(module, DataLoader(dataset, batch_size=4, num_workers=workers))
            assert module.seen == (32 if isinstance(dataset, Endless) else 30)


HOOKS = ("setup", "configure_optimizers", "on_train_batch_start", "training_step", "on_train_batch_end", "teardown")


@pytest.mark.parametrize("devices", [1, 2])
def test_stop_iteration_of_steps_and_hooks_comes_out_as_itself(devices: int) -> None:
    for name in HOOKS if devices == 1 else HOOKS[::2]:
        kind = type("Broken", (Net,), {name: lambda self, *args, **options: exhausted()})
        with pytest.raises(StopIteration):
            quiet(devices=devices, accumulate_grad_batches=2).fit(kind(), loader(32, 4))


def test_a_transform_on_its_way_to_the_device_comes_out_as_itself() -> None:
    class Moves(Net):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return exhausted()

    with pytest.raises(StopIteration):
        quiet().fit(Moves(), loader(8, 4))
