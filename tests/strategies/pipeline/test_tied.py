"""Parameters that several stages share, modules without parameters, and facts about weights of other stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.callbacks import WeightAveraging
from lockstep.strategies import Pipeline
from lockstep.strategies.pipeline.partition import cut, stages
from lockstep.strategies.pipeline.timeline import plan
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.strategies.pipeline.classifiers import Base, difference, exact, fit

pytestmark = pytest.mark.ranks

TOKENS, WIDTH = 11, 8


class Rotary(nn.Module):
    """No parameters, a buffer that is not saved, and a cache that the first call fills."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 0.5 ** torch.arange(WIDTH, dtype=torch.float64), persistent=False)
        self.cached: Tensor | None = None
        self.cached_length = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.cached_length < x.shape[1]:
            self.cached_length = x.shape[1]
            places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
            self.cached = torch.outer(places, self.frequencies).cos()
        assert self.cached is not None
        return self.cached.to(x.dtype)


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up, self.down, self.shared = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), shared

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x * rotation * self.shared(x))))


class LanguageModel(nn.Module):
    """A tied head, a rotary module that is defined last and called first, and one that all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        shared = Rotary()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.rotary = Rotary()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).to(self.blocks[0].up.weight.dtype)
        rotation = self.rotary(x)
        for block in self.blocks:
            x = block(x, rotation)
            assert block.up.weight.dtype == self.norm.weight.dtype == x.dtype and self.embed.weight.device == x.device
        assert self.head.weight.shape == (TOKENS, WIDTH) and self.blocks[3].up.weight.size(1) == WIDTH
        assert next(self.parameters()).is_floating_point() and self.norm.weight.new_zeros(2).dtype == x.dtype
        return self.head(self.norm(x))


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = LanguageModel().double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = (batch[0].abs() * 5).long().clamp(max=TOKENS - 1)
        return F.cross_entropy(self.net(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        """Weight decay for matrices only."""
        matrices = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)


OPTIONS: dict[str, Any] = {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipeline", 2),
        pytest.param(lambda: Pipeline(schedule="gpipe", split=["net.blocks.1", "net.norm"]), 3, marks=pytest.mark.slow),
        (lambda: Pipeline(schedule="zbv"), 2),
        pytest.param(
            lambda: Pipeline(schedule="interleaved_zero_bubble", num_micro_batches=4), 2, marks=pytest.mark.slow
        ),
        ("ddp=2,pipeline=2", 4),
        pytest.param("fsdp=2,pipeline=2", 4, marks=pytest.mark.slow),  # as in test_skips.py
    ],
    ids=["1f1b", "gpipe", "zbv", "zero_bubble", "ddp", "fsdp"],
)
def test_a_tied_head_and_rotary_modules_are_exact(strategy: Any, devices: int) -> None:
    exact(Tied, {strategy: devices}, **OPTIONS)


@pytest.mark.long
def test_checkpoints_of_tied_parameters_go_to_one_process_and_back(tmp_path: Path) -> None:
    """With averages of the weights; each tensor is saved once, under the names that one process gives it."""
    runs: dict[str, Any] = {"pipeline": 2, "single": 1}
    expected = fit(Tied(), "single", 1, **OPTIONS, callbacks=[WeightAveraging(0.5)])
    for strategy, devices in runs.items():
        saves = Saves(tmp_path / strategy)
        fit(saves, strategy, devices, **OPTIONS, max_epochs=1, callbacks=[WeightAveraging(0.5)])
    for strategy, source in (("single", "pipeline"), ("pipeline", "single"), ("pipeline", "pipeline")):
        options = OPTIONS | {"ckpt_path": tmp_path / source, "callbacks": [WeightAveraging(0.5)]}
        assert difference(fit(Tied(), strategy, runs[strategy], **options), expected) < 1e-12, (source, strategy)
    one, other = (Checkpoint.open(tmp_path / name) for name in runs)
    assert one.names("model/") == other.names("model/") and one.names("optimizer/") == other.names("optimizer/")
    assert one.meta["model"] == other.meta["model"]
    for key, saved in one.meta["optimizers"].items():
        assert saved["param_groups"] == other.meta["optimizers"][key]["param_groups"]
        assert saved["state"].keys() == other.meta["optimizers"][key]["state"].keys()


class Saves(Tied):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


class Hooks(Tied):
    """What hooks do to the shared parameter, and what they see of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net.embed.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.register_buffer("norms", torch.zeros(100, dtype=torch.float64))

    def on_train_epoch_start(self) -> None:
        self.net.head.weight.requires_grad_(self.current_epoch != 1)
        if self.current_epoch == 2:
            self.net.embed.weight.data.normal_(generator=torch.Generator().manual_seed(3))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms[self.global_step] = self.grad_norm()
        if self.current_epoch != 1:
            with self.trainer.whole(self):
                assert self.net.head.weight is self.net.embed.weight
                self.net.embed.weight.grad *= 1.5

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net.embed.weight.clamp_(-0.5, 0.5)
            self.net.norm.bias.zero_()


@pytest.mark.long
def test_hooks_on_tied_parameters_are_exact() -> None:
    exact(Hooks, {"pipeline": 2, "ddp=2,pipeline=2": 4}, max_epochs=4, gradient_clip_val=0.2)


class SharedBy(Base):
    """A square matrix that the layers `places` of four have in common."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh(), nn.Linear(8, 4)).double()
        for place in places[1:]:
            self.net[place].weight = self.net[places[0]].weight


@pytest.mark.long
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 2), (1, 3)], ids=str)
def test_any_stages_may_share_a_parameter(places: tuple[int, ...]) -> None:
    split = lambda: Pipeline(split=["net.1", "net.2", "net.3"])  # noqa: E731
    exact(lambda: SharedBy(places), {split: 4}, gradient_clip_val=0.05)


def copies() -> list[Any]:
    """After two steps: whether the copies of the shared parameter and of its optimizer state are equal bit by bit, the
    norm of the gradient, and how many tensors each rank saves."""
    strategy = Pipeline()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    try:
        module = Tied()
        wrapped = strategy.setup_module(module)
        (optimizer,) = strategy.setup_optimizers(
            wrapped, {"main": torch.optim.AdamW(module.parameters(), lr=0.1)}
        ).values()
        loader = strategy.shard_loader(torch.utils.data.DataLoader(SAMPLES, 8), seed=0)
        for window in loader.windows(0):
            optimizer.zero_grad()
            strategy.forward_backward(wrapped, module.training_step, window)
            norm = strategy.clip_gradients(wrapped, optimizer, 0.1)
            strategy.optimizer_step(wrapped, optimizer)
        shared = module.net.embed.weight
        assert shared is module.net.head.weight and norm is not None
        moment = optimizer.state.held[shared]["exp_avg"]  # type: ignore[attr-defined]
        found = strategy.all_gather(torch.cat([shared.detach(), moment, norm.expand(1, WIDTH)]))
        saved = strategy.all_gather(torch.tensor(len(strategy.state_dict(wrapped, {}).tensors)))
        return [torch.equal(found[0], found[1]), float(norm), saved.tolist()]
    finally:
        strategy.teardown()


SAMPLES = torch.utils.data.TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).double())


def test_copies_are_equal_bit_by_bit_and_counted_once(run_ranks: Callable[..., Any]) -> None:
    equal, norm, saved = run_ranks(copies, 2)
    module, tensors = Tied(), SAMPLES.tensors[0]
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for part in tensors.split(8):
        optimizer.zero_grad()
        module.training_step([part], 0).backward()
        expected = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    assert equal and norm == pytest.approx(float(expected), rel=1e-12)
    assert sum(saved) == len(module.state_dict())


class Drifts(Tied):
    def on_train_epoch_end(self) -> None:
        if self.trainer.global_rank == 1:
            self.net.head.weight.data[0, 0] += 1e-12


def test_copies_that_drift_apart_are_found() -> None:
    with pytest.raises(RuntimeError, match="drifted apart: after step 3 net.embed.weight on rank 1 is not what it is"):
        fit(Drifts(), "pipeline", 2, max_epochs=1)


class NormalizedRows(Tied):
    """Changes the shared weight in place where the embedding is called, which is one stage of two."""

    def __init__(self) -> None:
        super().__init__()
        self.net.embed.register_forward_pre_hook(normalizes)


@torch.no_grad()
def normalizes(module: nn.Module, args: Any) -> None:
    if type(args[0]) is Tensor and type(module.weight) is nn.Parameter:
        module.weight.mul_(0.5)  # type: ignore[operator]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_shared_weight_that_a_step_changes_is_refused(parts: int) -> None:
    module = NormalizedRows()
    with pytest.raises(RuntimeError, match=r"training_step changes net.embed.weight in place"):
        fit(module, Pipeline(num_micro_batches=parts, schedule="gpipe"), 2)


def test_the_plan_shows_what_stages_share() -> None:
    strategy = Pipeline()
    strategy.configure(devices=2, accelerator="cpu")
    text = plan(strategy, Tied())
    assert "net.embed.weight = net.head.weight is on stages 0 and 1, which sum its gradients" in text


def test_what_stages_cannot_share_is_named() -> None:
    tied, layer, norm = Tied(), nn.Linear(4, 4), nn.BatchNorm1d(4)
    tied.net.embed.max_norm = 1.0
    twice = nn.Sequential(layer, nn.Linear(4, 4), nn.ReLU(), nn.Sequential(layer, nn.ReLU()))
    for model, message in (
        (tied, "net.embed changes its weight in the forward, which stages 0 and 1 of the pipeline share"),
        (twice, "0 on stage 0 of the pipeline is the same module as 3.0 on stage 1"),
        (nn.Sequential(layer, nn.Linear(4, 4), Normalized(layer)), "2.norm on stage 1 of the pipeline is the same mod"),
        (nn.Sequential(Normalized(norm), Normalized(norm)), "0.norm changes its running_mean in the forward, which"),
    ):
        with pytest.raises(ValueError, match=message):
            stages(cut(model), 2)


class Normalized(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))
