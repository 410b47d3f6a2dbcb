"""Predictions of several ranks come back as those of one process: tensors of any kind, and such that share memory."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.strategies.base import Topology
from lockstep.trainer.metrics import gathering
from tests.trainer.toy import Net, loader, quiet

pytestmark = pytest.mark.ranks

KINDS: dict[str, Callable[[Tensor], Any]] = {
    "twice": lambda x: (x, x),
    "views": lambda x: {"all": x, "flat": x.view(-1), "column": x[:, 0], "expanded": x[:, :1].expand(-1, 3)},
    "complex": lambda x: torch.complex(x, -x),
    "sparse": lambda x: (x * (x > 0)).to_sparse(),
    "columns first": lambda x: x.t().contiguous().t(),
}


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].double()
        return {name: make(x) for name, make in KINDS.items()}


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.to_dense()]
    return [tensor for item in (value.values() if isinstance(value, dict) else value) for tensor in flat(item)]


def test_tensors_of_each_kind_come_back() -> None:
    found = []
    for strategy, devices in (("single", 1), ("ddp", 2)):
        run = quiet(strategy=strategy, devices=devices, accelerator="cpu", split_batches=True)
        found.append(run.predict(Predicts(), loader(19, 4)))
    for kind in KINDS:
        rows, others = ([flat(batch[kind]) for batch in batches] for batches in found)
        for one, other in zip(zip(*rows, strict=True), zip(*others, strict=True), strict=True):
            assert torch.equal(torch.cat(one), torch.cat(other)), kind


class Kind(enum.Enum):
    CAT, DOG = range(2)


class Name(str, enum.Enum):
    CAT, DOG = "cat", "dog"


class Marks(enum.Flag):
    FIRST, LAST = 1, 2


class Rows(list):
    pass


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda x: [x.shape, {"empty": torch.Size([])}],
    "numbers of numpy": lambda x: (np.float32(1.1), np.float64(x.sum()), np.int64(5), np.bool_(True), np.str_("a")),
    "complex numbers": lambda x: [1 - 2j, np.complex64(1 - 2j)],
    "sets": lambda x: (set(), {1, "a", (2, 3)}, frozenset({Kind.DOG})),
    "bytes": lambda x: (b"", b"\x00\xff", bytearray(b"ab")),
    "kinds of tensors": lambda x: (x.dtype, x.device, x.layout, torch.channels_last),
    "other classes": lambda x: Rows([(Rows(), x.shape)]),
    "enums": lambda x: (Kind.CAT, Name.DOG, Marks.FIRST | Marks.LAST),
    "keys": lambda x: {Kind.CAT: 1, np.int64(2): 2, (3, Name.CAT): 3, None: 4, 5.5: 5},
}


class PredictsValues(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return [make(batch[0]) for make in VALUES.values()], batch[0].max(dim=1)


class PredictsHidden(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return np.ma.masked_array([1.0, 2.0], [True, False])


def typed(value: Any) -> Any:
    """With the type of each value, also of those that are equal to others."""
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    return type(value), [typed(item) for item in value] if isinstance(value, list | tuple) else value


def test_values_of_a_class_come_back_as_they_were() -> None:
    one, other = (
        quiet(strategy=strategy, devices=devices, accelerator="cpu").predict(PredictsValues(), loader(4, 1))
        for strategy, devices in (("single", 1), ("ddp", 2))
    )
    for (values, (largest, at)), (others, result) in zip(one, other, strict=True):
        assert typed(values) == typed(others)
        assert type(result) is torch.return_types.max
        assert torch.equal(result.values, largest) and torch.equal(result.indices, at)


def test_each_item_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    size = gathering._size
    monkeypatch.setattr(gathering, "_size", lambda shard: measured.append(shard) or size(shard))
    alone: Any = SimpleNamespace(topology=Topology(), all_gather=lambda tensor: tensor[None])
    gathered = gathering.gather_items(alone, [torch.ones(2), (torch.ones(3), 4), 5] * 10, {})
    assert gathered is not None and len(gathered[0]) == 30
    assert len(measured) == 20


class PredictsAttributes(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        rows = Rows([1])
        vars(rows)["size"] = 3
        return rows


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (PredictsHidden, r"predictions\.0 is numpy\.ma\.MaskedArray"),
        (PredictsAttributes, r"a Rows has attributes \(size\)"),
    ],
)
def test_what_would_lose_a_part_is_refused(kind: type[Net], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        quiet(devices=2, accelerator="cpu").predict(kind(), loader(4, 1))
