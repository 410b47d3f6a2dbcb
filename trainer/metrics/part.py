"""A step that runs on a part of a micro-batch, as the metrics see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.trainer.metrics.store import MetricStore


class Part:
    """What a step has logged on a part of a micro-batch."""

    def __init__(self, store: MetricStore, num_samples: int) -> None:
        self._store = store
        self.num_samples = num_samples
        self.calls: list[tuple[Any, ...]] = []
        self.done = False
        self._outer: Part | None = None

    def __enter__(self) -> list[tuple[Any, ...]]:
        self._outer, self._store.open_part = self._store.open_part, self
        return self.calls

    def __exit__(self, *_: Any) -> None:
        self._store.open_part = self._outer
        self._store.leave(self)
