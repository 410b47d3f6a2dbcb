"""Parameters and buffers that user code holds apart from the model follow those that a strategy puts in their place."""

from __future__ import annotations

import sys
import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep.callbacks import Callback
from tests.trainer.toy import Net, distance, loader, quiet, weights

Pair = namedtuple("Pair", "first second")
REPLACING = ["fsdp", "tensor", "pipeline"]

pytestmark = pytest.mark.usefixtures("one_rank_keeps_its_mesh")


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


def closure(p: Any) -> Callable[[], Any]:
    return lambda: p


def default(p: Any) -> Callable[[], Any]:
    def held(p: Any = p, *, q: Any = p) -> Any:
        assert p is q
        return p

    return held


def shared(p: Any) -> nn.Module:
    layer = nn.Linear(8, 16)
    layer.weight = p
    return layer


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an attribute in a list": (lambda p: [p], lambda held: held[0]),
    "a dict of lists": (lambda p: {"a": [0, p]}, lambda held: held["a"][1]),
    "a key": (lambda p: {0: 1, p: 2}, lambda held: next(key for key, value in held.items() if value == 2)),
    "a tuple in a list": (lambda p: [(1, p, p)], lambda held: held[0][2]),
    "a tuple twice": (lambda p: [(t := (p, 1)), {"t": t}], lambda held: held[1]["t"][0]),
    "a named tuple": (lambda p: Pair(p, 1), lambda held: held.first),
    "a set": (lambda p: {p}, lambda held: next(iter(held))),
    "a frozen set": (lambda p: frozenset({p}), lambda held: next(iter(held))),
    "a deque": (lambda p: deque([p]), lambda held: held[0]),
    "an object": (lambda p: Plain([p]), lambda held: held.held[0]),
    "an object with slots": (Slotted, lambda held: held.held),
    "a weak reference": (lambda p: [weakref.ref(p)], lambda held: held[0]()),
    "a closure": (closure, lambda held: held()),
    "a default": (default, lambda held: held()),
    "a partial": (lambda p: partial(lambda a, b, c: (a, b, c), p, c=p), lambda held: held(1)[0]),
    "a keyword of a partial": (lambda p: partial(lambda a, c: (a, c), c=p), lambda held: held(1)[1]),
    "a module beside the model": (lambda p: [shared(p)], lambda held: held[0].weight),
    "an optimizer": (lambda p: torch.optim.SGD([p], lr=0.1), lambda held: held.param_groups[0]["params"][0]),
    "a scheduler": (
        lambda p: torch.optim.lr_scheduler.StepLR(torch.optim.SGD([p], lr=0.1), 1),
        lambda held: held.optimizer.param_groups[0]["params"][0],
    ),
}


class Watch(Callback):
    """Holds a parameter as well, and sees whether both are those that the model has."""

    def __init__(self, held: Any, get: Callable[[Any], Any]) -> None:
        self.held, self.get, self.same = held, get, []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        now = module.net[0].weight
        self.same.append(self.get(module.held) is now and self.get(self.held) is now)


@pytest.mark.parametrize("strategy", REPLACING)
def test_what_holds_a_parameter_holds_the_new_one(strategy: str) -> None:
    for name, (hold, get) in WAYS.items():
        module = Net()
        before = module.net[0].weight
        module.held = hold(before)
        assert get(module.held) is before
        watch = Watch(hold(before), get)
        quiet(strategy=strategy, devices=1, accelerator="cpu", callbacks=[watch]).fit(module, loader(16, 8))
        assert watch.same == [True, True], name
        assert get(module.held) is module.net[0].weight, name  # of the model that is the caller's again
        assert (module.net[0].weight is before) == (strategy == "pipeline"), name  # which cuts nothing on one rank
        assert get(watch.held) is module.net[0].weight, name


def test_what_holds_a_layer_of_torch_follows_by_itself() -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.rnn(x.unsqueeze(1))[0].squeeze(1))

    found = []
    for strategy in ("single", "fsdp"):
        torch.manual_seed(0)
        module = Recurrent()
        quiet(strategy=strategy, devices=1, accelerator="cpu", precision="64-true").fit(module, loader(16, 8))
        found.append(weights(module))
    assert distance(*found) < 1e-12


class Holds(Net):
    """Reaches into the model by what `__init__` has kept of it."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.kept, self.norms = habit, [*self.net.parameters()], []
        self.by_hand = torch.optim.SGD(self.kept, lr=0.1)
        first = self.net[0].weight
        self.penalty = lambda: first.square().sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss + self.penalty() if self.habit == "penalty" else loss

    def on_after_backward(self) -> None:
        for parameter in self.kept if self.habit == "gradients" else ():
            parameter.grad.mul_(0.5)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.kept if self.habit == "clamp" else ():
                parameter.clamp_(-0.2, 0.2)
        if self.habit == "norms":
            self.norms.append([float(parameter.detach().norm()) for parameter in self.kept])

    def on_train_epoch_end(self) -> None:
        for parameter in self.kept[:2] if self.habit == "freeze" else ():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.by_hand if self.habit == "optimizer" else torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("habit", "strategy"),
    [
        *((habit, name) for habit in ("gradients", "clamp", "norms", "freeze") for name in ("fsdp", "tensor")),
        *(("optimizer", name) for name in REPLACING),
    ],
)
def test_hooks_may_use_what_init_has_kept(habit: str, strategy: str) -> None:
    found, norms = [], []
    for name, devices in (("single", 1), (strategy, 2)):
        torch.manual_seed(0)
        module = Holds(habit)
        options: dict[str, Any] = {"precision": "64-true", "max_epochs": 2, "split_batches": True, "seed": 0}
        quiet(strategy=name, devices=devices, accelerator="cpu", **options).fit(module, loader(32, 16))
        found.append(weights(module))
        norms.append(torch.tensor(module.norms))
    assert distance(*found) < 1e-12
    assert norms[0].shape == norms[1].shape and torch.allclose(*norms, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_a_gradient_hook_that_would_add_a_shard_it_closes_over_is_refused(strategy: str) -> None:
    """It gets the whole gradient, and would have added the weights of before the run."""
    module = Net()
    module.net[0].weight.register_hook(closing(module.net[0].weight))
    with pytest.raises(RuntimeError, match="weights or gradients that are sharded over ranks together with tensors"):
        quiet(strategy=strategy, devices=1, accelerator="cpu").fit(module, loader(32, 16))


def closing(weight: Any) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient + 0.1 * weight.detach()


KEPT: list[Any] = []
square: Any = None
"""Views of weights, by a name that methods use of tensors only."""


def clamp_all() -> None:
    for parameter in KEPT:
        parameter.clamp_(-0.2, 0.2)


class Clamps(Net):
    """Holds its weights in a global, which a function uses that a method calls."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net[0].weight.square()
            clamp_all()


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_globals_follow_that_methods_use(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("single", strategy):
        torch.manual_seed(0)
        module = Clamps()
        KEPT[:] = module.net.parameters()
        monkeypatch.setattr(sys.modules[__name__], "square", [module.net[0].weight.detach()])
        quiet(strategy=name, devices=1, accelerator="cpu", precision="64-true").fit(module, loader(32, 16))
        found.append(weights(module))
    assert distance(*found) < 1e-12 and all(float(p.abs().max()) <= 0.2 for p in found[0])


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", REPLACING)
def test_a_step_that_would_use_shards_by_what_init_has_kept_is_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"sharded over ranks|net\.0\.weight is on stage 0 of the pipeline"):
        quiet(strategy=strategy, devices=2, accelerator="cpu").fit(Holds("penalty"), loader(32, 16))


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        (lambda p: p.norm, r"Net\.held holds the parameter net\.0\.weight, in whose place strategy FSDP puts another"),
        (lambda p: [p.data.view(-1)], r"Net\.held\[0\] holds a view of the memory of the parameter net\.0\.weight"),
        (lambda p: {"t": p.t()}, r"Net\.held\['t'\] holds a view of the memory of the parameter net\.0\.weight"),
    ],
    ids=["a method", "a view", "a transposed weight"],
)
def test_what_cannot_follow_is_refused_by_name(hold: Callable[[Any], Any], message: str) -> None:
    refused(Net(), message, lambda module: setattr(module, "held", hold(module.net[0].weight)))


def test_a_buffer_that_is_a_view_of_a_weight_is_refused_by_name() -> None:
    message = r"net\.0\.first holds a view of the memory of the parameter net\.0\.weight"
    refused(Net(), message, lambda module: module.net[0].register_buffer("first", module.net[0].weight.detach()))


def refused(module: Net, message: str, change: Callable[[Net], Any]) -> None:
    """Under fsdp, and before anything of the model is changed."""
    change(module)
    with pytest.raises(ValueError, match=message):
        quiet(strategy="fsdp", devices=1, accelerator="cpu").fit(module, loader(16, 8))
    quiet(strategy="ddp", devices=1, accelerator="cpu").fit(module, loader(16, 8))


def test_a_weight_that_torch_computes_from_another_is_neither_followed_nor_refused() -> None:
    found = []
    for strategy in ("single", "fsdp"):
        torch.manual_seed(0)
        module = Net()
        torch.nn.utils.spectral_norm(module.net[0])
        quiet(strategy=strategy, devices=1, accelerator="cpu", precision="64-true").fit(module, loader(16, 8))
        found.append(weights(module))
    assert distance(*found) < 1e-12


class Normalized(Net):
    """Reads a statistic of BatchNorm by what `__init__` has kept of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.statistics, self.seen = {"mean": self.net[1].running_mean}, []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.statistics["mean"].sum()))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", REPLACING)
def test_a_buffer_follows_or_is_named_where_it_is_not(strategy: str) -> None:
    found = []
    for name, devices in (("single", 1), (strategy, 2)):
        torch.manual_seed(0)
        module = Normalized()
        run = quiet(strategy=name, devices=devices, accelerator="cpu", precision="64-true", seed=0)
        x = torch.randn(4, 8).repeat_interleave(2, 0).repeat(4, 1)  # each rank's batches are those of one process
        same = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8)
        if name == "pipeline":
            with pytest.raises(RuntimeError, match=r"net\.1\.running_mean is on stage \d of the pipeline"):
                run.fit(module, same)
            return
        run.fit(module, same)
        found.append(module.seen[:2])
    assert len(found[0]) == 2 and found[0] == pytest.approx(found[1], rel=1e-8)


def test_objects_that_answer_to_no_name_are_left_alone() -> None:
    class Odd:
        __slots__ = ("__dict__", "never")

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    module = Net()
    module.odd = Odd()
    quiet(strategy="fsdp", devices=1, accelerator="cpu").fit(module, loader(16, 8))


def test_names_do_not_show_keys_that_cannot_be_shown() -> None:
    class Key:
        def __repr__(self) -> str:
            raise RecursionError

    module = Net()
    module.held = {Key(): [module.net[0].weight]}
    quiet(strategy="fsdp", devices=1, accelerator="cpu").fit(module, loader(16, 8))
    assert next(iter(module.held.values()))[0] is module.net[0].weight


def test_what_a_hook_keeps_of_a_weight_does_not_end_the_run() -> None:
    class Keeps(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            self.kept = [p.detach() for p in self.parameters()], self.net[0].weight.norm

    for strategy in REPLACING:
        quiet(strategy=strategy, devices=1, accelerator="cpu").fit(Keeps(), loader(16, 8))


def test_large_and_deep_structures_are_not_searched_to_their_end() -> None:
    module = Net()
    module.held = [[0] * 10, list(range(3_000_000))]
    nested: list[Any] = []
    for _ in range(5_000):
        nested = [nested]
    module.nested = nested
    quiet(strategy="fsdp", devices=1, accelerator="cpu").fit(module, loader(16, 8))
