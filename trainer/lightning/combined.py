"""CombinedLoader with Lightning's default mode, and its iteration."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.strategies.data import combined

_END = object()


class CombinedLoader(combined.CombinedLoader):
    """`lockstep.CombinedLoader`, which by default is as long as the shortest loader.

    Iterating over it gives triples: a batch of the loaders, its index, and the loader's, which is 0 unless `mode` is
    "sequential". The Trainer reads the loaders, not this.
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        super().__init__(iterables, mode)

    @property
    def iterables(self) -> Any:
        """The loaders, as they were given; one alone is in a list."""
        return self.loaders

    @property
    def flattened(self) -> list[Any]:
        """The loaders, one after the other."""
        return list(self.named().values())

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        if self.mode == "sequential":
            first, *others = self.flattened
            return _one_by_one(itertools.chain([iter(first)], others))
        return self._side_by_side({name: iter(loader) for name, loader in self.named().items()})

    def _side_by_side(self, open_loaders: dict[Any, Iterator[Any]]) -> Iterator[tuple[Any, int, int]]:
        ended: set[Any] = set()
        for index in itertools.count():
            batches = {name: next(batches, _END) for name, batches in open_loaders.items()}
            ended |= {name for name, batch in batches.items() if batch is _END}
            if len(ended) == len(batches) or (ended and self.mode == "min_size"):
                return
            for name in [name for name, batch in batches.items() if batch is _END]:
                if self.mode == "max_size_cycle":
                    open_loaders[name] = iter(self.named()[name])
                batches[name] = next(open_loaders[name], None)
            yield self.together(batches), index, 0


def _one_by_one(loaders: Iterator[Any]) -> Iterator[tuple[Any, int, int]]:
    for number, loader in enumerate(loaders):
        for index, batch in enumerate(loader):
            yield batch, index, number
