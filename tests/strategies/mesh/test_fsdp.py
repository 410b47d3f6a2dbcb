"""FSDP beyond the contract suite: odd modules, options, initialization, memory, checkpoints over world sizes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import DDP, FSDP, SingleDevice, Strategy
from lockstep.strategies.checkpoint_state import gather_whole
from lockstep.strategies.mesh.dtensors import cut_like
from lockstep.strategies.modules.blocks import find_blocks
from lockstep.strategies.modules.side_effect_free import side_effect_free
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.strategies.odd import Adversaries, Odd, TwoLosses, tokens
from tests.trainer.toy import distance, equal, quiet, weights

pytestmark = pytest.mark.ranks


def fit(
    strategy: Strategy | str,
    devices: int | str,
    module: Module,
    train: Any = None,
    val: Any = None,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Trainer:
    defaults = {"seed": 1, "split_batches": True, "precision": "64-true", "max_epochs": 2}
    trainer = quiet(strategy=strategy, devices=devices, accelerator="cpu", **defaults | options)
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return trainer


def rows(n: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(0))), 4, shuffle=True)


def seeded(cls: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(**options)


@pytest.mark.long
def test_an_odd_module_trains_as_on_one_process() -> None:
    """0-dim, tied, frozen and directly used parameters, submodules called past their parents, hooks that compute, ranks
    without samples."""
    one, sharded = seeded(Odd), seeded(Odd)
    kept = fit("single", 1, one, tokens(22), tokens(9, 4, False), accumulate_grad_batches=2)
    found = fit(FSDP(), 2, sharded, tokens(22), tokens(9, 4, False), accumulate_grad_batches=2)
    assert distance(weights(one), weights(sharded)) < 1e-12
    expected = {name: float(value) for name, value in kept.callback_metrics.items()}
    assert {name: float(value) for name, value in found.callback_metrics.items()} == pytest.approx(expected, rel=1e-12)
    assert all(type(p) is nn.Parameter for p in sharded.parameters()), "the caller's module is plain again"
    assert sharded.core.head.weight is sharded.core.token.weight
    assert sharded.core.get_extra_state() == {"note": "of core", "numbers": [1, 2]}
    assert torch.equal(
        torch.cat(found.predict(sharded, tokens(9, 4, False))), torch.cat(kept.predict(one, tokens(9, 4, False)))
    )
    assert found.validate(sharded, tokens(9, 4, False), verbose=False)[0] == pytest.approx(
        kept.validate(one, tokens(9, 4, False), verbose=False)[0], rel=1e-12
    )


@pytest.mark.parametrize("module", [Adversaries, TwoLosses])
def test_several_optimizers(module: Any) -> None:
    one, sharded = seeded(module), seeded(module)
    accumulate = {} if module is Adversaries else {"accumulate_grad_batches": 2}
    fit("single", 1, one, rows(22), **accumulate)
    fit(FSDP(), 2, sharded, rows(22), **accumulate)
    assert distance(weights(one), weights(sharded)) < 1e-12


@pytest.mark.long
def test_blocks_may_stay_gathered_on_groups_of_ranks() -> None:
    one, sharded = seeded(Odd, bypass=False), seeded(Odd, bypass=False)
    fit("single", 1, one, tokens(8), max_epochs=1)
    fit(FSDP(reshard_after_forward=2), 4, sharded, tokens(8), max_epochs=1)
    assert distance(weights(one), weights(sharded)) < 1e-12


OPTIONS: dict[str, dict[str, Any]] = {
    "kept after forward": {"reshard_after_forward": False},
    "synchronized each time": {"sync_every_micro_batch": True},
    "recomputed": {"activation_checkpointing": True},
    "offloaded": {"cpu_offload": True},
    "one unit": {"wrap": None},
    "by class": {"wrap": nn.Linear},
    "by name": {"wrap": ["body.[12]", contract.Block]},
    "by function": {"wrap": lambda name, module: name.endswith("up")},
}


SLOW = ("one unit", "by class", "by function")
"""The rules of `wrap` are tested alone in tests/strategies/modules, and by name here."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, options in OPTIONS.items()
    ],
)
def test_options_change_no_number(options: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(accumulate=2, clip=0.1, num_samples=13, global_batch=5)
    found = contract.run(FSDP(**options), 2, plan, tmp_path / "end")
    model, expected = reference(plan)
    assert difference(saved_weights(tmp_path / "end"), model) < 1e-11
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-9)


class Built(Module):
    """Makes its layers in configure_model, with initial values of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(self.dropout), nn.Linear(8, 4))
        nn.init.normal_(self.net[0].weight, std=0.3)
        self.net.register_buffer("table", torch.rand(3))
        self.extra = nn.Parameter(torch.rand(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not any(tensor.is_meta for tensor in (*self.parameters(), *self.buffers()))
        return (self.net(batch[0]) * self.extra).square().mean() + self.net.table.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(("strategy", "dropout"), [("fsdp", 0.0), ("tensor", 0.5)])
def test_a_model_built_on_the_meta_device_begins_as_on_one_process(strategy: str, dropout: float) -> None:
    """And the random numbers that follow are those of one process too."""
    one, sharded = Built(dropout), Built(dropout)
    fit("single", 1, one, rows(12))
    fit(strategy, 2, sharded, rows(12))
    assert distance(weights(one), weights(sharded)) < 1e-12
    assert torch.equal(one.net.table, sharded.net.table)


class Plain(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Counted(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_values_of_a_model_on_the_meta_device_are_those_of_building_it(strategy: str) -> None:
    """Under a seed: the layers' own `reset_parameters`, in their order."""
    torch.manual_seed(1)
    built = Plain()
    with torch.device("meta"):
        deferred = Plain()
    for module in (built, deferred):
        name = strategy if module is deferred else "single"
        fit(name, 1 if name == "single" else 2, module, rows(12), max_epochs=1, precision="32-true")
    assert distance(weights(built), weights(deferred)) < 1e-6


def test_a_layer_that_cannot_make_its_values_is_named() -> None:
    with torch.device("meta"):
        module = Counted()
    with pytest.raises(ValueError, match=r"Counted.offset is on the meta device and Counted has no reset_parameters"):
        fit("single", 1, module, rows(8))


def held(strategy: Strategy, folder: str) -> dict[str, int]:
    """Bytes that a rank holds of parameters, gradients and optimizer state after a step: the most of any rank, and of
    all."""
    model = nn.Sequential(*[contract.Block(32, 128) for _ in range(4)])
    strategy.setup()
    try:
        wrapped = strategy.setup_module(model)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = strategy.shard_loader(DataLoader(torch.randn(8, 32), 8), seed=0, split=True)
        (window,) = loader.windows(0)
        strategy.forward_backward(wrapped, lambda batch, _: model(batch).square().mean(), window)
        strategy.optimizer_step(wrapped, strategy.setup_optimizers(wrapped, {"main": optimizer})["main"])
        kept = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values()) if t.dim()]
        mine = sum(
            local.numel() * local.element_size()
            for t in kept
            if t is not None
            for local in [t.to_local() if hasattr(t, "to_local") else t]
        )
        return {
            "most": int(strategy.all_reduce(torch.tensor(mine), "max")),
            "total": int(strategy.all_reduce(torch.tensor(mine))),
        }
    finally:
        strategy.teardown()


def test_a_rank_of_four_holds_a_quarter(tmp_path: Path) -> None:
    found = {}
    for name, strategy in (("ddp", DDP(gradient_as_bucket_view=False)), ("fsdp", FSDP())):
        strategy.configure(devices=4, accelerator="cpu")
        found[name] = strategy.launch(held, strategy, str(tmp_path))
    assert found["ddp"]["most"] == 4 * 4 * sum(
        p.numel() for p in nn.Sequential(*[contract.Block(32, 128) for _ in range(4)]).parameters()
    )
    assert found["fsdp"]["total"] == found["ddp"]["most"]
    assert found["fsdp"]["most"] * 4 == found["ddp"]["most"], "every dimension divides by four"


@pytest.mark.long
def test_state_passes_through_any_world_size_bit_for_bit(tmp_path: Path) -> None:
    """4 ranks → one process → 2 ranks, without a step in between: nothing is rounded, nothing is lost."""
    contract.run(FSDP(), 4, Plan(epochs=1, accumulate=2), tmp_path / "four")
    contract.run(SingleDevice(), 1, Plan(epochs=0, start_from=str(tmp_path / "four")), tmp_path / "one")
    contract.run(FSDP(), 2, Plan(epochs=0, start_from=str(tmp_path / "one")), tmp_path / "two")
    first, *others = [Checkpoint.open(tmp_path / name) for name in ("four", "one", "two")]
    for other in others:
        assert other.names() == first.names() and any(name.startswith("optimizer/") for name in first.names())
        assert all(torch.equal(other.read(name), first.read(name)) for name in first.names())
        assert other.state["strategy"] == first.state["strategy"]


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(module: Module, **options: Any) -> None:
        saver = ModelCheckpoint(dirpath=str(tmp_path / "ck"), every_n_train_steps=3, save_top_k=-1, filename="{step}")
        fit(
            FSDP(),
            2,
            module,
            tokens(22),
            callbacks=[saver],
            enable_checkpointing=True,
            default_root_dir=str(tmp_path),
            **options,
        )

    whole, again = seeded(Odd), seeded(Odd)
    run(whole)
    first = sorted((tmp_path / "ck").iterdir())[0]
    fit(FSDP(), 2, again, tokens(22), ckpt_path=first)
    assert equal(weights(whole), weights(again))


class Overflows(Plain):
    """In the second step the gradient of one row overflows, which is on the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[1](self.net[0](batch[0]))
        loss = self.net[2](hidden).float().square().mean() * 0.1
        return loss + self.net[2](hidden.detach())[:, 3].float().mean() * 1e30 if batch_idx == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("steps", float(self.global_step), reduce_fx="max", on_step=False, on_epoch=True)
        whole = torch.cat(
            [p.full_tensor().flatten() if hasattr(p, "full_tensor") else p.flatten() for p in self.parameters()]
        )
        everywhere = self.all_gather(whole.detach())
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_loss_scaling_skips_the_same_step_on_all_ranks(clip: float | None) -> None:
    one, sharded = seeded(Overflows), seeded(Overflows)
    kept = fit("single", 1, one, rows(16), max_epochs=1, precision="16-mixed", gradient_clip_val=clip)
    found = fit(FSDP(), 2, sharded, rows(16), max_epochs=1, precision="16-mixed", gradient_clip_val=clip)
    assert kept.global_step == found.global_step < 4, "what overflowed on one rank was stepped by none"
    assert distance(weights(one), weights(sharded)) < 1e-2


def on_launched_ranks(folder: str) -> list[Any]:
    """What a script under torchrun does: two runs in a row on the same module, which is whole and plain after each."""
    os.environ["LOCKSTEP_LAUNCHER"], os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "torchrun", "127.0.0.1", "1"
    init = os.environ["LOCKSTEP_INIT_METHOD"]
    module = seeded(Odd)
    kinds = [type(child) for child in module.modules()]
    for run in range(2):
        os.environ["LOCKSTEP_INIT_METHOD"] = f"{init}-{run}"
        fit(FSDP(), 2, module, tokens(8), tokens(6, 4, False), max_epochs=1)
        assert [type(child) for child in module.modules()] == kinds
        assert all(type(p) is nn.Parameter for p in module.parameters())
    hooks = [
        len(child._forward_pre_hooks) + len(child._forward_hooks) + len(child._state_dict_pre_hooks)
        for child in module.core.modules()
    ]
    return [hooks, weights(module)]


@pytest.mark.long
def test_ranks_of_another_launcher_keep_a_plain_module(run_ranks: Any, tmp_path: Path) -> None:
    one = seeded(Odd)
    fit("single", 1, one, tokens(8), tokens(6, 4, False), max_epochs=1)
    fit("single", 1, one, tokens(8), tokens(6, 4, False), max_epochs=1)
    hooks, found = run_ranks(on_launched_ranks, 2, str(tmp_path))
    assert not any(hooks)
    assert distance(weights(one), found) < 1e-12


class Averaged(Odd):
    """Keeps an average of its weights part by part, reads them whole and puts them back whole."""

    def on_fit_start(self) -> None:
        self.average = [p.detach().clone() for p in self.parameters()]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for mean, parameter in zip(self.average, self.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.5)

    def on_train_end(self) -> None:
        with torch.no_grad():
            for mean, parameter in zip(self.average, self.parameters(), strict=True):
                parameter.copy_(mean)
        strategy, wrapped = self.trainer.strategy, self.trainer._run.wrapped
        whole = gather_whole(strategy, strategy.state_dict(wrapped, {}))
        assert whole.tensors["model/core.blocks.0.up.weight"].shape == (16, 8)
        whole.tensors["model/bias"] += 1.0
        strategy.load_state_dict(wrapped, {}, whole)


def test_callbacks_read_and_write_whole_weights() -> None:
    one, sharded = seeded(Averaged), seeded(Averaged)
    fit("single", 1, one, tokens(8))
    fit(FSDP(), 2, sharded, tokens(8))
    assert distance(weights(one), weights(sharded)) < 1e-12
    assert one.bias.min() > 0.5


class Ema(Callback):
    """An average of the weights, part by part, that is saved whole."""

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        saved = getattr(self, "saved", None)
        kept = list(module.parameters())
        self.average = (
            [cut_like(whole, p) for whole, p in zip(saved, kept, strict=True)]
            if saved
            else [p.detach().clone() for p in kept]
        )

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mean, parameter in zip(self.average, module.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.5)
        module.log("norm", self.average[0].norm())

    def state_dict(self) -> dict[str, Any]:
        return {"average": list(self.average)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["average"]


@pytest.mark.long
def test_what_a_callback_keeps_of_cut_parameters_is_saved_whole(tmp_path: Path) -> None:
    def run(strategy: str, **options: Any) -> list[Tensor]:
        saver = ModelCheckpoint(
            dirpath=str(tmp_path / strategy), every_n_train_steps=2, save_top_k=-1, filename="{step}"
        )
        trainer = fit(
            strategy,
            1 if strategy == "single" else 2,
            seeded(Odd),
            tokens(16),
            callbacks=[Ema(), saver],
            enable_checkpointing=True,
            **options,
        )
        checkpoint = Checkpoint.open(tmp_path / strategy / "step=8")
        names = [name for name in checkpoint.names("callbacks/") if "average" in name]
        assert names and trainer.callback_metrics["norm"] > 0
        return [checkpoint.read(name) for name in names]

    expected = run("single")
    assert distance(expected, run("fsdp")) < 1e-12
    for strategy, halfway in (("single", "fsdp"), ("fsdp", "single")):
        assert distance(expected, run(strategy, ckpt_path=tmp_path / halfway / "step=4")) < 1e-12


class Normalized(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(3), nn.Linear(8, 4))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        everywhere = self.all_gather(self.net[1].running_mean)
        assert all(torch.equal(row, everywhere[0]) for row in everywhere)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_statistics_are_those_of_rank_0_and_padding_adds_nothing(precision: str) -> None:
    """9 samples in windows of 4 on 2 ranks: the last leaves one rank without samples."""
    module = seeded(Normalized)
    fit(FSDP(), 2, module, DataLoader(TensorDataset(torch.randn(9, 3, 4)), 4), precision=precision, max_epochs=1)
    assert module.net[1].num_batches_tracked == 3


class Skips(Plain):
    """One rank skips a batch, the other does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (
            None
            if self.trainer.strategy.topology.rank == 1 and batch_idx == 1
            else super().training_step(batch, batch_idx)
        )


class SkipsEverywhere(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_step_that_only_one_rank_skips_is_refused() -> None:
    with pytest.raises(RuntimeError, match="training_step returned None on rank 1"):
        fit(FSDP(), 2, seeded(Skips), rows(12))


def test_a_step_that_all_ranks_skip_has_no_weight() -> None:
    one, sharded = seeded(SkipsEverywhere), seeded(SkipsEverywhere)
    fit("single", 1, one, rows(12))
    fit(FSDP(), 2, sharded, rows(12))
    assert distance(weights(one), weights(sharded)) < 1e-12


class Branches(Plain):
    """The first half of a batch goes one way and the second the other, which on two ranks is a way a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        if self.trainer.world_size > 1:
            return self.ways[self.global_rank](self.net(x)).square().mean()
        return torch.cat([way(self.net(part)) for way, part in zip(self.ways, x.chunk(2), strict=True)]).square().mean()


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13, and is refused before")
def test_ranks_may_use_other_parameters_where_that_is_allowed() -> None:
    one, sharded = seeded(Branches), seeded(Branches)
    train = DataLoader(TensorDataset(torch.randn(12, 4)), 4)
    fit("single", 1, one, train)
    fit(FSDP(find_unused_parameters=True), 2, sharded, train)
    assert distance(weights(one), weights(sharded)) < 1e-12
    with pytest.raises(
        RuntimeError,
        match=r"on rank 0, 1 these parameters got no gradient, but on others they did: ways\.0\.weight, ways\.0\.bias, "
        r"ways\.1\.weight",
    ):
        fit(FSDP(), 2, seeded(Branches), train)


class Unfreezes(Odd):
    """Trains a frozen layer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.core.frozen.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_layers_unfreeze_in_the_middle_of_a_run() -> None:
    one, sharded = seeded(Unfreezes), seeded(Unfreezes)
    begin = one.core.frozen.weight.detach().clone()
    fit("single", 1, one, tokens(8))
    fit(FSDP(), 2, sharded, tokens(8))
    assert not torch.equal(begin, one.core.frozen.weight.float())
    assert distance(weights(one), weights(sharded)) < 1e-12


def test_blocks_are_found_by_rule() -> None:
    model = nn.ModuleDict(
        {
            "body": contract.Body(),
            "nested": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))]),
        }
    )
    assert list(find_blocks(model, "auto")) == ["body.1", "body.2", "body.3", "body.4", "nested.0", "nested.1"]
    assert list(find_blocks(model, contract.Block)) == ["body.1", "body.2", "body.3", "body.4"]
    assert list(find_blocks(model, ["body.1", nn.Sequential])) == ["body.1", "nested.0", "nested.1", "body"]
    assert list(find_blocks(model, lambda name, module: name == "body.1.up")) == ["body.1.up"]
    assert not find_blocks(model, None)
    with pytest.raises(
        ValueError, match=r"wrap must name .* but 'blocks\.\*' is not one of ModuleDict; there are body\.1\.norm"
    ):
        find_blocks(model, "blocks.*")
    model["body"][2].up.weight = model["body"][0].weight
    assert "body.2" not in find_blocks(model, "auto"), "its parameter is another's too"
    shared = contract.Body()
    shared[1].up = shared[2].up
    assert list(find_blocks(shared, "auto")) == ["3", "4"], "a layer is in two blocks"
    shared[3] = shared[4]
    assert list(find_blocks(shared, "auto")) == ["3"], "one block that is called twice"


def test_a_side_effect_free_step_leaves_nothing() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.count, self.seen, self.table = 0, [torch.zeros(1)], {"a": [1]}

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.seen[0] += 1
            self.seen.append(x)
            self.table["a"].append(2)
            self.late = x
            return F.dropout(self.norm(x))

    module = Leaves()
    random, before = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    with side_effect_free(module):
        module(torch.randn(4, 2))
    assert (module.count, len(module.seen), float(module.seen[0]), module.table) == (0, 1, 0.0, {"a": [1]})
    assert not hasattr(module, "late") and torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def add_norm(factor: float, layer: nn.Linear, args: Any, output: Tensor) -> Tensor:
    return output + factor * layer.weight.pow(2).sum(0)


class AddsNorm:
    def __call__(self, layer: nn.Linear, args: Any, output: Tensor) -> Tensor:
        return self.added(layer, args, output)

    def added(self, layer: nn.Linear, args: Any, output: Tensor) -> Tensor:
        return output + layer.weight.pow(2).sum(0)


HOOKS: dict[str, Any] = {
    "partial": functools.partial(add_norm, 2.0),
    "method": AddsNorm().added,
    "object": AddsNorm(),
    "helper": lambda layer, args, output: add_norm(1.0, layer, args, output),
}


class Block(nn.Module):
    """Computes in 16 bits only, or by its kind with weights that autocast leaves in float32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        if kind == "hooked":
            self.inner.register_forward_hook(lambda layer, args, output: output + layer.weight.pow(2).sum(0))
        if kind in HOOKS:
            self.outer.register_forward_hook(HOOKS[kind])
        if kind == "scale":
            self.scale = nn.Parameter(torch.rand(8))
        if kind == "double":
            self.outer.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.norm(x)).relu()
        if self.kind == "region":
            with torch.autocast("cpu", enabled=False):
                return x + self.outer(y.float())
        if self.kind == "double":
            return x + self.outer(y.double()).float()
        return x + self.outer(y) * (self.scale if self.kind == "scale" else 1)


class Reads(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + getattr(self.inner, "weight").pow(2).sum(0)  # noqa: B009


class InMixedPrecision(Module):
    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 8)
        self.blocks = nn.ModuleList((Reads if kind == "reads" else Block)(kind) for kind in kinds)
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0][:, 0].abs().long().clamp(max=3)) + batch[0].repeat(1, 2)
        for block in self.blocks:
            x = block(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadsInStep(InMixedPrecision):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.blocks[0].inner.weight.pow(2).sum()


@pytest.mark.parametrize(
    ("cls", "kinds", "stays"),
    [(InMixedPrecision, ("", "scale", "reads", "double", "hooked", *HOOKS), None), (ReadsInStep, ("",), False)],
)
def test_float32_parts_of_a_step_see_float32_weights_in_mixed_precision(cls: Any, kinds: Any, stays: Any) -> None:
    """Blocks that only compute what autocast casts are gathered in 16 bits, and others are not: the bits of DDP."""
    one, sharded = seeded(lambda: cls(*kinds)), seeded(lambda: cls(*kinds))
    fit("ddp", 2, one, rows(16), precision="bf16-mixed", max_epochs=1)
    fit(FSDP(reshard_after_forward=stays), 2, sharded, rows(16), precision="bf16-mixed", max_epochs=1)
    assert equal(weights(one), weights(sharded))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.after = Block("scale"), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(x))


class Nested(InMixedPrecision):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(2))


def test_a_block_in_16_bits_may_hold_one_in_float32() -> None:
    one, sharded = seeded(Nested), seeded(Nested)
    fit("ddp", 2, one, rows(16), precision="bf16-mixed", max_epochs=1)
    fit(FSDP(wrap=[Outer, Block]), 2, sharded, rows(16), precision="bf16-mixed", max_epochs=1)
    assert equal(weights(one), weights(sharded))


class NotesFormats(InMixedPrecision):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.blocks[0](self.embedding(batch[0][:, 0].abs().long().clamp(max=3)))
        print("embedding", self.embedding.weight.dtype)
        return self.head(x).square().mean()


def test_all_may_be_gathered_in_16_bits(capfd: pytest.CaptureFixture[str]) -> None:
    for gather, dtype in ("all", torch.bfloat16), (True, torch.float32), (False, torch.float32):
        strategy = FSDP(low_precision_gather=gather)
        fit(strategy, 2, NotesFormats(""), rows(16), precision="bf16-mixed", max_epochs=1)
        found = capfd.readouterr().out.splitlines()
        assert found and all(line == f"embedding {dtype}" for line in found if "embedding" in line)
    with pytest.raises(ValueError, match="low_precision_gather must be True, False or 'all', but .*='most'"):
        FSDP(low_precision_gather="most")


def test_a_float32_part_within_a_block_that_is_gathered_in_16_bits_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"blocks\.0\.outer is called outside of the run's autocast.*=False"):
        fit("fsdp", 2, InMixedPrecision("region"), rows(16), precision="bf16-mixed", max_epochs=1)
