"""Several loaders as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MODES = ("max_size_cycle", "min_size", "max_size", "sequential")


class CombinedLoader:
    """Several training loaders as one, for `fit`; a bare dict or list of loaders is `CombinedLoader(loaders)`.

    `mode` says how long an epoch is, and what a batch:

    - "max_size_cycle": a batch of each loader, in a dict or list as `loaders` is; as long as the longest, and the
      shorter ones start again, in a new order;
    - "max_size": the same, with None in place of what a shorter one no longer has;
    - "min_size": the same, as long as the shortest;
    - "sequential": one loader after the other, each batch by itself.

    Every loader keeps its own order, a function of seed, epoch and its place among the others. A batch of each
    loader makes one that is not cut: they go to the ranks in turn, which fetch only their own where the
    dataset has indices. Its samples, by which a mean is weighted, are those of all loaders. Raises ValueError
    for another mode or where there is no loader.
    """

    def __init__(self, loaders: Mapping[str, Any] | Sequence[Any], mode: str = "max_size_cycle") -> None:
        if mode not in MODES:
            raise ValueError(f"mode of CombinedLoader must be one of {', '.join(map(repr, MODES))}, but mode={mode!r}")
        if not loaders:
            raise ValueError(f"CombinedLoader needs a dict or list of loaders, but got {loaders!r}")
        self.loaders = loaders
        self.mode = mode

    def named(self) -> dict[Any, Any]:
        """The loaders by name or place."""
        return dict(self.loaders) if isinstance(self.loaders, Mapping) else dict(enumerate(self.loaders))

    def together(self, batches: dict[Any, Any]) -> Any:
        """Batches by name or place in the form of `loaders`."""
        return batches if isinstance(self.loaders, Mapping) else list(batches.values())

    def length(self, lengths: Sequence[int | None]) -> int | None:
        """Batches of an epoch, from those of the loaders; None where that is unknown."""
        known = [length for length in lengths if length is not None]
        if len(known) < len(lengths):
            return None
        return min(known) if self.mode == "min_size" else sum(known) if self.mode == "sequential" else max(known)

    def __len__(self) -> int:
        """Batches of an epoch on one process; 0 where a loader is empty. Raises TypeError where a length is unknown."""
        lengths = [len(loader) for loader in self.named().values()]
        return (self.length(lengths) or 0) if all(lengths) else 0
