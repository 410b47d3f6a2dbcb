"""What layers and hooks on them keep in an evaluation is on every rank what one process has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.callbacks import Callback
from tests.strategies.pipeline.classifiers import Base, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks

KEPT: list[float] = []


class Classifying(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


class Reading(Callback):
    """A hook of the last layer keeps something in each validation step, which rank 0 reads after it."""

    def __init__(self, how: str) -> None:
        self.how, self.rows = how, list[Any]()
        self.mean, self.text, self.shape, self.count, self.first = 0.0, "", (), 0, 0
        self.means, self.layers, self.all = dict[str, Any](), dict[nn.Module, float](), list[Tensor]()
        self.output: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[4].register_forward_hook(self.note)
        pl_module.net[0].register_forward_hook(self.note_first)

    def note_first(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if not layer.training:
            self.first += 1

    def note(self, layer: Any, args: Any, output: Tensor) -> None:
        if layer.training:
            return
        if self.how == "numbers":
            self.mean, self.text, self.shape = float(output.mean()), f"{len(output)} rows", (*output.shape,)
            self.count += 1
        elif self.how == "items":
            self.means["mean"], self.layers[layer] = output.mean(), float(output.mean())
        elif self.how == "lists":
            self.all.append(output)
            KEPT.append(float(output.mean()))
        else:
            layer.mean, self.output = float(output.mean()), output

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **options: Any) -> None:
        layer = pl_module.net[4]
        if trainer.is_global_zero:
            found = {
                "numbers": lambda: [self.mean, self.text, self.shape, self.count, self.first],
                "items": lambda: [float(self.means["mean"]), self.layers[layer]],
                "lists": lambda: [len(self.all), *(float(each.mean()) for each in self.all), *KEPT],
                "layers": lambda: [layer.mean, float(self.output.mean())],
            }
            self.rows.append(found[self.how]())
        self.all.clear()


class Measured(nn.Linear):
    """Keeps what it measures in an evaluation."""

    def __init__(self) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.mean = x.detach().mean()
        return super().forward(x)


class ReadingLayers(Classifying):
    """Rank 0 reads what a layer of the last stage has kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net[2], self.rows = Measured(), list[float]()

    def on_validation_batch_end(self, *args: Any, **options: Any) -> None:
        if self.trainer.is_global_zero:
            self.rows.append(float(self.net[2].mean))


class MeasuredLate(Measured):
    """Measures the last step of an evaluation, which has fewer samples."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == 3:
            self.mean = x.detach().mean()
        return nn.Linear.forward(self, x)


class ReadingLate(ReadingLayers):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = MeasuredLate()


class Large(nn.Linear):
    """Keeps much of what it has read in an evaluation."""

    def __init__(self) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.kept = torch.zeros(300_000, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.keep(x.detach().mean())
        return super().forward(x)

    def keep(self, mean: Tensor) -> None:
        self.kept = mean.expand(300_000).clone()


class LargeMean(Large):
    def keep(self, mean: Tensor) -> None:
        self.kept = 0.9 * self.kept + mean


class ReadingLarge(ReadingLayers):
    def __init__(self, kind: type[Large]) -> None:
        super().__init__()
        self.net[2] = kind()

    def on_validation_batch_end(self, *args: Any, **options: Any) -> None:
        if self.trainer.is_global_zero:
            self.rows.append(float(self.net[2].kept.sum()))


def rows(strategy: str, devices: int, make: Callable[[], tuple[Classifying, list[Any]]]) -> list[Any]:
    KEPT.clear()
    module, callbacks = make()
    options = {"strategy": strategy, "devices": devices, "precision": "64-true", "seed": 0, "split_batches": True}
    data = DataLoader(samples(22), 8)
    quiet(max_epochs=2, callbacks=callbacks, **options).fit(module, data, data)
    return (callbacks[0] if callbacks else module).rows


def same(make: Callable[[], tuple[Classifying, list[Any]]]) -> None:
    one, two = rows("single", 1, make), rows("pipeline", 2, make)
    assert len(one) == len(two) == 6
    assert two == [pytest.approx(each, abs=1e-12) if isinstance(each, float) else approximately(each) for each in one]


def approximately(row: list[Any]) -> list[Any]:
    return [pytest.approx(each, abs=1e-12) if isinstance(each, float) else each for each in row]


@pytest.mark.parametrize("how", ["numbers", "items", "lists", "layers"])
def test_rank_0_reads_after_each_batch_what_hooks_of_other_ranks_have_kept(how: str) -> None:
    same(lambda: (Classifying(), [Reading(how)]))


def test_rank_0_reads_after_each_batch_what_a_layer_of_another_rank_has_kept() -> None:
    same(lambda: (ReadingLayers(), []))


def test_rank_0_reads_a_large_running_mean_of_another_rank() -> None:
    same(lambda: (ReadingLarge(LargeMean), []))


def test_what_is_large_and_set_in_each_evaluation_step_is_not_what_it_was_before() -> None:
    with pytest.raises(RuntimeError, match=r"a layer or a hook of a layer has set net\.2\.kept"):
        rows("pipeline", 2, lambda: (ReadingLarge(Large), []))


def test_rank_0_reads_what_a_layer_of_another_rank_keeps_in_one_late_step() -> None:
    def late(strategy: str, devices: int) -> list[Any]:
        module = ReadingLate()
        options = {"strategy": strategy, "devices": devices, "precision": "64-true", "seed": 0, "split_batches": True}
        quiet(**options).fit(module, DataLoader(samples(8), 8), DataLoader(samples(9 * 4 + 3), 4))
        return module.rows

    assert late("pipeline", 2) == approximately(late("single", 1))


class Collecting(Callback):
    """A hook of the last layer keeps something for each sample, in the last epoch only, after its second batch."""

    def __init__(self) -> None:
        self.means, self.by_number, self.counts = list[float](), dict[int, float](), list[Any]()
        self.is_on = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[4].register_forward_hook(self.note)

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *args: Any) -> None:
        self.is_on = trainer.current_epoch == 1 and batch_idx > 1

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if self.is_on and not layer.training:
            self.means += output.detach().mean(1).tolist()
            self.by_number |= {len(self.by_number) + i: 1.0 for i in range(len(output))}

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **options: Any) -> None:
        if len(self.means) == 1100:
            del self.means[1050:]
        self.counts.append([len(self.means), len(self.by_number), sum(self.means)])


def test_more_than_1000_items_that_hooks_keep_late_are_on_every_rank() -> None:
    def fit(strategy: str, devices: int) -> list[Any]:
        collecting, options = Collecting(), {"precision": "64-true", "seed": 0, "split_batches": True}
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=2, callbacks=[collecting], **options)
        trainer.fit(Classifying(), DataLoader(samples(8 * 6), 8), DataLoader(samples(1300), 100))
        return collecting.counts

    one, two = fit("single", 1), fit("pipeline", 2)
    assert one[-1][:2] == [1050, 1100]
    assert two == [approximately(row) for row in one]


class Adding(Callback):
    """Hooks on layers of both ranks add to one number."""

    def __init__(self) -> None:
        self.total = 0.0

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        for i in (0, 4):
            pl_module.net[i].register_forward_hook(self.note)

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.total += float(output.mean())


def test_a_sum_to_which_hooks_on_two_ranks_add_in_an_evaluation_is_refused() -> None:
    class Testing(Classifying):
        test_step = Classifying.validation_step

    trainer = quiet(strategy="pipeline", devices=2, precision="64-true", callbacks=[Adding()])
    with pytest.raises(RuntimeError, match=r"a hook of a layer has set Adding\.total"):
        trainer.test(Testing(), DataLoader(samples(24), 8), verbose=False)


class CountingLastLayers(Callback):
    """Hooks on layers of the second and third rank count in one number."""

    def __init__(self) -> None:
        self.count = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for i in (2, 4):
            pl_module.net[i].register_forward_hook(self.note)

    def note(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if not layer.training:
            self.count += 1

    def on_validation_batch_end(self, trainer: Any, *args: Any, **options: Any) -> None:
        if trainer.is_global_zero:
            assert self.count >= 0


@pytest.mark.slow
def test_a_count_of_hooks_on_two_other_ranks_refuses_any_use_on_rank_0() -> None:
    trainer = quiet(strategy="pipeline", devices=3, precision="64-true", max_epochs=1, callbacks=[CountingLastLayers()])
    with pytest.raises(RuntimeError, match=r"a hook of a layer has set CountingLastLayers\.count"):
        trainer.fit(Classifying(), DataLoader(samples(24), 8), DataLoader(samples(8), 8))
