"""What hooks of layers keep in variables and callbacks is of one rank and a part of a batch: it refuses any use, also
in the program after the run."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.callbacks import Callback
from tests.strategies.pipeline.classifiers import Base, exact, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Monitor(Callback):
    """Notes what layers return, and may read it after each step."""

    def __init__(self, how: str, reads: bool = False) -> None:
        self.how, self.reads, self.read = how, reads, list[float]()
        self.means, self.last, self.all = dict[str, Any](), 0.0, list[Tensor]()
        self.by_layer, self.layers = dict[nn.Module, float](), list[nn.Module]()
        self.handles: list[Any] = []

    def read_last(self) -> float:
        """What the hook of the last layer has kept."""
        if self.how == "modules":
            return float(self.by_layer[self.layers[-1]])
        return float(self.last if self.how == "attribute" else self.means["4"])

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for name, layer in pl_module.net.named_children():
            if isinstance(layer, nn.Linear):
                self.layers.append(layer)
                self.handles.append(layer.register_forward_hook(functools.partial(self.note, name)))

    on_test_start = on_fit_start

    def note(self, name: str, layer: nn.Module, args: Any, output: Tensor) -> None:
        if self.how == "tensors":
            self.means[name] = output.detach().mean()
        elif self.how == "numbers":
            self.means[name] = float(output.detach().mean())
        elif self.how == "modules":
            self.by_layer[layer] = float(output.detach().mean())
        elif self.how == "attribute":
            self.last = float(output.detach().mean())
        else:
            self.all.append(output.detach())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads:
            self.read += [float(self.last), *map(float, (*self.means.values(), *self.by_layer.values()))]

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    on_test_end = on_fit_end


class Classifying(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    test_step = validation_step


MESSAGE = "a hook of a layer has set Monitor.{}, but in a pipeline only the rank that runs the layer calls it"


@pytest.mark.parametrize("how", ["tensors", "numbers", "attribute", "modules"])
def test_what_hooks_of_layers_measure_refuses_any_use_after_a_run(how: str) -> None:
    callback, data = Monitor(how), DataLoader(samples(24), 8)
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true", callbacks=[callback])
    trainer.fit(Classifying(), data)
    name = {"attribute": "last", "modules": r"by_layer\[net\.4\]"}.get(how, r"means\['4'\]")
    with pytest.raises(RuntimeError, match=MESSAGE.format(name)):
        callback.read_last()


@pytest.mark.parametrize("stage", ["validate in fit", "test"])
@pytest.mark.parametrize("how", ["tensors", "numbers", "modules"])
def test_what_hooks_of_layers_measure_in_an_evaluation_is_that_of_one_process(how: str, stage: str) -> None:
    found = []
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        callback, module, data = Monitor(how), Classifying(), DataLoader(samples(24), 8)
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=1, precision="64-true", callbacks=[callback])
        if stage == "test":
            trainer.test(module, data, verbose=False)
        else:
            trainer.fit(module, data, data)
        found.append(callback.read_last())
    assert found[1] == pytest.approx(found[0], abs=1e-12)


@pytest.mark.parametrize("how", ["tensors", "numbers", "attribute", "modules"])
def test_what_hooks_of_layers_measure_refuses_any_use_in_a_run(how: str) -> None:
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true", callbacks=[Monitor(how, True)])
    with pytest.raises(RuntimeError, match=MESSAGE.format("(last|means.*|by_layer.*)")):
        trainer.fit(Classifying(), DataLoader(samples(24), 8))


def test_what_hooks_on_two_ranks_set_in_an_evaluation_refuses_any_use() -> None:
    callback = Monitor("attribute")
    trainer = quiet(strategy="pipeline", devices=2, precision="64-true", callbacks=[callback])
    trainer.test(Classifying(), DataLoader(samples(24), 8), verbose=False)
    with pytest.raises(RuntimeError, match=MESSAGE.format("last")):
        callback.read_last()


def test_what_hooks_of_layers_collect_in_an_evaluation_is_refused() -> None:
    trainer = quiet(strategy="pipeline", devices=2, precision="64-true", callbacks=[Monitor("list")])
    with pytest.raises(RuntimeError, match=MESSAGE.format("all")):
        trainer.test(Classifying(), DataLoader(samples(24), 8), verbose=False)


class Enclosing(Base):
    """Hooks of the last stage's layers hand on what its step uses, keep a mask, and note times."""

    def __init__(self, how: str) -> None:
        super().__init__()
        kept: dict[str, Any] = {}
        self.features = lambda: kept["features"]

        def keep(held: dict[str, Any], layer: nn.Module, args: Any, output: Tensor) -> Any:
            if "mask" not in held:
                held["mask"] = torch.full((16,), 0.5, dtype=torch.float64)
            held["seconds"] = time.perf_counter() - held["start"]
            held["features"] = output
            return output * held["mask"]

        self.net[2].register_forward_pre_hook(lambda *_: kept.update(start=time.perf_counter()))
        self.net[2].register_forward_hook(
            functools.partial(keep, kept) if how == "partial" else lambda *args: keep(kept, *args)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return loss + 0.1 * self.features().square().mean()

    validation_step = training_step


@pytest.mark.parametrize("how", ["partial", "closure"])
def test_what_hooks_hand_on_within_a_stage_is_that_of_one_process(how: str) -> None:
    exact(lambda: Enclosing(how), {"pipeline": 2}, max_epochs=1)
