"""Layers may read the values of what they are given: shape inference, which has none, makes some up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lockstep import Module
from tests.strategies.pipeline.classifiers import TWO, Base, exact, fit


class Reading(nn.Linear):
    """A layer that reads values in one way."""

    def __init__(self, how: str, model: Module | None = None) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.how, self.held = how, [model]
        self.lstm = nn.LSTM(4, 4, batch_first=True, dtype=torch.float64) if how in ("packed", "sent") else None

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "number":
            assert not torch.isnan(x).any() and x.abs().max().item() < 1e9
        elif self.how == "numpy":
            assert x.detach().numpy().shape == (len(x), 16)
        elif self.how == "routed":
            chosen = (x[:, 0] > 0).nonzero()[:, 0]
            return super().forward(x).index_add(0, chosen, x[chosen] ** 2)
        elif self.how == "dropped":
            return super().forward(x[x[:, 0] > 0])
        elif self.how == "changed":
            x.mul_(2)
        elif self.how == "logged":
            self.held[0].log("inner", x.mean(), on_epoch=True)  # type: ignore[union-attr]
        elif self.lstm is not None:
            lengths = torch.full((len(x),), 4)
            packed = pack_padded_sequence(x.view(-1, 4, 4), lengths, batch_first=True, enforce_sorted=False)
            if self.how == "sent":
                return self.lstm(packed)[0]
            return super().forward(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0].flatten(1))
        return super().forward(x)


class Net(Base):
    def __init__(self, how: str, place: int) -> None:
        super().__init__()
        self.net[place] = Reading(how, self if how == "logged" else None)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:net.* reads values of tensors")
@pytest.mark.parametrize("how", ["number", "numpy", "routed", "packed", "changed"])
@pytest.mark.parametrize("place", [1, 3])
def test_a_layer_may_read_values(how: str, place: int) -> None:
    exact(lambda: Net(how, place), TWO, max_epochs=1)


@pytest.mark.ranks
@pytest.mark.filterwarnings("always:net.* reads values of tensors")
def test_a_layer_that_reads_values_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    fit(Net("number", 1), "pipeline", 2)
    assert capfd.readouterr().err.count("net.1 reads values of tensors") == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "place", "message"),
    [
        ("dropped", 1, r"net\.1 reads values and returns \[\[\d, 16\]\] where shape inference gave \[\[4, 16\]\]"),
        ("sent", 1, r"net\.1 returns a PackedSequence, .* let the layer return pad_packed_sequence"),
        ("logged", 1, r"net\.1 logs 'inner', but .* log it in training_step"),
    ],
)
def test_what_follows_from_values_is_refused_by_name(how: str, place: int, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        fit(Net(how, place), "pipeline", 2, max_epochs=1)


class Mapped(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(torch.func.vmap(self.net)(batch[0]), batch[1])


@pytest.mark.ranks
def test_transforms_of_torch_func_around_the_module_are_refused() -> None:
    with pytest.raises(ValueError, match=r"within a transform of torch\.func \(vmap, grad, jvp\), .* strategy='ddp'"):
        fit(Mapped(), "pipeline", 2, max_epochs=1)
