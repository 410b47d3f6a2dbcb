"""Who computes which batch, and who is alive: rank 0 knows."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("lockstep")


class Dealer:
    """Hands out the batches of each clock to whoever is free, and those of a rank that died to the others."""

    def __init__(self, workers: int, ranks: int, clock: int) -> None:
        self._workers = workers
        self._first = clock
        self._next = (clock + 1) * workers
        self._own = [[*shares_of(rank, ranks, workers)] for rank in range(ranks)]
        """Of the first clock every rank gets its part, so that each has logged something."""
        self._votes = 0
        self._stops: dict[int, tuple[int, int]] = {}
        """By clock what all ranks conclude, and how many of them have asked."""
        self._orders: dict[int, tuple[int, int]] = {}
        """By clock the hash of the order of samples of the rank that has asked first, and which one that is."""
        self._living = [*range(ranks)]
        self._computed: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
        """By rank the batches that it has and whose gradients have not arrived."""
        self._late: list[int] = []
        """Batches of ranks that died."""
        self._met: set[int] = set()
        self._meetings: list[list[int]] = []
        """Of each meeting so far who was there."""
        self._between_steps = False
        """Whether ranks call collectives, which need all that have met."""
        self._changed = threading.Condition()

    def take(self, rank: int, clock: int, vote: int, order: int = 0, late: bool = False) -> tuple[int | None, int]:
        """The next batch of a clock for `rank`, or one of an earlier clock that a rank which died has left; with `late`
        only such a one. None if all are handed out, with what the ranks conclude of their votes to stop: what the first
        one that has finished with the clock knew, the same for all; -1 - r where `order`, a hash of the order of
        samples, is another than that of rank r."""
        with self._changed:
            if not late:
                known, first = self._orders.setdefault(clock, (order, rank))
                if known != order:
                    return None, -1 - first
            self._votes, self._between_steps = max(self._votes, vote), False
            batch = next((batch for batch in self._late if batch // self._workers <= clock), None)
            if batch is not None:
                self._late.remove(batch)
            elif late:
                return None, 0
            elif clock == self._first:
                if self._own[rank]:
                    batch = clock * self._workers + self._own[rank].pop(0)
            elif self._next // self._workers == clock:
                self._next += 1
                batch = self._next - 1
            if batch is not None:
                self._computed[rank].add(batch)
                return batch, 0
            stop, asked = self._stops.get(clock, (self._votes, 0))
            self._stops[clock] = stop, asked + 1
            if asked + 1 >= len(self._living):
                del self._stops[clock], self._orders[clock]
            return None, stop

    def arrived(self, rank: int, batch: int) -> None:
        """The gradient of a batch has come from `rank`."""
        with self._changed:
            self._computed[rank].discard(batch)

    def meet(self, rank: int, failed: Callable[[], bool]) -> list[int]:
        """The ranks that live, once all of them have called this, or those that call it have `failed`."""
        with self._changed:
            number = len(self._meetings)
            self._met.add(rank)
            self._meet()
            while len(self._meetings) == number and not failed():
                self._changed.wait(0.2)
            return self._meetings[number] if len(self._meetings) > number else self._living

    def died(self, rank: int) -> None:
        """Let others compute what `rank` had, and meet without it."""
        with self._changed:
            if not self._between_steps:
                _log.warning(
                    "the other ranks compute the batches of the one that died; what it logged in this epoch is lost"
                )
            self._living.remove(rank)
            self._met.discard(rank)
            own = [self._first * self._workers + share for share in self._own[rank]]
            self._late += sorted([*self._computed.pop(rank), *own])
            self._own[rank] = []
            self._meet()

    def _meet(self) -> None:
        if self._met.issuperset(self._living):
            self._meetings.append([*self._living])
            self._between_steps = True
            self._met.clear()
            self._changed.notify_all()


def shares_of(rank: int, ranks: int, workers: int) -> range:
    """The workers that a rank stands for."""
    return range(rank * workers // ranks, (rank + 1) * workers // ranks)
