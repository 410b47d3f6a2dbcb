"""A change that a hook makes on one rank only is an error on all; one on all ranks is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep import Module
from lockstep.strategies import DDP, LocalSGD, Strategy
from tests.trainer.test_user_code import Base, assert_as_on_one_process, batches, fitted

pytestmark = pytest.mark.ranks

DISAGREE = r"the ranks disagree on their changes of weights, gradients, .* in hooks: .*\(rank \d changed "


class Scaled(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.mul_(0.5)


class Loaded(Base):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.trainer.is_global_zero:
            self.load_state_dict({name: torch.zeros_like(value) for name, value in self.state_dict().items()})


class Frozen(Base):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 1:
            self.net[0].requires_grad_(False)


class FrozenInTheStep(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.net[0].requires_grad_(False)


class Gradients(Base):
    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)


class GradientsTogether(Base):
    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            torch.nn.utils.clip_grad_value_(self.parameters(), 0.001)


class GradientsBeforeTheStep(Base):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_rank == 1:
            self.net[0].weight.grad = torch.zeros_like(self.net[0].weight)


class OwnShard(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            with torch.no_grad():
                self.net[0].weight.to_local().mul_(0.5)


class Moments(Base):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.trainer.is_global_zero:
            for state in self.optimizers().state.values():
                state["exp_avg"].zero_()


class Forgets(Base):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.global_rank == 1:
            self.optimizers().state.clear()


class OwnGroup(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 1:
            self.optimizers().param_groups[0]["eps"] = 0.1


class Cast(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((batch[0].to(self.dtype), batch[1]), batch_idx)


class AtTheEnd(Cast):
    def on_fit_end(self) -> None:
        if self.global_rank == 1:
            with torch.no_grad():
                self.net[0].weight.zero_()


class Buffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.scale.mul_(0.9)


class Validated(Base):
    """Only rank 0 has a sample in the second batch."""

    def val_dataloader(self) -> Any:
        return batches(9)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        *((Scaled, strategy) for strategy in ("ddp", "fsdp", "tensor", "pipeline")),
        (Loaded, "pipeline"),
        *((Frozen, strategy) for strategy in ("ddp", "tensor", "pipeline")),
        *((FrozenInTheStep, strategy) for strategy in ("ddp", "pipeline")),
        *((Gradients, strategy) for strategy in ("ddp", "fsdp", "tensor")),
        *((GradientsTogether, strategy) for strategy in ("fsdp", "tensor")),
        (GradientsBeforeTheStep, "fsdp"),
        *((AtTheEnd, strategy) for strategy in ("fsdp", "pipeline")),
        (Buffer, "pipeline"),
        (OwnShard, "fsdp"),
        *((Moments, strategy) for strategy in ("ddp", "fsdp", "tensor")),
        *((Forgets, strategy) for strategy in ("fsdp", "pipeline")),
        *((OwnGroup, strategy) for strategy in ("fsdp", "pipeline")),
        (Validated, "fsdp"),
        pytest.param(Scaled, "ddp=2,fsdp=2", marks=pytest.mark.slow),
        pytest.param(Loaded, "ddp=2,pipeline=2", marks=pytest.mark.slow),
        pytest.param(AtTheEnd, "fsdp=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_a_change_on_one_rank_is_an_error_on_all(make: type[Module], strategy: str) -> None:
    with pytest.raises(RuntimeError, match=DISAGREE):
        fitted(make(), strategy, 4 if "=" in strategy else 2)


@pytest.mark.parametrize("strategy", [DDP(compress="topk=1.0"), LocalSGD(period=1)], ids=["compressed", "local"])
def test_so_it_is_where_numbers_are_others_than_those_of_one_process(strategy: Strategy) -> None:
    with pytest.raises(RuntimeError, match=DISAGREE):
        fitted(Frozen(), strategy, 2)


def test_zero_says_which_weights_a_last_hook_changed_on_one_rank() -> None:
    with pytest.raises(RuntimeError, match="net.0.weight.* were changed in a hook to values that are not the same"):
        fitted(AtTheEnd(), "deepspeed_stage_1", 2, precision="32-true")


class MomentsOfZeRO(Moments, Cast): ...


class GroupOfZeRO(OwnGroup, Cast): ...


@pytest.mark.parametrize(("make", "stage"), [(MomentsOfZeRO, 2), (MomentsOfZeRO, 3), (GroupOfZeRO, 1)])
def test_an_optimizer_of_zero_that_one_rank_changes_is_an_error_on_all(make: type[Module], stage: int) -> None:
    with pytest.raises(RuntimeError, match=DISAGREE):
        fitted(make(), f"deepspeed_stage_{stage}", 2, precision="32-true")


class EachHalvesItsMoments(Cast):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.optimizers().state.values():
            state["exp_avg"].mul_(0.5)
        self.optimizers().param_groups[0]["eps"] *= 2


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_of_zero_that_all_ranks_change_is_that_of_one_process(stage: int) -> None:
    one = fitted(EachHalvesItsMoments(), "single", 1, precision="32-true")
    several = fitted(EachHalvesItsMoments(), f"deepspeed_stage_{stage}", 2, precision="32-true")
    for a, b in zip(one.parameters(), several.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Alike(Base):
    """All that the others do, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale.mul_(0.99)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            self.net[0].weight.clamp_(-0.3, 0.3)

    def on_fit_end(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)


class AlikeWithGradients(Alike):
    def on_after_backward(self) -> None:
        self.net[0].weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 2


class AlikeWithMoments(Alike):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for state in self.optimizers().state.values():
            state["exp_avg"].mul_(0.5)
        self.optimizers().param_groups[0]["eps"] *= 2


class AlikeForgetting(Alike):
    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.optimizers().state.clear()


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (AlikeWithMoments, "fsdp"),
        (AlikeWithMoments, "tensor"),
        (AlikeForgetting, "pipeline"),
        (AlikeWithGradients, "ddp"),
        (AlikeWithGradients, "fsdp"),
        (Alike, "tensor"),
        pytest.param(Alike, "fsdp=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_a_change_on_all_ranks_is_that_of_one_process(make: type[Module], strategy: str) -> None:
    assert_as_on_one_process(make, strategy, 4 if "=" in strategy else 2)
