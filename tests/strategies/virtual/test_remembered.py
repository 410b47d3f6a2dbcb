"""What steps keep outside of attributes, and what an evaluation keeps: shares of a rank would have it in common."""

from __future__ import annotations

import array
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import DataModule
from lockstep.callbacks import Callback
from lockstep.strategies import LocalSGD
from tests.trainer.toy import Net, equal, loader, quiet, weights

STATE = {"n": 0}
NAMES = SimpleNamespace(n=0)
NUMBER = 0
COUNT = itertools.count()
TENSOR = torch.zeros(2)
SEEN: list[int] = []
BYTES = bytearray()


class Common:
    pass


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.kept = 0, {"n": 0}

    def train_dataloader(self) -> Any:
        return loader(32)


def in_a_global(module: Any) -> None:
    STATE["n"] += 1


def in_an_object(module: Any) -> None:
    NAMES.n += 1


def in_a_class(module: Any) -> None:
    Common.n = getattr(Common, "n", 0) + 1  # type: ignore[attr-defined]


def bind_again(module: Any) -> None:
    global NUMBER
    NUMBER += 1


def read(module: Any) -> None:
    next(COUNT)


def in_a_tensor(module: Any) -> None:
    TENSOR.add_(1)


def in_a_default(module: Any, kept: list[int] = [0]) -> None:  # noqa: B006
    kept[0] += 1


def of_itself(module: Any) -> None:
    of_itself.n = getattr(of_itself, "n", 0) + 1  # type: ignore[attr-defined]


def of_the_data(module: Any) -> None:
    module.trainer.datamodule.count += 1


def within_the_data(module: Any) -> None:
    module.trainer.datamodule.kept["n"] += 1


def append(module: Any) -> None:
    SEEN.append(len(SEEN))


def of_bytes(module: Any) -> None:
    BYTES.append(1)


def in_an_array(module: Any) -> None:
    module.array.append(1.0)


def of_a_scheduler(module: Any) -> None:
    module.lr_schedulers().mine = getattr(module.lr_schedulers(), "mine", 0) + 1


def step_a_scheduler(module: Any) -> None:
    if module.global_step:
        module.lr_schedulers().step()


class OfGlobals(Net):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.act, self.array = act, array.array("f")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        acts = in_a_global, in_an_object, in_a_class, bind_again, read, in_a_tensor, in_a_default, of_itself
        others = of_the_data, within_the_data, append, of_bytes, in_an_array, of_a_scheduler, step_a_scheduler
        for act in (*acts, *others):
            if act.__name__ == self.act:
                act(self)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        ("in_a_global", r"test_remembered\.STATE"),
        ("in_an_object", r"test_remembered\.NAMES"),
        ("in_a_class", r"Common\.n"),
        ("bind_again", r"test_remembered\.NUMBER"),
        ("read", r"test_remembered\.COUNT"),
        ("in_a_tensor", r"test_remembered\.TENSOR"),
        ("in_a_default", "default arguments of in_a_default"),
        ("of_itself", "attributes of of_itself"),
        ("of_the_data", r"Data\.count"),
        ("within_the_data", r"Data\.kept"),
        ("append", r"test_remembered\.SEEN"),
        ("of_bytes", r"test_remembered\.BYTES"),
        ("in_an_array", "array"),
        ("of_a_scheduler", r"ExponentialLR\.mine"),
        ("step_a_scheduler", r"ExponentialLR\._last_lr, .*ExponentialLR\.last_epoch"),
    ],
)
def test_what_a_step_changes_outside_of_the_module_is_refused(act: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"training_step changed \S*{name}, which would depend on how many shares"):
        quiet(strategy="single", virtual_ranks=2).fit(OfGlobals(act), datamodule=Data())


class Collected(Net):
    """Notes in a list what an epoch or the program reads, in steps or at the end of batches."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.outs = where, [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training_step":
            self.outs[0] += 1.0
            self.outs.append(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.where == "on_train_batch_end":
            self.outs.append(1.0)


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.ranks)], ids=["one", "two"]
)
def test_a_list_to_which_shares_append_is_refused(where: str, strategy: str, devices: int) -> None:
    """Its length would tell how many shares a rank runs, to hooks and to the program after the run."""
    with pytest.raises(RuntimeError, match=f"{where} changed outs, (?!outs)"):
        quiet(strategy=strategy, devices=devices, virtual_ranks=4).fit(Collected(where), loader(32, 4))


def test_a_variable_that_a_step_closes_over_is_refused() -> None:
    n = 0

    class Counting(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            nonlocal n
            n += 1
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="training_step changed n in the closure of .*Counting.training_step"):
        quiet(strategy="single", virtual_ranks=2).fit(Counting(), loader(32))


class Evaluated(Net):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.outs, self.total, self.example = habit, [torch.zeros(())], 0.0, None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.habit == "outs":
            self.outs.append(batch[0].sum())
        elif self.habit == "total":
            self.total += float(batch[0].sum())
        elif self.habit == "example" and batch_idx == 0:
            self.example = batch[0]
        self.log("mean", batch[0].mean())
        if self.habit == "cleared":
            self.outs.append(batch[0].sum())

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.habit == "cleared":
            self.outs.pop()


@pytest.mark.parametrize("habit", ["outs", "total", "example"])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.ranks)], ids=["one", "two"]
)
def test_what_an_evaluation_keeps_is_refused_on_any_number_of_ranks(habit: str, strategy: str, devices: int) -> None:
    trainer = quiet(strategy=strategy, devices=devices, virtual_ranks=2)
    with pytest.raises(RuntimeError, match=f"changed {habit} in an evaluation, so that what reads it would depend"):
        trainer.fit(Evaluated(habit), loader(32), loader(32))


@pytest.mark.parametrize("habit", ["", "cleared"])
def test_what_is_gone_after_the_batch_is_not_refused(habit: str) -> None:
    trainer = quiet(strategy="single", virtual_ranks=2, max_epochs=1)
    trainer.fit(Evaluated(habit), loader(32), loader(32))
    assert "mean" in trainer.callback_metrics


class Counter(Callback):
    def __init__(self, of: str) -> None:
        self.of, self.number = of, 0.0

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.number += 1 if self.of == "batches" else float(batch[0].sum())

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.log("number", self.number)


def counted(strategy: str, devices: int, of: str) -> float:
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "virtual_ranks": 2}
    trainer = quiet(**options, callbacks=[Counter(of)])
    return trainer.validate(Evaluated(""), loader(32))[0]["number"]


@pytest.mark.ranks
def test_a_callback_counts_batches_of_an_evaluation_alike_on_any_number_of_ranks() -> None:
    assert counted("single", 1, "batches") == counted("ddp", 2, "batches")


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2)])
def test_a_callback_that_adds_up_what_it_sees_of_an_evaluation_is_refused(strategy: str, devices: int) -> None:
    with pytest.raises(RuntimeError, match=r"changed Counter\.number"):
        counted(strategy, devices, "samples")


class Bank(Evaluated):
    """Holds a large tensor without a version, made as the evaluation begins."""

    def on_validation_start(self) -> None:
        with torch.inference_mode():
            self.bank = torch.zeros(2**21)


def test_an_evaluation_may_hold_inference_tensors() -> None:
    found = quiet(virtual_ranks=2).validate(Bank(""), loader(32))[0]
    assert found == quiet(virtual_ranks=2).validate(Evaluated(""), loader(32))[0]


class Collects(Evaluated):
    def on_validation_epoch_end(self) -> None:
        self.log("total", torch.stack(self.outs).sum())
        self.outs.clear()


def test_learners_of_a_rank_may_collect_what_an_evaluation_finds() -> None:
    trainer = quiet(strategy=LocalSGD(learners=2, period=2), accelerator="cpu", max_epochs=1)
    trainer.fit(Collects("outs"), loader(32), loader(32))
    total = sum(float(batch[0].sum()) for batch in loader(32))
    assert float(trainer.callback_metrics["total"]) == pytest.approx(total, rel=1e-5)


class KeepsByRank(Callback):
    def __init__(self) -> None:
        self.number = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.number += 1 + trainer.global_rank

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        raise AssertionError("it would read another number on each rank")


@pytest.mark.ranks
def test_a_number_of_a_callback_that_differs_between_ranks_is_refused_before_an_epoch_ends() -> None:
    trainer = quiet(strategy="ddp", devices=2, virtual_ranks=4, callbacks=[KeepsByRank()])
    with pytest.raises(RuntimeError, match=r"changed KeepsByRank\.number by another number in one share"):
        trainer.fit(Net(), loader(32, 4))


class Grows(Net):
    """Keeps what it sees in a buffer that another share makes of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first = batch[0][:, 0]
        self.seen = torch.cat([self.seen, first[first > 0]])
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.seen.mean().nan_to_num())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ({"strategy": "ddp"}, {"virtual_ranks": 2}),
        ({"strategy": "fsdp"}, {"virtual_ranks": 2}),
        ({"strategy": LocalSGD(learners=2, period=2)}, {"strategy": LocalSGD(learners=2, period=2)}),
    ],
    ids=["ddp", "fsdp", "local_sgd"],
)
def test_a_buffer_whose_length_depends_on_samples_follows_the_first_share(
    ranks: dict[str, Any], options: dict[str, Any]
) -> None:
    found = []
    for layout in ({"devices": 1, **options}, {"devices": 2, **options, **ranks}):
        torch.manual_seed(0)
        module = Grows()
        quiet(split_batches=True, **layout).fit(module, loader(24, 8))
        found.append((module.seen, *weights(module)))
    assert equal(*map(list, found)) and len(found[0][0])
