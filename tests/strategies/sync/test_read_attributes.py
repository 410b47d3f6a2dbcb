"""What steps read of attributes that each rank has set from its own samples is named."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.strategies.launch.program.reads import read_first
from lockstep.trainer.metrics.counts import ReadAttributes
from tests.trainer.test_user_code import Base, batches, quiet


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center = torch.zeros(3)

    def forward(self, x: Any) -> Any:
        return self.follow(x)

    def follow(self, x: Any) -> Any:
        self.center.lerp_(x.detach().mean(0), 0.1)
        return x - self.center


class Reads(nn.Module):
    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = batch if self.mean is None else 0.9 * self.mean + 0.1 * batch
        self.total *= 2
        shape: tuple[int, ...] = ()
        del shape
        given = self.last = batch
        again = self.last + given
        if self.example is None:
            self.example = again
        self.scale = self.scale * 2
        self.seen[3] = [self.weight for _ in batch]
        return self.helper(self.alpha)

    def helper(self, value: Any) -> Any:
        self.count += 1
        return value * self.share

    @property
    def share(self) -> float:
        return self.part / 2


def test_what_a_step_reads_before_it_sets_it() -> None:
    read = {"mean", "total", "scale", "seen", "weight", "alpha", "count", "part"}
    assert read_first(Reads, ("training_step",)) == read
    assert "center" in read_first(Layer, ("forward",))


class Ranks:
    """The other rank holds the same contents, plus `add`."""

    def __init__(self, add: float) -> None:
        self.add = add

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([mine, mine + torch.where(mine == -1, 0, int(self.add))])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.average, self.weights = Layer(), 10**400, np.ones(3)  # no float holds it
        self.hidden, self.started_s, self.names, self.flag = torch.zeros(2, 6), 1.5, ["a"], True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.layer(batch) * self.average * self.weights[0] + self.hidden.mean()
        return out.mean() + self.started_s + len(self.names) + self.flag


class Timed(Model):
    def forward(self, x: Any) -> Any:
        self.begun = time.perf_counter()
        return x


def test_numbers_and_tensors_that_differ_are_found_once() -> None:
    found = ReadAttributes(Ranks(1), Model())  # type: ignore[arg-type]
    assert found.compare(6) == ["average", "layer.center", "weights"]  # `hidden` has a row for each sample
    assert found.compare(0) == []
    assert ReadAttributes(Ranks(0), Model()).compare(0) == []  # type: ignore[arg-type]


class Routed(nn.Module):
    """Leaves a loss for the step, which asks for it afterwards, and reads labels that the step gives it before."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.entropy, self.labels = torch.zeros(()), torch.zeros(()), torch.zeros(6)

    def forward(self, x: Any) -> Any:
        self.loss, self.entropy = x.mean(), x.std()
        return x + self.labels

    def balance(self) -> Any:
        return self.loss

    @property
    def spread(self) -> Any:
        return self.entropy


class Balanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Routed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.layer.labels = batch[1]
        return self.layer(batch[0]).mean() + self.layer.balance() + self.layer.spread


def test_what_a_layer_leaves_for_the_same_step_is_not_named() -> None:
    assert ReadAttributes(Ranks(1), Balanced()).compare(6) == []  # type: ignore[arg-type]


def test_numbers_may_be_times_where_code_reads_a_clock() -> None:
    assert ReadAttributes(Ranks(1), Timed()).compare(6) == ["layer.center", "weights"]  # type: ignore[arg-type]


class Normalized(Base):
    """Divides the loss by its mean over earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.average = loss.detach() if self.average is None else 0.9 * self.average + 0.1 * loss.detach()
        return loss / self.average


class Reweighted(Base):
    """Weights classes by what its rank has found in the validation before."""

    def __init__(self) -> None:
        super().__init__()
        self.of_classes, self.found = torch.ones(4, dtype=torch.float64), list[torch.Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return (losses * self.of_classes[batch[1]]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.found.append(F.one_hot(self.net(batch[0]).argmax(1), 4).sum(0))

    def on_validation_epoch_end(self) -> None:
        self.of_classes = 1 + torch.stack(self.found).sum(0) / 100.0
        self.found.clear()


class Summed(Reweighted):
    def on_validation_epoch_end(self) -> None:
        self.of_classes = 1 + self.sum_over_ranks(torch.stack(self.found).sum(0)) / 100.0
        self.found.clear()


@pytest.mark.ranks
def test_values_that_ranks_have_set_from_their_samples_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    for module in (Normalized(), Reweighted(), Summed()):
        run = quiet(strategy="ddp", devices=2, accelerator="cpu", precision="64-true", split_batches=True, max_epochs=3)
        loaders = [batches(28)] if isinstance(module, Normalized) else [batches(28), batches(28)]
        with warnings.catch_warnings():  # which the ranks print
            warnings.simplefilter("default")
            run.fit(module, *loaders)
    shown = capfd.readouterr().err
    assert shown.count("training_step reads average as an earlier step or hook has set it, under DDP") == 1
    assert shown.count("training_step reads of_classes as ") == 1  # not where it is summed over ranks
