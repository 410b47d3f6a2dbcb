"""Several loaders as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

MODES = ("max_size_cycle", "min_size", "max_size", "sequential")


class CombinedLoader:
    """Several training loaders as one, for `fit`; a bare dict or list of loaders is `CombinedLoader(loaders)`.

    `mode` says how long an epoch is, and what a batch:

    - "max_size_cycle": a batch of each loader, in dicts and lists nested as `loaders` is; as long as the longest, and
      the shorter ones start again, in a new order;
    - "max_size": the same, with None in place of what a shorter one no longer has;
    - "min_size": the same, as long as the shortest;
    - "sequential": one loader after the other, each batch by itself; in an evaluation they are several loaders.

    Every loader keeps its own order, a function of seed, epoch and its place among the others. A batch of each
    loader makes one that is not cut: they go to the ranks in turn, which fetch only their own where the
    dataset has indices. Its samples, by which a mean is weighted, are those of all loaders. Raises ValueError
    for another mode or where there is no loader.
    """

    def __init__(self, loaders: Mapping[str, Any] | Sequence[Any], mode: str = "max_size_cycle") -> None:
        if mode not in MODES:
            raise ValueError(f"mode of CombinedLoader must be one of {', '.join(map(repr, MODES))}, but mode={mode!r}")
        if not isinstance(loaders, Mapping | Sequence):
            loaders, mode = [loaders], "sequential"  # whose batches stand by themselves, as those of one loader do
        self.loaders = loaders
        self.mode = mode
        self._named = dict(_leaves(loaders))
        if not self._named:
            raise ValueError(f"CombinedLoader needs a dict or list of loaders, but got {loaders!r}")

    def named(self) -> dict[Any, Any]:
        """The loaders by name or place; by the path of these where dicts and lists are nested."""
        return self._named

    def together(self, batches: dict[Any, Any]) -> Any:
        """Batches by name or place in the form of `loaders`."""
        return _filled(self.loaders, batches)

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


def _leaves(loaders: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """(name or place, loader) of all loaders in nested dicts and lists."""
    for name, loader in loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders):
        if is_nested(loader):
            yield from _leaves(loader, (*path, name))
        else:
            yield (*path, name) if path else name, loader


def _filled(loaders: Any, batches: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Any:
    def part(name: Any, loader: Any) -> Any:
        if is_nested(loader):
            return _filled(loader, batches, (*path, name))
        return batches[(*path, name) if path else name]

    if isinstance(loaders, Mapping):
        return {name: part(name, loader) for name, loader in loaders.items()}
    return [part(name, loader) for name, loader in enumerate(loaders)]


def is_several(source: Any) -> bool:
    """Whether what a user gives as a loader is a dict or a list of loaders."""
    return isinstance(source, Mapping) or (
        isinstance(source, list | tuple)
        and bool(source)
        and (
            all(_is_loader(item) or is_nested(item) for item in source)
            or any(isinstance(item, DataLoader) for item in source)  # never a batch
        )
    )


def is_nested(item: Any) -> bool:
    """Whether an item of a dict or list of loaders is again a dict or list of DataLoaders, and no list of batches."""
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
    return bool(values) and all(isinstance(value, DataLoader) or is_nested(value) for value in values)


def _is_loader(item: Any) -> bool:
    """Whether an item of a list is a loader and not a batch."""
    return isinstance(item, DataLoader | Dataset | FunctionType) or (
        hasattr(item, "__iter__") and not isinstance(item, Tensor | tuple | list | dict | str)
    )
