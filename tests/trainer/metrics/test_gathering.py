"""Predictions of several ranks come back as those of one process: tensors of any kind, and such that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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
