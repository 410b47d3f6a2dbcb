"""What user code does to a model before and during a run: the same on one process and on several, or refused by
name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.callbacks import Callback, Guard
from lockstep.strategies import DDP, Strategy
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks

SPREAD: list[tuple[str, int]] = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("tensor", 2), ("pipeline", 2), ("dp", 2)]


def batches(n: int, dtype: torch.dtype = torch.float64) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 8, generator=generator, dtype=torch.float64).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (n,), generator=generator)), batch_size=8)


class Base(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


def fitted(module: Module, strategy: str | Strategy, devices: int, n: int = 24, **options: Any) -> Module:
    run = quiet(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        **{"max_epochs": 2, "precision": "64-true", "split_batches": True, **options},
    )
    run.fit(module, batches(n))
    return module


def assert_same(module: Module, expected: Module, bound: float = 1e-12) -> None:
    values = module.state_dict()
    for name, value in expected.state_dict().items():
        assert float((values[name] - value).abs().max()) <= bound, name


def assert_as_on_one_process(
    make: Callable[[], Module], strategy: str | Strategy, devices: int, **options: Any
) -> None:
    alone = fitted(make(), "single", 1, **{**options, "accumulate_grad_batches": 1})
    assert_same(fitted(make(), strategy, devices, **options), alone)


class Hooked(Base):
    """Hooks from the constructor travel to the ranks with the module; one of them is not linear, one is removed."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(16, 1, dtype=torch.float64)
        mask[:8] = 1
        self.net[2].weight.register_hook(lambda gradient: gradient * mask)
        self.net[0].weight.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        self.gone = self.net[4].weight.register_hook(torch.zeros_like)

    def on_train_epoch_end(self) -> None:
        self.gone.remove()


@pytest.mark.parametrize(("strategy", "devices"), SPREAD)
def test_hooks_on_parameters_act_on_the_whole_gradient(strategy: str, devices: int) -> None:
    assert_as_on_one_process(Hooked, strategy, devices, n=17)


def test_hooks_act_once_on_what_several_micro_batches_add_up_to() -> None:
    assert_as_on_one_process(Hooked, "single", 1, accumulate_grad_batches=2)
    assert_as_on_one_process(Hooked, "ddp", 2, accumulate_grad_batches=2)


def test_hooks_are_on_the_parameters_again_after_the_run() -> None:
    module = fitted(Hooked(), "single", 1)
    module.zero_grad()
    F.cross_entropy(module.net(torch.randn(4, 8, dtype=torch.float64)), torch.tensor([0, 1, 2, 3])).backward()
    assert not module.net[2].weight.grad[8:].any() and module.net[2].weight.grad[:8].any()


class Counted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_fit_start(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda p: self.norms.append(float(p.grad.norm())))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.norms.pop() == float(self.net[0].weight.grad.norm())
        assert not self.norms


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("dp", 2)])
def test_hooks_after_accumulation_see_what_the_optimizer_gets(strategy: str, devices: int) -> None:
    fitted(Counted(), strategy, devices, accumulate_grad_batches=2)


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.net[0])
        parametrizations.orthogonal(self.net[2])


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("fsdp", 2), ("tensor", 2)])
def test_parametrized_layers_train_on_ranks(strategy: str, devices: int) -> None:
    assert_as_on_one_process(Parametrized, strategy, devices)


class Unfreezing(Base):
    """Layers freeze and unfreeze at other times than epochs begin, in the module and in a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.net[4].requires_grad_(False)
        return super().configure_optimizers()


class Unfreeze(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.net[0].requires_grad_(trainer.global_step % 2 == 1)
        module.net[4].requires_grad_(trainer.global_step > 2)


@pytest.mark.parametrize(("strategy", "devices"), SPREAD)
def test_layers_freeze_and_unfreeze_during_a_run(strategy: str, devices: int) -> None:
    assert_as_on_one_process(Unfreezing, strategy, devices, callbacks=[Unfreeze()], n=17)


class Branching(Module):
    """Every third batch leaves a layer out, which AdamW must then leave alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def loss(self, batch: Any, batch_idx: int) -> Any:
        h = torch.tanh(self.a(batch[0]))
        if batch_idx % 3 != 2:
            h = h + torch.tanh(self.b(h))
        return F.cross_entropy(self.c(h), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize("devices", [2, 4])
def test_ddp_leaves_alone_what_no_rank_used(devices: int) -> None:
    """In the last step but one rank have no sample, and stand in with zeros."""
    assert_as_on_one_process(Branching, DDP(find_unused_parameters=True), devices, n=17)


class Unheard(Branching):
    """One rank's step has no loss where the other's leaves a layer out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 2 and self.global_rank else self.loss(batch, batch_idx)


def test_a_rank_without_a_loss_brings_no_zeros() -> None:
    module = Unheard()
    moved: list[bool] = []

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            moved.append(module.b.weight.grad is not None)
            assert moved[-1] is (trainer.global_step % 3 != 2)

    fitted(module, DDP(find_unused_parameters=True), 2, callbacks=[Watch()])


@pytest.mark.parametrize("n", [24, 17])
def test_ddp_names_unused_parameters_before_anything_moves(n: int) -> None:
    with pytest.raises(RuntimeError, match=r"these parameters got no gradient in a step: b.weight, b.bias; use them"):
        fitted(Branching(), "ddp", 2, n=n)


class OnlyFirst(Branching):
    """The last micro-batch of a window skips what the first used."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch, 2 if batch_idx % 2 else 0)


def test_ddp_names_what_the_last_micro_batch_skipped() -> None:
    with pytest.raises(RuntimeError, match=r"these parameters got no gradient in a step: b.weight, b.bias; use them"):
        fitted(OnlyFirst(), "ddp", 2, accumulate_grad_batches=2)


class ManualBranching(Branching):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        self.clip_gradients(optimizer, 0.1)
        self.manual_backward(0.3 * self.loss(batch, batch_idx))
        self.clip_gradients(optimizer, 0.2)
        optimizer.step()


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("ddp=2,fsdp=2", 4)])
def test_manual_steps_sum_each_backward_once(strategy: str, devices: int) -> None:
    assert_as_on_one_process(ManualBranching, strategy, devices)


class Complex(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.filter, self.out = nn.Parameter(torch.randn(5, dtype=torch.complex128)), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.out(torch.fft.irfft(torch.fft.rfft(batch[0]) * self.filter, n=8)), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("dp", 2)])
def test_complex_parameters_stay_complex(strategy: str, devices: int) -> None:
    module = fitted(Complex(), strategy, devices, n=17)
    assert module.filter.dtype == torch.complex128 and module.filter.imag.any()
    assert_same(module, fitted(Complex(), "single", 1, n=17))


class Clamped(Base):
    """Clamps the gradient of an activation, as recurrent nets do: not linear in the gradient of a sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.net[:2](batch[0])
        h.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
        return F.cross_entropy(self.net[2:](h), batch[1])


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("dp", 2), ("ddp=2,fsdp=2", 4)])
def test_hooks_on_activations_see_the_gradients_of_one_process(strategy: str, devices: int) -> None:
    assert_as_on_one_process(Clamped, strategy, devices, n=17)


class Seen(Base):
    """What hooks around the backward see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_after_backward(self) -> None:
        self.seen.append(float(self.grad_norm()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.seen[-1] == float(self.grad_norm())
        self.log("norm", self.seen[-1], on_step=False, on_epoch=True)


@pytest.mark.parametrize(("strategy", "devices"), SPREAD)
def test_the_gradient_after_the_backward_is_the_global_one(strategy: str, devices: int) -> None:
    values = []
    for name, count in (("single", 1), (strategy, devices)):
        run = quiet(strategy=name, devices=count, precision="64-true", split_batches=True, max_epochs=1)
        run.fit(Seen(), batches(17))
        values.append(float(run.callback_metrics["norm"]))
    assert values[0] == pytest.approx(values[1], rel=1e-12)


class Cuts(Base):
    """Changes and logs, after each backward, the gradient of a window so far."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)
        self.log("norm", self.grad_norm())


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("ddp", 2), ("fsdp", 2), *(pytest.param(f"ddp=2,{x}=2", 4, marks=pytest.mark.slow) for x in ("fsdp", "tensor"))],
)
def test_within_a_window_too_the_gradient_is_that_of_one_process(strategy: str, devices: int) -> None:
    options = {"n": 17, "accumulate_grad_batches": 2}
    assert_same(fitted(Cuts(), strategy, devices, **options), fitted(Cuts(), "single", 1, **options))


class EveryOther(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


class FreezesWithin(Base):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (EveryOther, "fsdp", "training_step returned None for the last micro-batch of an accumulation window"),
        (FreezesWithin, "ddp", r"requires_grad of net\.0\.weight, net\.0\.bias changed between the micro-batches"),
    ],
)
def test_what_breaks_a_window_is_refused(make: Any, strategy: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fitted(make(), strategy, 2, accumulate_grad_batches=2)


class CutsForEach(Cuts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"body": loss, "head": 2 * loss}

    def configure_optimizers(self) -> Any:
        return {"body": torch.optim.SGD(self.net[:3].parameters()), "head": torch.optim.SGD(self.net[3:].parameters())}


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (CutsForEach, {}, "DDP reduces the gradients of several losses together"),
        (Cuts, {"virtual_ranks": 2, "accumulate_grad_batches": 2}, "the gradients of shares are kept apart"),
    ],
)
def test_where_it_would_be_a_part_the_hook_is_refused(make: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(RuntimeError, match=f"on_after_backward is overridden, but .* because {why}"):
        fitted(make(), "ddp", 2, n=17, **options)


class Grows(Base):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[2] = nn.Linear(16, 16, dtype=torch.float64)


class GrowsInTheStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.net[2].weight = nn.Parameter(torch.zeros(16, 16))
        return super().training_step(batch, batch_idx)


class Rare(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, nn.Embedding(3, 8, max_norm=1.0))


class UnfreezesInTheStep(Unfreezing):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


class RunsBackward(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and self.global_rank == 1:
            (0.1 * loss).backward(retain_graph=True)
        return loss


class DeletesABias(Base):
    def on_train_epoch_start(self) -> None:
        del self.net[2].bias
        self.net[2].register_parameter("bias", None)


class RenamesAtTheEnd(Base):
    def on_train_end(self) -> None:
        self.body = self.net
        del self.net


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_a_rename_is_brought_back(strategy: str) -> None:
    alone, found = fitted(RenamesAtTheEnd(), "single", 1), fitted(RenamesAtTheEnd(), strategy, 2)
    assert not hasattr(found, "net") and alone.state_dict().keys() == found.state_dict().keys()
    for one, other in zip(alone.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_rename_that_cannot_be_brought_back_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"other parameters or buffers after the run .*body.0.*which \w+ cannot bring"
    ):
        fitted(RenamesAtTheEnd(), "pipeline", 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Grows, r"added, replaced or removed during the run \(net.2.weight, net.2.bias\), which DDP cannot"),
        (DeletesABias, r"were added, replaced or removed during the run \(net.2.bias\), which DDP cannot"),
        (GrowsInTheStep, r"parameters were added, replaced or removed during the run \(net.2.weight\)"),
        (Rare, r"net.0 has max_norm=1.0, which changes its weight in the forward"),
        (UnfreezesInTheStep, r"requires_grad was changed within a step \(net.0.weight, net.0.bias\)"),
        (RunsBackward, r"training_step changed gradients by itself \(net.0.weight, net.0.bias, net.2.weight, …\)"),
    ],
)
def test_what_ddp_cannot_follow_is_refused(make: Callable[[], Module], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        fitted(make(), "ddp", 2)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_static_graph_sums_the_first_micro_batches_once(accumulate: int) -> None:
    static = fitted(Base(), DDP(static_graph=True), 2, accumulate_grad_batches=accumulate)
    assert_same(static, fitted(Base(), "single", 1, accumulate_grad_batches=accumulate))


class TwoLosses(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        return {"body": hidden.square().mean(), "head": F.cross_entropy(self.net[4](hidden.detach()), batch[1])}

    def configure_optimizers(self) -> Any:
        return {
            "body": torch.optim.SGD(self.net[:4].parameters(), lr=0.1),
            "head": torch.optim.SGD(self.net[4].parameters(), lr=0.1),
        }


class FreezesPartOfABody(TwoLosses):
    """All that the second optimizer steps in the first epoch, whose loss still has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net[:4](batch[0])
        return {"body": hidden.square().mean(), "head": F.cross_entropy(self.net[4](hidden), batch[1])}

    def on_train_epoch_start(self) -> None:
        self.net[4].requires_grad_(self.current_epoch > 0)


def test_losses_of_several_optimizers_leave_frozen_parameters() -> None:
    def by_hand(module: FreezesPartOfABody) -> FreezesPartOfABody:
        optimizers = module.double().configure_optimizers()
        for epoch in range(2):
            for batch in batches(24):
                hidden = module.net[:4](batch[0])
                hidden.square().mean().backward(retain_graph=True)
                body = [None if p.grad is None else p.grad.clone() for p in module.net[:4].parameters()]
                if epoch:
                    F.cross_entropy(module.net[4](hidden), batch[1]).backward()
                    optimizers["head"].step()
                for parameter, gradient in zip(module.net[:4].parameters(), body, strict=True):
                    parameter.grad = gradient
                optimizers["body"].step()
                module.zero_grad()
        return module

    expected = by_hand(FreezesPartOfABody())
    for strategy, devices in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        assert_same(fitted(FreezesPartOfABody(), strategy, devices), expected)


class FreezesAHead(TwoLosses):
    """Whose loss has no graph then."""

    def on_train_start(self) -> None:
        self.net[4].requires_grad_(False)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "16-mixed"}, {"precision": "16-mixed", "gradient_clip_val": 1.0}]
)
def test_a_loss_whose_optimizer_steps_frozen_layers_moves_nothing(options: dict[str, Any]) -> None:
    run = quiet(max_epochs=1, **options)
    module = FreezesAHead()
    before = copy.deepcopy(module.net.state_dict())
    run.fit(module, batches(24, torch.float32))
    moved = {name for name, value in module.net.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_static_graph_of_several_losses_is_refused() -> None:
    with pytest.raises(RuntimeError, match="several losses, and static_graph=True takes the graph of the first"):
        fitted(TwoLosses(), DDP(static_graph=True), 2)


class Drops(Base):
    """One rank changes its gradients once they are reduced, and torch does not count it."""

    def on_after_backward(self) -> None:
        if self.global_rank == 1 and self.trainer.global_step == 1:
            for parameter in self.parameters():
                parameter.grad.data.zero_()


def test_replicas_are_compared_without_being_asked() -> None:
    with pytest.raises(RuntimeError, match=r"the replicas have drifted apart: after step 6 net.0.weight on rank 1"):
        fitted(Drops(), "ddp", 2)
    fitted(Drops(), "ddp", 2, callbacks=[Guard(check_replicas_every_n_steps=None)])


class Gathers(Base):
    """A step that calls a collective, where a rank has no sample in the last step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        assert self.all_gather(loss.detach()).shape == (self.trainer.world_size,)
        return loss


class Counts(Base):
    """Statistics of the whole batch in buffers, which weight the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("center", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch[0])
        count = self.sum_over_ranks(float(len(y))).to(y.dtype)
        self.seen += count
        self.center = 0.9 * self.center + 0.1 * self.sum_over_ranks(y.detach().sum(0)) / count
        return (y - self.center).square().mean() * (1 + 0.01 * self.seen)


class Moves(Base):
    """A target network that the step moves; on a rank without samples it must move too."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for own, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                slow.lerp_(own, 0.3)
        return (self.net(batch[0]) - self.slow(batch[0]) + batch[0][:, :4]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize(("make", "n"), [(Counts, 17), (Counts, 9), (Moves, 17)])
def test_a_rank_without_samples_runs_the_step_for_what_it_does_beside_the_loss(
    make: Callable[[], Module], n: int
) -> None:
    """With 9 samples that is the step in which DDP lays out its buckets."""
    assert_as_on_one_process(make, "ddp", 2, n=n)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_without_samples_gathers_nothing_in_a_step(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="all_gather was called on a rank without samples in this batch"):
        fitted(Gathers(), strategy, 2, n=17)


@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
def test_ranks_that_run_a_step_in_parts_do_not_meet_in_it(strategy: str) -> None:
    with pytest.raises(RuntimeError, match="sum_over_ranks was called in a step, which .* runs in parts"):
        fitted(Counts(), strategy, 2, n=16)


class Statistics(Base):
    """Buffers that the step changes, read in validation by a rank that had no sample in the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("steps", self.steps)


def test_buffers_are_those_of_rank_0_in_validation() -> None:
    run = quiet(strategy="ddp", devices=2, precision="64-true", split_batches=True, max_epochs=2)
    run.fit(Statistics(), batches(17), batches(17))
    assert float(run.callback_metrics["steps"]) == 6
