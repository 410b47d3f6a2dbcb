"""Attributes that add up a part of each batch: found and named, and nothing else."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.callbacks import Callback
from lockstep.strategies.sync.buffers import refusing_counts
from lockstep.strategies.sync.counts import GrowingCounts, PartialCounts
from lockstep.trainer.metrics.counts import CountsWatch
from tests.trainer.test_user_code import Base, batches, quiet


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0


class Meter:
    total = 0.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.meter, self.numbers = Layer(), Meter(), {"tokens": torch.zeros(())}
        self._seen, self.steps, self.last, self.history, self.max_length = 0, 0, 0.0, list[float](), 0


def samples(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model._seen += len(batch["x"])


def in_a_layer(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model.layer.seen += len(batch["x"])


def tokens(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model.numbers["tokens"] += batch["x"].numel()


def masked(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model._seen += int(batch["mask"].sum())


def losses(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model.meter.total += loss.item()


def correct(model: Model, batch: dict[str, Tensor], loss: Tensor) -> None:
    model.steps += 1
    model.last = loss.item()
    model.history.append(loss.item())
    model.max_length = max(model.max_length, batch["x"].shape[1])
    model._seen += 2 * len(batch["x"])  # as sum_over_ranks gives


def found(step: Callable[..., None]) -> str:
    model = Model()
    counts = PartialCounts({"": model}, 2, "ddp", "self.log it")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            batch = {"x": torch.zeros(4, 7), "mask": torch.arange(4 * 7).reshape(4, 7) % (3 + number) == 0}
            loss = torch.tensor(0.5 + number)
            counts.begin()
            step(model, batch, loss)
            counts.end(4, batch, {"loss": loss})
    return "".join(str(item.message) for item in caught)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (samples, "_seen (samples); "),
        (in_a_layer, "layer.seen (samples); "),
        (tokens, "numbers['tokens'] (elements of the batch); "),
        (masked, "_seen (the sum of a tensor of the batch); "),
        (losses, "meter.total (a loss); "),
    ],
)
def test_a_number_that_adds_up_a_part_of_each_batch_is_named(step: Callable[..., None], name: str) -> None:
    assert f"not the whole as on one process: {name}" in found(step)


def test_counts_of_batches_and_what_the_last_batch_left_are_not() -> None:
    assert found(correct) == ""


def test_a_buffer_that_counts_under_a_mask_is_refused() -> None:
    """It hides as many elements on each rank, and their number is a multiple of the samples of all."""
    seen, suspects = torch.zeros(()), dict[str, float]()

    def step(hidden: int, growth: int | None = None) -> None:
        mask = torch.arange(32).reshape(4, 8) < hidden
        with refusing_counts(lambda: {"seen": seen}, 4, 8, "ddp", [(mask, torch.arange(4) % 2)], suspects):
            seen.add_(mask.sum() if growth is None else growth)

    for _ in range(3):
        step(16, growth=2)  # the labels add up to as much: it counts calls
    step(18)
    with pytest.raises(RuntimeError, match="added 16 to the buffer seen"):
        step(16)


def test_parts_of_one_sample_are_watched_a_few_times_only() -> None:
    counts = PartialCounts({"": Model()}, 2, "ddp", "self.log it")
    for _ in range(9):
        counts.begin()
        counts.end(1, {"x": torch.zeros(1, 7)}, None)
    assert counts.done


class Counts(Base):
    seen = validated = steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += len(batch[0])
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += len(batch[0])


class CountsToo(Callback):
    total = 0
    is_watched = True

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.total += len(batch[0])
        hooks = trainer._run.hooks
        owners = [getattr(hook, "__self__", None) for hook in (*hooks.on_train_batch_start, *hooks.on_train_batch_end)]
        self.is_watched = any(isinstance(owner, CountsWatch) for owner in owners)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"correct": [0, 3, 3, 5, 9]}, True),
        ({"intersection": [0, 3, 3, 5, 9]}, True),
        ({"step_seconds": [0, 3, 3, 5, 9]}, False),
        ({"elapsedTime": [0, 3, 3, 5, 9]}, False),
        ({"last": [0, 3, 1, 5, 9]}, False),
        ({"largest": [0, 3, 3, 3, 3]}, False),
        ({"accuracies": [0, 0.5, 0.5, 1.5, 2.25]}, True),
        ({"mean": [0, 0.1, 0.19, 0.27, 0.34]}, True),
        ({"mean": [0, 1, 0.9, 1.27, 1.34]}, False),
        ({"total": [0, 1.5, math.nan, math.nan, math.nan]}, False),
        ({"resident": [2**28, 2**28 + 1, 2**28 + 2, 2**28 + 3, 2**28 + 4]}, False),
        ({"elapsed_ms": [0, 1, 2, 3, 4]}, False),
        ({"correct": [0, 3, 4]}, None),
    ],
)
def test_what_may_add_up_are_numbers_that_never_fall(values: dict[str, list[float]], counts: bool | None) -> None:
    ((name, numbers),) = values.items()
    model = Model()
    growing = GrowingCounts({"": model})
    for number in numbers:
        vars(model)[name] = number
        growing.look()
    assert growing.found() == (None if counts is None else [name] * counts)
    assert growing.done is (len(numbers) > 4)


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.count = 0.0, 0


class Timed(Total):
    def forward(self, x: Tensor) -> Tensor:
        self.total -= time.perf_counter()
        return x


def now() -> float:
    return time.monotonic()


class Spans(Total):
    @contextmanager
    def span(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.total += time.perf_counter() - begin


class Helped(Total):
    @property
    def age(self) -> float:
        return now() - self.total


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(model: Total, *arguments: Any) -> Any:
        begin = time.perf_counter()
        output = function(model, *arguments)
        model.total += time.perf_counter() - begin
        return output

    return around


class Decorated(Total):
    @timed
    def forward(self, x: Tensor) -> Tensor:
        return x


class Constant(Total):
    def forward(self, x: Tensor) -> Tensor:
        return x + ZERO


ZERO = time.timezone


def test_a_global_number_is_not_a_clock() -> None:
    model = Constant()
    growing = GrowingCounts({"": model})
    for number in range(5):
        vars(model).update(total=number / 2)
        growing.look()
    assert growing.found() == ["total"]


@pytest.mark.parametrize("kind", [Timed, Spans, Helped, Decorated])
def test_fractions_are_left_alone_where_code_reads_a_clock(kind: type[Total]) -> None:
    model = nn.Sequential(kind())
    growing = GrowingCounts({"": model})
    for number in range(5):
        vars(model[0]).update(total=number / 2, count=number)
        growing.look()
    assert growing.found() == ["0.count"]


class Correct(Base):
    """What counts guesses, on this rank or on all, and what differs by rank otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.correct = self.of_all = self.validated = self.last = self.written = 0
        self.accuracies = 0.0
        self.elapsed_ms = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = 1 + self.global_rank + batch_idx % 2
        self.correct += found
        self.accuracies += found / 8
        self.of_all += int(self.sum_over_ranks(found))
        self.last = (7 * batch_idx) % (3 + self.global_rank)
        self.elapsed_ms += 5 + self.global_rank
        self.written += self.global_rank == 0
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += 1 + 4 * self.global_rank + batch_idx % 2


@pytest.mark.ranks
def test_counts_that_differ_between_ranks_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    options = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "num_sanity_val_steps": 2}
    with warnings.catch_warnings():  # which the ranks print
        warnings.simplefilter("always")
        quiet(max_epochs=1, **options).fit(Correct(), batches(96, torch.float32), batches(96))
    lines = [line for line in capfd.readouterr().err.splitlines() if "add up something else on each rank" in line]
    named = [line.split("one process: ")[1].split("; ")[0] for line in lines]
    assert [name.split(" (")[0] for name in named] == ["correct", "validated"]
    assert "accuracies (" in named[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        ("ddp", {"seen (samples), CountsToo.total (samples)", "validated (samples)"}),
        ("fsdp", {"seen (samples), CountsToo.total (samples)", "validated (samples)"}),
        ("dp", {"seen (samples)"}),
        ("tensor", set()),
    ],
)
def test_counts_of_a_run_are_named_on_one_rank(
    strategy: str, named: set[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:  # those of this process; ranks print theirs
        warnings.simplefilter("always")
        trainer = quiet(
            strategy=strategy, devices=2, accelerator="cpu", split_batches=True, max_epochs=3, callbacks=[CountsToo()]
        )
        trainer.fit(Counts(), batches(16, torch.float32), batches(16))
    assert not trainer.callbacks[0].is_watched, "nothing is called once it is known"
    printed = [*capfd.readouterr().err.splitlines(), *(str(item.message) for item in caught)]
    lines = [line for line in printed if "attributes add up a part" in line]
    assert {line.split("one process: ")[1].split("; ")[0] for line in lines} == named
    assert len(lines) == len(named)
