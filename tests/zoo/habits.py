"""What users do to a model in a training of their own: each as a module that is trained under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Loss, Module
from tests.zoo.models import perceptron

HABITS: dict[str, Callable[[], Module]] = {}


def habit(cls: type[Module]) -> type[Module]:
    HABITS[(cls.__doc__ or "").rstrip(".")] = cls
    return cls


class Plain(Module):
    """The classifier that all others vary: `net` holds every trained parameter and is called once a step."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = perceptron() if net is None else net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


class Shadowed(Plain):
    """With a slow copy of the network beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self, pace: float) -> None:
        with torch.no_grad():
            for own, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                slow.lerp_(own, pace)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


def mask(gradient: Tensor) -> Tensor:
    half = torch.zeros_like(gradient)
    half[: len(gradient) // 2] = 1
    return gradient * half


@habit
class MaskedGradient(Plain):
    """A gradient hook on a weight that masks rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_hook(mask)


@habit
class ClampedGradient(Plain):
    """A gradient hook registered in on_fit_start that is not linear."""

    def on_fit_start(self) -> None:
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


@habit
class RemovedHook(Plain):
    """A gradient hook that is removed after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.net[2].weight.register_hook(mask)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.handle.remove()


@habit
class ScaledAfterAccumulation(Plain):
    """A post-accumulate gradient hook that scales the gradient."""

    def on_fit_start(self) -> None:
        def halve(parameter: Tensor) -> None:
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

        self.net[2].weight.register_post_accumulate_grad_hook(halve)


@habit
class Unfrozen(Plain):
    """A layer unfrozen after an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


@habit
class Frozen(Plain):
    """A layer frozen after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4].requires_grad_(False)


@habit
class Alternating(Plain):
    """Layers frozen and unfrozen in turn before each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)
        self.net[2].requires_grad_(batch_idx % 2 == 1)


@habit
class UnfrozenInTheStep(Plain):
    """A layer unfrozen in training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


@habit
class MovingAverage(Shadowed):
    """A moving average of the weights, in on_train_batch_end."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow(0.3)


@habit
class TargetInTheStep(Shadowed):
    """A target network that training_step moves."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.follow(0.3)
        with torch.no_grad():
            target = self.slow(batch[0])
        loss = (self.net(batch[0]) - target + batch[0][:, :4]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss


@habit
class LoadedTarget(Plain):
    """A trainable target network that no optimizer steps, loaded in on_train_batch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.target(batch[0])
        loss = (self.net(batch[0]) - 0.9 * target - batch[0][:, :4]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 2 == 0:
            self.target.load_state_dict(self.net.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


@habit
class SwappedForValidation(Shadowed):
    """Averaged weights swapped in for validation."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow(0.5)

    def swap(self) -> None:
        with torch.no_grad():
            for own, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                held = own.detach().clone()
                own.copy_(slow)
                slow.copy_(held)

    def on_validation_start(self) -> None:
        self.swap()

    def on_validation_end(self) -> None:
        self.swap()


@habit
class Clipped(Plain):
    """Weights clamped after each step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)


@habit
class Reset(Plain):
    """A layer given new values in a hook."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with self.trainer.whole(self), torch.no_grad():
                weight = self.net[4].weight
                weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).view(weight.shape))


@habit
class BestWeights(Plain):
    """Weights of an earlier epoch loaded in a hook."""

    def on_train_epoch_start(self) -> None:
        with self.trainer.whole(self):
            if self.current_epoch == 0:
                self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}
            else:
                self.net.load_state_dict(self.kept)


@habit
class Penalty(Plain):
    """A penalty on all weights in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 1e-2 * sum(p.square().sum() for p in self.parameters())


@habit
class GradientPenalty(Plain):
    """A penalty on the gradient of the inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].detach().clone().requires_grad_(True)
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return F.cross_entropy(y, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


@habit
class Counter(Plain):
    """A counter in training_step that weights the loss."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        y = self.net(batch[0])
        return F.cross_entropy(y, batch[1]) + 0.01 * self.calls * y.square().mean()


@habit
class CounterOfBatches(Plain):
    """A counter kept in on_train_batch_start."""

    calls = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch[0])
        return F.cross_entropy(y, batch[1]) + 0.01 * self.calls * y.square().mean()


@habit
class BufferOfSteps(Plain):
    """A buffer that training_step counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        y = self.net(batch[0])
        return F.cross_entropy(y, batch[1]) + 0.01 * self.steps * y.square().mean()


@habit
class SomeBatches(Plain):
    """None for batches that do not count."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


@habit
class Tokens(Plain):
    """Loss(total, count) with samples of different weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = (batch[0][:, 0] > 0).to(batch[0].dtype)
        return Loss((F.cross_entropy(self.net(batch[0]), batch[1], reduction="none") * weight).sum(), weight.sum())


@habit
class NoneWithoutTokens(Tokens):
    """Loss(total, count), and None where no sample counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if bool((batch[0][:, 0] > 0).any()) else None


@habit
class NormLogged(Plain):
    """The gradient norm logged by module.grad_norm()."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.grad_norm(), on_step=False, on_epoch=True)


@habit
class NormByHand(Plain):
    """The gradient norm computed over self.parameters() and logged."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm(2) for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.tensor([float(norm) for norm in norms]).norm(2), on_step=False, on_epoch=True)


@habit
class ClippedByHand(Plain):
    """Gradients clipped by torch's clip_grad_norm_ in a hook."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@habit
class ChangedGradients(Plain):
    """Gradients scaled in on_after_backward."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


@habit
class ClampedActivations(Plain):
    """A hook on an activation that clamps its gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].detach().clone().requires_grad_(True)
        y = self.net(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return F.cross_entropy(y, batch[1])


@habit
class ScaledOutputs(Plain):
    """A forward hook on a layer that normalizes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_forward_hook(lambda module, args, output: output / (1 + output.norm(dim=-1, keepdim=True)))


@habit
class Backward(Plain):
    """A call of backward in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (0.1 * loss).backward(retain_graph=True)
        return loss


@habit
class Adversary(Module):
    """Two networks trained by manual optimization."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        make, judge = self.optimizers()
        fake = self.make(batch[0])
        self.toggle_optimizer(judge)
        judge.zero_grad()
        self.manual_backward((self.judge(fake.detach()) - self.judge(batch[0])).mean())
        self.clip_gradients(judge, 0.5)
        judge.step()
        self.untoggle_optimizer(judge)
        self.toggle_optimizer(make)
        make.zero_grad()
        self.manual_backward(-self.judge(self.make(batch[0])).mean() + (fake - batch[0]).square().mean())
        make.step()
        self.untoggle_optimizer(make)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.make.parameters(), lr=0.02),
            torch.optim.SGD(self.judge.parameters(), lr=0.02, momentum=0.9),
        ]


@habit
class TwoBackwards(Plain):
    """Manual optimization with two backwards a step and clipping."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, 0.3)
        self.manual_backward(0.1 * self.net(batch[0]).square().mean())
        self.clip_gradients(optimizer, 0.3)
        optimizer.step()


@habit
class SeveralOptimizers(Plain):
    """A loss for each of two optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch[0])
        return {"body": F.cross_entropy(y, batch[1]), "head": F.cross_entropy(2 * y, batch[1])}

    def configure_optimizers(self) -> Any:
        return {
            "body": torch.optim.AdamW(self.net[:3].parameters(), lr=0.02),
            "head": torch.optim.SGD(self.net[4].parameters(), lr=0.05),
        }


@habit
class OwnSchedule(Plain):
    """A learning rate set in a hook."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.02 / (1 + self.global_step)


class OverNorm(torch.optim.Optimizer):
    """Gradient descent over the norm of all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters))
        for parameter in parameters:
            parameter.sub_(parameter.grad / norm * 0.05)


@habit
class CoupledOptimizer(Plain):
    """A custom optimizer that divides by the norm of all gradients."""

    def configure_optimizers(self) -> Any:
        return OverNorm(self.parameters())


@habit
class WholeMatrices(Plain):
    """An optimizer that needs whole matrices (Adafactor)."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=0.02)


@habit
class Searching(Plain):
    """An optimizer that calls its closure repeatedly (LBFGS)."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@habit
class Grown(Plain):
    """A layer added during the run."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.append(nn.Linear(4, 4).to(self.device, self.dtype))


@habit
class Collected(Plain):
    """Values collected in training_step whose mean a hook logs."""

    def on_train_epoch_start(self) -> None:
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.seen.append(losses.detach())
        return losses.mean()

    def on_train_epoch_end(self) -> None:
        self.log("collected", torch.cat(self.seen).mean())


@habit
class Dump(Plain):
    """A complete state_dict within trainer.whole."""

    def on_train_epoch_end(self) -> None:
        with self.trainer.whole(self):
            self.log("size", float(sum(value.double().square().sum() for value in self.state_dict().values())))
