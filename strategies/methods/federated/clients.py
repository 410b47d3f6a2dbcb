"""Which sample belongs to which client: by a key of the items, by a function of the index, or by a Dirichlet split."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from lockstep.strategies.launch.rng import kept_streams

Clients: TypeAlias = "str | int | Callable[[int], Any] | Dirichlet"
_DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.eE+-]+)\s*,\s*n\s*=\s*(\d+)\s*(?:,\s*seed\s*=\s*(\d+)\s*)?\)")


@dataclass(frozen=True)
class Dirichlet:
    """A split of the samples over `n` clients: the samples of each label go to the clients in proportions that are
    drawn from a symmetric Dirichlet distribution, as in Hsu, Qi and Brown, 2019. The smaller `alpha`, the fewer labels
    a client has. A function of `seed` and the labels alone."""

    alpha: float
    n: int
    label: str | int = 1
    """Key or index of the label in the dataset's items."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.alpha > 0 or self.n < 1:
            raise ValueError(
                f"dirichlet needs alpha > 0 and at least one client, but alpha={self.alpha} and n={self.n}"
            )

    def assign(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        """The client of each sample: int64 `[samples]`."""
        random = np.random.Generator(np.random.PCG64(self.seed))
        client = np.empty(len(labels), np.int64)
        for label in np.unique(labels):
            mine = random.permutation(np.flatnonzero(labels == label))
            ends = np.cumsum(random.dirichlet(np.full(self.n, self.alpha))) * len(mine)
            client[mine] = np.minimum(np.searchsorted(ends, np.arange(len(mine)), side="right"), self.n - 1)
        return client


def dirichlet(alpha: float, n: int, label: str | int = 1, seed: int = 0) -> Dirichlet:
    """Clients of a `Federated` strategy: a split over `n` clients, in which each has few labels if `alpha` is small."""
    return Dirichlet(alpha, n, label, seed)


@dataclass(frozen=True)
class Population:
    """All clients that have samples, in the order of their names."""

    names: tuple[Any, ...]
    """By client the value of the key, what the function returned, or the number in the split."""
    order: NDArray[np.int64]
    """The indices of samples, those of a client one after the other."""
    starts: NDArray[np.int64]
    """By client where its samples begin in `order`; one more for the end."""

    def __len__(self) -> int:
        return len(self.names)

    def samples(self, client: int) -> NDArray[np.int64]:
        """The indices of a client's samples, rising: int64 `[samples]`."""
        return self.order[self.starts[client] : self.starts[client + 1]]

    def num_samples(self, client: int) -> int:
        return int(self.starts[client + 1] - self.starts[client])


def parse(clients: Any) -> Clients:
    """What was given as `clients`, where "dirichlet(0.3, n=100)" may be a string. Raises TypeError or ValueError."""
    if isinstance(clients, str) and clients.startswith("dirichlet"):
        found = _DIRICHLET.fullmatch(clients.strip())
        if found is None:
            raise ValueError(f"write clients='dirichlet(0.3, n=100)', but clients={clients!r}")
        return Dirichlet(float(found[1]), int(found[2]), seed=int(found[3] or 0))
    if isinstance(clients, bool) or not (isinstance(clients, (str, int, Dirichlet)) or callable(clients)):
        raise TypeError(
            "clients must be a key of the dataset's items, a function of a sample's index or dirichlet(…), but "
            f"clients={clients!r}"
        )
    return clients


def population_of(dataset: Any, clients: Clients) -> Population:
    """Who has which samples of a map-style dataset. Reads each item once for a key that is not a column of it."""
    if isinstance(clients, Dirichlet):
        labels = np.asarray(_values(dataset, clients.label, "label"))
        assigned: Sequence[Any] = clients.assign(labels).tolist()
    elif isinstance(clients, (str, int)):
        assigned = _values(dataset, clients, "clients")
    else:
        assigned = [_plain(clients(index)) for index in range(len(dataset))]
    by_name: dict[Any, list[int]] = {}
    for index, name in enumerate(assigned):
        if not isinstance(name, (str, int)):
            raise TypeError(f"a client must be a number or a string, but {clients!r} gives {name!r}")
        by_name.setdefault(name, []).append(index)
    names = sorted(by_name, key=lambda name: (isinstance(name, str), name))
    sizes = [len(by_name[name]) for name in names]
    order = np.array([index for name in names for index in by_name[name]], np.int64)
    return Population(tuple(names), order, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _values(dataset: Any, key: str | int, what: str) -> list[Any]:
    """The value of `key` in each item."""
    column: Any = None
    if type(dataset) is TensorDataset and isinstance(key, int) and -len(dataset.tensors) <= key < len(dataset.tensors):
        column = dataset.tensors[key]
    elif key in (getattr(dataset, "column_names", None) or ()):
        column = dataset[key]
    if column is not None:
        return [_plain(value) for value in (column.tolist() if isinstance(column, Tensor) else column)]
    found = []
    with kept_streams():
        for index in range(len(dataset)):
            item = dataset[index]
            try:
                found.append(_plain(item[key]))
            except (KeyError, IndexError, TypeError) as error:
                shown = sorted(map(str, item)) if isinstance(item, dict) else f"{type(item).__name__}"
                raise ValueError(
                    f"{what}={key!r} must be a key of each item of {type(dataset).__name__}, but item {index} is or "
                    f"has {shown}"
                ) from error
    return found


def _plain(value: Any) -> Any:
    """A number of torch or numpy as one of Python's."""
    if (isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0) or isinstance(value, np.generic):
        return value.item()
    return int(value) if isinstance(value, torch.SymInt) else value
