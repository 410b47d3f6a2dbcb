"""The batches of all workers, read by each rank, which fetches only those that it computes where it can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.strategies.data.map_style import Indexed
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window


class Later:
    """A batch that has not been read yet."""

    def __init__(self, read: Callable[[Any], Any], key: Any) -> None:
        self._read, self._key = read, key

    def __call__(self) -> Any:
        return self._read(self._key)


class _Fetcher:
    """Reads nothing by itself."""

    def __init__(self, fetcher: Any) -> None:
        self.fetcher = fetcher

    def __getitem__(self, key: Any) -> Later:
        return Later(self.fetcher.__getitem__, key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fetcher, name)


class DealtLoader(ShardedLoader):
    """A loader whose windows have the micro-batches of all workers.

    A map-style dataset without DataLoader workers is read for the batches that this rank computes. Any other loader is
    read whole by every rank, as it cannot know beforehand which batches it will get.
    """

    def windows(self, epoch: int, start: int = 0, limit: int | None = None) -> Iterator[Window]:
        source = self._source
        if isinstance(source, Indexed) and not (source.may_filter or source.counts_own or source.reads_ahead):
            source.wrap_fetcher(_Fetcher)
        return super().windows(epoch, start, limit)
