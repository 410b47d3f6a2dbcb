"""Hooks that are called, and those that are refused by name before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback, CSVLogger, EarlyStopping, ModelCheckpoint
from tests.trainer.toy import Net, loader, net, quiet, weights


class Transfers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.order.append(f"before {dataloader_idx}")
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.order.append(f"after {dataloader_idx}")
        return [batch[0] / 2, batch[1]]

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.order.append(f"step {dataloader_idx}")


class TransfersOfData(DataModule):
    def __init__(self) -> None:
        self.order: list[str] = []

    def train_dataloader(self) -> Any:
        return loader(8)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.order.append(f"{device} {dataloader_idx}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.order.append("after, in place of the module's")
        return batch

    def on_exception(self, exception: BaseException) -> None:
        self.order.append(str(exception))


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_batches_pass_the_hooks_around_their_transfer(devices: int) -> None:
    torch.manual_seed(0)
    one, other = Transfers(), net()
    other.load_state_dict(one.state_dict())
    for module in (one, other):
        quiet(devices=devices, accelerator="cpu", seed=0).fit(module, loader())
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def test_the_transfer_of_a_datamodule_goes_before_that_of_the_module() -> None:
    module, data = Transfers(), TransfersOfData()
    quiet(accelerator="cpu", devices=1).fit(module, datamodule=data)
    assert data.order == ["cpu 0", "after, in place of the module's"]
    assert module.order == ["before 0"]
    quiet(accelerator="cpu", devices=1).test(Transfers(), [loader(4), loader(4)], verbose=False)


def test_a_transfer_knows_the_index_of_the_loader() -> None:
    module = Transfers()
    quiet(accelerator="cpu", devices=1).test(module, [loader(4), loader(4)], verbose=False)
    assert module.order == ["before 0", "after 0", "step 0", "before 1", "after 1", "step 1"]


class Modes(Net):
    """Swaps its mode by hand, and has a `train` with an argument that has no default."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def train(self, mode: bool) -> Any:  # type: ignore[override]
        return super().train(mode)

    def on_validation_model_eval(self) -> None:
        self.calls.append("eval")
        super().on_validation_model_eval()

    def on_validation_model_train(self) -> None:
        self.calls.append("train")
        super().on_validation_model_train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training
        self.calls.append("step")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.training
        return super().training_step(batch, batch_idx)


def test_a_module_switches_its_modes_around_validation() -> None:
    module = Modes()
    quiet(accelerator="cpu", devices=1).fit(module, loader(8), loader(8))
    assert module.calls == ["eval", "step", "train"]


def test_a_datamodule_hears_of_exceptions() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("no step")

    data = TransfersOfData()
    with pytest.raises(ValueError, match="no step"):
        quiet(accelerator="cpu", devices=1).fit(Fails(), datamodule=data)
    assert data.order[-1] == "no step"


class Short(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:  # type: ignore[override]
        self.seen.append(batch_idx)


def test_a_callback_may_omit_the_index_of_the_loader() -> None:
    callback = Short()
    quiet(accelerator="cpu", devices=1, callbacks=[callback]).validate(net(), loader(16), verbose=False)
    assert callback.seen == [0, 1]


def misnamed(base: type, name: str) -> Any:
    made = type("Own", (base,), {name: lambda self, *args, **options: None})()
    return made


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("on_trian_start", "Own.on_trian_start is not a hook.*nearest hook is on_train_start"),
        ("on_epoch_end", "on_epoch_end is not a hook, so it would never be called; call it on_train_epoch_end"),
        ("on_validation_batch_ends", "nearest hook is on_validation_batch_end"),
    ],
)
@pytest.mark.parametrize("base", [Net, Callback, DataModule])
def test_methods_named_almost_like_hooks_are_refused(base: type, name: str, message: str) -> None:
    own = misnamed(base, name)
    message = message if base is not DataModule else f"Own.{name} is not a hook"
    module = own if base is Net else net()
    data = own if base is DataModule else None
    trainer = quiet(callbacks=[own] if base is Callback else [], devices=2, accelerator="cpu")
    with pytest.raises(TypeError, match=message):
        trainer.fit(module, loader(), datamodule=data)
    with pytest.raises(TypeError, match=message):
        trainer.validate(module, loader(), datamodule=data)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer_zero_grad", "accumulate_grad_batches"),
        ("training_epoch_end", "on_train_epoch_end"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("test_step_end", "test_step sees"),
    ],
)
def test_methods_that_are_not_called_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(TypeError, match=f"Own.{name} is not called by Lockstep.*{message}"):
        quiet().fit(misnamed(Net, name), loader())


def test_hooks_and_loaders_may_be_none() -> None:
    class Off(Net):
        on_train_start = None  # type: ignore[assignment]
        val_dataloader = None  # type: ignore[assignment]
        validation_step = None  # type: ignore[assignment]
        configure_gradient_clipping = None  # type: ignore[assignment]

    class Data(DataModule):
        val_dataloader = None  # type: ignore[assignment]

        def train_dataloader(self) -> Any:
            return loader(8)

    trainer = quiet(accelerator="cpu", devices=1)
    trainer.fit(Off(), datamodule=Data())
    assert trainer.global_step == 1


class Inner(Module):
    """A module within a module: logs and reads the run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.epochs: list[int] = []

    def loss(self, batch: Any) -> torch.Tensor:
        self.epochs.append(self.current_epoch)
        loss = F.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("inner/loss", loss)
        self.log("inner/steps", float(self.trainer.global_step))
        return loss


class Outer(Module):
    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.inner = None if late else Inner()

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = Inner()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.inner is not None
        return self.inner.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "late"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_module_within_a_module_knows_the_run(devices: int, late: bool) -> None:
    trainer = quiet(accelerator="cpu", devices=devices, max_epochs=2, log_every_n_steps=1)
    module = Outer(late)
    trainer.fit(module, loader(8, 4))
    assert "inner/loss" in trainer.callback_metrics
    assert module.inner is not None
    assert module.inner.current_epoch == module.current_epoch == 2
    if devices == 1:
        assert set(module.inner.epochs) == {0, 1}


class Configured(Net):
    def configure_callbacks(self) -> Any:
        return [EarlyStopping(monitor="val/loss", patience=7), CSVLogger()]


def test_a_module_brings_callbacks_that_replace_those_of_their_class(tmp_path: Path) -> None:
    saver, short = ModelCheckpoint(tmp_path), Short()
    trainer = quiet(
        callbacks=[EarlyStopping(monitor="val/loss"), saver, short],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
    )
    for _ in range(2):
        trainer.fit(Configured(), loader(), loader())
        assert [type(item).__name__ for item in trainer.callbacks] == [
            "CSVLogger",
            "Short",
            "EarlyStopping",
            "ModelCheckpoint",
        ]
        assert trainer.early_stopping_callback.patience == 7  # type: ignore[union-attr]
        trainer.max_epochs = 2
    with pytest.raises(TypeError, match="configure_callbacks must return Callback objects, but one is 3"):
        quiet().fit(type("Own", (Net,), {"configure_callbacks": lambda self: [3]})(), loader())


class SavesTheBest(Net):
    test_step = Net.validation_step

    def configure_callbacks(self) -> Any:
        return ModelCheckpoint(monitor="val/loss")


def test_evaluations_of_a_module_use_the_callbacks_that_it_brought_to_fit(tmp_path: Path) -> None:
    module, other = SavesTheBest(), SavesTheBest()
    trainer = quiet(enable_checkpointing=True, default_root_dir=tmp_path, accelerator="cpu", devices=1)
    trainer.fit(module, loader(), loader())
    saver = trainer.checkpoint_callback
    trainer.validate(module, loader(), verbose=False)
    trainer.test(dataloaders=loader(), verbose=False)
    assert saver is not None and trainer.checkpoint_callback is saver
    assert trainer._run.begins_from == saver.best_model_path
    trainer.test(other, loader(), verbose=False)
    assert trainer.checkpoint_callback is not saver


class Exchanges(Net):
    """Changes in a hook what the run was set up with."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def second(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 2

    def configure_optimizers(self) -> Any:
        if self.what == "in time":
            self.training_step = self.second  # type: ignore[method-assign]
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        if self.what == "trainer.callbacks":
            self.trainer.callbacks.append(Short())
        elif self.what == "on_train_batch_end":
            self.on_train_batch_end = print  # type: ignore[method-assign]
        elif self.what == "Short.on_train_batch_end":
            self.trainer.callbacks[-1].on_train_batch_end = print

    def on_train_epoch_start(self) -> None:
        if self.what == "training_step" and self.current_epoch == 1:
            self.training_step = self.second  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "what", ["trainer.callbacks", "on_train_batch_end", "Short.on_train_batch_end", "training_step"]
)
def test_what_is_exchanged_while_a_run_lasts_is_refused_by_name(what: str) -> None:
    trainer = quiet(accelerator="cpu", devices=1, max_epochs=2, callbacks=[Short(), Short()])
    with pytest.raises(RuntimeError, match=rf"{what} changed after the run was set up, which would have no effect"):
        trainer.fit(Exchanges(what), loader(16))
    assert trainer.current_epoch == (what == "training_step") and trainer.global_step == 2 * trainer.current_epoch


def test_what_is_exchanged_before_a_run_reads_it_is_not_refused() -> None:
    trainer = quiet(accelerator="cpu", devices=1, max_epochs=2, callbacks=[Short(), Short()])
    trainer.fit(Exchanges("in time"), loader(16))
    assert trainer.current_epoch == 2


def test_freezing_and_unfreezing() -> None:
    module = net()
    module.freeze()
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    module.unfreeze()
    assert module.net.training and all(p.requires_grad for p in module.parameters())


class Steps(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        with first.toggle_model():
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        assert self.net[3].weight.grad is None and self.net[0].weight.grad is not None
        assert all(p.requires_grad for p in self.parameters())
        first.step()
        first.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


def test_an_optimizer_toggles_the_model() -> None:
    quiet(accelerator="cpu", devices=1).fit(Steps(), loader(8))


@pytest.mark.parametrize(
    ("name", "method", "extra"),
    [
        ("lr_scheduler_step", lambda self, scheduler, optimizer_idx, metric: None, "optimizer_idx"),
        (
            "optimizer_step",
            lambda self, epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure: None,
            "optimizer_idx",
        ),
    ],
)
def test_methods_of_an_earlier_lightning_are_refused(name: str, method: Any, extra: str) -> None:
    module = type("Own", (Net,), {name: method})()
    with pytest.raises(TypeError, match=f"Own.{name} has the argument '{extra}', which the loop does not give"):
        quiet().fit(module, loader())
