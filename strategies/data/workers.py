"""Runs a fetcher in a torch DataLoader with the workers, pinning and timeout of the user's."""

from __future__ import annotations

import atexit
import signal
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import DataLoader, IterableDataset

from lockstep.strategies.data.permutation import mix
from lockstep.strategies.data.randomness import Draws, refused, warning_of
from lockstep.strategies.data.source import Share, escaped


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
        streams = isinstance(loader.dataset, IterableDataset) and not getattr(loader.dataset, "shards_itself", False)
        parts = share.cuts_batches or (streams and share.size > 1 and not share.virtual)
        self.draws = Draws() if loader.num_workers and parts else None
        """Whether a batch that is made in parts has drawn random numbers as a whole; None where all is exact."""
        self.own_draws = Draws() if loader.num_workers else None
        """What copies in workers draw from generators of their own, or count; None once it was reported."""
        self._made_by = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        self._kept: tuple[_Keys, DataLoader[Any]] | None = None
        self._busy = False

    @property
    def reads_ahead(self) -> bool:
        return bool(self.num_workers or self._pins)

    def run(self, fetcher: Any, keys: Iterator[Any], epoch: int) -> Iterator[Any]:
        """What `fetcher[key]` gives, key by key. Persistent workers keep the first fetcher they were given."""
        with closing(self._run(fetcher, keys, epoch)) as batches:
            for batch in batches:
                if self.draws:
                    self._warn_of_draws()
                if self.own_draws:
                    self._report_own_draws(self.own_draws.name)
                yield batch

    def _warn_of_draws(self) -> None:
        self.draws = None
        if self._share.rank == 0:
            warnings.warn(
                f"collate_fn={self._made_by}, or __getitems__ of its dataset, draws random numbers for what one rank "
                "holds of a batch, so they repeat only on the same number of ranks and micro-batches; draw them for "
                "each sample in the dataset, or in the step",
                stacklevel=2,
            )

    def _report_own_draws(self, done: str) -> None:
        self.own_draws = None
        if self._share.virtual:
            raise refused(done)
        if self._share.rank == 0:
            warnings.warn(warning_of(done), stacklevel=2)

    def _run(self, fetcher: Any, keys: Iterator[Any], epoch: int) -> Generator[Any, None, None]:
        if not self.reads_ahead:
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


def keep(batch: Any) -> Any:
    """The collate function of what is ready."""
    return batch


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
        _end_in_silence()
        return iterator

    def check_worker_number_rationality(self) -> None:
        """Warn of nothing: the user's own loader has warned of too many workers."""


@cache
def _end_in_silence() -> None:
    """Let workers that a failed program has left be killed at its end without torch's error about killed workers."""
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)


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
