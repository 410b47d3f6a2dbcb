"""Hooks of a batch get what the step has returned on every rank of a pipeline, as on one process."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep import DataModule
from lockstep.callbacks import Callback, LambdaCallback
from lockstep.trainer.kept.outputs import _reads
from tests.strategies.pipeline.classifiers import Base, samples
from tests.trainer.toy import quiet


class Classifying(Base):
    """Sets from outputs what its steps use, and keeps some."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.found = 1.0, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        loss = F.cross_entropy(output, batch[1]) * self.weight
        return {"loss": loss, "classes": output.argmax(1), "n": len(batch[0])}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        return {"output": output, "loss": F.cross_entropy(output, batch[1])}

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weight = 1 / (1 + float(outputs["loss"]))
        self.found.append([outputs["classes"].tolist(), outputs["n"]])


class Keeping(Callback):
    """Keeps outputs, on one of the ranks too."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.outputs: list[Tensor] = []
        self.of_rank_zero: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        trainer.datamodule.seen.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs["output"])
        if trainer.is_global_zero:
            self.of_rank_zero.append(outputs["loss"])

    on_test_batch_end = on_validation_batch_end

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)


class Data(DataModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def train_dataloader(self) -> Any:
        return DataLoader(samples(22), 8)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def run(strategy: str, devices: int, **options: Any) -> list[Any]:
    """What user code holds after a fit, a test and a prediction."""
    module, data, callback = Classifying(), Data(), Keeping()
    options = {"max_epochs": 2, "seed": 0, "precision": "64-true", "split_batches": True} | options
    trainer = quiet(strategy=strategy, devices=devices, callbacks=[callback], **options)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data)
    trainer.predict(module, datamodule=data)
    tensors = torch.cat(callback.outputs), torch.stack(callback.of_rank_zero)
    return [module.weight, module.found, callback.losses, data.seen, *tensors]


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_hooks_keep_the_outputs_of_one_process(options: dict[str, Any]) -> None:
    expected = run("single", 1, **options)
    torch.testing.assert_close(run("pipeline", 2, **options), expected, rtol=0, atol=1e-12)


class Measuring(Callback):
    """Holds a metric, which torchmetrics would gather of all ranks."""

    def __init__(self) -> None:
        metric = pytest.importorskip("torchmetrics").MeanMetric
        self.sums, self.found = {"loss": metric()}, list[float]()
        self.sums["number"] = pytest.importorskip("torchmetrics").SumMetric()

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.sums["loss"].update(outputs["loss"])
        self.sums["number"].update(len(outputs["output"]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.found += [float(metric.compute()) for metric in self.sums.values()]


class Late(Measuring):
    """Makes its metrics as the run starts."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        Measuring.__init__(self)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Measuring, Late])
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_metrics_of_callbacks_count_what_ranks_share_once(strategy: str, kind: type[Measuring]) -> None:
    found = []
    for name, devices in (("single", 1), (strategy, 2)):
        callback = kind()
        quiet(strategy=name, devices=devices, callbacks=[callback], precision="64-true").validate(
            Classifying(), DataLoader(samples(22), 8), verbose=False
        )
        found.append(callback.found)
    assert found[0] == pytest.approx(found[1]) and found[0][1] == 22


class Logging(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("loss", outputs, on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", outputs)


@pytest.mark.ranks
def test_outputs_of_virtual_ranks_are_those_of_one_process() -> None:
    found = []
    for strategy, devices in (("single", 1), ("pipeline", 2)):
        options = {"max_epochs": 1, "seed": 0, "precision": "64-true", "split_batches": True, "virtual_ranks": 2}
        trainer = quiet(strategy=strategy, devices=devices, **options)
        trainer.fit(Logging(), DataLoader(samples(16), 8), DataLoader(samples(16), 8))
        found.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert found[0] == found[1] and {"loss", "val/loss"} <= found[0].keys()


@pytest.mark.ranks
def test_outputs_within_a_window_of_virtual_ranks_are_refused() -> None:
    options = {"virtual_ranks": 2, "accumulate_grad_batches": 2, "split_batches": True, "seed": 0, "max_epochs": 1}
    trainer = quiet(strategy="pipeline", devices=2, precision="64-true", **options)
    with pytest.raises(RuntimeError, match="on_train_batch_end uses its outputs, which with virtual_ranks and accum"):
        trainer.fit(Logging(), DataLoader(samples(16), 8))


class Unsendable(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "items": iter(DataLoader(samples(8)))}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = outputs["loss"]


@pytest.mark.ranks
def test_outputs_that_cannot_be_sent_are_refused() -> None:
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true")
    with pytest.raises(TypeError, match="hooks of a batch use outputs, but what a step of the pipeline returned"):
        trainer.fit(Unsendable(), DataLoader(samples(8), 4))


class Noting(Callback):
    num_calls = 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.num_calls += 1


@pytest.mark.ranks
def test_what_a_callback_changes_before_backward_is_refused() -> None:
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true", callbacks=[Noting()])
    with pytest.raises(RuntimeError, match="on_before_backward changes Noting.num_calls, but a pipeline calls it"):
        trainer.fit(Base(), DataLoader(samples(8), 4))


class Hooks(Callback):
    def unused(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch

    def used(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = [outputs for _ in range(2)]

    def first(self, trainer: Any, pl_module: Any) -> None: ...

    def any_number(self, *args: Any) -> None: ...

    def by_name(self, trainer: Any, pl_module: Any, outputs: Any) -> None:
        self.last = locals()


def test_code_of_hooks_shows_whether_they_use_outputs() -> None:
    hooks = Hooks()
    uses = {name: _reads(getattr(hooks, name), 2) for name in ("unused", "used", "first", "any_number", "by_name")}
    assert uses == {"unused": False, "used": True, "first": False, "any_number": True, "by_name": True}
    callback = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: print(outputs))
    assert _reads(callback.on_train_batch_end, 2) and _reads(operator.itemgetter(0), 2)
