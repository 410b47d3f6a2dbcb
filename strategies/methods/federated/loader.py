"""The rounds of a federated run: who takes part, on which rank, with which batches in which order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from lockstep.strategies.data.map_style import Indexed
from lockstep.strategies.data.permutation import Permutation, mix
from lockstep.strategies.data.randomness import OwnDraws
from lockstep.strategies.data.sharded_loader import MicroBatch, ShardedLoader, Window
from lockstep.strategies.data.source import name_of
from lockstep.strategies.methods.federated.clients import Clients, Population, population_of

_BATCH: Any = vars(MicroBatch)["batch"]
"""Where a micro-batch has its batch."""


class NotRead(RuntimeError):
    """The machine could not read a client's batch, which ends the run, as no client has done it."""


def of_workers(error: Exception) -> bool:
    """Whether it tells that a worker of a DataLoader was killed or was too slow; torch raises it in any line."""
    return isinstance(error, RuntimeError) and str(error).startswith(("DataLoader worker (pid", "DataLoader timed out"))


class ClientBatch(MicroBatch):
    """A micro-batch that is read when it is asked for."""

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], tuple[Any, int | None]], num_samples: int) -> None:
        """`read` returns the batch and how many samples are in it, None where nothing tells."""
        self._read: Callable[[], tuple[Any, int | None]] | None = None
        super().__init__(None, num_samples)
        self._read = read

    @property
    def batch(self) -> Any:
        if self._read is not None:
            batch, found = self._read()
            self.num_samples, self.is_ambiguous = self.num_samples if found is None else found, found is None
            self.batch = batch
        return _BATCH.__get__(self)

    @batch.setter
    def batch(self, value: Any) -> None:
        self._read = None
        _BATCH.__set__(self, value)


@dataclass(slots=True)
class Participant:
    """A client's part in a round."""

    client: int
    """Its place in the population."""
    name: Any
    num_samples: int
    seed: int
    """Of its random streams: a function of the run's seed, the round and the client."""
    steps: list[list[MicroBatch]]
    """The micro-batches of each local step, if this rank runs it."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro_batch for step in self.steps for micro_batch in step]


@dataclass(slots=True)
class Round(Window):
    """A window in which clients train: an epoch of the loader."""

    number: int = 0
    seed: int = 0
    participants: list[Participant] = field(default_factory=list)
    """All of them, in the order of the population; those of other ranks without steps."""
    population: Population | None = None


class RoundSummary(NamedTuple):
    """What a round was, equal on all ranks."""

    number: int
    participants: int
    """Clients whose weights were averaged."""
    dropped: int
    """Clients that were drawn but raised."""
    samples: float
    """What the losses of the participants counted, over all local epochs."""
    bytes_down: int
    """What the server would send to the clients that were drawn."""
    bytes_up: int
    """What the participants would send back."""
    seconds: float
    """Wall time of the round on this rank."""


class FederatedLoader(ShardedLoader):
    """The training loader of `Federated`: each epoch is one round, and has one window.

    `fraction` of the clients, at least one, take part in a round; which is a function of (seed, round). Each runs
    `local_epochs` over its own samples in batches of the loader's `batch_size`, of which `accumulate` make a step, in
    an order that is a function of (seed, round, client), or in the dataset's if the loader does not shuffle.
    `rank_of(client)` says which rank runs a client; None balances samples. Raises ValueError for a loader that is not
    a DataLoader over a map-style dataset with a `batch_size`.
    """

    def __init__(
        self,
        loader: Any,
        clients: Clients,
        *,
        rank: int,
        size: int,
        seed: int,
        shuffle: bool | None = None,
        accumulate: int = 1,
        fraction: float = 0.1,
        local_epochs: int = 1,
        rank_of: Callable[[int], int] | None = None,
    ) -> None:
        if shuffle is False:
            raise ValueError("overfit_batches cannot be used with Federated, whose clients have batches of their own")
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            given = f"{name_of(loader)} of {name_of(getattr(loader, 'dataset', loader))}"
            raise ValueError(f"Federated needs one DataLoader over a map-style dataset, but got {given}")
        super().__init__(loader, rank=0, size=1, seed=seed, accumulate=accumulate, virtual=(0,))
        source = self._source
        assert isinstance(source, Indexed)
        if source.batch_size is None or source.stateful is not None:
            raise ValueError(
                f"Federated draws each client's samples itself, so it needs a DataLoader with a batch_size and without "
                f"a sampler of its own, but {name_of(loader)} has {name_of(loader.batch_sampler or loader.sampler)} of "
                f"{name_of(loader.sampler)}; use shuffle=True"
            )
        if source.sample_order.drop_last:
            raise ValueError(
                "drop_last=True would drop all of a client with fewer samples than batch_size; use drop_last=False "
                "with Federated"
            )
        self._indexed, self._rank, self._size, self._seed = source, rank, size, seed
        self._size_of_batch, self._accumulate = source.batch_size, accumulate
        self._local_epochs, self._rank_of = local_epochs, rank_of
        self.population = population_of(loader.dataset, clients)
        """All clients that have samples."""
        self.num_participants = max(1, int(fraction * len(self.population) + 0.5))
        """Clients in a round."""

    def participants(self, number: int) -> list[int]:
        """The clients of round `number`, rising: `num_participants` of the population, without replacement."""
        drawn = Permutation(len(self.population), mix(self._seed, 1), number).take(np.arange(self.num_participants))
        return sorted(drawn.tolist())

    def windows(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Window]:
        if start < 0 or (limit is not None and limit < 0):
            raise ValueError(f"start and limit must not be negative, but start is {start} and limit is {limit}")
        if start or limit == 0:
            return iter(())
        return iter([self._round(epoch)])

    def _round(self, number: int) -> Round:
        population, drawn = self.population, self.participants(number)
        ranks = self._ranks(drawn)
        reader = _Reader(self._indexed, number)
        participants = []
        for client in drawn:
            seed = mix(self._seed, 2, number, client)
            steps = self._steps(client, seed, reader) if ranks[client] == self._rank else []
            participants.append(
                Participant(client, population.names[client], population.num_samples(client), seed, steps)
            )
        samples = sum(participant.num_samples for participant in participants) * self._local_epochs
        own = [micro_batch for participant in participants for micro_batch in participant.micro_batches]
        return Round(
            own[-1:] or [MicroBatch(None, 0)],
            samples,
            num_batches=1,
            number=number,
            seed=mix(self._seed, 3, number),
            participants=participants,
            population=population,
        )

    def _ranks(self, drawn: list[int]) -> dict[int, int]:
        """Which rank runs each client: the largest first, each to the rank with the fewest samples."""
        if self._rank_of is not None:
            return {client: self._rank_of(client) for client in drawn}
        loads = [(0, rank) for rank in range(self._size)]
        ranks = {}
        for client in sorted(drawn, key=lambda client: (-self.population.num_samples(client), client)):
            load, ranks[client] = heapq.heappop(loads)
            heapq.heappush(loads, (load + self.population.num_samples(client), ranks[client]))
        return ranks

    def _steps(self, client: int, seed: int, reader: _Reader) -> list[list[MicroBatch]]:
        samples, size, steps = self.population.samples(client), self._size_of_batch, []
        for epoch in range(self._local_epochs):
            own = mix(seed, epoch)
            order = samples
            if self._indexed.sample_order.shuffled:
                order = samples[Permutation(len(samples), own).take(np.arange(len(samples)))]
            keys = [(own, begin, order[begin : begin + size].tolist()) for begin in range(0, len(order), size)]
            batches: list[MicroBatch] = [ClientBatch(reader.add(key), len(key[2])) for key in keys]
            steps += [batches[i : i + self._accumulate] for i in range(0, len(batches), self._accumulate)]
        return steps

    def __len__(self) -> int:
        return 1

    @property
    def num_samples(self) -> int | None:
        """Samples of a round: unknown, as rounds have other clients."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Samples of a full local step."""
        return self._size_of_batch * self._accumulate

    def num_windows(self, limit: int | None = None) -> int | None:
        return 1 if limit is None else min(1, limit)

    @property
    def num_micro_batches(self) -> int:
        return 1

    @property
    def plan(self) -> dict[str, Any]:
        return {"ranks": 1, "batch_size": self._size_of_batch, "accumulate": self._accumulate, "split": False}

    def resume_windows(self, plan: Mapping[str, Any], start: int = 0, whole: bool = False) -> str | None:
        return None  # a round is the same on any number of ranks

    def follow(self, lengths: list[int]) -> bool:
        if lengths != self._lengths:
            raise ValueError(
                f"Federated deals the samples out to clients at the start of fit, but the dataset has {lengths[0]} "
                f"samples now and had {self._lengths[0]}; keep its length during a fit"
            )
        return False

    def set_accumulation(self, accumulate: int) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, but accumulate={accumulate}")
        self._accumulate = accumulate


class _Reader:
    """Reads the batches of a round in order, ahead with workers; begins again where some are skipped."""

    def __init__(self, source: Indexed, number: int) -> None:
        self._source, self._number = source, number
        self._keys: list[tuple[int, int, list[int]]] = []
        self._batches: Iterator[Any] = iter(())
        self._next = -1

    def add(self, key: tuple[int, int, list[int]]) -> Callable[[], tuple[Any, int | None]]:
        self._keys.append(key)
        return partial(self._read, len(self._keys) - 1)

    def _read(self, place: int) -> tuple[Any, int | None]:
        if place != self._next:
            close = getattr(self._batches, "close", None)
            if close is not None:
                close()
            self._batches = self._source._workers.run(self._source._fetcher, iter(self._keys[place:]), self._number)
        self._next = -1  # if reading fails
        try:
            batch = next(self._batches)
        except OwnDraws as error:
            raise NotRead(str(error)) from None
        except (OSError, EOFError) as error:
            raise NotRead(
                f"reading a batch of a client failed with {type(error).__name__}, which may be of this machine and not "
                "of the client, so the run ends; start it again, or raise a ValueError in the dataset for a sample "
                "that cannot be used, so that its client is dropped"
            ) from error
        self._next = place + 1
        if self._next == len(self._keys):
            next(self._batches, None)  # which ends its workers
        asked = len(self._keys[place][2])
        return batch, self._source.samples_in(batch, asked) if self._source.may_filter else asked
