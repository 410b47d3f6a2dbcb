"""Steps of `16-mixed` that compute in float32: the scale of losses changes no bit, and a step that overflows is as one
that is not taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
from lockstep.callbacks import Callback
from tests.trainer.toy import equal, loader, quiet, weights

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


class Scaled(Module):
    """The batches `overflow` have a loss whose gradient is infinite once it is scaled; without scaling no step is taken
    there."""

    overflow: tuple[int, ...] = ()

    def __init__(self, scales: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scales = scales
        self.often, self.seldom = nn.Linear(8, 3), nn.Linear(8, 3)

    def loss(self, layer: nn.Module, batch: Any, batch_idx: int = -1) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            loss = F.cross_entropy(layer(batch[0]), batch[1])
        return loss * 1e38 if self.overflows(batch_idx) and self.scales else loss

    def overflows(self, batch_idx: int) -> bool:
        return batch_idx in self.overflow

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.overflows(batch_idx) and not self.scales:
            return None
        return self.loss(self.often, batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.often, batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.often.parameters(), 0.1, momentum=0.9)


class ClipsInHook(Scaled):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.often.parameters(), 0.05)


class DecaysInHook(Scaled):
    overflow = (2, 3)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.often.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.1)


class MeasuresEachMicroBatch(Scaled):
    def on_after_backward(self) -> None:
        self.grad_norm()


class StepsSometimes(Scaled):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)


class ByHand(Scaled):
    """Two optimizers: one steps in each batch, the other every third."""

    automatic_optimization = False
    overflow = (1, 3)
    clips = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, seldom = self.optimizers()
        self.manual_backward(self.loss(self.often, batch, batch_idx))
        if self.scales or not self.overflows(batch_idx):
            often.step()
        often.zero_grad()
        self.manual_backward(self.loss(self.seldom, batch))
        if self.clips:
            self.clip_gradients(seldom, 0.1)
        if batch_idx % 3 == 2:
            seldom.step()
            seldom.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.often, self.seldom)]


class ClipsByHand(ByHand):
    clips = True


class SkipsByHand(ByHand):
    """Measures the gradient and does not step with each."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, _ = self.optimizers()
        self.manual_backward(self.loss(self.often, batch))
        self.clip_gradients(often, 0.1)
        if batch_idx % 2:
            often.step()
        often.zero_grad()


class StaleByHand(ByHand):
    """Steps with the gradients of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, _ = self.optimizers()
        if self.scales or not self.overflows(batch_idx - 1):
            often.step()
        often.zero_grad()
        self.manual_backward(self.loss(self.often, batch, batch_idx))


class NeverZeroed(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(self.often, batch))
        self.optimizers()[0].step()


class ClipsValuesByHand(ByHand):
    """Steps by the clipped gradient of the batch before, which hides what was infinite."""

    overflow = (2,)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, _ = self.optimizers()
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(self.often, batch, batch_idx))
            self.clip_gradients(often, 0.1, "value")
            return
        if self.scales or not self.overflows(batch_idx - 1):
            often.step()
        often.zero_grad()


class TwiceByHand(NeverZeroed):
    """Steps twice by a gradient, and by that of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers()[0].step()
        self.manual_backward(self.loss(self.often, batch))
        self.optimizers()[0].step()
        self.optimizers()[0].step()


class FactoredByHand(NeverZeroed):
    """Its optimizer multiplies matrices, and under `fsdp` steps whole parameters, each on one rank."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adafactor(part.parameters(), 0.1) for part in (self.often, self.seldom)]


class ClipsInHookByHand(NeverZeroed):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.often.parameters(), 0.05)


class LooksAtKept(ByHand):
    """Edits a kept gradient after a save."""

    clips = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.seldom.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=0.1)


class Shared(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(self.often, batch))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.often.parameters(), 0.1) for _ in range(2)]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ClipsInHook, {}),
        (DecaysInHook, {"accumulate_grad_batches": 2}),
        (MeasuresEachMicroBatch, {"accumulate_grad_batches": 2}),
        (StepsSometimes, {"gradient_clip_val": 0.05}),
        (ByHand, {}),
        (ClipsByHand, {}),
        (SkipsByHand, {}),
        (StaleByHand, {}),
        (NeverZeroed, {}),
        (ClipsValuesByHand, {}),
        (TwiceByHand, {}),
        (FactoredByHand, {}),
        (ClipsInHookByHand, {}),
    ],
)
def test_the_scale_changes_no_bit(
    kind: type[Scaled], options: dict[str, Any], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    found = []
    for scales in (True, False):
        module = kind(scales)
        precision = "16-mixed" if scales else "32-true"
        trainer = quiet(strategy=strategy, accelerator="cpu", precision=precision, split_batches=True, **options)
        trainer.fit(module, loader(48, 8))
        found.append(weights(module))
    assert equal(*found)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", [ClipsInHook, MeasuresEachMicroBatch, ClipsByHand, FactoredByHand])
def test_the_scale_changes_no_bit_on_two_ranks(kind: type[Scaled], strategy: str) -> None:
    if strategy == "dp" and issubclass(kind, ByHand):
        pytest.skip("dp refuses manual optimization")
    found = []
    for scales in (True, False):
        module = kind(scales)
        options = {} if issubclass(kind, ByHand) else {"accumulate_grad_batches": 2}
        trainer = quiet(
            strategy=strategy,
            devices=2,
            accelerator="cpu",
            precision="16-mixed" if scales else "32-true",
            split_batches=True,
            **options,
        )
        trainer.fit(module, loader(48, 8))
        found.append(weights(module))
    assert equal(*found)


class Saves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.path / str(trainer.global_step))


def test_a_save_changes_no_gradient_that_is_kept(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [Saves(tmp_path)]):
        module = LooksAtKept(True)
        quiet(accelerator="cpu", precision="16-mixed", callbacks=callbacks).fit(module, loader(48, 8))
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([*weights(module), *gradients])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))


def test_a_parameter_of_two_optimizers_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"shape \(3, 8\) is stepped by two optimizers"):
        quiet(accelerator="cpu", precision="16-mixed").fit(Shared(True), loader(48, 8))


def test_gradients_of_the_user_keep_their_values(tmp_path: Path) -> None:
    quiet(accelerator="cpu", precision="16-mixed", callbacks=[Saves(tmp_path)]).fit(Scaled(True), loader(48, 8))
    module = Scaled(True)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    quiet(accelerator="cpu").validate(module, loader(48, 8), ckpt_path=str(tmp_path / "3"))
    assert all(p.grad is not None and p.grad.eq(1).all() for p in module.parameters())


@pytest.mark.parametrize("kind", [ClipsByHand, ClipsValuesByHand, LooksAtKept])
def test_a_run_that_is_resumed_between_clip_and_step_is_the_same(kind: type[Scaled], tmp_path: Path) -> None:
    whole = kind(True)
    quiet(accelerator="cpu", precision="16-mixed", callbacks=[SavesEach(tmp_path)]).fit(whole, loader(48, 8))
    for number in range(1, 6):
        module = kind(True)
        trainer = quiet(accelerator="cpu", precision="16-mixed")
        trainer.fit(module, loader(48, 8), ckpt_path=str(tmp_path / str(number)))
        assert equal(weights(module), weights(whole)), number


class SavesEach(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.path / str(batch_idx + 1))


class PlainBackward(NeverZeroed):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(self.often, batch).backward()
        self.optimizers()[0].step()


def test_a_backward_without_the_scale_is_refused() -> None:
    with pytest.raises(RuntimeError, match="call self.manual_backward"):
        quiet(accelerator="cpu", precision="16-mixed").fit(PlainBackward(True), loader(48, 8))


class WritesGradients(NeverZeroed):
    """Takes gradients apart and writes them itself, from the batch of number `first` on."""

    first = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often = self.optimizers()[0]
        often.zero_grad()
        loss, own = self.loss(self.often, batch), [*self.often.parameters()]
        if batch_idx < self.first:
            self.manual_backward(loss)
        else:
            for parameter, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
                parameter.grad = gradient
        often.step()


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("first", [0, 2])
def test_gradients_that_are_written_without_the_scale_are_refused(
    first: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    module = WritesGradients(True)
    module.first = first
    with pytest.raises(RuntimeError, match=r"has written that of a parameter of shape .* without the scale"):
        quiet(strategy=strategy, accelerator="cpu", precision="16-mixed").fit(module, loader(48, 8))


class AddsProjected(NeverZeroed):
    """Keeps the gradients of two losses apart, and writes back what it makes of them."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        often, own, kept = self.optimizers()[0], [*self.often.parameters()], list[list[Tensor]]()
        for factor in (0.5, 2.0):
            often.zero_grad()
            self.manual_backward(self.loss(self.often, batch) * factor)
            kept.append([p.grad.clone() for p in own if p.grad is not None])
        often.zero_grad()
        for parameter, one, other in zip(own, *kept, strict=True):
            parameter.grad = one + other
        often.step()


def test_scaled_gradients_that_a_step_writes_back_are_stepped_with() -> None:
    found = []
    for scales in (True, False):
        module = AddsProjected(scales)
        quiet(accelerator="cpu", precision="16-mixed" if scales else "32-true").fit(module, loader(48, 8))
        found.append(weights(module))
    assert equal(*found)
