"""What user code draws from generators of its own, or counts, as samples are read: found in workers, and refused where
shares would draw it."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from lockstep.strategies.data.randomness import HeldState, OwnDraws
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.launch.program.held_search import search

STREAMS = "draw from the streams of torch, Python"


class Base(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index))


class OfNumpy(Base):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.rng.normal())


class OfLegacy(Base):
    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.rng.randn(700))


class OfPython(Base):
    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.rng.random())


class OfTorch(Base):
    def __init__(self) -> None:
        self.rng = torch.Generator()

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1, generator=self.rng)


class Counts(Base):
    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.tensor(float(self.calls))


class Iterates(Base):
    def __init__(self) -> None:
        self.number = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(next(self.number)))


class Schedule:
    def __init__(self) -> None:
        self.level = 1.0

    def __call__(self, x: Any) -> Any:
        self.step()
        return x * self.level

    def step(self) -> None:
        self.level = 0.9 * self.level


class Scheduled(Base):
    def __init__(self) -> None:
        self.transforms = [Schedule()]

    def __getitem__(self, index: int) -> Any:
        return self.transforms[0](super().__getitem__(index))


def collating() -> Any:
    rng = np.random.default_rng(0)

    def mask(batch: Any) -> Any:
        return default_collate(batch) * rng.random()

    return mask


DRAWING = {
    "OfNumpy.rng is drawn from": lambda: DataLoader(OfNumpy(), 4),
    "OfLegacy.rng is drawn from": lambda: DataLoader(OfLegacy(), 4),
    "OfPython.rng is drawn from": lambda: DataLoader(Subset(OfPython(), range(40)), 4),
    "OfTorch.rng is drawn from": lambda: DataLoader(OfTorch(), 4),
    "Counts.calls is changed": lambda: DataLoader(Counts(), 4),
    "Iterates.number is changed": lambda: DataLoader(Iterates(), 4),
    "Schedule.level is changed": lambda: DataLoader(Scheduled(), 4),
    "rng in the closure of collating.<locals>.mask is drawn from": lambda: DataLoader(
        Base(), 4, collate_fn=collating()
    ),
}


class Cached(Base):
    """Holds much that is made or set as samples are read, of which nothing decides what is read later."""

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}
        self.read: list[int] = []
        self.order: Any = None
        self.rng = np.random.default_rng(0)
        self.of_sample, self.seeded = np.random.default_rng(0), torch.Generator()
        self.python, self.legacy = random.Random(0), np.random.RandomState(0)
        self.last, self.length, self.is_open, self.mean = -1, 0, False, None
        self.no_data, self.of_torch, self.of_numpy = float("nan"), torch.tensor(torch.nan), np.float32("nan")

    def __getitem__(self, index: int) -> Any:
        if self.order is None:
            self.order = self.rng.permutation(40)
        self.last = index
        self.length = self.length or 40
        self.is_open = True
        self.mean = 0.5 if self.mean is None else self.mean
        self.read.append(index)
        if index not in self.cache:
            self.cache[index] = self.made(index)
        self.of_sample = np.random.default_rng(index)
        self.seeded.manual_seed(index)
        self.python.seed(index)
        self.legacy.seed(index)
        drawn = self.of_sample.normal() + self.python.random() + self.legacy.randn()
        return self.cache[index] + drawn + torch.rand(1, generator=self.seeded) + self.of_last()

    def of_last(self) -> int:
        return self.last % 3

    @lru_cache  # noqa: B019
    def made(self, index: int) -> Any:
        return torch.tensor(float(self.order[index]))


class FromStreams(Base):
    def __init__(self) -> None:
        self.numpy, self.python, self.torch = np.random, random, torch.default_generator
        self.legacy = np.random.mtrand._rand

    def __getitem__(self, index: int) -> Any:
        drawn = self.numpy.randn() + self.python.random() + self.legacy.randn()
        return torch.rand(1, generator=self.torch) + drawn


HARMLESS: dict[str, Any] = {
    "plain": Base,
    "cached": Cached,
    "streams": FromStreams,
}


def read(loader: Any, **options: Any) -> list[Any]:
    given = {"rank": 0, "size": 1, "seed": 0} | options
    return [part.batch for window in ShardedLoader(loader, **given).windows(0) for part in window.micro_batches]


def with_workers(loader: Any, **options: Any) -> Any:
    return DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, num_workers=2, **options)


@pytest.mark.parametrize("said", DRAWING)
@pytest.mark.parametrize("workers", [False, pytest.param(True, marks=pytest.mark.ranks)])
def test_shares_refuse_it(said: str, workers: bool) -> None:
    loader = DRAWING[said]()
    loader = with_workers(loader) if workers else loader
    for virtual in ((0, 1, 2, 3), (2, 3)):
        with pytest.raises(
            OwnDraws, match=f"^{said} as samples are read, which a rank does.* virtual_ranks.*{STREAMS}"
        ):
            read(loader, rank=virtual[0], size=4, virtual=virtual)


@pytest.mark.ranks
@pytest.mark.parametrize("said", DRAWING)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_warn_of_it_once(said: str, persistent: bool) -> None:
    with pytest.warns(UserWarning, match="as samples are read, in copies") as caught:
        read(with_workers(DRAWING[said](), persistent_workers=persistent))
    (warning,) = caught
    assert str(warning.message).startswith(f"{said} as samples are read, in copies of DataLoader workers")
    assert STREAMS in str(warning.message)


@pytest.mark.ranks
@pytest.mark.parametrize("name", HARMLESS)
def test_caches_and_what_is_made_or_set_for_a_sample_are_not_reported(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(with_workers(DataLoader(HARMLESS[name](), 4)))
        read(DataLoader(HARMLESS[name](), 4), size=4, virtual=(0, 1, 2, 3))


@pytest.mark.ranks
def test_a_worker_that_is_spawned_reports_it() -> None:
    with pytest.warns(UserWarning, match=r"OfNumpy\.rng is drawn from"):
        read(with_workers(DataLoader(OfNumpy(), 4), multiprocessing_context="spawn"))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(40.0))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.ranks)])
def test_collate_functions_of_iterable_datasets_are_refused(workers: int) -> None:
    with pytest.raises(OwnDraws, match="rng in the closure"):
        read(DataLoader(Stream(), 4, collate_fn=collating(), num_workers=workers), size=2, virtual=(0, 1))


class Pair(NamedTuple):
    samples: list[float]
    rng: Any

    def draw(self, index: int) -> Any:
        return self.samples[index] + self.rng.random()


class Forwards:
    """Has any attribute that is asked for, as proxies have, and lets none be set."""

    def __init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(0))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(f"{name} was set")


class NoPickle:
    def __init__(self) -> None:
        self.rng, self.opened = np.random.default_rng(0), open(__file__)  # noqa: SIM115

    def __reduce__(self) -> Any:
        raise AssertionError("pickled")


@dataclass(frozen=True)
class Frozen:
    rng: Any
    calls: int = 0


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda: Pair([1.0], random.Random(0)), ["dataset[1]"]),
        (Forwards, ["dataset.rng"]),
        (NoPickle, ["dataset.rng"]),
        (lambda: Frozen(torch.Generator()), ["dataset.rng", "dataset.calls"]),
        (lambda: [Frozen(torch.Generator())], ["dataset[0].rng", "dataset[0].calls"]),
    ],
)
def test_objects_of_any_kind_are_searched_by_no_code_of_theirs(make: Any, paths: list[str]) -> None:
    made = make()
    found = search({"dataset": made})
    names = {f"{owner}{'' if name.startswith('[') else '.'}{name}" for owner, name in found.places}
    assert names >= set(paths)
    state = HeldState({"dataset": made})
    if isinstance(made, Frozen):
        object.__setattr__(made, "calls", 7)
        held = state.state_dict()
        object.__setattr__(made, "calls", 0)
        state.load_state_dict(held)
        assert made.calls == 7
    if isinstance(made, NoPickle):
        made.opened.close()


def test_millions_of_items_cost_nothing() -> None:
    class Large(Base):
        def __init__(self) -> None:
            self.paths = [f"{i}.png" for i in range(2_000_000)]
            self.items = dict.fromkeys(range(1_000_000))
            self.array, self.rng = np.zeros(10_000_000), np.random.default_rng(0)
            self.parts = [[0] * 100_000 for _ in range(100)]

    data = Large()
    state = HeldState({"dataset": data})
    data.rng.random()
    begin = time.perf_counter()
    for _ in range(10):
        assert list(state.state_dict()["held"]["kept"]["dataset"]) == ["rng"]
    assert time.perf_counter() - begin < 0.5


def test_what_is_of_another_kind_now_stays_and_is_named(caplog: Any) -> None:
    saved, now = OfNumpy(), OfNumpy()
    state = HeldState({"dataset": saved})
    saved.rng.random()
    now.rng = 3  # type: ignore[assignment]
    with caplog.at_level("WARNING", "lockstep"):
        rest = HeldState({"dataset": now}).load_state_dict(state.state_dict() | {"epoch": 1})
    assert now.rng == 3 and rest == {"epoch": 1}
    assert "begin as they are built: dataset.rng" in caplog.text
