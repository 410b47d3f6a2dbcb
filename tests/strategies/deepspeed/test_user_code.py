"""What a user's hooks and steps may do to a model under ZeRO: the effect of one process, or a sentence."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lockstep import Module
from lockstep.strategies import DeepSpeed, Strategy
from lockstep.strategies.launch.launcher import launch
from tests.trainer.toy import data, distance, loader, quiet, weights

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="it is in the extra deepspeed"
)
pytestmark = [NEEDS_DEEPSPEED, pytest.mark.ranks]

CUT_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
STAGES: dict[str, Callable[[], Strategy]] = {
    "1": lambda: DeepSpeed(stage=1),
    "2": lambda: DeepSpeed(stage=2),
    "2 offloaded": lambda: DeepSpeed(stage=2, offload_optimizer=True),
    "3": lambda: DeepSpeed(stage=3, config=CUT_ALL),
    "3 with small parameters whole": lambda: DeepSpeed(stage=3),
    "3 offloaded": lambda: DeepSpeed(stage=3, offload_optimizer=True, offload_parameters=True, config=CUT_ALL),
}


class Plain(Module):
    """Layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 5), nn.Tanh(), nn.Linear(5, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class Clamps(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class Assigns(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data * 0.9


class LoadsInHook(Plain):
    def on_train_epoch_end(self) -> None:
        self.load_state_dict({name: value * 0.5 for name, value in self.state_dict().items()})


class ScalesInStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net[2].weight.data.mul_(0.5)
        return super().training_step(batch, batch_idx)


class ClampsWhole(Plain):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.1, 0.1)


class HalvesGroups(Plain):
    """Changes weights before the first step, with groups of the optimizer."""

    def on_train_start(self) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.5)

    def configure_optimizers(self) -> Any:
        groups = [{"params": list(layer.parameters())} for layer in self.net[::2]]
        return torch.optim.AdamW(groups, lr=0.01)


class ChangesGradients(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with self.trainer.whole(self):
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.clamp_(-0.01, 0.01)
                parameter.grad[0] = 0.0


class Averages(Plain):
    """A running average of the weights, frozen, that takes their place now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
            if self.trainer.global_step % 3 == 0:
                self.net.load_state_dict(self.slow.state_dict())


class Masks(Plain):
    """Gradient hooks, one of them registered late."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def on_fit_start(self) -> None:
        self.net[0].bias.register_hook(lambda gradient: gradient * 0)


class Penalty(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


class GradientPenalty(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].detach().clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.net(x).square().sum(), x, create_graph=True)
        return super().training_step(batch, batch_idx) + slope.square().mean()


class Logs(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.grad.norm() for parameter in self.parameters() if parameter.grad is not None]
        assert norms


class DropsGradient(Plain):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[4].bias.grad = None


class LogsLate(Plain):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        assert self.net[0].weight.grad is None, "one process still has it"


class Unfreezes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 1)


class Alternates(Plain):
    """A branch that every third step skips."""

    def __init__(self) -> None:
        super().__init__()
        self.net.extra = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net[:5](batch[0])
        if batch_idx % 3 != 2:
            logits = logits + self.net.extra(batch[0])
        return F.cross_entropy(logits, batch[1])


class Experts(Plain):
    """Each sample goes to one of two experts of the same shape; some batches of a rank use only one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = x[:, :3]
        for expert, chosen in zip(self.net, (x[:, 0] < 0, x[:, 0] >= 0), strict=True):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                logits = logits.index_add(0, rows, expert(x[rows]))
        return F.cross_entropy(logits, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Strided(Plain):
    """Parameters that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.net[2].weight = nn.Parameter(self.net[2].weight.detach().t().contiguous().t())


class StepsTwice(Plain):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(optimizer_closure)
        optimizer.step(optimizer_closure)


class ClampsAmongEvaluations(Clamps):
    """An evaluation before the first step lets ZeRO-3 free small parameters, too, that hooks find whole."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        return loader(12)


class ClampsTied(ClampsAmongEvaluations):
    """The engine leaves the embedding's weight whole after a backward, and gathers it again for the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(3, 8), nn.Linear(8, 3, bias=False)
        self.net, self.head.weight = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.net(self.embedding((batch[0] > 0).long()).mean(1))), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.1, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(kind: type[Module], strategy: Strategy | str, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = kind()
    trainer = quiet(strategy=strategy, accelerator="cpu", seed=1, max_epochs=2, **{"split_batches": True} | options)
    trainer.fit(module, torch.utils.data.DataLoader(data(20), batch_size=8))
    return weights(module)


def train_each(cases: list[tuple[type[Module], str, dict[str, Any]]]) -> list[list[Tensor] | str]:
    """On a rank: the weights of each case, or the sentence that refused it."""
    results: list[list[Tensor] | str] = []
    for kind, stage, options in cases:
        try:
            results.append(train(kind, STAGES[stage](), devices=2, **options))
        except (RuntimeError, ValueError) as error:
            results.append(str(error))
    return results


WHOLE = [(kind, stage) for kind in (Clamps, Assigns, LoadsInHook, ScalesInStep) for stage in ("1", "2 offloaded")]
ANYWHERE = [
    (kind, stage) for kind in (ClampsWhole, ChangesGradients, Averages, Masks) for stage in ("2", "2 offloaded", "3")
]
REST: list[tuple[type[Module], str]] = [
    (Clamps, "3 with small parameters whole"),
    (ClampsAmongEvaluations, "3 with small parameters whole"),
    (Penalty, "1"),
    (Penalty, "2"),
    (GradientPenalty, "2"),
    (Experts, "1"),
    (ChangesGradients, "1"),
    (Averages, "3 offloaded"),
    (HalvesGroups, "2"),
    (HalvesGroups, "3"),
    (Masks, "3 with small parameters whole"),
    (Strided, "2"),
    (Strided, "3"),
]


@pytest.mark.long
@pytest.mark.parametrize("cases", [WHOLE + REST, ANYWHERE], ids=["whole parameters", "any stage"])
def test_what_user_code_does_has_the_effect_of_one_process(cases: list[tuple[type[Module], str]]) -> None:
    checked = {"num_sanity_val_steps": 2}
    found = launch(train_each, ([(kind, stage, checked) for kind, stage in cases],), 2)
    expected = {kind: train(kind, "single") for kind in {kind for kind, _ in cases}}
    for (kind, stage), result in zip(cases, found, strict=True):
        assert not isinstance(result, str), (kind.__name__, stage, result)
        assert distance(result, expected[kind]) < 1e-5, (kind.__name__, stage)


@pytest.mark.long
def test_weights_changed_between_micro_batches_count_in_the_next_one() -> None:
    options = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 2}
    (found,) = launch(train_each, ([(ClampsTied, "3 with small parameters whole", options)],), 2)
    assert not isinstance(found, str), found
    assert distance(found, train(ClampsTied, "single", **options)) < 1e-5


class MaxNorm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class MaxNorms(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(MaxNorm(8, 15), nn.Tanh(), nn.Linear(15, 3))


class ShrinksInBackward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[2].register_full_backward_hook(self.shrink)

    def shrink(self, module: Any, *_: Any) -> None:
        module.weight.data.mul_(0.9)


REFUSED: list[tuple[type[Module], str, str]] = [
    (Clamps, "3", "net.0.weight is in pieces over the ranks under ZeRO-3, and empty here, so clamp_ would not see it"),
    (Assigns, "3", "net.0.weight is in pieces over the ranks under ZeRO-3"),
    (LoadsInHook, "3", "within `with trainer.whole(module):`"),
    (MaxNorms, "3", "net.0.weight was changed in the forward or backward of its layer, or in a hook of it, but ZeRO-3"),
    (MaxNorms, "3 with small parameters whole", "net.0.weight was changed in the forward or backward of its layer"),
    (ShrinksInBackward, "3", "net.2.weight was changed in the forward or backward of its layer"),
    (Penalty, "3", "so square would not see it"),
    (GradientPenalty, "3", "takes the gradient of a gradient (create_graph=True), but ZeRO-3 frees parameters"),
    (GradientPenalty, "3 with small parameters whole", "takes the gradient of a gradient"),
    (Logs, "1", "the gradient of net.0.weight is in DeepSpeed's engine, in pieces, and not in .grad"),
    (Logs, "3", "the gradient of net.0.weight is in DeepSpeed's engine"),
    (DropsGradient, "2", "the gradient of net.4.bias is in DeepSpeed's engine"),
    (LogsLate, "2", "the gradient of net.0.weight is in DeepSpeed's engine"),
    (Unfreezes, "1", "net.0.weight, net.0.bias"),
    (StepsTwice, "2", "AdamW.step was called again for the same gradient, which DeepSpeed's engine drops"),
    (StepsTwice, "3", "AdamW.step was called again for the same gradient, which DeepSpeed's engine drops"),
    (
        Alternates,
        "1",
        "got no gradient in a step, but ZeRO steps them with the others: net.extra.weight, net.extra.bias",
    ),
    (
        Alternates,
        "3",
        "got no gradient in a step, but ZeRO steps them with the others: net.extra.weight, net.extra.bias",
    ),
]


@pytest.mark.long
def test_what_would_change_numbers_is_refused_by_name() -> None:
    found = launch(train_each, ([(kind, stage, {}) for kind, stage, _ in REFUSED],), 2)
    for (kind, stage, sentence), result in zip(REFUSED, found, strict=True):
        assert isinstance(result, str) and sentence in result, (kind.__name__, stage, result)


@pytest.mark.long
def test_counts_and_shapes_are_those_of_whole_parameters(tmp_path: Path) -> None:
    class Counts(Plain):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sizes = [(p.numel(), tuple(p.shape), p.size(0), p.dim(), p.ndim, len(p)) for p in self.parameters()]
            if self.trainer.is_global_zero:
                (tmp_path / "sizes").write_text(repr(sizes))

    train(Counts, "single")
    expected = (tmp_path / "sizes").read_text()
    (tmp_path / "sizes").unlink()
    train(Counts, STAGES["3"](), devices=2)
    assert (tmp_path / "sizes").read_text() == expected


class CountsCalls(Plain):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.calls


@pytest.mark.long
def test_a_count_that_a_rank_without_samples_would_miss_is_refused() -> None:
    trainer = quiet(strategy=STAGES["3"](), accelerator="cpu", devices=2, split_batches=True)
    with pytest.raises(
        Exception, match="training_step, or backward, changed the number calls of the model in a step in which a rank"
    ):
        trainer.fit(CountsCalls(), torch.utils.data.DataLoader(data(9), batch_size=8))


class UnevenExperts(Module):
    """Uses one expert more on rank 1, once rank 0 is in its backward."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 4) for _ in range(3)])
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [expert(batch[0]).square().mean() for expert in self.experts[:2]]
        if self.trainer.global_rank == 1:
            wait_for(self.folder / "backward")
            losses.append(self.experts[2](batch[0]).square().mean())
        return sum(losses)

    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.global_rank == 0:
            (self.folder / "backward").touch()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class UnevenBackwards(UnevenExperts):
    """Calls the same experts on each rank, of which rank 1 trains one only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.experts = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 16)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = (expert(batch[0]).square().mean() for expert in self.experts)
        return first + (second if self.trainer.global_rank == 0 else second.detach())


def wait_for(file: Path) -> None:
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not appear"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.parametrize("stage", ["2", "3"])
@pytest.mark.parametrize("module", [UnevenExperts, UnevenBackwards])
def test_layers_that_ranks_use_differently_are_named(
    stage: str, module: Callable[[Path], Module], tmp_path: Path
) -> None:
    train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 8)), 4)
    trainer = quiet(strategy=STAGES[stage](), devices=2, accelerator="cpu", max_epochs=1)
    named = rf"(uses|gradients of|backward of) experts\.\d.* on rank \d; ZeRO-{stage} exchanges"
    with pytest.raises(RuntimeError, match=named):
        trainer.fit(module(tmp_path), train)


class CopiesMetrics(Plain):
    """As torchmetrics' MetricTracker does; `of_net` copies layers too."""

    def __init__(self, of_net: bool = False) -> None:
        super().__init__()
        self.of_net, self.accuracy = of_net, MeanMetric()

    def on_train_epoch_start(self) -> None:
        copy.deepcopy(self.net if self.of_net else self.accuracy)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_torchmetrics_objects_can_be_copied(stage: int) -> None:
    trained = quiet(strategy=DeepSpeed(stage=stage), devices=2, max_epochs=1)
    trained.fit(CopiesMetrics(), loader())
    assert trained.global_step


@pytest.mark.long
def test_layers_in_pieces_cannot_be_copied() -> None:
    with pytest.raises(RuntimeError, match=r"in pieces over the ranks under ZeRO-3 was copied \(copy.deepcopy\)"):
        quiet(strategy=DeepSpeed(stage=3), devices=2, max_epochs=1).fit(CopiesMetrics(of_net=True), loader())
