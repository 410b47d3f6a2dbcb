"""Reads samples, in the main process or in a DataLoader's workers, and keeps randomness reproducible there."""

from __future__ import annotations

import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from lockstep.strategies.data.permutation import mix


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part in the cut of an epoch."""

    rank: int
    size: int
    seed: int
    accumulate: int
    """Micro-batches of a window."""
    split: bool
    """The loader's batch is the global batch of a window."""
    planned: int = 0
    """Ranks by which batches and windows are measured where not by `size`: of a run that began on so many; else 0."""
    whole: bool = False
    """Cut a planned window into one micro-batch, where a step of the user's is one."""

    @property
    def ranks(self) -> int:
        """Ranks by which batches and windows are measured."""
        return self.planned or self.size

    def num_parts(self) -> int:
        """Micro-batches into which a planned window is cut: no rank gets more samples at once than was planned."""
        return 1 if self.whole else -(-self.planned * self.accumulate // self.size)


class Samples:
    """Fetches the samples of a key `(epoch, position, indices)`, in the main process or in a worker."""

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], seed: int, one_by_one: bool) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn
        self._seed = seed
        self._one_by_one = one_by_one
        inner = dataset
        while type(inner) is Subset:
            # A Subset always has `__getitems__`, which is a loop unless its dataset has one.
            inner = inner.dataset
        self._in_bulk = one_by_one and bool(getattr(inner, "__getitems__", None))
        self._is_tensor = type(dataset) is torch.Tensor
        self._tensors = _stacked(dataset) if one_by_one and collate_fn is default_collate else None
        self.may_filter = self._tensors is None and (self._in_bulk or collate_fn is not default_collate)
        """Whether the user's own function makes batches and so may leave samples out."""

    def __getitem__(self, key: tuple[int, int, Any]) -> Any:
        try:
            epoch, position, indices = key
            if self._tensors is not None:
                rows = torch.from_numpy(np.array(indices))
                try:
                    batch = [tensor.index_select(0, rows) for tensor in self._tensors]
                except (IndexError, RuntimeError):  # counted from the end, or none of the dataset's
                    batch = [tensor[rows] for tensor in self._tensors]
                return batch[0] if self._is_tensor else batch
            dataset = self.dataset
            if get_worker_info() is None:
                if self._in_bulk:
                    return self._collate_fn(dataset.__getitems__(indices))
                return self._collate_fn([dataset[index] for index in indices] if self._one_by_one else dataset[indices])
            if self._one_by_one and not self._in_bulk:
                samples = []
                for place, index in enumerate(indices, position):
                    _seed_all(mix(self._seed, epoch, place))
                    samples.append(dataset[index])
                return self._collate_fn(samples)
            _seed_all(mix(self._seed, epoch, position))
            return self._collate_fn(dataset.__getitems__(indices) if self._in_bulk else dataset[indices])
        except StopIteration as error:
            raise escaped(error, f"reading {str(key[2])[:200]} of {type(self.dataset).__name__}") from error
        except IndexError as error:
            refuse_emptied(error, f"samples {str(key[2])[:200]} of {type(self.dataset).__name__}")
            raise


def _stacked(dataset: Any) -> Sequence[torch.Tensor] | None:
    """The tensors of a dataset whose batches are rows of them, so that indexing gives at once what stacking samples
    does; else None."""
    tensors = (
        (dataset,) if type(dataset) is torch.Tensor else dataset.tensors if type(dataset) is TensorDataset else None
    )
    if tensors is None or not all(
        type(t) is torch.Tensor and t.layout == torch.strided and t.is_contiguous() and not t.requires_grad
        for t in tensors
    ):
        return None
    return tensors


class Items:
    """Fetches this rank's part of global micro-batch `number` for a key `(run, epoch, start, limit, number)`.

    A new `run` opens the iterable again. Keys come with rising numbers, to one worker every so-many-th;
    what is between is read and left to the others. Returns (batch, samples here, samples on all
    ranks), the last of which is -1 after the end.
    """

    STATE = ("epoch", "samples", "micro_batches", "dataset", "random")

    def __init__(
        self,
        dataset: Any,
        share: Share,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any] | None,
        drop_last: bool,
    ) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self._share = share
        self._batch_size = batch_size
        self._collate_fn = collate_fn
        self._alone = bool(getattr(dataset, "shards_itself", False)) and collate_fn is not None
        self._rank, self._size = (0, 1) if self._alone else (share.rank, share.size)
        self._unit = (batch_size or 1) * self._size
        self._run = -1
        self._resume: Mapping[str, Any] | None = None
        self.samples = 0
        """Samples of the epoch read so far, over all ranks."""
        self.micro_batches = 0
        """Global micro-batches of the epoch read so far."""

    def copy(self) -> Items:
        return Items(self.dataset, self._share, self._batch_size, self._collate_fn, self.drop_last)

    def __getitem__(self, key: tuple[int, int, int, int | None, int]) -> tuple[Any, int, int]:
        try:
            return self._fetch(key)
        except StopIteration as error:
            raise escaped(error, f"reading batch {key[4]} of {type(self.dataset).__name__}") from error
        except IndexError as error:
            refuse_emptied(error, f"samples of batch {key[4]} of {type(self.dataset).__name__}")
            raise

    def _fetch(self, key: tuple[int, int, int, int | None, int]) -> tuple[Any, int, int]:
        run, epoch, start, limit, number = key
        if run != self._run:
            self._open(epoch, start, limit)
            self._run = run
        while True:
            mine, num_samples, all_samples = self._read()
            if all_samples < 0:
                return None, 0, -1
            self._number += 1
            if self._alone or self._number > number:
                break
        if get_worker_info() is not None:
            _seed_all(mix(self._share.seed, epoch, self.micro_batches, *self._place))
        batch = mine if self._batch_size is not None else mine[0]
        return (batch if self._collate_fn is None else self._collate_fn(batch)), num_samples, all_samples

    def resume(self, state: Mapping[str, Any]) -> None:
        """Begin the next run where `state` was taken."""
        self._resume = state

    @property
    def has_state(self) -> bool:
        # The state of a stateful DataLoader is its own affair: it may hold what a checkpoint refuses.
        return (
            not isinstance(self.dataset, DataLoader)
            and hasattr(self.dataset, "state_dict")
            and hasattr(self.dataset, "load_state_dict")
        )

    def state_dict(self) -> dict[str, Any]:
        if self._run < 0 or not self.has_state:
            return {}
        values = (self._epoch, self.samples, self.micro_batches, self.dataset.state_dict(), self._apart.state_dict())
        return dict(zip(self.STATE, values, strict=True))

    def _open(self, epoch: int, start: int, limit: int | None) -> None:
        state, self._resume = self._resume, None
        self._place = (self._share.rank, getattr(get_worker_info(), "id", 0)) if self._alone else (self._share.rank,)
        self._apart = Randomness(mix(self._share.seed, epoch, *(self._place if self._alone else ())))
        self._epoch, self._limit = epoch, limit
        self._number, self._ended = 0, False
        self.samples = self.micro_batches = 0
        announce(self.dataset, self._share.seed, epoch)
        if state is not None:
            self.dataset.load_state_dict(state["dataset"])
            self.samples, self.micro_batches = state["samples"], state["micro_batches"]
        with self._iterating():
            self._items = iter(self.dataset)
        if state is not None:
            self._apart.load_state_dict(state["random"])
        passed = 0
        with self._iterating():
            while self.samples < start and not self._ended:
                item = next(self._items, _NOTHING)
                if item is _NOTHING:
                    self._ended = True
                else:
                    self.samples += self._weight(item)
                    passed += 1
        self.micro_batches += passed // self._unit

    @contextmanager
    def _iterating(self) -> Iterator[None]:
        """Be to the dataset as on every other rank and worker: one process, one random state."""
        info = torch_worker._worker_info
        if not self._alone:
            # A dataset that shares itself out over workers would drop what our own cut gives to the others.
            torch_worker._worker_info = None
        try:
            with self._apart:
                yield
        finally:
            torch_worker._worker_info = info

    def _read(self) -> tuple[list[Any], int, int]:
        if self._ended or (self._limit is not None and self.micro_batches >= self._limit):
            return [], 0, -1
        begin = self._rank * self._unit // self._size
        end = begin + self._unit // self._size
        mine: list[Any] = []
        padding = None
        items = num_samples = all_samples = 0
        with self._iterating():
            for item in islice(Once(self._items), self._unit):
                weight = self._weight(item)
                if begin <= items < end:
                    mine.append(item)
                    num_samples += weight
                elif items == 0:
                    padding = item
                items += 1
                all_samples += weight
        self._ended = items < self._unit
        if items == 0 or (self._ended and self.drop_last):
            self._ended = True
            return [], 0, -1
        self.samples += all_samples
        self.micro_batches += 1
        return mine or [padding], num_samples, all_samples

    def _weight(self, item: Any) -> int:
        return guess_batch_size(item) if self._batch_size is None else 1


class Once:
    """Reads on in an iterator without asking it for another: one whose `__iter__` begins again would."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Once:
        return self

    def __next__(self) -> Any:
        return next(self._iterator)


class Randomness:
    """Within it, torch, random and numpy draw from a state of their own, which stays for the next time."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(seed)
        self._gauss: Gauss = (0, 0.0)

    def __enter__(self) -> None:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._outside = torch.default_generator.get_state(), random.getstate(), bits, _gauss()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        _set_numpy(self._numpy, self._gauss)

    def __exit__(self, *_: object) -> None:
        self._torch, self._python, self._gauss = torch.default_generator.get_state(), random.getstate(), _gauss()
        torch_state, python_state, generator, gauss = self._outside
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        _set_numpy(generator, gauss)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self._python
        numpy = self._numpy.state["state"]
        return {
            "torch": self._torch,
            "python": [version, list(numbers), gauss],
            "numpy": [numpy["key"].tolist(), int(numpy["pos"]), *self._gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        key, position, *numpy_gauss = state["numpy"]
        self._torch = state["torch"].clone()
        self._python = (version, tuple(numbers), gauss)
        self._numpy.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
        self._gauss = (numpy_gauss[0], numpy_gauss[1]) if numpy_gauss else (0, 0.0)


Gauss: TypeAlias = "tuple[int, float]"
"""Whether numpy holds the second of two gaussian numbers for the next call, and which."""


def _gauss() -> Gauss:
    state = np.random.get_state(legacy=False)
    return state["has_gauss"], state["gauss"]


def _set_numpy(generator: Any, gauss: Gauss) -> None:
    # setting a complete state would copy it; this discards the cached Gaussian
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
    if gauss[0]:
        np.random.set_state(np.random.get_state(legacy=False) | dict(zip(("has_gauss", "gauss"), gauss, strict=True)))


class Workers:
    """Runs a fetcher on keys through a torch DataLoader with the workers, pinning and timeout of the user's."""

    def __init__(self, loader: DataLoader[Any], share: Share) -> None:
        self.num_workers = loader.num_workers
        self._share = share
        self._persistent = loader.persistent_workers
        self._pins = (
            loader.pin_memory and torch.accelerator.is_available()
        )  # else there is nothing to pin for, and torch would warn at every epoch
        self._options: dict[str, Any] = {"timeout": loader.timeout, "pin_memory_device": loader.pin_memory_device}
        if loader.num_workers:
            self._options |= {
                "num_workers": loader.num_workers,
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
                "worker_init_fn": _StartWorker(loader.worker_init_fn),
            }
            if not loader.in_order:
                warnings.warn(
                    "in_order=False is ignored: batches are yielded in order, because a window must have the same "
                    "samples in every run",
                    stacklevel=5,
                )
        self._kept: tuple[_Keys, DataLoader[Any]] | None = None
        self._busy = False

    def run(self, fetcher: Any, keys: Iterator[Any], epoch: int) -> Iterator[Any]:
        """What `fetcher[key]` gives, key by key. Persistent workers keep the first fetcher they were given."""
        if not self.num_workers and not self._pins:
            yield from map(fetcher.__getitem__, keys)
            return
        if not self._persistent or self._busy:
            # Two runs at once cannot share workers.
            yield from self._loader(fetcher, _Keys(keys), epoch, persistent=False)
            return
        if self._kept is None:
            held = _Keys(keys)
            self._kept = held, self._loader(fetcher, held, epoch, persistent=True)
        self._kept[0].keys = keys
        self._busy = True
        try:
            yield from self._kept[1]
        finally:
            self._busy = False

    def _loader(self, fetcher: Any, keys: _Keys, epoch: int, persistent: bool) -> DataLoader[Any]:
        return _QuietLoader(
            fetcher,
            batch_size=None,
            sampler=keys,
            collate_fn=keep,
            pin_memory=self._pins,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(mix(self._share.seed, epoch, self._share.rank)),
            **self._options,
        )


def guess_batch_size(batch: Any) -> int:
    """The number of samples of a batch whose making is unknown: the first dimension of its first tensor.

    Looks through mappings, sequences and dataclasses, then asks `size` and `len`; a list of strings
    counts them; 1 where nothing tells.
    """
    found = _first_length(batch)
    return 1 if found is None else found


def keep(batch: Any) -> Any:
    """The collate function of what is ready."""
    return batch


def announce(iterated: Any, seed: int, epoch: int) -> None:
    """Tell the epoch to whatever of the user's decides an order, and seed the generators that it draws from."""
    for part in (iterated, getattr(iterated, "batch_sampler", None), getattr(iterated, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(mix(seed, epoch))


class _QuietLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        """Start the workers with the signals blocked that they leave to the rank, until they can."""
        if not self.num_workers:
            return super().__iter__()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_RANK)
        try:
            iterator: Any = super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for worker in iterator._workers:  # torch, and Python at its end, ask those that do not react to end: they must
            worker._popen.terminate = worker._popen.kill
        return iterator

    def check_worker_number_rationality(self) -> None:
        """Warn of nothing: the user's own loader has warned of too many workers."""


@dataclass(slots=True)
class _Keys:
    """A sampler whose keys are put in before each iteration."""

    keys: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.keys


@dataclass(frozen=True)
class _StartWorker:
    """Shows the user's dataset, not our fetcher, to `get_worker_info()` in a worker, then runs the user's function."""

    worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        info = torch_worker._worker_info
        assert info is not None
        # Signals to all processes of a job, or from a terminal, are the rank's to answer: it may need its workers until
        # it has saved. By functions, as programs that a worker starts would inherit that they are ignored.
        for number in _OF_THE_RANK:
            signal.signal(number, _leave_to_the_rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_RANK)
        dataset = info.dataset.dataset  # type: ignore[attr-defined]
        torch_worker._worker_info = type(info)(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=dataset
        )
        if self.worker_init_fn is not None:
            try:
                self.worker_init_fn(worker_id)
            except StopIteration as error:
                raise escaped(error, f"starting worker {worker_id}") from error


_OF_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def _leave_to_the_rank(number: int, frame: Any) -> None: ...


def escaped(error: StopIteration, doing: str) -> RuntimeError:
    """What to raise in place of a StopIteration of user code that is no end of an iteration, but would be taken for
    one."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    code = frame.f_code
    where = f"{getattr(code, 'co_qualname', code.co_name)} ({code.co_filename}, line {line})"
    return RuntimeError(
        f"{where} raised StopIteration while {doing}, which would end the epoch silently; pass a default to next(), or "
        "catch it"
    )


def refuse_emptied(error: IndexError, samples: str) -> None:
    """Raise ValueError in place of torch's error for a collate function that has called `default_collate` without
    samples."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    given = frame.f_locals.get("batch")
    if frame.f_code.co_filename == default_collate.__code__.co_filename and isinstance(given, list) and not given:
        raise ValueError(
            f"the collate function drops all {samples}and calls default_collate with an empty list; return None if no "
            "sample is left"
        ) from error


_NOTHING = object()


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _first_length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else 1
    if value is None or isinstance(value, str | bytes | int | float | complex):
        return None
    if isinstance(value, Mapping):
        return _first_known(value.values())
    if isinstance(value, list) and value and all(isinstance(element, str) for element in value):
        return len(value)
    if isinstance(value, list | tuple):
        return _first_known(value)
    if is_dataclass(value):
        return _first_known(getattr(value, field.name) for field in fields(value))
    size = getattr(value, "size", None)
    if callable(size):
        size = size()
    if isinstance(size, int):
        return size
    if isinstance(size, Sequence) and size:
        return int(size[0])
    return len(value) if hasattr(value, "__len__") else None


def _first_known(values: Iterable[Any]) -> int | None:
    return next((found for value in values if (found := _first_length(value)) is not None), None)
