"""What user code does to weights, gradients, buffers and rates that other ranks hold too: as on one process, or
refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MetricTracker, Running

from lockstep import Module
from lockstep.strategies import DDP, FSDP, DeepSpeed, ParameterServer, TensorParallel
from tests.trainer.test_user_code import Base, assert_as_on_one_process, assert_same, batches, fitted, quiet
from tests.trainer.toy import loader

pytestmark = pytest.mark.ranks

UNEVEN = 17
"""Samples, of which the last batch of 8 leaves a rank without any."""


class Replaced(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


class FromVector(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, self.parameters())


@pytest.mark.parametrize(
    ("make", "strategy"), [(Replaced, "fsdp"), (Replaced, "tensor"), (FromVector, "fsdp"), (Replaced, "ddp=2,fsdp=2")]
)
def test_weights_assigned_to_data_hold(make: Callable[[], Module], strategy: str) -> None:
    assert_as_on_one_process(make, strategy, 4 if "=" in strategy else 2, n=UNEVEN)


class Halved(Base):
    def on_train_start(self) -> None:
        self.net[0].weight.data = self.net[0].weight.data.float()


def test_another_dtype_is_not_assigned_to_data_of_a_shard() -> None:
    with pytest.raises(RuntimeError, match=r"of shape \[16, 8\] and torch.float32 was assigned to `data` of a sharded"):
        fitted(Halved(), "fsdp", 2)


class EvaluatedInHalf(Base):
    def on_test_start(self) -> None:
        self.net.bfloat16()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.net(batch[0])


def test_a_model_that_a_hook_casts_is_not_evaluated_as_it_was_where_it_is_sharded() -> None:
    message = "weight of a Linear was cast to torch.bfloat16 during the run, but FSDP gathers it as torch.float32"
    quiet(accelerator="cpu").test(EvaluatedInHalf(), loader(8), verbose=False)
    with pytest.raises(RuntimeError, match=message):
        quiet(strategy="fsdp", devices=2, accelerator="cpu").test(EvaluatedInHalf(), loader(8), verbose=False)


class RoundsToFloat(Base):
    """The weights are rounded, and have other memory afterwards, of which engines hear nothing."""

    def on_train_epoch_start(self) -> None:
        self.net[0].float().double()

    def configure_optimizers(self) -> Any:
        self.net.float().double()
        return super().configure_optimizers()


class RoundsInStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[0].float().double()
        return super().training_step(batch, batch_idx)


class TrainsInFloat(Base):
    def on_train_start(self) -> None:
        self.net.float()


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("fsdp", 2), ("ddp=2,fsdp=2", 4)])
def test_weights_that_hooks_cast_and_cast_back_are_trained(strategy: str, devices: int) -> None:
    assert_as_on_one_process(RoundsToFloat, strategy, devices)


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (RoundsInStep, "ddp", r"a step cast net\.0\.weight, net\.0\.bias, but DDP has made ready"),
        (RoundsInStep, "fsdp", r"a step cast net\.0\.weight, net\.0\.bias, but FSDP has made ready"),
        (
            TrainsInFloat,
            "fsdp",
            r"weight of a Linear was cast to torch\.float32 during the run, but FSDP gathers it as",
        ),
    ],
)
def test_casts_that_engines_cannot_follow_are_refused(make: Callable[[], Module], strategy: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fitted(make(), strategy, 2)


class KeepsView(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before = self.net[0].weight.detach()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.before.norm()


def test_a_view_of_a_weight_that_a_step_keeps_is_refused() -> None:
    """The memory is freed: reading it ended the process."""
    with pytest.raises(RuntimeError, match=r"before was given a view .* of a parameter, which FSDP had gathered"):
        fitted(KeepsView(), "fsdp", 2)


class ReturnsWeight(Base):
    """Steps return a weight, which hooks of the batch read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "bias": self.net[0].bias}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return [self.net[0].weight[0]]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]), self.net[0].weight.detach()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["bias"].norm()

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        outputs[0].norm()


@pytest.mark.parametrize(
    ("verb", "strategy", "message"),
    [
        ("fit", "fsdp", "a step returned a weight, or a view of one .* which FSDP had gathered"),
        ("test", "fsdp", "a step returned a weight, or a view of one .* which FSDP had gathered"),
        ("predict", "fsdp", "a step returned a weight, or a view of one .* which FSDP had gathered"),
        ("predict", "tensor", "predict_step returned a weight that is sharded over ranks"),
        ("fit", "dp", "training_step returned a weight, or a view of one .* strategy 'dp' joins"),
    ],
)
def test_a_weight_that_a_step_returns_is_refused(verb: str, strategy: str, message: str) -> None:
    """Its memory is freed: a hook that read it ended the process. Under dp it was that of before the step."""
    trainer = quiet(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, accumulate_grad_batches=2)
    with pytest.raises((RuntimeError, TypeError), match=message):
        getattr(trainer, verb)(ReturnsWeight(), loader(16))


class KeepsRow(Base):
    """A hook keeps a view, of which a rank that holds another shard has a copy."""

    of_whole = False

    def on_train_start(self) -> None:
        with self.trainer.whole(self) if self.of_whole else nullcontext():
            self.row = self.net[0].weight.detach()[0]


class KeepsRowOfWhole(KeepsRow):
    of_whole = True


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.parametrize("make", [KeepsRow, KeepsRowOfWhole])
def test_a_view_that_a_hook_keeps_of_a_copy_is_refused(make: Callable[[], Module], strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"keeps a view of net.0.weight .* which is a copy, .*; keep a clone"):
        fitted(make(), strategy, 2)


class ReadsRows(Base):
    """Views that nobody keeps, and one that is only aliased where no copy was made."""

    def on_train_start(self) -> None:
        self.matrix = self.net[0].weight.detach()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("row", self.net[0].weight[0].sum())
        with self.trainer.whole(self):
            torch.save(self.state_dict(), io.BytesIO())  # whose tensors wait for the garbage collector
        self.slope = self.net[0].weight.grad[0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("sum", self.matrix.sum())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_views_that_follow_the_weight_or_are_not_kept_are_allowed(strategy: str) -> None:
    assert_as_on_one_process(ReadsRows, strategy, 2, n=UNEVEN)


class ListsOfTensors(Base):
    """torch's functions of lists of tensors, of which a tensor-parallel model shards some."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.LayerNorm(16))
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        nn.utils.clip_grad_value_(self.net.parameters(), 0.05)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_functions_of_lists_take_sharded_and_whole_tensors(strategy: str) -> None:
    assert_as_on_one_process(ListsOfTensors, strategy, 2, n=UNEVEN)


class OfAnyPrecision(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0].to(self.dtype), batch[1]), batch_idx)


class Drawn(OfAnyPrecision):
    """New weights, and noise on gradients, both drawn in hooks."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with self.trainer.whole(self):
                nn.init.normal_(self.net[2].weight, 0, 0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for parameter in self.parameters():
                parameter.grad.add_(torch.randn_like(parameter.grad) * 0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_random_numbers_within_whole_are_those_of_one_process(strategy: str) -> None:
    assert_as_on_one_process(Drawn, strategy, 2, n=UNEVEN)


def test_random_numbers_within_whole_are_those_of_one_process_under_deepspeed() -> None:
    alone = fitted(Drawn(), "single", 1, n=UNEVEN, precision="32-true")
    assert_same(fitted(Drawn(), DeepSpeed(stage=2), 2, n=UNEVEN, precision="32-true"), alone, 2e-4)


class DrawnOnShards(OfAnyPrecision):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            nn.init.normal_(self.net[2].weight, 0, 0.1)


class NoiseOnShards(Base):
    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad) * 0.01)


class DrawnAsData(Base):
    def on_train_start(self) -> None:
        self.net[2].weight.data.normal_(0, 0.1)


class ExponentialNoise(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(torch.empty_like(parameter.grad).exponential_())


class DroppedWeights(Base):
    def on_train_epoch_end(self) -> None:
        F.dropout(self.net[0].weight.detach())


@pytest.mark.parametrize("make", [DrawnOnShards, NoiseOnShards, DrawnAsData, ExponentialNoise, DroppedWeights])
@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_random_numbers_for_shards_are_refused(make: Callable[[], Module], strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"random numbers were drawn \(aten.* of which this rank holds a shard"):
        fitted(make(), strategy, 2)


def test_weights_that_ranks_set_differently_are_refused_under_deepspeed() -> None:
    with pytest.raises(RuntimeError, match="the weights net.2.weight were changed in a hook to values that are not"):
        fitted(DrawnOnShards(), DeepSpeed(stage=1), 2, precision="32-true")


class NoisyLayer(Base):
    """Noise that a layer draws in a step is not that of weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:2](batch[0])
        return F.cross_entropy(self.net[2:](hidden + 0.1 * torch.randn_like(hidden)), batch[1])


def test_a_layer_may_draw_in_a_step_of_tensor_parallelism() -> None:
    fitted(NoisyLayer(), "tensor", 2)


class OwnWithinWhole(Base):
    def on_train_epoch_start(self) -> None:
        with self.trainer.whole(self), torch.no_grad():
            self.net[2].weight.add_(0.01 * self.global_rank)


class OwnGradientWithinWhole(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self), torch.no_grad():
            self.net[2].weight.grad.add_(0.01 * self.global_rank)


@pytest.mark.parametrize(
    ("make", "what"), [(OwnWithinWhole, "net.2.weight"), (OwnGradientWithinWhole, "the gradient of net.2.weight")]
)
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_change_within_whole_that_is_not_that_of_all_ranks_is_refused(
    make: Callable[[], Module], what: str, strategy: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"drifted apart: after step \d+ {what} on rank 1 is not what it is on"):
        fitted(make(), strategy, 2)


class ByHand(Base):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.change(batch)
        optimizer.step()

    def change(self, batch: Any) -> None: ...


class ClippedByHand(ByHand):
    def change(self, batch: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)


class SignsByHand(ByHand):
    def change(self, batch: Any) -> None:
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.sign_()


class AddedByHand(ByHand):
    """A gradient clipped, and that of a second loss on top of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def change(self, batch: Any) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)
        self.manual_backward(0.1 * self.net(batch[0]).square().mean())


class Sharpness(ByHand):
    """Sharpness-aware minimization: a step up the gradient of the whole batch, and back."""

    def change(self, batch: Any) -> None:
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in self.net.parameters()]).norm()
            steps = [p.grad * (0.05 / norm) for p in self.net.parameters()]
            for parameter, step in zip(self.net.parameters(), steps, strict=True):
                parameter.add_(step)
        self.optimizers().zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        with torch.no_grad():
            for parameter, step in zip(self.net.parameters(), steps, strict=True):
                parameter.sub_(step)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        *((make, "ddp") for make in (ClippedByHand, SignsByHand, AddedByHand, Sharpness)),
        *((make, "fsdp") for make in (ClippedByHand, SignsByHand, AddedByHand)),
        (SignsByHand, "tensor"),
    ],
)
def test_gradients_are_those_of_the_batch_after_a_manual_backward(make: Callable[[], Module], strategy: str) -> None:
    assert_as_on_one_process(make, strategy, 2, n=UNEVEN)


class AmongHooks(AddedByHand):
    """Hooks that are watched for changes come between the backward and what follows."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None: ...

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...


def test_hooks_on_parameters_hold_among_others_in_manual_optimization() -> None:
    alone = fitted(AddedByHand(), "single", 1, n=UNEVEN)
    assert_same(fitted(AmongHooks(), "single", 1, n=UNEVEN), alone)
    assert_same(fitted(AmongHooks(), "ddp", 2, n=UNEVEN), alone)


class LateHook(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("ddp", 2), ("fsdp", 2), ("tensor", 2), ("pipeline", 2), ("dp", 2), ("fsdp=2,pipeline=2", 4)],
)
def test_a_hook_that_a_step_registers_is_refused(strategy: str, devices: int) -> None:
    with pytest.raises(Exception, match=r"hooks were registered on net\.0\.weight within a step, where .* a part of"):
        fitted(LateHook(), strategy, devices)


def test_a_hook_that_a_step_registers_is_refused_where_others_step() -> None:
    with pytest.raises(Exception, match=r"hooks were registered on net\.0\.weight within a step"):
        fitted(LateHook(), ParameterServer(staleness=0), 2)


class LateByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            self.net[2].weight.register_post_accumulate_grad_hook(self.clamp)
        super().training_step(batch, batch_idx)

    @staticmethod
    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_a_hook_that_a_step_registers_before_its_own_backward_gets_the_gradient_of_all(strategy: str) -> None:
    assert_as_on_one_process(LateByHand, strategy, 2, n=UNEVEN)


class InWindow(Base):
    """Reaches into the whole model at each micro-batch, or once a step."""

    at = "on_train_batch_end"

    def clamp(self, *_: Any) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "on_train_batch_end":
            self.clamp()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.at == "on_before_zero_grad":
            self.clamp()


class OncePerStep(InWindow):
    at = "on_before_zero_grad"


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
def test_the_whole_model_is_seen_after_a_window_and_not_within(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="called within an accumulation window, whose gradients are not added up"):
        fitted(InWindow(), strategy, 2, accumulate_grad_batches=2)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "n": UNEVEN}
    assert_same(fitted(OncePerStep(), strategy, 2, **options), fitted(OncePerStep(), "single", 1, **options))


class InEvaluatedBatch(Base):
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        with self.trainer.whole(self):
            pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_whole_model_is_refused_for_a_batch_of_an_evaluation(strategy: str) -> None:
    quiet(accelerator="cpu").validate(InEvaluatedBatch(), loader(UNEVEN), verbose=False)
    with pytest.raises(RuntimeError, match=r"ranks without samples in it do not run; call it in a hook of the epoch"):
        quiet(strategy=strategy, devices=2, accelerator="cpu").validate(InEvaluatedBatch(), loader(UNEVEN))


class RemovesWeightNorm(Base):
    kind = staticmethod(parametrizations.weight_norm)

    def __init__(self) -> None:
        super().__init__()
        self.kind(self.net[0])

    def on_train_end(self) -> None:
        parametrize.remove_parametrizations(self.net[0], "weight")


class RemovesSpectralNorm(RemovesWeightNorm):
    kind = staticmethod(parametrizations.spectral_norm)


@pytest.mark.parametrize("make", [RemovesWeightNorm, RemovesSpectralNorm])
def test_to_remove_a_parametrization_of_shards_is_refused(make: Callable[[], Module]) -> None:
    with pytest.raises(RuntimeError, match=r"on_train_end removes the parametrization of a layer .*; remove it before"):
        fitted(make(), "fsdp", 2)


class Padded(Base):
    """In evaluation torch's encoder makes a nested tensor of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        mask = torch.tensor([[False, True]]).expand(len(batch[0]), 2)
        self.encoder(batch[0][:, None, :8].expand(-1, 2, 8), src_key_padding_mask=mask)


class CastAfterForward(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net[2].float()
        return loss


def test_what_layers_of_tensor_parallelism_cannot_take_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"^Padded.validation_step gives a nested tensor, .* enable_nested_tensor="):
        quiet(strategy="tensor", devices=2, accelerator="cpu").validate(Padded(), loader(8))
    with pytest.raises(RuntimeError, match=r"training_step casts or moves a layer whose weights are sharded .*; do it"):
        fitted(CastAfterForward(), "tensor", 2)


class WholeByHand(ByHand):
    """Two steps a batch, with the whole model in each: gradients changed before it, weights after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        with self.trainer.whole(self), torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
        super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm + 0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp", 2), ("fsdp", 2), ("tensor", 2), ("ddp=2,fsdp=2", 4), ("fsdp=2,tensor=2", 4)]
)
def test_the_whole_model_is_seen_between_manual_steps(strategy: str, devices: int) -> None:
    assert_as_on_one_process(WholeByHand, strategy, devices, n=UNEVEN)


class Toggled(ByHand):
    """Two optimizers, toggled between forward and backward; gradients are cleared after the steps."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1, momentum=0.9) for i in (0, 4)]


@pytest.mark.parametrize(
    ("strategy", "devices"), [("ddp", 2), ("fsdp", 2), ("tensor", 2), ("ddp=2,fsdp=2", 4), ("ddp=2,tensor=2", 4)]
)
def test_toggled_optimizers_leave_no_gradients_to_others(strategy: str, devices: int) -> None:
    assert_as_on_one_process(Toggled, strategy, devices, n=UNEVEN)


class OwnBackward(ByHand):
    def manual_backward(self, loss: torch.Tensor, *args: Any, **options: Any) -> None:
        loss.backward()


class NormsWithin(Base):
    """Logs the norm of what each micro-batch has added up to."""

    def on_after_backward(self) -> None:
        self.log("norm", self.grad_norm())


class Tied(NormsWithin):
    """Its last layer has the weight of the first, on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.net[2].weight = self.net[0].weight


def norm_of(strategy: str, devices: int, **options: Any) -> float:
    return float(fitted(NormsWithin(), strategy, devices, **options).trainer.callback_metrics["norm"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ddp=2,pipeline=2", {}), ("fsdp=2,pipeline=2", {}), ("ddp=2,pipeline=2", {"virtual_ranks": 2})],
)
def test_gradients_of_a_part_of_the_ranks_are_not_read_within_a_window(strategy: str, options: dict[str, Any]) -> None:
    """Without accumulation they are those of all ranks."""
    with pytest.raises(RuntimeError, match=r"on_after_backward is overridden.* of some samples only"):
        norm_of(strategy, 4, accumulate_grad_batches=2, **options)
    assert norm_of(strategy, 4, **options) == pytest.approx(norm_of("single", 1, **options), rel=1e-12)


def test_gradients_that_stages_add_up_are_not_read_within_a_window() -> None:
    with pytest.raises(RuntimeError, match=r"on_after_backward is overridden.* of some samples only"):
        fitted(Tied(), "pipeline", 2, accumulate_grad_batches=2)
    norms = [fitted(Tied(), *layout).trainer.callback_metrics["norm"] for layout in (("single", 1), ("pipeline", 2))]
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-12)


class NormsAfterBatches(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2 == 0:
            self.log("norm", self.grad_norm())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_norm_between_micro_batches_is_refused_on_several_ranks(strategy: str) -> None:
    fitted(NormsAfterBatches(), "single", 1, accumulate_grad_batches=2)
    with pytest.raises(RuntimeError, match=r"grad_norm\(\) was called within an accumulation window"):
        fitted(NormsAfterBatches(), strategy, 2, accumulate_grad_batches=2)


def test_norms_within_a_window_are_those_of_one_process_in_a_pipeline_of_own_parameters() -> None:
    alone, staged = (norm_of(*layout, accumulate_grad_batches=2) for layout in (("single", 1), ("pipeline", 2)))
    assert staged == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_plain_backward_before_a_manual_step_is_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="call self.manual_backward"):
        fitted(OwnBackward(), strategy, 2)
    fitted(OwnBackward(), "single", 1)


class Centered(Base):
    """The mean of what the net returned, of this rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch[0])
        loss = F.cross_entropy(y - self.center, batch[1])
        self.center = 0.9 * self.center + 0.1 * y.detach().mean(0)
        return loss


class CenteredLate(Centered):
    def __init__(self) -> None:
        super().__init__()
        del self.center

    def on_train_start(self) -> None:
        self.register_buffer("center", torch.zeros(4))


@pytest.mark.parametrize(
    ("strategy", "make"),
    [("ddp", Centered), ("fsdp", Centered), ("ddp=2,fsdp=2", Centered), ("ddp", CenteredLate), ("fsdp", CenteredLate)],
)
def test_buffers_computed_from_a_ranks_samples_are_refused(strategy: str, make: Callable[[], Module]) -> None:
    with pytest.raises(RuntimeError, match=r"hold different values of a buffer \(center\)"):
        fitted(make(), strategy, 4 if "=" in strategy else 2)


class GrowsBetweenSteps(Base):
    """A buffer that a hook gives another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.ones(1, 4))

    def grows(self) -> bool:
        return self.current_epoch == 1

    def on_train_epoch_start(self) -> None:
        if self.grows():
            self.rows = torch.cat([self.rows, self.rows / 2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows.mul_(0.99)
        return F.cross_entropy(self.net(batch[0]) * self.rows.mean(0), batch[1])


class PrunesBetweenSteps(GrowsBetweenSteps):
    """Buffers that a hook adds to a layer that has some, and to one that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_buffer("scale", torch.full((1,), 0.9))

    def on_train_epoch_start(self) -> None:
        if self.grows():
            for layer in (self.net[0], self.net[2]):
                prune.l1_unstructured(layer, "weight", 0.3)

    def on_train_end(self) -> None:
        for layer in (self.net[0], self.net[2]):
            prune.remove(layer, "weight")


class GrowsOnRank0(GrowsBetweenSteps):
    def grows(self) -> bool:
        return super().grows() and self.trainer.is_global_zero


@pytest.mark.parametrize(
    ("strategy", "make"),
    [("ddp", PrunesBetweenSteps), ("fsdp", GrowsBetweenSteps), ("tensor", GrowsBetweenSteps)],
)
def test_buffers_that_hooks_add_and_reshape_are_shared(strategy: str, make: Callable[[], Module]) -> None:
    assert_as_on_one_process(make, strategy, 2, n=UNEVEN)
    with pytest.raises(RuntimeError, match="the ranks disagree on their changes of .* in hooks"):
        fitted(GrowsOnRank0(), strategy, 2)


class CountsSamples(Base):
    """A number that grows alike on all ranks, and not as on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def count(self, x: Tensor) -> Any:
        return len(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += self.count(batch[0])
        return super().training_step(batch, batch_idx) * (1 + self.seen / 100)


class CountsOverRanks(CountsSamples):
    def count(self, x: Tensor) -> Any:
        return self.sum_over_ranks(len(x))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "dp"])
def test_a_buffer_that_counts_a_ranks_samples_is_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"seen, which counts the 4 samples that \w+ showed it, and not the 8"):
        fitted(CountsSamples(), strategy, 2)


class CountsTokens(CountsSamples):
    def count(self, x: Tensor) -> Any:
        return x.numel()


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_a_buffer_that_counts_a_ranks_tokens_is_refused(strategy: str) -> None:
    """The number is a multiple of the samples of all ranks too."""
    with pytest.raises(RuntimeError, match=r"added \d+ to the buffer seen, which counts the 4 samples .*not the 8"):
        fitted(CountsTokens(), strategy, 2)


class CountsTwice(CountsSamples):
    def count(self, x: Tensor) -> Any:
        return len(torch.cat((x, x, x)))


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_a_buffer_that_counts_a_ranks_views_is_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"added 12 to the buffer seen, which counts the 4 samples .*not the 8"):
        fitted(CountsTwice(), strategy, 2)


class KeepsLength(CountsSamples):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.clamp_(min=12)  # the longest of all batches
        return Base.training_step(self, batch, batch_idx) * (1 + self.seen / 100)


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_a_buffer_may_keep_a_length_that_is_a_multiple_of_a_ranks_samples(strategy: str) -> None:
    assert_as_on_one_process(KeepsLength, strategy, 2)


class CountsInSteps(CountsSamples):
    training_step = Base.training_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += self.count(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += self.count(batch[0])
        return batch[0]


@pytest.mark.parametrize("call", ["validate", "predict"])
def test_a_buffer_that_counts_a_ranks_samples_in_evaluation_is_refused(call: str) -> None:
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu", split_batches=True)
    with pytest.raises(RuntimeError, match=r"seen, which counts the 4 samples that DDP showed it, and not the 8"):
        getattr(trainer, call)(CountsInSteps(), batches(16))


def test_a_buffer_may_count_the_samples_of_all_ranks() -> None:
    assert_as_on_one_process(CountsOverRanks, "ddp", 2)


class Remembering(Base):
    """A buffer that grows."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 8), persistent=self.persistent)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = torch.cat([self.seen, batch[0]])
        return super().training_step(batch, batch_idx)


class Caching(Remembering):
    persistent = False


@pytest.mark.long
def test_a_buffer_that_grows_is_refused_unless_it_is_a_cache() -> None:
    with pytest.raises(RuntimeError, match=r"the shape of a buffer changed in a step \(seen\)"):
        fitted(Remembering(), "ddp", 2, n=UNEVEN)
    fitted(Caching(), "ddp", 2, n=UNEVEN)


def test_buffers_of_rank_0_are_taken_if_asked_for() -> None:
    fitted(Centered(), DDP(broadcast_buffers=True), 2)


class RateByLoss(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 * float(loss.detach())
        return loss


class TensorRateByLoss(RateByLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = Base.training_step(self, batch, batch_idx)
        for group in self.optimizers().param_groups:
            group["lr"].fill_(0.01 * loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), torch.tensor(0.1, dtype=torch.float64))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize("kind", [RateByLoss, TensorRateByLoss])
def test_learning_rates_that_differ_between_ranks_are_refused(strategy: str, kind: type[RateByLoss]) -> None:
    with pytest.raises(RuntimeError, match="the ranks disagree on their optimizers' learning rates"):
        fitted(kind(), strategy, 2)


@pytest.mark.parametrize("kind", [RateByLoss, TensorRateByLoss])
def test_a_rate_that_slices_of_a_batch_set_is_refused(kind: type[RateByLoss]) -> None:
    with pytest.raises(RuntimeError, match="and strategy 'dp' runs it on slices"):
        fitted(kind(), "dp", 2)


@pytest.mark.parametrize(("devices", "match"), [(1, "leave different numbers in param_groups"), (2, "disagree on")])
def test_rates_in_tensors_that_shares_set_otherwise_are_refused(devices: int, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        fitted(TensorRateByLoss(), "ddp" if devices == 2 else "single", devices, virtual_ranks=2)


class Bag(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.EmbeddingBag(10, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net((batch[0].abs() * 3).long().clamp(0, 9)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_sparse_gradients_where_a_rank_has_no_samples() -> None:
    assert_as_on_one_process(Bag, "ddp", 2, n=UNEVEN)
    with pytest.raises(ValueError, match="net has sparse=True, and DeepSpeed cannot shard a sparse gradient"):
        fitted(Bag(), DeepSpeed(stage=1), 2, precision="32-true")


class MovedBag(Bag):
    """Its optimizer moves each row that a gradient has, also one of zeros; only the first step takes row 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = (batch[0].abs() * 3).long().clamp(0, 8) + (self.global_step > 0)
        return F.cross_entropy(self.net(rows), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters(), 0.1)


def test_rows_of_which_no_sample_has_a_gradient_stay_where_a_rank_has_no_samples() -> None:
    assert_as_on_one_process(MovedBag, "ddp", 2, n=UNEVEN)


class Copied(Base):
    def on_train_start(self) -> None:
        copy.deepcopy(self.net)


def test_a_copy_of_a_sharded_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Copied.on_train_start copies a module \(copy.deepcopy\) whose parameters"):
        fitted(Copied(), "fsdp", 2)


class Grouped(OfAnyPrecision):
    def __init__(self) -> None:
        super().__init__()
        self.net[4].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": self.net[4].parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[:4].parameters(), 0.1)


def test_a_group_of_parameters_is_not_added_under_deepspeed() -> None:
    with pytest.raises(RuntimeError, match="a parameter group was added during the run"):
        fitted(Grouped(), DeepSpeed(stage=1), 2, precision="32-true")


class WeightsLogged(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = sum(parameter.detach().square().sum() for parameter in self.parameters())
        self.log("norm", norm + torch.rand(()), on_step=False, on_epoch=True)


class WeightsReplaced(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class StateScaled(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.optimizers().state.values():
            state["exp_avg"].mul_(0.5)


def test_batches_of_all_shares_end_after_the_step() -> None:
    logged = []
    for devices in (1, 2):
        run = quiet(strategy="ddp", devices=devices, virtual_ranks=2, precision="64-true", max_epochs=2)
        run.fit(WeightsLogged(), batches(UNEVEN))
        logged.append(run.callback_metrics["norm"])
    assert torch.equal(logged[0], logged[1])


@pytest.mark.parametrize(
    ("make", "what"), [(WeightsReplaced, "net.0.bias, net.0.weight"), (StateScaled, "the optimizer's exp_avg")]
)
def test_what_a_rank_would_change_once_for_each_of_its_shares_is_refused(make: Callable[[], Module], what: str) -> None:
    with pytest.raises(RuntimeError, match=f"on_train_batch_end changed {what}"):
        fitted(make(), "single", 1, virtual_ranks=2)


class ReadsOutputs(OfAnyPrecision):
    """Reads in a hook what the step returned, also on a rank whose batch is padding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            return None
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "zeros": (batch[1] == 0).to(loss.dtype).mean()} if self.current_epoch else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert (outputs is None) == (batch_idx == 1)
        returned = outputs if isinstance(outputs, dict) else {"loss": outputs, "zeros": outputs}
        for name, value in returned.items() if outputs is not None else ():
            self.log(name, value.detach(), on_step=False, on_epoch=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "deepspeed_stage_2"])
def test_hooks_read_the_outputs_of_a_rank_without_samples(strategy: str) -> None:
    precision = "32-true" if "deepspeed" in strategy else "64-true"
    logged = []
    for name, devices in (("single", 1), (strategy, 2)):
        run = quiet(strategy=name, devices=devices, precision=precision, max_epochs=2, split_batches=True)
        run.fit(ReadsOutputs(), batches(UNEVEN))
        logged.append(run.callback_metrics)
    for name in ("loss", "zeros"):
        assert float(abs(logged[0][name] - logged[1][name])) <= (1e-12 if precision == "64-true" else 2e-4)


class CountsInEvaluation(OfAnyPrecision):
    """Buffers that an evaluation changes, of which the last batch gives the second rank no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen += self.total(batch[0].sum(0))
        self.batches = self.batches + 1

    def total(self, value: Any) -> Any:
        return self.sum_over_ranks(value)


class CountsItsOwn(CountsInEvaluation):
    def total(self, value: Any) -> Any:
        return value


def evaluated(make: Callable[[], Module], strategy: Any, devices: int) -> Module:
    precision = "32-true" if "deepspeed" in str(strategy) else "64-true"
    module = make()
    run = quiet(strategy=strategy, devices=devices, precision=precision, max_epochs=2, split_batches=True)
    run.fit(module, batches(32), batches(UNEVEN))
    run.validate(module, batches(UNEVEN))
    return module


IN_EVALUATION = ["ddp", "fsdp", "ddp=2,tensor=2", "deepspeed_stage_1", "deepspeed_stage_3"]


@pytest.mark.parametrize("strategy", IN_EVALUATION)
def test_buffers_that_an_evaluation_sums_over_ranks_are_those_of_one_process(strategy: str) -> None:
    one, many = (
        evaluated(CountsInEvaluation, s, d) for s, d in (("single", 1), (strategy, 4 if "=" in strategy else 2))
    )
    assert int(many.batches) == int(one.batches) > 0
    assert float((many.seen - one.seen).abs().max()) < 1e-4


@pytest.mark.parametrize("strategy", [*IN_EVALUATION, "ddp=2,pipeline=2"])
def test_buffers_that_an_evaluation_computes_from_a_ranks_samples_are_refused(strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"validation_step has left other values of a buffer .*\(seen"):
        evaluated(CountsItsOwn, strategy, 4 if "=" in strategy else 2)


def test_buffers_of_rank_0_after_an_evaluation_are_taken_if_asked_for() -> None:
    assert int(evaluated(CountsItsOwn, DDP(broadcast_buffers=True), 2).batches) > 0


class ChangesBuffers(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        with nullcontext() if self.bare else self.trainer.whole(self):
            self.count += 10

    bare = False


class ChangesBare(ChangesBuffers):
    bare = True


@pytest.mark.parametrize("devices", [1, 2])
def test_a_parameter_server_takes_over_buffers_within_whole_only(devices: int) -> None:
    module = fitted(ChangesBuffers(), ParameterServer(workers=2), devices)
    assert int(module.count) == 2 * 10 + 6  # epochs and steps
    with pytest.raises(RuntimeError, match="the buffers count were changed in a hook or in an evaluation"):
        fitted(ChangesBare(), ParameterServer(workers=2), devices)


class LogsWindow(Base):
    def __init__(self) -> None:
        super().__init__()
        self.recent = Running(MeanMetric(), window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.recent.update(loss.detach())
        return loss


def test_a_metric_over_the_last_updates_is_refused_on_several_ranks() -> None:
    fitted(LogsWindow(), "single", 1)
    with pytest.raises(ValueError, match=r"recent \(Running\) is over the last 3 updates, and each of 2 ranks"):
        fitted(LogsWindow(), "ddp", 2)
    with pytest.raises(ValueError, match=r"recent \(Running\) is over the last 3 updates, and each of 2 ranks"):
        fitted(LogsWindow(), "ddp", 1, virtual_ranks=2)


class LogsByWeight(OfAnyPrecision):
    """Weights of a mean that no float adds up exactly."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("by weight", batch[0].mean(), batch_size=batch[0].abs().sum(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("seed", range(3))
def test_means_with_weights_of_any_size_have_the_same_bits_on_any_number_of_ranks(seed: int) -> None:
    logged = []
    for devices in (1, 2):
        run = quiet(
            strategy="ddp", devices=devices, virtual_ranks=2, precision="64-true", split_batches=True, seed=seed
        )
        torch.manual_seed(seed)
        run.fit(LogsByWeight(), batches(40 + seed))
        logged.append(float(run.callback_metrics["by weight"]))
    assert logged[0] == logged[1]


class TracksMetric(OfAnyPrecision):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()


def test_a_copy_of_a_metric_of_shares_is_refused() -> None:
    with pytest.raises(RuntimeError, match="MeanMetric was copied during a run in which a rank stands for several"):
        fitted(TracksMetric(), "ddp", 1, virtual_ranks=2)


class Square(OfAnyPrecision):
    """Two layers of one shape, which may be tied or swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

    def tie(self) -> None:
        self.net[2].weight = self.net[0].weight


class TiesInFitStart(Square):
    def on_fit_start(self) -> None:
        self.tie()


class TiesInTrainStart(Square):
    def on_train_start(self) -> None:
        self.tie()


class TiesInTheStep(Square):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tie()
        return super().training_step(batch, batch_idx)


class TakesALayerOut(Square):
    def on_train_start(self) -> None:
        self.net[2] = nn.Identity()


class AddsATiedLayer(Square):
    def on_train_start(self) -> None:
        self.more = nn.Linear(8, 8, bias=False)
        self.more.weight = self.net[0].weight


class SetsABiasToNone(Square):
    def on_train_start(self) -> None:
        self.net[2].bias = None


@pytest.mark.parametrize(
    ("make", "strategy", "names"),
    [
        (TiesInFitStart, "fsdp", "net.2.weight"),
        (TiesInTrainStart, "fsdp", "net.2.weight"),
        (TiesInTrainStart, "ddp=2,fsdp=2", "net.2.weight"),
        (TiesInTheStep, "fsdp", "net.2.weight"),
        (TakesALayerOut, "fsdp", "net.2.weight, net.2.bias"),
        (AddsATiedLayer, "fsdp", "more.weight"),
        *((SetsABiasToNone, name, "net.2.bias") for name in ("fsdp", "tensor", "pipeline")),
    ],
)
def test_parameters_that_a_run_ties_or_takes_out_are_refused(
    make: Callable[[], Module], strategy: str, names: str
) -> None:
    with pytest.raises(
        RuntimeError, match=rf"added, replaced or removed during the run \({names}\), which \w+ cannot take over"
    ):
        fitted(make(), strategy, 4 if "=" in strategy else 2)


class Swaps(Square):
    def on_train_start(self) -> None:
        self.net[0], self.net[2] = self.net[2], self.net[0]


class TiesForAMoment(Square):
    def on_train_start(self) -> None:
        own = self.net[2].weight
        self.tie()
        self.net[2].weight = own


@pytest.mark.parametrize(
    ("make", "strategy"), [(Swaps, "fsdp"), (TiesForAMoment, "fsdp"), (TiesInTrainStart, "tensor")]
)
def test_layers_that_a_run_swaps_or_ties_are_as_on_one_process(make: Callable[[], Module], strategy: str) -> None:
    assert_as_on_one_process(make, strategy, 2)


class AssignsInFitStart(Square):
    def on_fit_start(self) -> None:
        self.load_state_dict(Square().to(self.dtype).state_dict(), assign=True)


class AssignsInTrainStart(Square):
    def on_train_start(self) -> None:
        self.load_state_dict(Square().to(self.dtype).state_dict(), assign=True)


@pytest.mark.parametrize("make", [AssignsInFitStart, AssignsInTrainStart])
@pytest.mark.parametrize("strategy", ["fsdp", "ddp=2,fsdp=2", "tensor"])
def test_a_state_that_a_run_assigns_is_refused(make: Callable[[], Module], strategy: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"added, replaced or removed during the run \(net.0.weight.*cannot take over"
    ):
        fitted(make(), strategy, 4 if "=" in strategy else 2)


class TiesByData(Square):
    """Two parameters have one memory from then on, which a step moves by the gradients of both."""

    def share(self) -> None:
        self.net[0].weight.data = self.net[2].weight.data

    def on_train_start(self) -> None:
        self.share()


class TiesByDataInTheStep(TiesByData):
    def on_train_start(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.share()
        return super().training_step(batch, batch_idx)


class TiesByDataBeforeAStep(TiesByDataInTheStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Square.training_step(self, batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.share()


class TiesAPart(TiesByData):
    def share(self) -> None:
        self.net[2].bias.data = self.net[2].weight.data[1]


class TiesWithinWhole(TiesByData):
    def share(self) -> None:
        with self.trainer.whole(self):
            super().share()


class TiesBetweenSteps(TiesByData):
    def on_train_start(self) -> None: ...

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.share()


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        *((TiesByData, strategy) for strategy in ("fsdp", "ddp=2,fsdp=2")),
        *((make, "fsdp") for make in (TiesByDataInTheStep, TiesByDataBeforeAStep, TiesAPart)),
    ],
)
def test_a_parameter_is_not_given_memory_that_others_keep(make: Callable[[], Module], strategy: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"what was assigned to `data` of net.\d.\w+ is kept by another parameter or"
    ):
        fitted(make(), strategy, 4 if "=" in strategy else 2)


class KeepsAssigned(TiesByData):
    def share(self) -> None:
        self.kept = 0.9 * self.net[0].weight.data
        self.net[0].weight.data = self.kept


def test_what_is_assigned_to_a_shard_may_be_kept() -> None:
    alone, found = fitted(KeepsAssigned(), "single", 1), fitted(KeepsAssigned(), "fsdp", 2)
    for one, other in zip(alone.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        *((make, "deepspeed_stage_2") for make in (TiesByData, TiesByDataInTheStep, TiesAPart, TiesWithinWhole)),
        *((make, "deepspeed_stage_3") for make in (TiesBetweenSteps, TiesWithinWhole)),
    ],
)
def test_a_parameter_is_not_given_the_memory_of_another_under_deepspeed(
    make: Callable[[], Module], strategy: str
) -> None:
    with pytest.raises(RuntimeError, match=r"`data` of net.\d.weight was assigned: its elements are those of net.\d."):
        fitted(make(), strategy, 2, precision="32-true")


def test_what_was_assigned_is_not_kept_under_deepspeed() -> None:
    with pytest.raises(RuntimeError, match="`data` of net.0.weight was assigned: its elements are those of a tensor"):
        fitted(KeepsAssigned(), "deepspeed_stage_2", 2, precision="32-true")


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
def test_parameters_do_not_share_memory_after_whole(strategy: str) -> None:
    with pytest.raises(ValueError, match="net.2.weight and net.0.weight are two parameters that share memory"):
        fitted(TiesWithinWhole(), strategy, 2)


class TiesShardedToWhole(TiesByData):
    def share(self) -> None:
        self.net[2].weight.data = self.net[0].weight.data


def test_a_shard_is_not_assigned_to_data_of_a_whole_parameter() -> None:
    with pytest.raises(
        RuntimeError, match=r"of which this rank holds a shard, was assigned to `data` of a parameter of"
    ):
        fitted(TiesShardedToWhole(), TensorParallel(plan={"net.0": "column"}), 2)


class SwapsData(Square):
    def on_train_start(self) -> None:
        one, other = self.net[0].weight, self.net[2].weight
        one.data, other.data = other.data, one.data

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.net[2].weight.data = self.net[2].weight.data
        self.net[0].weight.data = (0.5 * self.net[0].weight.data + 0.5 * self.net[2].weight.data).clone()


class AveragesWeights(Square):
    """Puts averages in the place of weights for a while, and in the end for good."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: dict[str, Any] = {}
        self.backup: dict[str, Any] = {}

    def on_train_start(self) -> None:
        self.averages = {name: p.data.clone() for name, p in self.net.named_parameters()}

    def apply_averages(self) -> None:
        for name, parameter in self.net.named_parameters():
            self.backup[name] = parameter.data
            parameter.data = self.averages[name]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.net.named_parameters():
            self.averages[name] = 0.5 * self.averages[name] + 0.5 * parameter.data
        self.apply_averages()
        for name, parameter in self.net.named_parameters():
            parameter.data = self.backup[name]
        self.backup = {}

    def on_train_end(self) -> None:
        self.apply_averages()


def test_averages_take_the_place_of_weights_as_on_one_process() -> None:
    assert_as_on_one_process(AveragesWeights, "fsdp", 2)


class SwapsTensors(Square):
    def on_train_start(self) -> None:
        torch.utils.swap_tensors(self.net[0].weight, self.net[2].weight)


@pytest.mark.parametrize(
    ("make", "strategy"), [(SwapsData, "fsdp"), (SwapsTensors, "fsdp"), (SwapsTensors, FSDP(wrap=nn.Linear))]
)
def test_values_that_change_places_are_those_of_one_process(make: Callable[[], Module], strategy: Any) -> None:
    assert_as_on_one_process(make, strategy, 2)


def test_values_that_change_places_are_those_of_one_process_under_deepspeed() -> None:
    options: dict[str, Any] = {"precision": "32-true"}
    alone = fitted(SwapsData(), "single", 1, **options)
    assert_same(fitted(SwapsData(), "deepspeed_stage_2", 2, **options), alone, bound=1e-5)


def test_what_ddp_holds_is_not_swapped() -> None:
    with pytest.raises(
        RuntimeError, match=r"swap_tensors\(\) was called with a parameter that the strategy or a graph"
    ):
        fitted(SwapsTensors(), "ddp", 2)
