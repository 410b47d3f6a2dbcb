"""Objects that the slices of 'dp' share: each slice finds in them what the micro-batch found."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.strategies.test_dp_user_code import Plain, both, train
from tests.trainer.toy import data, equal, loader, quiet, weights


class Phase:
    def __init__(self, name: str) -> None:
        self.name = name


WARM, MAIN = Phase("warm"), Phase("main")
WEIGHTS = {WARM: 0.1, MAIN: 1.0}


class Asks(Plain):
    """An object of a global by identity, by `==` and as a key."""

    OFF = Phase("off")

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.mode = WARM, self.OFF

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        known = [self.phase is WARM, self.phase == WARM, self.mode is self.OFF, WARM in {self.phase}]
        return super().training_step(batch, batch_idx) * WEIGHTS[self.phase] * sum(known)


class Teacher(Plain):
    """A module that is not registered, whose weights the step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(8, 3).double().requires_grad_(False)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher[0].weight.mul_(0.5)
        return F.mse_loss(self.net(batch[0]), self.teacher[0](batch[0]))


class Replay(Dataset):
    def __init__(self) -> None:
        self.n = 0


class Stores(Plain):
    """In an object of a class of the user's that a library's is the base of."""

    def __init__(self) -> None:
        super().__init__()
        self.replay = Replay()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.replay.n += 1
        return super().training_step(batch, batch_idx) / self.replay.n


class NamedHooks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.hooks = {"n": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hooks["n"] += 1
        return super().training_step(batch, batch_idx) / self.hooks["n"]


class Recent(OrderedDict[str, float]):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def __setitem__(self, key: str, value: float) -> None:
        self.written.append(key)
        super().__setitem__(key, value)


class Caches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.recent = Recent()
        self.recent["a"], self.recent["b"] = 1.0, 2.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.recent.move_to_end("a" if batch_idx % 2 else "b")
        self.recent["c"] = float(batch_idx)
        first, _ = self.recent.popitem(last=False)
        self.recent[first] = 1.0
        order = sum(i * ord(key) for i, key in enumerate(self.recent))
        return super().training_step(batch, batch_idx) / (len(self.recent.written) + order)


class Watches(Plain):
    """A hook of the backward counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net[1].register_full_backward_hook(self.count)

    def count(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.calls += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) / (1 + self.calls)


@pytest.mark.parametrize("kind", [Asks, Teacher, Stores, NamedHooks, Caches, Watches])
def test_objects_are_those_of_the_program_and_change_once(kind: type[Plain]) -> None:
    both(kind)


FIRST, LAST = data(20)[0][0][0], data(20)[-1][0][0]


class Late(Plain):
    """Sets an attribute where a sample asks for it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch[0][:, 0] == LAST).any():
            self.saw = True
        return super().training_step(batch, batch_idx)


class Early(Late):
    """Deletes one."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if hasattr(self, "waits") and (batch[0][:, 0] == FIRST).any():
            del self.waits
        return Plain.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(("kind", "name"), [(Late, "saw"), (Early, "waits")])
def test_an_attribute_that_a_module_has_after_some_slices_alone_is_refused(kind: type[Plain], name: str) -> None:
    with pytest.raises(RuntimeError, match=f"training_step set or deleted the attribute {name} by the samples of"):
        train(kind, "dp")


class Box:
    pass


class LateInObject(Late):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if (batch[0][:, 0] == LAST).any():
            vars(self.box)["saw"] = True
        return Plain.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        hasattr(self.box, "saw")


def test_an_object_that_has_an_attribute_after_some_slices_alone_refuses_any_use() -> None:
    with pytest.raises(RuntimeError, match=r"box\.saw was set by training_step, which strategy 'dp' runs on slices"):
        train(LateInObject, "dp")


class Draws(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {"noise": np.random.default_rng(0)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.streams["noise"].random()


def test_a_run_repeats_that_draws_from_a_generator_in_a_container() -> None:
    assert equal(weights(train(Draws, "dp")), weights(train(Draws, "dp")))


def later(items: list[Any]) -> Any:
    kept = [item for item in items if item[0][0] < 10]
    return default_collate(kept) if kept else None


class Drops(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(F.dropout(batch[0], 0.5)), batch[1])


def test_a_first_batch_without_samples_leaves_open_whether_a_step_draws() -> None:
    samples = [(x + 100 * (i < 8), y) for i, (x, y) in enumerate(data(32))]
    train(Drops, "dp", DataLoader(samples, batch_size=8, collate_fn=later))


def test_a_step_that_fails_leaves_the_modules_own_parameters() -> None:
    class Fails(Plain):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            type(self).calls += 1
            if self.calls == 2:
                raise ArithmeticError("of the second slice")
            return super().training_step(batch, batch_idx)

    module = Fails()
    before = [*module.parameters()]
    with pytest.raises(ArithmeticError, match="of the second slice"):
        quiet(strategy="dp", devices=2, accelerator="cpu").fit(module, loader(8))
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))


@dataclass(slots=True)
class Count:
    n: int = 0


class CountsInSlots(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count.n += len(batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("error")
def test_a_number_in_slots_that_counts_samples_is_warned_of() -> None:
    with pytest.raises(UserWarning, match=r"add up a part of each batch under DataParallel.*: count\.n \(samples\)"):
        quiet(strategy="dp", devices=2, accelerator="cpu").fit(CountsInSlots(), loader(32))


def test_what_a_backward_sets_by_the_samples_of_a_slice_is_nobodys() -> None:
    class Keeps(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = 0.0
            self.net[1].register_full_backward_hook(self.keep)

        def keep(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
            self.norm = outputs[0].norm()

    module = train(Keeps, "dp")
    with pytest.raises(RuntimeError, match="norm was set by training_step, which strategy 'dp' runs on slices"):
        module.norm + 1  # type: ignore[operator]


def keep_input(layer: nn.Module, args: Any, output: Tensor) -> None:
    layer.saved = args[0].detach()


def scale(layer: nn.Module, inputs: Any, outputs: Any) -> Any:
    return None if inputs[0] is None else (inputs[0] * (1 + layer.saved.sum(1, keepdim=True)),)


class Backwards(Plain):
    """Hooks of a backward read what the forward of the slice has kept."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(keep_input)
                layer.register_full_backward_hook(scale)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_finds_what_its_slice_has_kept() -> None:
    both(Backwards)


class Ends:
    """Ends something as it is deleted, as progress bars do."""

    def __init__(self) -> None:
        self.at = 0.0

    def update(self) -> None:
        self.at = time.monotonic()

    def __del__(self) -> None: ...


class Shows(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.bar = Ends()
        self.words = {f"word {i}": i for i in range(5000)}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.bar.update()
        return super().training_step(batch, batch_idx)


def test_an_object_that_ends_something_is_not_put_back() -> None:
    both(Shows)
