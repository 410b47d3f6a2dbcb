"""Activation checkpointing: under every strategy the numbers stay, blocks run a second time, and less is kept."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    MeshParallel,
    ModelParallel,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.modules.activation_checkpointing import is_recomputed, keep, recompute
from lockstep.strategies.spmd import SPMDStrategy
from tests.strategies import contract
from tests.strategies.contract import Plan, saved_weights


class Block(nn.Module):
    """A residual block with all that a second forward can get wrong: noise and statistics."""

    def __init__(self, dim: int = 8, hidden: int = 16, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm(dim)
        self.up = nn.Linear(dim, hidden)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Model(contract.Model):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), *[Block(norm=norm) for _ in range(4)], nn.Linear(8, 4))


MADE: dict[str, tuple[Callable[..., Strategy], int, type[nn.Module]]] = {
    "single": (SingleDevice, 1, nn.BatchNorm1d),
    "dp": (DataParallel, 2, nn.BatchNorm1d),
    "model": (ModelParallel, 3, nn.BatchNorm1d),
    "ddp": (DDP, 2, nn.BatchNorm1d),
    "ddp static graph": (lambda **options: DDP(static_graph=True, **options), 2, nn.BatchNorm1d),
    "ddp unused": (lambda **options: DDP(find_unused_parameters=True, **options), 2, nn.BatchNorm1d),
    "fsdp": (FSDP, 2, nn.BatchNorm1d),
    "fsdp on one rank": (FSDP, 1, nn.BatchNorm1d),
    "tensor": (TensorParallel, 2, nn.LayerNorm),
    "fsdp=2,tensor=2": (lambda **options: MeshParallel("fsdp=2,tensor=2", **options), 4, nn.LayerNorm),
    "pipeline 1f1b": (Pipeline, 2, nn.BatchNorm1d),
    "pipeline gpipe": (lambda **options: Pipeline(schedule="gpipe", **options), 2, nn.BatchNorm1d),
    "pipeline interleaved": (lambda **options: Pipeline(schedule="interleaved_1f1b", **options), 2, nn.BatchNorm1d),
    "fsdp=2,pipeline=2": (lambda **options: Pipeline(mesh="fsdp=2,pipeline=2", **options), 4, nn.BatchNorm1d),
    "deepspeed 2": (DeepSpeed, 2, nn.BatchNorm1d),
    "deepspeed 3": (
        lambda **options: DeepSpeed(
            stage=3, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}, **options
        ),
        2,
        nn.BatchNorm1d,
    ),
}
"""How to build each strategy, its number of devices, and the norm of its blocks."""


@contextmanager
def counting() -> Iterator[list[Any]]:
    """A list that has the layer of each forward of a `Block` in training mode: out of reach of what a pipeline refuses,
    which are layers that count themselves."""
    ran: list[Any] = []
    gelu = F.gelu

    def counted(x: torch.Tensor) -> torch.Tensor:
        block = sys._getframe(1).f_locals["self"]
        if block.training:
            ran.append(block)
        return gelu(x)

    F.gelu = counted
    try:
        yield ran
    finally:
        F.gelu = gelu


def on_rank(strategy: Strategy, plan: Plan, folder: str, norm: type[nn.Module]) -> list[int]:
    """The contract's training of this file's model; how often each block ran on rank 0 in training mode."""
    torch.manual_seed(0)
    model = Model(norm)
    build, contract.build = contract.build, lambda: model
    try:
        with counting() as ran:
            contract.on_rank(strategy, plan, folder)
    finally:
        contract.build = build
    return [ran.count(block) for block in model.modules() if isinstance(block, Block)]


def both_on_rank(strategies: dict[str, Strategy], plan: Plan, folder: str, norm: type[nn.Module]) -> list[list[int]]:
    return [on_rank(strategy, plan, f"{folder}/{name}", norm) for name, strategy in strategies.items()]


SLOW = (
    "ddp static graph",
    "tensor",
    "pipeline gpipe",
    "pipeline interleaved",
    "fsdp=2,pipeline=2",
    "fsdp=2,tensor=2",
    "deepspeed 2",
)
"""Those that differ little from another one here."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MADE]
)
@pytest.mark.filterwarnings("ignore:.*find_unused_parameters=True was specified")
def test_numbers_stay_and_blocks_run_twice(name: str, tmp_path: Path) -> None:
    make, devices, norm = MADE[name]
    plan = Plan(
        num_samples=48,
        global_batch=24,
        accumulate=2,
        epochs=1,
        precision="32-true" if "deepspeed" in name else "64-true",
    )
    strategies = {"kept": make(), "recomputed": make(activation_checkpointing=True)}
    for strategy in strategies.values():
        strategy.configure(devices=devices, accelerator="cpu", precision=plan.precision)
    work = strategies, plan, str(tmp_path), norm
    once, twice = strategy.launch(both_on_rank, *work) if strategy.starts_ranks else both_on_rank(*work)
    assert any(once) and twice == [2 * calls for calls in once]
    expected, found = saved_weights(tmp_path / "kept"), saved_weights(tmp_path / "recomputed")
    assert expected.keys() == found.keys()
    for key, value in expected.items():  # statistics of BatchNorm and its counters too
        if devices == 1 or name in ("dp", "model"):
            assert torch.equal(found[key], value), key
        else:
            assert found[key].allclose(value, rtol=0, atol=1e-12 if plan.precision == "64-true" else 1e-6), key


def step(strategy: Strategy, model: nn.Module, batch: Any) -> tuple[nn.Module, int]:
    """One step; returns what was wrapped, and the bytes of the tensors that its forward has kept for the backward."""
    strategy.configure(accelerator="cpu")
    strategy.setup()
    wrapped = strategy.setup_module(model)
    strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), 0.1)})
    parameters = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for block in model.children():
        block.register_forward_pre_hook(
            lambda module, args: (note(args[0]), *args[1:])
        )  # what torch keeps of a recomputed block, beside the graph

    def training_step(batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return model(batch).square().mean()

    strategy.forward_backward(wrapped, training_step, Window([MicroBatch(batch, len(batch))], len(batch)))
    return wrapped, sum(kept.values())


def test_less_is_kept_between_forward_and_backward() -> None:
    x = torch.randn(256, 8)

    def kept_bytes(**options: Any) -> int:
        torch.manual_seed(0)
        strategy = SingleDevice(**options)
        model = nn.Sequential(*[Block(hidden=64) for _ in range(6)])
        try:
            wrapped, kept = step(strategy, model, x)
            strategy.teardown_module(wrapped)
        finally:
            strategy.teardown()
        return kept

    # A block keeps what enters it (8 numbers a sample) in place of six times 8 and several times 64.
    assert kept_bytes(activation_checkpointing=True) * 10 < kept_bytes()


def test_unwrapping_restores_the_callers_classes_also_after_a_failed_run() -> None:
    model = nn.Sequential(*[Block() for _ in range(2)])
    strategy = SingleDevice(activation_checkpointing=True)
    strategy.configure(accelerator="cpu")
    strategy.setup()
    wrapped = strategy.setup_module(model)
    assert all(is_recomputed(block) for block in model) and [type(block).__name__ for block in model] == ["Block"] * 2
    again = SingleDevice(activation_checkpointing=True)  # as after a run that failed before it released the model
    again.configure(accelerator="cpu")
    again.setup()
    wrapped = again.setup_module(model)
    with counting() as ran:
        model(torch.randn(4, 8)).sum().backward()
    assert ran.count(model[0]) == 2, "recomputed once, not once for each run"
    again.teardown_module(wrapped)
    assert [type(block) for block in model] == [Block, Block] and not any("forward" in vars(block) for block in model)
    plain = SingleDevice()
    recompute(model, "auto")
    plain.configure(accelerator="cpu")
    plain.setup()
    assert not any(map(is_recomputed, plain.setup_module(model).modules()))
    for each in (strategy, again, plain):
        each.teardown()


def test_copies_and_pickles_are_plain() -> None:
    model = nn.Sequential(*[Block() for _ in range(2)])
    recompute(model, "auto")
    recompute(model, "auto")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(model, 2))):
        assert [type(block) for block in copied] == [Block, Block]
        assert all(
            torch.equal(a, b) for a, b in zip(copied.state_dict().values(), model.state_dict().values(), strict=True)
        )
    assert all(map(is_recomputed, model))
    keep(model)
    assert [type(block) for block in model] == [Block, Block]


class Spectral(nn.Module):
    """Its forward changes a buffer that its output depends on, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True)
        self.register_buffer("u", torch.ones(8))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.u.add_(self.layer.weight @ self.u).div_(self.u.norm())
            self.seen = self.seen + len(x)
        return x + (self.layer(self.norm(x.unsqueeze(1)).squeeze(1)) * self.u).tanh() * self.seen


def test_a_block_that_changes_its_buffers_finds_them_as_they_were() -> None:
    x = torch.randn(16, 8)

    def gradients(recomputed: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Spectral() for _ in range(3)])
        if recomputed:
            recompute(model, Spectral)
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None], dict(model.named_buffers())

    (expected, buffers), (found, after) = gradients(False), gradients(True)
    assert all(map(torch.equal, expected, found)) and all(torch.equal(buffers[name], after[name]) for name in buffers)


@pytest.mark.parametrize(
    "rule",
    [Block, "body.?", ["body.1", "body.2"], lambda name, module: name == "body.2"],
    ids=["class", "name", "list", "function"],
)
def test_a_rule_says_which(rule: Any) -> None:
    model = Model()
    recompute(model, rule)
    found = [name for name, module in model.named_modules() if is_recomputed(module)]
    assert found == {list: ["body.1", "body.2"], str: [f"body.{i}" for i in range(6)]}.get(
        type(rule), ["body.2"] if rule is not Block else [f"body.{i}" for i in range(1, 5)]
    )


def test_blocks_that_share_parameters_are_recomputed_too() -> None:
    shared = Block()
    other = Block()
    other.up = shared.up
    model = nn.Sequential(shared, other)
    recompute(model, "auto")
    assert all(map(is_recomputed, model))


class Careful(SPMDStrategy):
    single_process = True

    def wrap(self, model: nn.Module) -> nn.Module:
        return model


def test_a_strategy_of_ones_own_gets_it_from_the_base() -> None:
    model = nn.Sequential(*[Block() for _ in range(2)])
    careful = Careful(activation_checkpointing=Block)
    with counting() as ran:
        wrapped, _ = step(careful, model, torch.randn(8, 8))
    assert ran.count(model[0]) == 2
    careful.teardown_module(wrapped)
    careful.teardown()


def place(strategy: Strategy, model: nn.Module) -> None:
    strategy.setup()
    try:
        strategy.setup_module(model)
    finally:
        strategy.teardown()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SingleDevice(activation_checkpointing=True),
            "needs blocks to recompute, but 'auto' finds none in Linear; give their class or name",
        ),
        (
            lambda: FSDP(wrap=None, activation_checkpointing=True),
            "needs blocks to recompute, but None finds none in Linear",
        ),
        (
            lambda: DDP(activation_checkpointing="blocks.*"),
            "activation_checkpointing must name classes or submodules that have parameters, but 'blocks.*' is not "
            "one of",
        ),
        (lambda: DDP(activation_checkpointing=lambda name, module: False), "but the rule finds none in Linear"),
        (
            lambda: SingleDevice(activation_checkpointing=2),
            "activation_checkpointing must be True, False or say which blocks, but activation_checkpointing=2",
        ),
        (
            lambda: Pipeline(schedule="zbv", activation_checkpointing=True),
            "schedule='zbv' runs backward to inputs and to each weight apart",
        ),
    ],
)
def test_what_cannot_be_is_one_sentence(make: Callable[[], Strategy], message: str) -> None:
    def run() -> None:
        strategy = make()
        strategy.configure(devices=1, accelerator="cpu")
        place(strategy, nn.Linear(2, 2))

    with pytest.raises(ValueError, match=re.escape(message)):
        run()


def test_a_forward_of_the_object_is_refused() -> None:
    model = Model()
    model.body[1].forward = lambda x: x  # type: ignore[assignment]
    with pytest.raises(ValueError, match="but body.1 has one of its own; define it in Block"):
        recompute(model, "auto")


@pytest.mark.ranks
def test_a_pipeline_refuses_a_block_over_several_layers() -> None:
    strategy = Pipeline(activation_checkpointing="body")
    strategy.configure(devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match="but activation_checkpointing finds body, which holds several; name them"):
        strategy.launch(place, strategy, Model())
