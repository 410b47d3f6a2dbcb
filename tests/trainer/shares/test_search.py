"""What a search for user state has read tells the next one whether it would find the same."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.callbacks import Callback
from lockstep.trainer.metrics.model_parts import Parts
from lockstep.trainer.shares.search import find
from tests.trainer.toy import Net, loader, quiet

COMMON = {"n": 0}


class Owner:
    def __init__(self) -> None:
        self.number = 0


class Kept(Net):
    """Holds something of every kind."""

    shared = [0]

    def __init__(self) -> None:
        super().__init__()
        self.number, self.flag, self.nothing = 1000, False, None
        self.items, self.nested, self.ring = [1, [2]], {"a": {"b": 1}}, deque([1, 2], maxlen=2)
        self.many, self.seen = [torch.zeros(1) for _ in range(100)], {1}
        self.array, self.generator, self.python = np.zeros(4), torch.Generator(), random.Random(0)
        self.owner, self.iterator, self.tensor = Owner(), iter(range(9)), [torch.zeros(3)]
        self.function = self._counter()
        self.handle = self.net[0].register_forward_hook(lambda *_: None)

    def _counter(self) -> Callable[[], None]:
        calls = [0]

        def count() -> None:
            calls[0] += 1

        return count

    def uses(self) -> int:
        return COMMON["n"]


def rename(module: Any) -> None:
    vars(module)["other"] = vars(module).pop("last")


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda m: setattr(m, "number", m.number + 1),
    "mode": lambda m: setattr(m, "flag", True),
    "new attribute": lambda m: setattr(m, "last", 5),
    "another name": rename,
    "appended": lambda m: m.items.append(3),
    "inner list": lambda m: m.items[1].append(3),
    "inner dict": lambda m: m.nested["a"].update(b=2),
    "ring": lambda m: m.ring.append(3),
    "set": lambda m: m.seen.add(2),
    "one of many tensors": lambda m: m.many[90].add_(1),
    "array": lambda m: m.array.__setitem__(0, 1.0),
    "tensor by numpy": lambda m: m.tensor[0].numpy().__setitem__(0, 1.0),
    "generator": lambda m: torch.rand(1, generator=m.generator),
    "Python's generator": lambda m: m.python.random(),
    "object": lambda m: setattr(m.owner, "number", 1),
    "iterator": lambda m: next(m.iterator),
    "closure": lambda m: m.function(),
    "class": lambda m: m.shared.append(1),
    "attribute of the class": lambda m: setattr(type(m), "added", 1),
    "global": lambda m: COMMON.update(n=COMMON["n"] + 1),
    "mode of a layer": lambda m: m.net[2].eval(),
    "number of a layer": lambda m: setattr(m.net[2], "p", 0.5),
    "hook": lambda m: m.net[1].register_forward_hook(lambda *_: None),
    "hook removed": lambda m: m.handle.remove(),
    "hook of a parameter": lambda m: m.net[0].weight.register_hook(lambda g: None),
    "other hooks": lambda m: setattr(m.net[0], "_forward_pre_hooks", OrderedDict({1: lambda *_: None})),
    "layer": lambda m: m.net.append(nn.Identity()),
}


class Searching(Callback):
    """Searches, changes something and asks what it has read."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[bool, bool]] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        run, parts = trainer._run, Parts(module)
        for name, change in CHANGES.items():
            found = find(run, parts.now(), set())
            before = found.holds(parts.now(), set())
            change(module)
            self.answers[name] = before, found.holds(parts.now(), set())
        module.items.append(nn.BatchNorm1d(2))
        self.answers["module in a list"] = False, find(run, parts.now(), set()).holds(parts.now(), set())


@pytest.fixture
def restored() -> Any:
    yield
    COMMON["n"] = 0
    Kept.shared[:] = [0]
    if hasattr(Kept, "added"):
        del Kept.added


def test_a_change_is_seen_by_what_a_search_has_read(restored: None) -> None:
    searching = Searching()
    quiet(callbacks=searching, max_steps=1, accelerator="cpu", devices=1).fit(Kept(), loader(16))
    assert searching.answers.pop("module in a list") == (False, False)  # its state is read each time
    assert searching.answers == dict.fromkeys(CHANGES, (True, False))
