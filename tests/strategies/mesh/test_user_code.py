"""What user code does to a model under FSDP, tensor parallelism and their meshes: as on one process, or refused by
name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.strategies import FSDP, MeshParallel, TensorParallel
from lockstep.strategies.launch.launcher import launch
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, weights

pytestmark = pytest.mark.ranks


def labelled(n: int = 16, batch: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(n, 8, generator=generator), torch.randint(0, 4, (n,), generator=generator)), batch
    )


class Perceptron(Module):
    """Three linear layers, of which the automatic plan of tensor parallelism shards two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


STRATEGIES = [("fsdp", 2), ("tensor", 2), pytest.param("fsdp=2,tensor=2", 4, marks=pytest.mark.slow)]


def fit_each(strategy: Any, makes: list[Callable[[], Module]], n: int, options: dict[str, Any]) -> list[list[Tensor]]:
    """The weights after training each module; on every rank."""
    modules = [make() for make in makes]
    for module in modules:
        fit(strategy, "auto", module, labelled(n), **options)
    return [weights(module) for module in modules]


def exact(strategy: Any, devices: int, *makes: Callable[[], Module], n: int = 16, **options: Any) -> None:
    """Train each module under `strategy`, in one start of ranks, and on one process: the weights must be equal."""
    found = launch(fit_each, (strategy, list(makes), n, options), devices)
    for make, several, one in zip(makes, found, fit_each("single", list(makes), n, options), strict=True):
        assert distance(several, one) < 1e-12, make


# ---- ranks without samples ---------------------------------------------------------------------------


class Annealed(Perceptron):
    """Weighs a penalty by a number of its own, which a subclass counts up in the step."""

    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count()
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + 0.01 * float(self.weight()) * out.square().mean()

    def count(self) -> None:
        self.calls += 1

    def weight(self) -> Any:
        return self.calls


class InDict(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"beta": 0.0}

    def count(self) -> None:
        self.state["beta"] += 0.5

    def weight(self) -> Any:
        return self.state["beta"]


class InBuffer(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count_", torch.zeros((), dtype=torch.int64))

    def count(self) -> None:
        self.count_ += 1

    def weight(self) -> Any:
        return self.count_


@pytest.mark.parametrize(("make", "name"), [(Annealed, "calls"), (InDict, r"state\['beta'\]")])
@pytest.mark.parametrize(("strategy", "devices"), [STRATEGIES[0], STRATEGIES[2]])
def test_a_count_of_steps_is_refused_where_a_rank_has_no_samples(
    make: Callable[[], Module], name: str, strategy: str, devices: int
) -> None:
    with pytest.raises(RuntimeError, match=rf"changed the number {name} of the model in a step in which a rank has"):
        fit(strategy, devices, make(), labelled(17))


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_a_count_of_steps_holds_where_every_rank_has_samples_or_it_is_a_buffer(strategy: str, devices: int) -> None:
    exact(strategy, devices, Annealed)
    exact(strategy, devices, InBuffer, n=17)


# ---- gradients of gradients, and blocks that a step calls in unusual ways ------------------------------


class Block(nn.Module):
    """A residual layer: gathered as one by FSDP, sharded by the automatic plan."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.net = nn.Sequential(Block(), Block(), nn.Linear(8, 4))


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


class Penalized(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + penalty(self.net, batch[0])


class PenalizedBlocks(Blocks):
    """The forward runs again after the gradient of which a gradient is taken."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return penalty(self.net, batch[0]) + super().training_step(batch, batch_idx)


class PenalizedGathered(Penalized):
    """Layers of other sizes, which the plan shards each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("strategy", "devices", "makes"),
    [
        ("tensor", 2, [Penalized, PenalizedGathered]),
        (TensorParallel(sequence_parallel=True), 2, [PenalizedBlocks]),
        ("fsdp", 2, [Penalized, PenalizedBlocks]),
        (FSDP(activation_checkpointing=True, reshard_after_forward=False), 2, [PenalizedBlocks]),
        pytest.param("fsdp=2,tensor=2", 4, [Penalized, PenalizedBlocks], marks=pytest.mark.slow),
    ],
)
def test_gradients_of_gradients_are_exact(strategy: Any, devices: int, makes: list[Callable[[], Module]]) -> None:
    exact(strategy, devices, *makes, n=17, accumulate_grad_batches=2)


class Twice(Blocks):
    """A block called for several inputs, whose backwards interleave."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(x * self.scale)
        block = self.net[0]
        return F.cross_entropy(self.net(block(h) * block(x) + block(block(h))), y)


class LayerFirst(Blocks):
    """A layer called past its block, before the block."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = torch.tanh(x * self.scale)
        early = self.net[0].up(h).square().mean()
        return F.cross_entropy(self.net(h), y) + early


class GradientBetween(Blocks):
    """A gradient taken in the step while the backward through a layer is still to come."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch[0].clone().requires_grad_(True), batch[1]
        early = self.net[0].up(x * self.scale)
        (gradient,) = torch.autograd.grad(early.tanh().sum(), x, create_graph=True)
        return F.cross_entropy(self.net(x + 0.1 * gradient), y) + early.square().mean()


class CheckpointedByHand(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = torch.tanh(batch[0] * self.scale)
        for block in self.net[:2]:
            h = checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(self.net[2](h), batch[1])


@pytest.mark.parametrize(
    ("strategy", "devices", "makes"),
    [
        ("fsdp", 2, [Twice, LayerFirst, GradientBetween, CheckpointedByHand]),
        ("tensor", 2, [Twice, CheckpointedByHand]),
        pytest.param("fsdp=2,tensor=2", 4, [Twice, CheckpointedByHand], marks=pytest.mark.slow),
    ],
)
def test_a_step_may_call_blocks_in_any_way(strategy: Any, devices: int, makes: list[Callable[[], Module]]) -> None:
    exact(strategy, devices, *makes, n=17, accumulate_grad_batches=2)


# ---- hooks on parameters, whole weights, layers that freeze and unfreeze -----------------------------------


class Hooked(Blocks):
    """Hooks that look at a whole gradient, one of them in place, on sharded and on replicated parameters."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.arange(16)[:, None] < 8
        self.net[0].up.weight.register_hook(lambda gradient: gradient * rows)
        self.net[0].norm.weight.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        self.net[1].down.bias.register_hook(lambda gradient: gradient.clamp_(max=0.01))
        self.scale.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class Edits(Blocks):
    """Reads and writes whole weights and gradients in hooks."""

    def whole(self) -> Any:
        assert self._trainer is not None
        return self._trainer.strategy.whole(self._trainer._run.wrapped)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.whole():
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.div_(norm + 0.1)
            weight = self.net[0].up.weight
            weight.data.div_(weight.detach().norm(dim=1, keepdim=True))

    def on_train_epoch_end(self) -> None:
        with self.whole():
            state = self.state_dict()
            assert state["net.0.up.weight"].shape == (16, 8) and type(state["net.0.up.weight"]) is Tensor
            self.load_state_dict({name: value * 0.9 for name, value in state.items()})
            self.net[1].norm.requires_grad_(False)


class Freezes(Blocks):
    """Whole blocks, part of one and parameters outside of blocks change between trained and frozen."""

    def on_train_epoch_start(self) -> None:
        epoch = self.current_epoch
        self.net[0].requires_grad_(epoch == 1)
        self.net[1].up.weight.requires_grad_(epoch != 1)
        self.net[1].down.requires_grad_(epoch < 2)
        self.scale.requires_grad_(epoch != 1)
        self.net[2].weight.requires_grad_(epoch == 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0] * self.scale), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_parameter_hooks_whole_edits_and_freezing_follow_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, Hooked, Edits, Freezes, max_epochs=3)


class CallsWhole(Edits):
    def on_train_epoch_end(self) -> None:
        with self.whole():
            self.net(torch.zeros(1, 8))


class WholeInStep(Edits):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.whole():
            return super().training_step(batch, batch_idx)


class Replaces(Edits):
    def on_train_epoch_end(self) -> None:
        with self.whole():
            self.net[0].up.weight = nn.Parameter(torch.zeros(16, 8))


class FreezesWithin(Blocks):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(batch_idx % 2 == 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (CallsWhole, "net was called within whole"),
        (WholeInStep, "whole.. was called within a step.*; call it in on_after_backward"),
        (Replaces, "the parameters net.0.up.weight were replaced.*weight.data.copy_"),
        (FreezesWithin, "requires_grad of net.0.*between the micro-batches.*; change it before the first"),
    ],
)
def test_what_fsdp_cannot_take_over_is_refused(make: Callable[[], Module], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit("fsdp", 2, make(), labelled(), accumulate_grad_batches=2)


# ---- hooks on modules, and weights that something computes ---------------------------------------------


class ComputedWeights(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])
        nn.utils.parametrizations.spectral_norm(self.net[2])
        prune.l1_unstructured(self.net[2], "bias", 0.5)


class ComputedInBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.orthogonal(self.net[0].up)
        prune.l1_unstructured(self.net[1].down, "weight", 0.5)


def normalized(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output / (1 + output.norm(dim=1, keepdim=True))


class HookedLayers(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(normalized)
        self.net[2].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(1, keepdim=True),))


class HookedBetween(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_forward_hook(normalized)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class HookedBlocks(Blocks):
    """A hooked layer, an adapter in the place of one, and a hook on a block, before and during the run."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].up.register_forward_hook(normalized)
        self.net[1].up = Adapter(self.net[1].up)
        self.net[1].register_forward_hook(normalized)

    def on_fit_start(self) -> None:
        self.net[0].register_forward_hook(normalized)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_hooks_and_computed_weights_follow_one_process(strategy: str, devices: int) -> None:
    exact(strategy, devices, ComputedWeights, ComputedInBlocks, HookedLayers, HookedBetween, HookedBlocks)


class HookedLate(Blocks):
    def on_fit_start(self) -> None:
        self.net[0].up.register_forward_hook(normalized)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (HookedLate, {}, RuntimeError, "a hook was registered on net.0.up, which works on shards.*; register it in"),
        (
            HookedLayers,
            {"plan": {"net.0": "column", "net.2": "row"}},
            ValueError,
            "shards net.0, but it has hooks; lea",
        ),
        (
            ComputedWeights,
            {"plan": {"net.0": "gather"}},
            ValueError,
            "shards net.0, but it has a weight that something",
        ),
        (HookedBlocks, {"sequence_parallel": True}, ValueError, "net.0.up has hooks, which would see a share of the"),
    ],
)
def test_hooks_that_would_see_shards_are_refused(
    make: Callable[[], Module], options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fit(TensorParallel(**options), 2, make(), labelled())


def test_a_model_takes_hooks_again_after_a_run() -> None:
    module = Blocks()
    fit("tensor", 2, module, labelled(), max_epochs=1)
    module.net[0].up.register_forward_hook(normalized)
    assert len(module.net[0].up._forward_hooks) == 1


# ---- weights that a step changes in place --------------------------------------------------------------


class Target(Perceptron):
    """A slow copy of a network that the step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        with torch.no_grad():
            wanted = self.slow(batch[0])
        return super().training_step(batch, batch_idx) + (self.net(batch[0]) - wanted).square().mean()

    @torch.no_grad()
    def move(self) -> None:
        for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            q.lerp_(p, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class TargetByData(Target):
    def move(self) -> None:
        for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
            q.data.copy_(0.9 * q.data + 0.1 * p.data)
        self.net[0].bias.data.clamp_(-0.1, 0.1)


class Remembers(nn.Module):
    """Changes a parameter of its own in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mean = nn.Parameter(torch.zeros(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.lerp_(self.linear.weight.detach(), 0.2)
        return x + torch.tanh(self.linear(x)) + x @ self.mean


class RemembersInBlock(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Block(), Remembers(), nn.Linear(8, 4))


class TargetByHand(Target):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        optimizer = self.optimizers()
        self.manual_backward((self.net(batch[0]) - self.slow(batch[0]) - batch[0][:, :4]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        self.move()


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_weights_changed_in_the_step_follow_one_process(strategy: str, devices: int) -> None:
    makes: list[Callable[[], Module]] = [Target, TargetByData, TargetByHand]
    if strategy == "fsdp":
        makes.append(RemembersInBlock)
    exact(strategy, devices, *makes, n=17)


class TargetOfBatch(Target):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.slow[0].bias.data += batch[0].mean()
        return super().training_step(batch, batch_idx)


def test_weights_set_to_other_values_on_each_rank_are_refused() -> None:
    with pytest.raises(
        RuntimeError, match="training_step changed the weights slow.0.bias to values that are not the same"
    ):
        fit("fsdp", 2, TargetOfBatch(), labelled())


# ---- numbers of sharded tensors, and what mixes them with others ---------------------------------------


class LogsNorms(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.tensor(norms).norm(), on_step=False, on_epoch=True)
        gradient = self.net[0].up.weight.grad
        assert gradient is not None
        self.log("most", gradient.abs().max().item(), on_step=False, on_epoch=True)


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_numbers_of_sharded_gradients_are_global(strategy: str, devices: int) -> None:
    expected = fit("single", 1, LogsNorms(), labelled(), max_epochs=1).callback_metrics
    found = fit(strategy, devices, LogsNorms(), labelled(), max_epochs=1).callback_metrics
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, rel=1e-9
    )


class CountsInGroups(torch.optim.SGD):
    """Its rate follows a count of its own in param_groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, foreach=True)
        for group in self.param_groups:
            group["k"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["lr"] = 0.1 / group["k"]
        return super().step(closure)


class CountedRate(Perceptron):
    def configure_optimizers(self) -> Any:
        return CountsInGroups(self.parameters())


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES[1:])
def test_what_an_optimizer_keeps_in_its_groups_survives_the_step(strategy: str, devices: int) -> None:
    exact(strategy, devices, CountedRate)


class PenalizedWeights(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(p.square().sum() for p in self.parameters())


class OneNorm(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(total)
        return super().step(closure)


class Normed(Perceptron):
    def configure_optimizers(self) -> Any:
        return OneNorm(self.parameters(), lr=0.1)


class Flat(Perceptron):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class ToNumpy(Perceptron):
    def on_train_epoch_end(self) -> None:
        self.net[0].weight.detach().numpy()


class ClipsInHook(Perceptron):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class MovesWeightsInHook(Perceptron):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = torch.zeros(sum(p.numel() for p in self.parameters()), dtype=torch.float64)
        torch.nn.utils.vector_to_parameters(vector, self.parameters())


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (
            ClipsInHook,
            "tensor",
            r"ClipsInHook.on_before_optimizer_step computes \(aten\._foreach_norm\) .*trainer.whole.* gradient_clip_val",
        ),
        (MovesWeightsInHook, "fsdp", r"assigned to `data` of a parameter of shape \[16, 8\] .*trainer.whole"),
        (PenalizedWeights, "tensor", "training_step computes .* weights or gradients that are sharded .*trainer.whole"),
        (Normed, "tensor", "OneNorm computes .* use strategy='ddp'"),
        (Flat, "tensor", "LBFGS computes .* use strategy='ddp'"),
        (ToNumpy, "fsdp", r"numpy.. was called on a tensor of shape \[16, 8\] of which .*trainer.whole"),
    ],
)
def test_code_that_would_mix_shards_with_others_is_refused(
    make: Callable[[], Module], strategy: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit(strategy, 2, make(), labelled())


# ---- layers that not every rank uses -------------------------------------------------------------------


class Experts(Perceptron):
    """Sends each sample to one of four experts: a step may use some on one rank only, and some on none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4)])
        self.gate = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        choice = (x[:, 0] * 2).long().clamp(-2, 1) + 2
        out = self.gate(x)
        for i in range(1 + batch_idx % 2, len(self.experts)):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), self.experts[i](x[rows]), accumulate=True)
        return F.cross_entropy(out, target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class ManyExperts(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        count = 1 + self.trainer.global_rank
        return F.cross_entropy(self.gate(x) + sum(expert(x) for expert in self.experts[:count]), target)


class OtherOrder(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, target = batch
        order = [0, 1] if self.trainer.global_rank == 0 else [1, 0]
        return F.cross_entropy(self.gate(x) + sum(self.experts[i](x) for i in order), target)


class OnlyValidates(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.gate(batch[0]), batch[1]) + 0 * sum(e(batch[0]).sum() for e in self.experts)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.experts[self.trainer.global_rank](batch[0])


@pytest.mark.parametrize(
    ("make", "strategy", "message"),
    [
        (Experts, "fsdp", r"uses experts\.\d on rank \d, .* on rank \d; FSDP .*find_unused_parameters"),
        (ManyExperts, "fsdp", r"uses experts\.1 on rank 1, is done with its forward on rank 0|is done .* uses experts"),
        (OtherOrder, "fsdp", r"uses experts\.\d on rank \d, uses experts\.\d on rank \d"),
        (OnlyValidates, "fsdp", r"uses experts\.\d on rank \d, uses experts\.\d on rank \d"),
        pytest.param(
            ManyExperts,
            "ddp=2,tensor=2",
            r"reduces gradients of experts\.1 \(\d+ elements\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_ranks_use_differently_are_named(make: Callable[[], Module], strategy: str, message: str) -> None:
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        fit(strategy, 4 if "," in strategy else 2, make(), labelled(), labelled() if make is OnlyValidates else None)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "strategy", [FSDP(find_unused_parameters=True), MeshParallel("fsdp=2,tensor=2", find_unused_parameters=True)]
)
def test_ranks_may_use_other_experts_where_that_is_allowed(strategy: Any) -> None:
    exact(strategy, 4 if isinstance(strategy, MeshParallel) else 2, Experts, n=18)


# ---- layers of a tensor-parallel sequence that a step calls by themselves ------------------------------


class Twice(Perceptron):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.softmax(self.net[0](batch[0]), -1)
        x = self.net[2](torch.tanh(self.net[2](x)))
        return F.cross_entropy(self.net[3:](x), batch[1]) + self.net[0](batch[0]).square().mean()


class Repeated(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        layer, norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.net = nn.Sequential(
            nn.Linear(8, 16), norm, layer, nn.Tanh(), layer, norm, nn.Linear(16, 16), nn.Linear(16, 4)
        )


class InPlace(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        self.net = nn.Sequential(nn.Linear(8, 16), relu, nn.Linear(16, 16), relu, nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        out += 1
        return F.cross_entropy(out.mul_(2), batch[1])


class OneByOne(Perceptron):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.net:
            x = layer(x)
        return F.cross_entropy(x, batch[1])


@pytest.mark.parametrize("strategy", ["tensor", TensorParallel(activation_checkpointing=nn.Sequential)])
def test_layers_of_a_sharded_pair_may_be_called_in_any_way(strategy: Any) -> None:
    exact(strategy, 2, Twice, Repeated, InPlace, OneByOne)
