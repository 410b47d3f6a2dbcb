"""What modules and scripts for Lightning rely on, run through `lockstep.lightning`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import lockstep.lightning.pytorch as pl
from lockstep.lightning.pytorch.trainer import states
from lockstep.lightning.pytorch.utilities import CombinedLoader
from lockstep.lightning.pytorch.utilities.exceptions import MisconfigurationException
from tests.trainer.lightning.projects import QUIET, classifier, loader


def trainer(**arguments: Any) -> pl.Trainer:
    return pl.Trainer(**QUIET | arguments)


def hooked(name: str, call: Callable[[Any], Any]) -> Any:
    """A classifier that calls `call` with itself in the hook `name`."""
    base = classifier(pl)

    def hook(self: Any, *args: Any) -> Any:
        call(self)
        return getattr(base, name)(self, *args)

    return type("Hooked", (base,), {name: hook})()


# ---- Trainer ---------------------------------------------------------------------------------------


def test_attributes_have_the_values_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(default_root_dir=tmp_path, max_epochs=None, max_steps=3, num_sanity_val_steps=-1)
    assert (made.max_epochs, made.max_steps, made.log_dir) == (None, 3, str(tmp_path))
    assert made.num_sanity_val_steps == float("inf")
    assert (made.limit_train_batches, made.limit_predict_batches, made.val_check_interval) == (1.0, 1.0, 1.0)
    assert (trainer(limit_val_batches=3).limit_val_batches, made.gradient_clip_val) == (3, None)
    assert (made.min_epochs, trainer(min_epochs=1).min_epochs, trainer(fast_dev_run=3).max_steps) == (0, 1, 3)
    assert trainer(overfit_batches=2).limit_val_batches == 2
    made.max_steps = -1
    assert made.max_steps == -1 and made._run.max_steps is None
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "7")
    assert (pl.Trainer().max_epochs, pl.Trainer(max_epochs=2).max_epochs) == (7, 2)


def test_attributes_tell_what_ran(tmp_path: Path) -> None:
    seen: list[Any] = []
    module = hooked("validation_step", lambda self: seen.append((self.trainer.evaluating, self.trainer.state.stage)))
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "saved")
    made = trainer(num_sanity_val_steps=1, enable_checkpointing=True, callbacks=[saver])
    assert (made.ckpt_path, made.enable_validation, made.num_test_batches) == (None, False, [])
    made.fit(module, loader(8), loader(8))
    assert seen[:2] == [(True, "sanity_check"), (True, "validate")] and not made.evaluating
    assert (made.ckpt_path, made.enable_validation, made.num_sanity_val_batches) == (None, True, [1])
    assert made.device_ids == [0]
    made.test(dataloaders=[loader(8), loader(16)], verbose=False)
    assert (made.ckpt_path, made.num_test_batches) == (saver.best_model_path, [2, 4])
    made.predict(module, loader(8))
    assert (made.ckpt_path, made.num_predict_batches) == (None, [2])
    assert (trainer(fast_dev_run=1).fast_dev_run, trainer(fast_dev_run=3).fast_dev_run) == (True, 3)
    assert pl.Trainer(barebones=True).barebones and not made.barebones


@pytest.mark.ranks
def test_the_checkpoint_that_ranks_began_with_is_known(tmp_path: Path) -> None:
    trainer(enable_checkpointing=True, callbacks=[pl.callbacks.ModelCheckpoint(tmp_path, "saved")]).fit(
        classifier(pl)(), loader(8)
    )
    made = trainer(max_epochs=2, devices=2, strategy="ddp")
    made.fit(classifier(pl)(), loader(8), ckpt_path=tmp_path / "saved.ckpt")
    assert made.ckpt_path == str(tmp_path / "saved.ckpt")


def test_values_that_are_not_possible_have_the_error_of_lightning() -> None:
    with pytest.raises(MisconfigurationException, match="limit_val_batches must be"):
        trainer(limit_val_batches=1.2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"barebones": True, "logger": True},
        {"barebones": True, "profiler": "simple"},
        {"enable_progress_bar": False, "callbacks": [pl.callbacks.TQDMProgressBar()]},
        {"enable_model_summary": False, "callbacks": [pl.callbacks.ModelSummary()]},
    ],
    ids=["logger", "profiler", "bar", "summary"],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="remove one of them|drop one of them"):
        pl.Trainer(max_epochs=1, **arguments)


def test_the_validation_interval_counts_across_epochs() -> None:
    at: list[int] = []
    module = hooked("on_validation_start", lambda self: at.append(self.trainer.global_step))
    made = trainer(max_epochs=3, val_check_interval=3, check_val_every_n_epoch=None)
    made.fit(module, loader(16), loader(4))
    assert at == [3, 6, 9, 12]
    with pytest.raises(ValueError, match="must be a whole number"):
        trainer(val_check_interval=0.5, check_val_every_n_epoch=None)


def test_the_sanity_check_keeps_to_the_limit() -> None:
    seen: list[bool] = []
    module = hooked("validation_step", lambda self: seen.append(self.trainer.sanity_checking))
    trainer(num_sanity_val_steps=-1, limit_val_batches=2, limit_train_batches=1).fit(module, loader(8), loader(16))
    assert seen == [True, True, False, False]


def test_checkpoints_are_where_lightning_has_them(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "{epoch}", save_last=True)
    made = trainer(enable_checkpointing=True, callbacks=[saver])
    made.fit(classifier(pl)(), loader(8))
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0.ckpt", "last.ckpt"]
    again = trainer(max_epochs=2, default_root_dir=tmp_path / "again", enable_checkpointing=True)
    again.fit(classifier(pl)(), loader(8), ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.global_step == 4
    assert again.checkpoint_callback.best_model_path.endswith("epoch=1-step=4.ckpt")


def test_callbacks_of_the_module_replace_those_of_the_trainer(tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(tmp_path, "mine")
    module = classifier(pl, configure_callbacks=lambda self: [saver])()
    made = trainer(enable_checkpointing=True)
    made.fit(module, loader(8))
    assert made.checkpoint_callbacks == [saver] and (tmp_path / "mine.ckpt").is_dir()


def test_the_state_has_the_members_of_the_enums() -> None:
    seen: list[Any] = []
    module = hooked("validation_step", lambda self: seen.append(self.trainer.state))
    made = trainer()
    assert made.state.status is states.TrainerStatus.INITIALIZING and made.state.fn is None and made.state.stage is None
    made.fit(module, loader(4), loader(4))
    assert seen == [("running", "fit", "validate")] and seen[0].fn is states.TrainerFn.FITTING
    assert seen[0].stage is states.RunningStage.VALIDATING and seen[0].stage.evaluating
    assert made.state.status.stopped and f"{made.state.fn} {made.state.status}" == "fit finished"


def test_a_module_takes_a_trainer_for_its_tests() -> None:
    module = classifier(pl)()
    module.inner = classifier(pl)()
    module.trainer = SimpleNamespace(current_epoch=3, global_rank=1)
    assert (module.current_epoch, module.inner.current_epoch, module.inner.trainer.global_rank) == (3, 3, 1)
    made = trainer()
    made.fit(module, loader(4))
    assert module.trainer is made and module.current_epoch == 1


# ---- log -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["setup", "configure_optimizers", "train_dataloader", "predict_step", "on_predict_start"]
)
def test_values_that_nobody_would_see_are_refused(name: str) -> None:
    module = hooked(name, lambda self: self.log("x", 1.0))
    made = trainer()
    with pytest.raises(RuntimeError, match=r"^self.log\('x'\) would be seen by nobody here"):
        made.predict(module, loader(8)) if "predict" in name else made.fit(
            module, None if name == "train_dataloader" else loader(8)
        )


def test_reductions_and_flags_of_log() -> None:
    class Logs(classifier(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("sum", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="SUM")
            self.log("mean", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="avg")
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", float(batch_idx), on_step=True, on_epoch=True)

    made, module = trainer(), Logs()
    made.fit(module, loader(16))
    assert (made.callback_metrics["sum"], made.callback_metrics["mean"]) == (6, 1.5)
    assert all(type(value) is float for value in made.progress_bar_metrics.values())
    assert made.test(module, loader(8)) == [{"x_epoch": 0.5}]
    several = made.test(module, [loader(8), loader(4)])
    assert several == [{"x_epoch/dataloader_idx_0": 0.5}, {"x_epoch/dataloader_idx_1": 0.0}]
    with pytest.raises(ValueError, match="shows nothing; set one to True"):
        trainer().fit(hooked("on_train_start", lambda self: self.log("x", 1.0, on_epoch=False)), loader(8))


# ---- loaders ---------------------------------------------------------------------------------------


def test_sequential_loaders_are_several_in_an_evaluation() -> None:
    seen: list[tuple[int, int]] = []

    def step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        seen.append((batch_idx, dataloader_idx))

    both = CombinedLoader({"a": loader(8), "b": loader(4)}, "sequential")
    trainer().validate(classifier(pl, validation_step=step)(), both)
    assert seen == [(0, 0), (1, 0), (0, 1)]


class _Stateful:
    """Yields one batch after the other, from where it was."""

    def __init__(self, index: int = 0) -> None:
        self.index = index

    def __iter__(self) -> Any:
        for index in range(self.index, 10):
            self.index = index
            yield torch.full((1, 4), float(index)), torch.zeros(1, dtype=torch.long)

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"] + 1


@pytest.mark.parametrize("several", [False, True])
def test_a_combined_loader_resumes_or_says_why_not(several: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        batch = batch[0] if several else batch
        seen.append(batch[0][0, 0].item())
        return nn.functional.cross_entropy(self(batch[0] / 10), batch[1])

    def combined() -> CombinedLoader:
        return CombinedLoader([_Stateful(), _Stateful(1)] if several else _Stateful())

    module = classifier(pl, training_step=step)
    made = trainer(max_epochs=None, max_steps=2)
    made.fit(module(), combined())
    made.save_checkpoint(tmp_path / "two.ckpt")
    again = trainer(max_epochs=None, max_steps=4)
    if several:
        with pytest.raises(ValueError, match="CombinedLoader resumes within an epoch by reading its loaders again"):
            again.fit(module(), combined(), ckpt_path=tmp_path / "two.ckpt")
    else:
        again.fit(module(), combined(), ckpt_path=tmp_path / "two.ckpt")
        assert seen == [0, 1, 2, 3]


# ---- steps -----------------------------------------------------------------------------------------


def _refused() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "minus one": ({"on_train_batch_start": lambda self, batch, batch_idx: -1}, "cannot skip the rest of an epoch"),
        "iterator": (
            {"training_step": lambda self, dataloader_iter: None},
            "takes dataloader_iter, but the loop gives",
        ),
    }


@pytest.mark.parametrize(("methods", "message"), _refused().values(), ids=_refused())
def test_what_a_step_cannot_do_is_refused(methods: dict[str, Any], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        trainer().fit(classifier(pl, **methods)(), loader(8))


class _Manual(classifier(pl)):  # type: ignore[misc]
    """Runs backward twice through one graph, and has a scheduler that monitors nothing."""

    automatic_optimization = False
    options: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss, retain_graph=True)
        first = [parameter.grad.clone() for parameter in self.parameters()]
        self.manual_backward(loss)
        for parameter, gradient in zip(self.parameters(), first, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * gradient)
        self.optimizers().step(**self.options)
        self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step(0.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [ReduceLROnPlateau(optimizer)]


def test_manual_optimization() -> None:
    made, module = trainer(), _Manual()
    made.fit(module, loader(8))
    assert made.global_step == 2
    module.options = {"scale": 2}
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        trainer().fit(module, loader(8))


@pytest.mark.slow
@pytest.mark.ranks
def test_sharded_parameters_keep_no_graph() -> None:
    with pytest.raises(Exception, match="retain_graph=True: sharded parameters are freed after backward"):
        trainer(devices=2, strategy="fsdp").fit(_Manual(), loader(8))


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert set(outputs) == {"loss"} and not outputs["loss"].requires_grad
        self.losses.append(float(outputs["loss"]))


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("dp", 2), ("ddp", 2), ("fsdp", 2), ("tensor", 2)])
def test_hooks_find_the_loss_in_a_dict(strategy: str, devices: int) -> None:
    seen = Losses()
    own: list[float] = []

    def hook(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        own.append(float(outputs["loss"]))

    module = type("Noted", (classifier(pl),), {"on_train_batch_end": hook})()
    trainer(callbacks=[seen], strategy=strategy, devices=devices).fit(module, loader())
    assert len(seen.losses) > 1 and (strategy not in ("auto", "dp") or own == seen.losses)
