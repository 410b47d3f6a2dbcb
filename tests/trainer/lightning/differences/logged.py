"""What is logged."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import torchmetrics
from torch import Tensor
from torch.nn import functional as F

from tests.trainer.lightning.differences.probe import QUIET, differs, fit, part, rows, seen
from tests.trainer.lightning.projects import classifier, loader


@differs("the step of loggers", ["0", "1", "2"], ["1", "2", "3"])
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), loader(12), logger=part(pl, "loggers").CSVLogger(folder))
    return sorted({row["step"] for row in rows(folder) if row["train_loss_step"]})


@differs("a logger that two Trainers are given", ["version_0"], ["version_0", "version_1"])
def _(pl: Any, folder: Path) -> Any:
    logger = part(pl, "loggers").CSVLogger(folder, "name")
    for _ in range(2):
        fit(pl, classifier(pl)(), logger=logger)
    return sorted(path.name for path in (folder / "name").iterdir())


@differs(
    "what a TensorBoardLogger, and which hyperparameters a CSVLogger, is given before a run", [True] * 2, [False] * 2
)
def _(pl: Any, folder: Path) -> Any:
    for logger in ("TensorBoardLogger", "CSVLogger"):
        getattr(part(pl, "loggers"), logger)(folder / logger).log_hyperparams({"a": 1})
    return [any(folder.rglob(name)) for name in ("events.out.*", "hparams.yaml")]


@differs("a CSVLogger in a folder that has a `metrics.csv`", ["2.0"], ["1.0", "2.0"])
def _(pl: Any, folder: Path) -> Any:
    for value in (1.0, 2.0):
        logger = part(pl, "loggers").CSVLogger(folder, version=0)
        logger.log_metrics({"x": value}, 0)
        logger.save()
    return [row["x"] for row in rows(folder)]


@differs("`save_dir` of a logger", None, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: part(pl, "loggers").CSVLogger("memory://runs") and None)


@differs("values of steps", 1, 2)
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), loader(12), logger=part(pl, "loggers").CSVLogger(folder), log_every_n_steps=2)
    return len([row for row in rows(folder) if row["train_loss_step"]])


@differs("`on_step=True` in evaluation", [True, 2], [False, 0])
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=True)

    trainer = fit(
        pl,
        classifier(pl, validation_step=validation_step)(),
        val=loader(8),
        logger=part(pl, "loggers").CSVLogger(folder),
    )
    del trainer
    steps = [row for row in rows(folder) if row.get("x_step")]
    return [bool(steps), len(steps)]


@differs("what `validate` and `test` return", [{}], [{"x": 0.5, "y": 1.0}])
def _(pl: Any, folder: Path) -> Any:
    def test_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)
        self.log("y", 1.0, logger=False)

    return pl.Trainer(**QUIET).test(classifier(pl, test_step=test_step)(), loader(8), verbose=False)


@differs("values in `callback_metrics` and `logged_metrics`", "torch.float32", "torch.float64")
def _(pl: Any, folder: Path) -> Any:
    return str(fit(pl, classifier(pl)()).callback_metrics["train_loss"].dtype)


@differs("`self.log` with `barebones=True`", [], ["train_loss"])
def _(pl: Any, folder: Path) -> Any:
    trainer = pl.Trainer(barebones=True, max_epochs=1, accelerator="cpu", devices=1)
    trainer.fit(classifier(pl)(), loader(8))
    return [name for name in trainer.callback_metrics if name == "train_loss"]


@differs("`self.log` without a Trainer", None, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: classifier(pl)().log("x", 1.0))


@differs("hyperparameters of the same name in module and DataModule", "RuntimeError", {"lr": 0.1, "data.lr": 7})
def _(pl: Any, folder: Path) -> Any:
    class Data(pl.LightningDataModule):
        def __init__(self, lr: float = 7) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(8)

    logger = part(pl, "loggers").CSVLogger(folder)

    def run() -> Any:
        pl.Trainer(**QUIET | {"logger": logger}).fit(classifier(pl)(), Data())
        import yaml

        (found,) = folder.rglob("hparams.yaml")
        return yaml.safe_load(found.read_text())

    return seen(run)


@differs("what `self.log` shows at a step", [[1.0], [0.0, 0.0, 2.0, 2.0]], [[0.5, 2.0], [0.0, 2.0]])
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)
        return F.cross_entropy(self(batch[0]), batch[1])

    def sometimes(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return training_step(self, batch, batch_idx) if batch_idx % 2 == 0 else self(batch[0]).sum()

    found = []
    for every, step, samples in ((2, training_step, 12), (1, sometimes, 16)):
        logger = part(pl, "loggers").CSVLogger(folder / str(every))
        fit(pl, classifier(pl, training_step=step)(), loader(samples), logger=logger, log_every_n_steps=every)
        found.append([float(row["x"]) for row in rows(folder / str(every)) if row["x"]])
    return found


@differs("what `on_train_batch_end` logs", ["0", "1"], ["2", "2"])
def _(pl: Any, folder: Path) -> Any:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("x", float(batch_idx), on_step=True, on_epoch=False)

    logger = part(pl, "loggers").CSVLogger(folder)
    fit(pl, classifier(pl, on_train_batch_end=on_train_batch_end)(), logger=logger)
    return [row["step"] for row in rows(folder) if row.get("x")]


@differs("a metric that is logged in the steps of one loader and updated in those of others", 0.5, 0.25)
def _(pl: Any, folder: Path) -> Any:
    from torchmetrics import MeanMetric

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.mean.update(0.5 - 0.5 * dataloader_idx)
        if dataloader_idx == 0:
            self.log("x", self.mean, add_dataloader_idx=False)

    module = classifier(pl, validation_step=validation_step)()
    module.mean = MeanMetric()
    return float(fit(pl, module, val=[loader(4), loader(4)]).callback_metrics["x"])


@differs("one metric object that is logged in the steps of several loaders", [2.0, 4.0], "ValueError")
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.rows(float(len(batch[0])))
        self.log("rows", self.rows)

    module = classifier(pl, validation_step=validation_step)()
    module.rows = torchmetrics.SumMetric()

    def rows_logged() -> list[float]:
        metrics = fit(pl, module, val=[loader(2), loader(2)]).callback_metrics
        return [value.item() for name, value in metrics.items() if name.startswith("rows")]

    return seen(rows_logged)


@differs("weight in means of a batch of several loaders", 1.5, round(5 / 3, 4))
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("batches", sum(part is not None for part in batch))

    both = part(pl, "utilities").CombinedLoader([loader(8), loader(4)], "max_size")
    trainer = fit(pl, classifier(pl, validation_step=validation_step)(), val=both)
    return round(trainer.callback_metrics["batches"].item(), 4)


@differs("values of the training epoch in the validation at its end", False, True)
def _(pl: Any, folder: Path) -> Any:
    found: list[bool] = []

    def on_validation_epoch_end(self: Any) -> None:
        found.append("train_loss_epoch" in self.trainer.callback_metrics)

    fit(pl, classifier(pl, on_validation_epoch_end=on_validation_epoch_end)(), val=loader(4))
    return found[0]


@differs("what `training_step` logs before and after a hook that logs, in manual optimization", 1.0, 0.5)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("before", float(batch_idx), on_step=False, on_epoch=True)
        self.manual_backward(self(batch[0]).sum())
        self.log("after", 1.0)
        self.optimizers().step()

    def on_after_backward(self: Any) -> None:
        self.log("between", 1.0)

    module = classifier(pl, training_step=training_step, on_after_backward=on_after_backward)()
    module.automatic_optimization = False
    return fit(pl, module).callback_metrics["before"].item()


@differs("a torchmetrics object that nobody resets, after the sanity check", [4.0, 8.0], [0.0, 4.0])
def _(pl: Any, folder: Path) -> Any:
    found = []

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.count.update(len(batch[0]))

    def on_train_start(self: Any) -> None:
        found.append(self.count.sum_value.item())

    module = classifier(pl, validation_step=validation_step, on_train_start=on_train_start)()
    module.count = torchmetrics.SumMetric()
    fit(pl, module, loader(8), loader(4), num_sanity_val_steps=1)
    return [*found, module.count.sum_value.item()]


@differs("what `validate` and `test` print", True, False)
def _(pl: Any, folder: Path) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        pl.Trainer(**QUIET).validate(classifier(pl)(), loader(4))
    assert "val_loss" in printed.getvalue()
    return "DataLoader 0" in printed.getvalue()
