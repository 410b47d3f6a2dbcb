"""What users write in a Module, in the forms in which they write it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lockstep import Loss, Trainer
from lockstep.callbacks import ModelCheckpoint
from tests.trainer.module_toys import Both
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights


def test_training_step_may_take_fewer_or_other_arguments() -> None:
    def loss(self: Any, batch: Any) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    steps: dict[str, Callable[..., Any]] = {
        "batch": lambda self, batch: loss(self, batch),
        "names": lambda self, data, index: loss(self, data),
        "args": lambda self, *args: loss(self, args[0]) + 0 * args[1],
        "both": lambda self, batch, *args, **kwargs: loss(self, batch) + 0 * args[0],
        "default": lambda self, batch, batch_idx=None, unused=3: loss(self, batch) + 0 * batch_idx,
    }
    reference = net()
    quiet().fit(reference, loader(24))
    for step in steps.values():
        model = net()
        model.__class__ = type("Other", (Net,), {"training_step": step})
        quiet().fit(model, loader(24))
        assert equal(weights(model), weights(reference))


def test_step_with_an_argument_that_the_loop_does_not_give() -> None:
    class Old(Net):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any: ...  # type: ignore[override]

    with pytest.raises(
        TypeError,
        match=(
            "training_step has the argument 'optimizer_idx', which the loop does not give; it gives \\(batch, "
            "batch_idx\\)"
        ),
    ):
        quiet().fit(Old(), loader(8))


def test_validation_step_takes_dataloader_idx_in_every_way() -> None:
    seen: list[Any] = []
    steps: dict[str, Callable[..., Any]] = {
        "default": lambda self, batch, batch_idx, dataloader_idx=0: seen.append(dataloader_idx),
        "required": lambda self, batch, batch_idx, dataloader_idx: seen.append(dataloader_idx),
        "keyword": lambda self, batch, batch_idx, *, dataloader_idx=0: seen.append(dataloader_idx),
        "args": lambda self, batch, *args: seen.append(args[1]),
        "kwargs": lambda self, batch, batch_idx, **kwargs: seen.append(kwargs["dataloader_idx"]),
    }
    for name, step in steps.items():
        seen.clear()
        model = type("Loaders", (Net,), {"validation_step": step})()
        quiet().validate(model, [loader(8), loader(16)], verbose=False)
        assert seen == [0, 1, 1], name
    seen.clear()
    model = type("Loaders", (Net,), {"validation_step": lambda self, batch: seen.append(len(batch))})()
    quiet().validate(model, [loader(8), loader(16)], verbose=False)
    assert seen == [2, 2, 2]
    quiet().validate(type("Default", (Net,), {"validation_step": steps["default"]})(), loader(8), verbose=False)
    assert seen[-1] == 0


def test_what_a_training_step_may_return() -> None:
    def fit(returns: Callable[[torch.Tensor, int], Any]) -> tuple[Trainer, list[torch.Tensor]]:
        class Returns(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x, y = batch
                return returns(F.cross_entropy(self(x), y), len(x))

        model, trainer = net(), quiet()
        model.__class__ = Returns
        trainer.fit(model, loader(20))
        return trainer, weights(model)

    _, expected = fit(lambda loss, n: loss)
    assert equal(fit(lambda loss, n: {"loss": loss, "n": n, "other": [loss]})[1], expected)
    assert distance(fit(lambda loss, n: Loss(loss * n, n))[1], expected) < 1e-5
    assert distance(fit(lambda loss, n: {"loss": Loss(loss * n, torch.tensor(n)), "more": "text"})[1], expected) < 1e-5
    with pytest.raises(ValueError, match="returned a loss in none of the run's 3 steps"):
        fit(lambda loss, n: None)
    trainer, _ = fit(lambda loss, n: loss if n == 8 else None)  # the last batch has 4 samples
    assert trainer.global_step == 2


def test_batches_without_a_loss_have_no_weight() -> None:
    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx % 2 else super().training_step(batch, batch_idx)

    model = net()
    model.__class__ = Skips
    quiet(accumulate_grad_batches=2).fit(model, loader(32))
    x, y = data(32).tensors
    reference = net()
    optimizer = reference.configure_optimizers()
    for begin in (0, 16):
        F.cross_entropy(reference(x[begin : begin + 8]), y[begin : begin + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(model), weights(reference)) < 1e-5


class Facts(Net):
    """Asks everything, on every rank; an assertion that fails comes out of fit."""

    def on_fit_start(self) -> None:
        assert self.trainer.world_size == 2 and self.global_rank == self.local_rank == self.trainer.global_rank
        assert self.device == torch.device("cpu") and self.dtype == torch.float32
        assert self.logger is None and self.loggers == []
        rank = float(self.global_rank)
        gathered = self.all_gather({"a": torch.tensor([rank, 1.0]), "b": (rank, [torch.tensor(rank)])})
        assert gathered["a"].tolist() == [[0.0, 1.0], [1.0, 1.0]]
        assert gathered["b"][0].tolist() == [0.0, 1.0] and gathered["b"][1][0].shape == (2,)
        assert self.all_gather(Both(torch.zeros(1), torch.ones(1))).y.tolist() == [[1.0], [1.0]]
        assert self.trainer.strategy.broadcast(int(rank) + 5) == 5
        self.print("said once")
        assert self.trainer.estimated_stepping_batches == 4 and self.trainer.num_training_batches == 2
        assert self.trainer.train_dataloader.dataset.tensors[0].shape == (16, 8)

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 4, "for schedulers that must know the end"
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert (
            self.current_epoch == self.trainer.current_epoch and self.global_step == 2 * self.current_epoch + batch_idx
        )
        assert self.training and self.trainer.optimizers[0].param_groups[0]["lr"] == 0.01
        return super().training_step(batch, batch_idx)


@pytest.mark.ranks
def test_attributes_of_a_module_in_a_step_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    model = Facts()
    quiet(devices=2, max_epochs=2).fit(model, loader(16, 4))
    assert capfd.readouterr().out.count("said once") == 1
    assert model.global_step == 4 and model.current_epoch == 2


def test_a_module_without_a_trainer_says_what_is_missing() -> None:
    model = Net()
    assert (model.current_epoch, model.global_step, model.global_rank, model.logger, model.device) == (
        0,
        0,
        0,
        None,
        torch.device("cpu"),
    )
    with pytest.raises(RuntimeError, match="this Net is not attached to a Trainer"):
        model.trainer  # noqa: B018
    with pytest.raises(RuntimeError, match="self.log\\('x'\\) was called outside of a run"):
        model.log("x", 1.0)
    with pytest.raises(RuntimeError, match="not attached"):
        model.manual_backward(torch.ones(()))


def test_copies_of_a_module_during_and_after_fit(tmp_path: Path) -> None:
    copies: list[Any] = []

    class Copied(Net):
        def on_train_epoch_end(self) -> None:
            copies.append(copy.deepcopy(self))
            torch.save(self, tmp_path / "whole.pt")
            copies.append(copy.deepcopy(self.net).eval())

    Copied.__qualname__ = "Copied"
    globals()["Copied"] = Copied
    model, trainer = Copied(), quiet()
    trainer.fit(model, loader(16))
    assert equal(weights(copies[0]), weights(model)) and equal(weights(copies[1]), weights(model.net))
    assert copies[0].hparams == model.hparams
    with pytest.raises(RuntimeError, match="not attached"):
        copies[0].trainer  # noqa: B018
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "whole.pt", weights_only=False),
    ):
        assert equal(weights(other), weights(model))
        quiet().fit(other, loader(8))
    del globals()["Copied"]


class Ema(Net):
    """Swaps averaged weights in for validation, as 8 of 39 modules in the wild do."""

    def __init__(self) -> None:
        super().__init__()
        for i, parameter in enumerate(self.net.parameters()):
            self.register_buffer(f"shadow{i}", parameter.detach().clone())
        self.kept: list[torch.Tensor] = []

    def shadows(self) -> list[torch.Tensor]:
        return [getattr(self, f"shadow{i}") for i, _ in enumerate(self.net.parameters())]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch._foreach_lerp_(self.shadows(), list(self.net.parameters()), 0.1)

    def on_validation_epoch_start(self) -> None:
        self.kept = [p.detach().clone() for p in self.net.parameters()]
        torch._foreach_copy_([p.data for p in self.net.parameters()], self.shadows())

    def on_validation_epoch_end(self) -> None:
        torch._foreach_copy_([p.data for p in self.net.parameters()], self.kept)


class Training(Net):
    """Swaps in `train`/`eval` instead."""

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.swaps = [*getattr(self, "swaps", []), mode]
        return super().train(mode)


def test_weights_swapped_in_for_validation_leave_training_alone() -> None:
    model, reference = net(), net()
    ema = Ema()
    ema.net.load_state_dict(model.net.state_dict())
    torch._foreach_copy_(ema.shadows(), weights(ema.net))
    trainer, plain = quiet(max_epochs=2, val_check_interval=2), quiet(max_epochs=2)
    trainer.fit(ema, loader(32), loader(16))
    plain.fit(reference, loader(32), loader(16))
    assert equal(weights(ema.net), weights(reference.net))
    assert trainer.callback_metrics["val/loss"] != plain.callback_metrics["val/loss"]
    ema.net.load_state_dict(dict(zip(ema.net.state_dict(), ema.shadows(), strict=True)))
    averaged = quiet().validate(reference_with(ema), loader(16), verbose=False)[0]["val/loss"]
    assert trainer.callback_metrics["val/loss"].item() == pytest.approx(averaged)


def reference_with(ema: Ema) -> Net:
    model = net()
    model.net.load_state_dict(ema.net.state_dict())
    return model


class Extra(Net):
    """Keeps state that is not a tensor, as averages of weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: dict[str, Any] = {"steps": 0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.extra = {"steps": self.extra["steps"] + 1, "mean": torch.ones(2)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_extra_state_is_returned_and_saved(devices: int, tmp_path: Path) -> None:
    model, trainer = (
        Extra(),
        quiet(devices=devices, callbacks=ModelCheckpoint(dirpath=tmp_path), enable_checkpointing=True),
    )
    trainer.fit(model, loader(16, 4))
    for found in (model.extra, Extra.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).extra):
        assert found["steps"] == 4 // devices and found["mean"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("frozen", [False, True])
def test_train_and_eval_overrides_are_called_in_turn(frozen: bool) -> None:
    model = Training()
    if frozen:
        model.net[0].eval()
    quiet(max_epochs=2).fit(model, loader(16), loader(8))
    assert model.swaps == [False, True, False, True]
    assert model.net[0].training is not frozen and model.net[3].training


@pytest.mark.ranks
def test_gradients_in_evaluation() -> None:
    class Adversarial(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            with torch.set_grad_enabled(True):
                x = batch[0].clone().requires_grad_()
                loss = F.cross_entropy(self(x), batch[1])
                (gradient,) = torch.autograd.grad(loss, x)
            self.log("val/norm", gradient.norm())
            self.log("val/loss", loss)

        predict_step = lambda self, batch, batch_idx: torch.enable_grad()(lambda: self(batch[0]).sum(1))()  # noqa: E731

    trainer, model = quiet(), Adversarial()
    trainer.fit(model, loader(16), loader(8))
    assert trainer.callback_metrics["val/norm"] > 0
    reference = net()
    model = net()
    model.__class__ = Adversarial
    quiet().fit(model, loader(16), loader(8))
    quiet().fit(reference, loader(16))
    assert equal(weights(model), weights(reference))
    quiet(devices=2).validate(model, loader(8), verbose=False)


@pytest.mark.ranks
def test_modules_read_attributes_of_the_trainer() -> None:
    class Own(Trainer):
        def fit(self, *args: Any, **kwargs: Any) -> None:
            self.started = True
            super().fit(*args, **kwargs)

    class Reaches(Net):
        def on_fit_start(self) -> None:
            first = next(iter(self.trainer.train_dataloader))
            size, rank = 4 // self.trainer.world_size, self.trainer.global_rank
            assert torch.equal(first[0], data(8).tensors[0][size * rank : size * (rank + 1)])
            assert len(list(self.trainer.train_dataloader)) == len(self.trainer.train_dataloader) == 2
            assert next(iter(self.trainer.val_dataloaders))[0].shape == (size, 8)
            assert self.trainer.started and self.trainer.mark == 5
            self.trainer.own = {"a": 1}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer.own == {"a": 1}
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.0
            assert self.trainer._run.schedulers[0].scheduler.last_epoch == 0
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [LambdaLR(optimizer, lambda epoch: 1.0)]

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
    for devices in (1, 2):
        trainer, model = Own(devices=devices, **options), net()
        trainer.mark = 5  # type: ignore[attr-defined]
        model.__class__ = Reaches
        trainer.fit(model, loader(8, 4 // devices), loader(8, 4 // devices))
        assert equal(weights(model), weights(net())), "the rate was set to zero"
        assert trainer.global_step == 2
