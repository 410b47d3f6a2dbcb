"""What `dp` reads of a module once and compares afterwards: whatever a step or a hook changes in it is seen."""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

import lockstep.strategies.dp.strategy as dp
from lockstep.strategies.dp.held import Held
from tests.strategies.test_dp_user_code import Plain, both, train
from tests.trainer.toy import loader


class Toggles(Plain):
    """A hook of the backward, which ends as it began after two slices."""

    def __init__(self) -> None:
        super().__init__()
        self.flag, self.calls = False, 0
        self.net[1].register_full_backward_hook(self.note)

    def note(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.flag, self.calls = not self.flag, self.calls + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + self.flag) / (1 + self.calls)


class TogglesWithHook(Toggles):
    """All forwards come before the hook, and backwards after it."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls += 1


class Counting(torch.autograd.Function):
    """A backward that counts in an object of the module's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: SimpleNamespace) -> Tensor:  # type: ignore[override]
        ctx.state = state
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.state.n += 1
        return gradient / ctx.state.n, None


class CountsInBackward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(n=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(Counting.apply(self.net(batch[0]), self.state), batch[1])


class Nested(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table: dict[str, Any] = {"a": [{"b": deque([1, 2], maxlen=3)}], "order": OrderedDict(x=1, y=2)}
        self.parts = (1, [2], {"seen": {3}})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        recent, order = self.table["a"][0]["b"], self.table["order"]
        recent.append(batch_idx)
        order.move_to_end("x" if batch_idx % 2 else "y")
        self.parts[2]["seen"].add(batch_idx)
        self.parts[1][0] += 1
        weight = sum(recent) + [*order].index("x") + len(self.parts[2]["seen"]) + self.parts[1][0]
        return super().training_step(batch, batch_idx) / weight


class Layer(nn.Module):
    def __init__(self, state: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(8, 8), state

    def forward(self, x: Tensor) -> Tensor:
        self.state.n += 1
        self.state.log[self.state.n % 5] = self.state.n
        return self.linear(x) / self.state.n


class Shares(Plain):
    """An object of two layers."""

    def __init__(self) -> None:
        super().__init__()
        state = SimpleNamespace(n=0, log={})
        self.net = nn.Sequential(Layer(state), Layer(state), nn.Linear(8, 3))


class MakesAnew(Plain):
    """Objects and containers in each step, and tensors that follow from those before."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.held, self.array = torch.zeros(3), [torch.zeros(1)], np.zeros(2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.box, self.rows = SimpleNamespace(n=batch_idx), [1, {"x": batch_idx}]
        self.rows[1]["x"] += self.box.n
        self.average, self.array = self.average * 0.9 + 1, self.array + 1
        self.held[0] = self.held[0] + 1
        self.held = [*self.held]
        factor = self.average.sum() / self.held[0].sum() / self.array.sum()
        return super().training_step(batch, batch_idx) * factor / (1 + self.rows[1]["x"])


class EqualButOthers(Plain):
    """Values that equal those in whose place they are, and a name in the place of another."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = [0, 0.0, 0]
        self.names = {1: "a", 2: "b"}
        self.first = 5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.values[0] = False if type(self.values[0]) is int else 0
        self.values[1] = -self.values[1]
        self.values[2] = self.values[2] + torch.ones(())
        self.names[1] = self.names.pop(1) + "x"
        factor = 1 if "first" in vars(self) else 2
        for one, other in (("first", "second"), ("second", "first"))[factor - 1 : factor]:
            vars(self)[other] = vars(self).pop(one)
        factor *= 2 if self.values[0] is False else 1
        return super().training_step(batch, batch_idx) * factor / (2 + np.copysign(1, self.values[1])) / self.values[2]


class HooksChange(Plain):
    """What hooks set between steps, in layers too, which they replace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.history = 1, list[int]()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.net[1] = nn.GELU()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.weight += 1
        self.history.append(batch_idx)
        self.box = SimpleNamespace(value=batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.weight *= 2
        self.net[1].scale = self.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weight += 1
        factor = self.weight % 7 + len(self.history) + self.box.value + getattr(self.net[1], "scale", 1) % 3
        return super().training_step(batch, batch_idx) / factor


@pytest.mark.parametrize(
    "kind",
    [Toggles, TogglesWithHook, CountsInBackward, Nested, Shares, MakesAnew, EqualButOthers, HooksChange],
)
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.long)])
def test_whatever_changes_in_a_module_is_seen(kind: type[Plain], accumulate: int) -> None:
    both(kind, accumulate_grad_batches=accumulate)


class ReadsGradients(Plain):
    """In the step: what the micro-batches before have added up."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        return super().training_step(batch, batch_idx) * (1 + sum(norms))


class ReadsTheOptimizers(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        groups = self.trainer.optimizers[0].param_groups
        norms = [p.grad.norm() for group in groups for p in group["params"] if p.grad is not None]
        return super().training_step(batch, batch_idx) * (1 + sum(norms))


class ReadsWithHook(ReadsGradients):
    def on_before_backward(self, loss: Tensor) -> None:
        self.seen = [float(loss.detach())]


class Clears(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        self.zero_grad()


class Presets(Plain):
    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)


@pytest.mark.parametrize("kind", [ReadsGradients, ReadsTheOptimizers, ReadsWithHook, Clears, Presets])
def test_a_step_finds_the_gradients_that_its_micro_batch_found(kind: type[Plain]) -> None:
    both(kind, accumulate_grad_batches=3)


class Grows(Plain):
    """Counts, and keeps something of each slice, in a module that holds much more."""

    def __init__(self) -> None:
        super().__init__()
        self.words = {f"word {i}": i for i in range(100)}
        self.calls, self.hidden = 0, None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.words["word 1"] += 1
        self.hidden = batch[0].sum()
        return super().training_step(batch, batch_idx) / self.calls


@pytest.mark.parametrize("kind", [Plain, Grows])
def test_a_module_is_read_once_as_long_as_it_holds_the_same_objects(
    kind: type[Plain], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[nn.Module] = []

    class Noted(Held):
        def __init__(self, model: nn.Module) -> None:
            read.append(model)
            super().__init__(model)

    monkeypatch.setattr(dp, "Held", Noted)
    train(kind, "dp")
    assert len(read) == 2, "again after each epoch, as an evaluation may have replaced much"


def test_metrics_in_a_list_count_all_slices() -> None:
    class Lists(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = [MulticlassAccuracy(3, average="micro")]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.net(batch[0])
            self.metrics[0].update(output, batch[1])
            return F.cross_entropy(output, batch[1])

    one, other = both(Lists)
    assert other.metrics[0].compute() == one.metrics[0].compute()
    assert int(other.metrics[0].tp.sum() + other.metrics[0].fn.sum()) == 40


def test_the_graph_of_a_slice_is_freed_before_the_next() -> None:
    alive: list[bool] = []
    graphs: list[Callable[[], Any]] = []

    class Watches(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            alive.extend(graph() is not None for graph in graphs)
            graphs.clear()
            loss = super().training_step(batch, batch_idx)
            graphs.append(weakref.ref(loss))
            return loss

    train(Watches, "dp", loader(6))
    assert len(alive) > 2 and not any(alive)


class Ends:
    """Ends something as it is deleted."""

    ended = 0

    def __del__(self) -> None:
        type(self).ended += 1


def test_what_a_hook_replaces_ends_before_the_next_slice() -> None:
    seen: list[int] = []

    class Replaces(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.file = Ends()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            Ends.ended, self.file = 0, Ends()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(Ends.ended)
            return super().training_step(batch, batch_idx)

    train(Replaces, "dp")
    assert len(seen) > 6 and set(seen[3:]) == {1}, "but the first one, which those know that began the run"
