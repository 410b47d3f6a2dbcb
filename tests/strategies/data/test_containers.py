"""Batches in classes of the user's come to a device, a slice or a stage with what they hold, and not built again."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.strategies.data.batch_slices import cut, move, move_in_place, rebuilt
from lockstep.strategies.data.sample_axis import SampleCutter

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Halved:
    """Its constructor changes what it is given, and makes more of it."""

    x: Tensor
    scale: InitVar[float] = 0.5
    mask: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.mask = self.x > 0
        self.x = self.x * scale
        self.length = self.x.sum(1)


@dataclass(frozen=True, slots=True)
class Fixed:
    x: Tensor


class Rows(list[Any]):
    """Its constructor takes no list."""

    def __init__(self, *rows: Any) -> None:
        super().__init__(rows)
        self.name = "rows"


class Pair(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> Pair:
        made = super().__new__(cls, (x, y))
        made.name = "pair"
        return made

    name: str


class Own(MutableMapping[str, Any]):
    """Keeps its items in a dict of its own, and copies of it share that."""

    def __init__(self, **items: Any) -> None:
        self.items_, self.name = items, "own"

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


X = torch.arange(12, dtype=torch.float64).reshape(6, 2) - 4
Named = namedtuple("Named", "x y")

BATCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Tensor]]]] = {
    "dataclass": (lambda: Halved(X), lambda batch: [batch.x, batch.mask, batch.length]),
    "frozen": (lambda: Fixed(X), lambda batch: [batch.x]),
    "list": (lambda: Rows(X, X + 1), lambda batch: [*batch]),
    "tuple": (lambda: Pair(X, X + 1), lambda batch: [*batch]),
    "named tuple": (lambda: Named(X, X + 1), lambda batch: [batch.x, batch.y]),
    "mapping": (lambda: Own(x=X), lambda batch: [batch["x"]]),
    "UserDict": (lambda: UserDict(x=X), lambda batch: [batch["x"]]),
    "nested": (lambda: {"rows": [Halved(X)]}, lambda batch: [batch["rows"][0].x, batch["rows"][0].mask]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_is_moved_as_it_is(kind: str) -> None:
    make, tensors = BATCHES[kind]
    batch = make()
    moved, there = move(batch, CPU, torch.float32), move(batch, META, None)
    assert type(moved) is type(there) is type(batch)
    assert getattr(moved, "name", None) == getattr(batch, "name", None)
    for found, value, elsewhere in zip(tensors(moved), tensors(batch), tensors(there), strict=True):
        torch.testing.assert_close(found, value.float() if value.is_floating_point() else value)
        assert elsewhere.is_meta and not value.is_meta and value.dtype in (torch.float64, torch.bool)


@pytest.mark.parametrize("cut_in_two", [lambda batch: SampleCutter().cut(batch, 6, 2), lambda batch: cut(batch, 6, 2)])
@pytest.mark.parametrize("kind", BATCHES)
def test_slices_hold_the_rows_of_the_batch(kind: str, cut_in_two: Callable[[Any], list[tuple[Any, int]]]) -> None:
    make, tensors = BATCHES[kind]
    batch = make()
    slices = [part for part, _ in cut_in_two(batch)]
    assert {type(part) for part in slices} == {type(batch)}
    assert [getattr(part, "name", None) for part in slices] == [getattr(batch, "name", None)] * 2
    for whole, *rows in zip(tensors(batch), *map(tensors, slices), strict=True):
        assert torch.equal(torch.cat(rows), whole) and len(whole) == 6


@dataclass
class Derived:
    """Makes a part that has no row a sample of its others."""

    x: Tensor
    make: InitVar[Callable[[Tensor], Any]]
    n: Any = field(init=False, default="none")

    def __post_init__(self, make: Callable[[Tensor], Any]) -> None:
        self.n = self.more = make(self.x)


@pytest.mark.parametrize("cut_in_two", [lambda batch: SampleCutter().cut(batch, 6, 2), lambda batch: cut(batch, 6, 2)])
def test_what_a_dataclass_makes_of_the_whole_batch_is_refused(
    cut_in_two: Callable[[Any], list[tuple[Any, int]]],
) -> None:
    for make in (len, Tensor.mean, lambda x: torch.arange(x.shape[1]), lambda x: {"n": [len(x)]}, lambda _: object()):
        with pytest.raises(ValueError, match=r"Derived.n \(batch\[0\].n\) is set in __post_init__ .* in training_step"):
            cut_in_two([Derived(X, make)])
    for make in (lambda x: x > 0, lambda x: {"mask": x > 0, "kind": None}, lambda x: [str(row) for row in x]):
        first, second = (part[0] for part, _ in cut_in_two([Derived(X, make)]))
        for half, rows in ((first, X[:3]), (second, X[3:])):
            assert str(half.n) == str(half.more) == str(make(rows))
    assert cut_in_two(Derived(X, lambda _: "a"))[1][0].n == "a"


def test_the_containers_of_a_batch_are_its_own() -> None:
    batch = {"rows": [X], "more": {}, "pairs": Rows()}
    for other in (
        move(batch, CPU, None),
        rebuilt(batch),
        cut(batch, 6, 2)[0][0],
        SampleCutter().cut(batch, 6, 2)[0][0],
    ):
        other["rows"].append(X)
        other["more"]["x"] = X
        other["pairs"].append(X)
    assert len(batch["rows"]) == 1 and not batch["more"] and not batch["pairs"]


def test_what_torch_makes_is_moved() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    there = move(packed, META, torch.float64)
    assert type(there) is PackedSequence and there.data.is_meta and there.batch_sizes.is_cpu
    assert there.data.dtype == torch.float64 and packed.data.dtype == torch.float32
    largest = move(X.max(0), META, None)
    assert type(largest) is type(X.max(0)) and largest.indices.is_meta
    assert move({"size": X.shape}, META, None)["size"] is not None


def test_layers_are_given_the_containers_of_their_caller() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    inner: list[Any] = [X]
    given = ({"inner": inner, "name": "x"}, Named(inner, 1), Fixed(X), Pair(X, inner), packed)
    assert move_in_place(given, CPU) is given
    mapping, named, fixed, pair, moved = move_in_place(given, META)
    assert mapping is given[0] and mapping["inner"] is named.x is pair[1] is inner
    assert inner[0].is_meta and fixed.x.is_meta and pair[0].is_meta and not given[2].x.is_meta
    assert moved.data.is_meta and moved.batch_sizes.is_cpu and (type(fixed), type(pair)) == (Fixed, Pair)
