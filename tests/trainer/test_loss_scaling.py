"""Steps of `16-mixed` that compute in float32: the scale of losses changes no bit, and a step that overflows is as one
that is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module
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


class FactoredByHand(NeverZeroed):
    """Its optimizer multiplies matrices, and under `fsdp` steps whole parameters, each on one rank."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adafactor(part.parameters(), 0.1) for part in (self.often, self.seldom)]


class ClipsInHookByHand(NeverZeroed):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.often.parameters(), 0.05)


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
