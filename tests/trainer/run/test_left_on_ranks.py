"""What user code keeps outside of attributes of the module is in the program after a run on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.callbacks import Callback, LambdaCallback
from tests.trainer.toy import Net, loader, quiet

pytestmark = pytest.mark.ranks

RANKS = {"strategy": "ddp", "devices": 2}
epochs: list[int] = []
counts = {"by": {"epoch": 0}}
steps = 0


class Meter:
    def __init__(self) -> None:
        self.sum, self.values = 0, list[int]()

    def add(self, value: int) -> None:
        self.sum += value
        self.values.append(value)


class Found:
    def __init__(self, meter: Meter) -> None:
        self.scale, self.meter = 0.5, meter


meter = Meter()


class Keeps(Net):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.meter = self.same = Meter()
        self.found: Any = None

    def on_train_start(self) -> None:
        self.trainer.my_count, self.trainer.history = 0, []  # type: ignore[union-attr]
        self.found = Found(self.meter)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, seen: list[int] = []) -> None:  # noqa: B006
        global steps
        steps += 1
        Keeps.calls += 1
        seen.append(batch_idx)
        self.meter.add(batch_idx)
        meter.add(batch_idx)
        self.trainer.my_count += 1  # type: ignore[union-attr]

    def on_train_epoch_end(self) -> None:
        self.trainer.history.append(self.current_epoch)  # type: ignore[union-attr]
        self.found.scale /= 2


class Calls(Callback):
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.function()


def note_epoch(trainer: Any, module: Any) -> None:
    epochs.append(trainer.current_epoch)
    counts["by"]["epoch"] += 1


def kept(options: dict[str, Any]) -> dict[str, Any]:
    global steps
    seen: Any = Keeps.on_train_batch_end.__defaults__
    steps = Keeps.calls = 0
    by = counts["by"]
    for held in (epochs, seen[0], meter.values):
        held.clear()
    by["epoch"] = meter.sum = number = 0
    losses: list[int] = []
    made: list[Any] = []

    class Local:
        number = 0

    def count() -> None:
        nonlocal number
        number += 1

    def show() -> None:
        losses.append(number)
        made.append(Local())
        made[-1].number = number

    module = Keeps()
    trainer = quiet(
        max_epochs=2,
        callbacks=[LambdaCallback(on_train_epoch_end=note_epoch), Calls(count), Calls(show)],
        split_batches=True,
        seed=0,
        **options,
    )
    trainer.before = [1]
    trainer.fit(module, loader(32, 8))
    assert module.same is module.meter is module.found.meter and type(module.found) is Found
    return {
        "trainer": (trainer.my_count, trainer.history, trainer.before),
        "globals": ([*epochs], steps, counts["by"] is by, {**by}, meter.sum, [*meter.values]),
        "closures": (number, losses, [(type(each) is Local, each.number) for each in made]),
        "class": (Keeps.calls, [*seen[0]]),
        "objects": (module.meter.sum, module.meter.values, module.found.scale),
    }


def test_what_functions_and_objects_have_collected_comes_back() -> None:
    assert kept(RANKS) == kept({})


class RegistersHook(Net):
    removes = False

    def setup(self, stage: str) -> None:
        self.net[3].register_forward_hook(lambda layer, given, made: None)  # each run again

    def on_fit_start(self) -> None:
        self.handle = self.net[1].register_forward_hook(lambda layer, given, made: made * 0.5)

    def on_fit_end(self) -> None:
        if self.removes:
            self.handle.remove()


def test_hooks_that_stay_on_ranks_are_refused_in_the_next_run() -> None:
    module = RegistersHook()
    quiet(**RANKS).fit(module, loader(16, 4))
    with pytest.raises(RuntimeError, match=r"registered hooks on net\.1 on its ranks, .* in __init__, configure_model"):
        quiet().validate(module, loader(16, 4))
    with pytest.raises(RuntimeError, match=r"registered hooks on net\.1"):
        quiet(**RANKS).fit(module, loader(16, 4))
    module.net[1].register_forward_hook(lambda layer, given, made: made * 0.5)
    quiet().validate(module, loader(16, 4))


def test_hooks_that_are_removed_as_a_run_ends_are_not() -> None:
    module = RegistersHook()
    module.removes = True
    trainer = quiet(**RANKS)
    trainer.fit(module, loader(16, 4))
    trainer.validate(module, loader(16, 4))


class HoldsItsOptimizer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held = {"sgd": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.held["sgd"]


def test_an_optimizer_that_ranks_have_stepped_is_refused_in_the_next_fit() -> None:
    module = HoldsItsOptimizer()
    trainer = quiet(**RANKS)
    trainer.fit(module, loader(16, 4))
    trainer.validate(module, loader(16, 4))
    for options in (RANKS, {}):
        with pytest.raises(
            RuntimeError, match=r"stepped held\['sgd'\] of HoldsItsOptimizer on its ranks, .* ckpt_path"
        ):
            quiet(**options).fit(module, loader(16, 4))
    module.held["sgd"] = torch.optim.SGD(module.parameters(), lr=0.1)
    quiet().fit(module, loader(16, 4))


def test_one_that_remembers_nothing_is_not() -> None:
    module = HoldsItsOptimizer()
    module.held["sgd"].param_groups[0]["momentum"] = 0.0
    quiet(**RANKS).fit(module, loader(16, 4))
    quiet().fit(module, loader(16, 4))


class MakesItsOptimizer(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.made = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return self.made


def test_one_that_each_fit_makes_is_not_nor_one_that_a_validation_was_given() -> None:
    module, other = MakesItsOptimizer(), HoldsItsOptimizer()
    for options in ({}, RANKS, {}):
        quiet(**options).fit(module, loader(16, 4))
    quiet().fit(other, loader(16, 4))
    quiet(**RANKS).validate(other, loader(16, 4))
    quiet().fit(other, loader(16, 4))


class CountsInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.my_count = getattr(self.trainer, "my_count", 0) + 1  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx) * self.trainer.my_count  # type: ignore[union-attr]


@pytest.mark.parametrize("strategy", ["dp", "pipeline"])
def test_a_step_that_runs_in_parts_may_not_count_on_the_trainer(strategy: str) -> None:
    trainer = quiet(strategy=strategy, devices=2)
    with pytest.raises(RuntimeError, match=r"training_step changed trainer\.my_count, .* for parts of a batch"):
        trainer.fit(CountsInStep(), loader(16, 8))


class SendsLess(Callback):
    """Keeps what it cannot send, with a function that others have too."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.first, self.meter = function, Meter()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        vars(self).setdefault("sums", []).append(trainer.current_epoch)


def test_a_callback_that_sends_less_than_it_holds_ends_no_run() -> None:
    number = 0

    def count() -> None:
        nonlocal number
        number += 1

    callback = SendsLess(count)
    quiet(callbacks=[callback, Calls(count)], **RANKS).fit(Net(), loader(16, 4))
    assert vars(callback)["sums"] == [0] and callback.meter.sum == 0
