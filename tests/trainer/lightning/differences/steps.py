"""Steps, losses, hooks and optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.lightning.differences.probe import QUIET, constant, differs, fallen, fit, part, seen
from tests.trainer.lightning.projects import classifier, data, loader


@differs("a fit without an end", [1000, 1], [1000, "ValueError"])
def _(pl: Any, folder: Path) -> Any:
    def stop(self: Any) -> None:
        self.trainer.should_stop = True

    module = classifier(pl, on_train_epoch_end=stop)
    return [
        fit(pl, module(), max_epochs=None).max_epochs,
        seen(lambda: fit(pl, module(), max_epochs=-1).current_epoch),
    ]


@differs(
    "a fit that trains nothing: a loader without batches, no optimizer, a step that returns None every time",
    [True] * 3,
    ["ValueError"] * 3,
)
def _(pl: Any, folder: Path) -> Any:
    def returns(module: Any, **arguments: Any) -> Any:
        return seen(lambda: bool(fit(pl, module(), **arguments)))

    plain = classifier(pl)
    return [
        returns(plain, train=DataLoader(data(2), 4, drop_last=True)),
        returns(classifier(pl, configure_optimizers=lambda self: None)),
        returns(classifier(pl, training_step=lambda self, batch, batch_idx: None)),
    ]


@differs("a loss or gradient that is not finite", 2, "FloatingPointError")
def _(pl: Any, folder: Path) -> Any:
    nan = classifier(pl, training_step=lambda self, batch, batch_idx: self(batch[0]).sum() * math.nan)
    return seen(lambda: fit(pl, nan()).global_step)


@differs("a step of an optimizer that moves no parameter", 2, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return closure() if closure is not None else None

    still = classifier(pl, configure_optimizers=lambda self: Idle(self.parameters(), 0.1))
    return seen(lambda: fit(pl, still()).global_step)


@differs("the loss in `backward` and `on_before_backward` with accumulation", [0.5, 0.5], [1.0, 1.0])
def _(pl: Any, folder: Path) -> Any:
    got: list[float] = []

    def backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        got.append(loss.item())
        pl.LightningModule.backward(self, loss, *args, **kwargs)

    own = classifier(
        pl,
        training_step=lambda self, batch, batch_idx: 1 + 0 * self(batch[0]).sum() + self.net[-1].bias[0] * 0,
        on_before_backward=lambda self, loss: got.append(loss.item()),
        backward=backward,
    )
    seen(lambda: fit(pl, own(), accumulate_grad_batches=2))
    return got[:2]


@differs("`-1` from `on_train_batch_start`", 0, "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    skips = classifier(pl, on_train_batch_start=lambda self, batch, batch_idx: -1)
    return seen(lambda: fit(pl, skips()).global_step)


@differs("`training_step(self, dataloader_iter)`", 2, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return F.cross_entropy(self(batch[0]), batch[1])

    return seen(lambda: fit(pl, classifier(pl, training_step=training_step)()).global_step)


@differs("steps and hooks without `dataloader_idx`, and several loaders", "RuntimeError", True)
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: bool(fit(pl, classifier(pl)(), val=[loader(4), loader(4)])))


@differs("short last accumulation window", 0.15, 0.2)
def _(pl: Any, folder: Path) -> Any:
    return fallen(pl, constant(pl)(), loader(12), accumulate_grad_batches=2)


@differs("uneven batches and ranks", 0.05, 0.08)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return (self.net[-1].bias[0] + 0 * self(batch[0]).sum()) * (batch_idx == 0)

    return fallen(pl, constant(pl, training_step=training_step)(), DataLoader(data(5), 4), accumulate_grad_batches=2)


@differs("resume in mid-epoch", [0, 1], [2, 3])
def _(pl: Any, folder: Path) -> Any:
    places: list[int] = []
    x = torch.arange(16.0).repeat_interleave(4).view(16, 4) / 4

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        places.append(int(batch[0][0, 0]))
        return F.cross_entropy(self(batch[0] / 16), batch[1])

    module = classifier(pl, training_step=training_step)
    batches = DataLoader(TensorDataset(x, torch.zeros(16, dtype=torch.long)), 4)
    save = part(pl, "callbacks").ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    fit(pl, module(), batches, callbacks=[save], enable_checkpointing=True, default_root_dir=folder)
    places.clear()
    fit(pl, module(), batches, ckpt_path=folder / "step=2.ckpt")
    return places


@differs("order at each hook", ["callback", "module"], ["module", "callback"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []

    class Notes(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            order.append("callback")

    module = classifier(pl, on_train_start=lambda self: order.append("module"))
    fit(pl, module(), callbacks=[Notes()])
    return order


@differs("`on_before_zero_grad`", ["zero", "backward", "step"], ["backward", "step", "zero"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []
    module = classifier(
        pl,
        on_before_zero_grad=lambda self, optimizer: order.append("zero"),
        on_before_backward=lambda self, loss: order.append("backward"),
        on_before_optimizer_step=lambda self, optimizer: order.append("step"),
    )
    fit(pl, module(), limit_train_batches=1)
    return order


@differs("`outputs` in `on_train_batch_end`", [["loss"], ["a", "loss"]], [["loss"], ["a", "loss"]])
def _(pl: Any, folder: Path) -> Any:
    keys: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return {"loss": self(batch[0]).sum(), "a": 1}

    for methods in ({}, {"training_step": training_step}):
        hook = {"on_train_batch_end": lambda self, outputs, *_: keys.append(sorted(outputs))}
        fit(pl, classifier(pl, **methods | hook)(), limit_train_batches=1)
    return keys


def _configured(**extra: Any) -> Any:
    def configure_optimizers(self: Any) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), 0.1)} | extra

    return configure_optimizers


@differs("unknown keys in the dicts of `configure_optimizers`", None, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl, configure_optimizers=_configured(wrong=1))()) and None)


def _manual(pl: Any, step: Callable[[Any, Tensor], Any], **attributes: Any) -> Any:
    """A module in manual optimization that calls `step` with itself and its loss."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        step(self, F.cross_entropy(self(batch[0]), batch[1]))

    return classifier(pl, automatic_optimization=False, training_step=training_step, **attributes)()


@differs("arguments of `self.optimizers().step()` besides the closure", 2, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None, scale: int = 1) -> Any:  # type: ignore[override]
            return super().step(closure)

    def step(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss)
        module.optimizers().step(scale=2)

    module = _manual(pl, step, configure_optimizers=lambda self: Scaled(self.parameters(), 0.1))
    return seen(lambda: fit(pl, module).global_step)


@differs("`self.optimizers(use_pl_optimizer=False)`", [True], [False])
def _(pl: Any, folder: Path) -> Any:
    found: list[bool] = []

    def step(module: Any, loss: Tensor) -> None:
        found.append(type(module.optimizers(use_pl_optimizer=False)) is torch.optim.SGD)
        module.manual_backward(loss)
        module.optimizers().step()

    fit(pl, _manual(pl, step), limit_train_batches=1)
    return found


def _two(self: Any) -> Any:
    return torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[-1].parameters(), 0.1)


@differs("several optimizers", "RuntimeError", 2)
def _(pl: Any, folder: Path) -> Any:
    def configure_optimizers(self: Any) -> Any:
        first, last = _two(self)
        return {"first": first, "last": last} if "lockstep" in pl.__name__ else [first, last]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return {"first": loss, "last": 2 * loss}

    return seen(
        lambda: (
            fit(
                pl, classifier(pl, configure_optimizers=configure_optimizers, training_step=training_step)()
            ).global_step
        )
    )


@differs("`global_step`", 4, 2)
def _(pl: Any, folder: Path) -> Any:
    def step(module: Any, loss: Tensor) -> None:
        module.manual_backward(loss)
        for optimizer in module.optimizers():
            optimizer.step()

    return fit(pl, _manual(pl, step, configure_optimizers=_two)).global_step


@differs("`None` from `training_step`", [0.1, 0.05], [0.1, 0.1])
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else self.net[-1].bias[0] + 0 * self(batch[0]).sum()

    module = constant(pl, training_step=training_step)
    return [fallen(pl, module()), fallen(pl, module(), accumulate_grad_batches=2)]


@differs("schedulers by epoch", [0.1, 0.05], [0.1, 0.1])
def _(pl: Any, folder: Path) -> Any:
    rates: list[float] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_batch_end(self: Any, *_: Any) -> None:
        rates.append(self.optimizers().param_groups[0]["lr"])

    fit(pl, classifier(pl, configure_optimizers=configure_optimizers, on_train_batch_end=on_train_batch_end)())
    return rates


@differs("`frequency` of a scheduler by step", 2, 3)
def _(pl: Any, folder: Path) -> Any:
    counted: list[int] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2}}

    def lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
        counted.append(1)
        scheduler.step()

    module = classifier(pl, configure_optimizers=configure_optimizers, lr_scheduler_step=lr_scheduler_step)
    fit(pl, module(), loader(12), max_epochs=2)
    return len(counted)


@differs("`dataloader_idx` of hooks with `*args` in evaluation", [2], [3])
def _(pl: Any, folder: Path) -> Any:
    given: list[int] = []

    def on_validation_batch_start(self: Any, *args: Any) -> None:
        given.append(len(args))

    fit(pl, classifier(pl, on_validation_batch_start=on_validation_batch_start)(), val=loader(4))
    return given


@differs(
    "a batch whose `training_step` returns None, or whose `optimizer_step` does not step",
    [[4, 0.0001], [4, 0.0001]],
    [[2, 0.01], [2, 0.01]],
)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).sum() if batch_idx % 2 else None

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(optimizer_closure)
        else:
            optimizer_closure()

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def outcome(**attributes: Any) -> list[float]:
        trainer = fit(pl, classifier(pl, configure_optimizers=configure_optimizers, **attributes)(), loader(16))
        return [trainer.global_step, round(trainer.optimizers[0].param_groups[0]["lr"], 6)]

    return [outcome(training_step=training_step), outcome(optimizer_step=optimizer_step)]


@differs("the closure of `optimizer_step`", ["step", "loss"], ["loss", "step"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        order.append("loss")
        return self(batch[0]).sum()

    def optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        order.append("step")
        optimizer.step(optimizer_closure)

    fit(pl, classifier(pl, training_step=training_step, optimizer_step=optimizer_step)(), loader(4))
    return order


@differs("a value of validation that a scheduler by step monitors", [2.0, 4.0], [2.0])
def _(pl: Any, folder: Path) -> Any:
    monitored: list[float] = []

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "step_of_val"}
        return [optimizer], [plateau | {"interval": "step", "frequency": 2, "strict": False}]

    module = classifier(
        pl,
        configure_optimizers=configure_optimizers,
        validation_step=lambda self, *_: self.log("step_of_val", float(self.global_step)),
        lr_scheduler_step=lambda self, scheduler, metric: monitored.append(float(metric)),
    )
    fit(pl, module(), loader(16), loader(4), val_check_interval=2)
    return monitored


@differs(
    'the default dtype of torch in loaders and hooks with `precision="64-true"`',
    ["float32", "float32", "float64"],
    ["float64", "float64", "float64"],
)
def _(pl: Any, folder: Path) -> Any:
    dtypes: list[str] = []

    def note(value: Any = None) -> Any:
        dtypes.append(str(torch.get_default_dtype()).removeprefix("torch."))
        return value

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        note()
        return self(batch[0].double()).sum()

    made = {"train_dataloader": lambda self: note(loader(4)), "on_train_start": lambda self: note()}
    pl.Trainer(**QUIET, precision="64-true").fit(classifier(pl, training_step=training_step, **made)())
    return dtypes
