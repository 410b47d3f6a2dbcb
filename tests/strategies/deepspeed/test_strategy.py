"""ZeRO on DeepSpeed's own engine: the numbers of one process, checkpoints, full weights, other launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Module, Trainer, strategies
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import DeepSpeed, Loss
from lockstep.strategies.checkpoint_state import gather_whole
from tests.conftest import REPO_ROOT
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.strategies.deepspeed.training import CUT_ALL, STAGES, Scheduled, scheduled, train
from tests.strategies.odd import tokens
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def single() -> tuple[list[float], Trainer, Scheduled]:
    module = scheduled()
    return *train("single", module, devices=1), module


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_losses_and_weights_are_those_of_one_process_at_every_step(stage: int, single: Any) -> None:
    expected, trainer, reference_module = single
    module = scheduled()
    losses, found = train(STAGES[stage](), module)
    assert len(losses) == 6 and losses == pytest.approx(expected, rel=1e-5)
    for name, value in trainer.callback_metrics.items():
        assert float(found.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5), name
    weights = dict(reference_module.named_parameters())
    for name, parameter in module.named_parameters():  # whole again, in the caller's process
        torch.testing.assert_close(parameter, weights[name], rtol=1e-4, atol=1e-6)
    predicted = torch.cat(quiet(strategy=STAGES[stage](), devices=2).predict(module, tokens(7, shuffle=False)))
    assert torch.equal(
        predicted, torch.cat(quiet(strategy="single").predict(reference_module, tokens(7, shuffle=False)))
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("deepspeed_stage_3", "fsdp"),
        pytest.param("fsdp", "deepspeed_stage_3", marks=pytest.mark.slow),
        pytest.param("deepspeed_stage_2", "single", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_under_another_strategy(first: str, then: str, single: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_top_k=-1)
    train(first, scheduled(), max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    (path,) = (tmp_path / "checkpoints").iterdir()
    module = scheduled()
    losses, trainer = train(then, module, devices=1 if then == "single" else 2, ckpt_path=path)
    assert trainer.global_step == 6 and losses == pytest.approx(single[0], rel=1e-5)


OPTIONS: dict[str, tuple[dict[str, Any], Plan]] = {
    "1 offloaded": ({"stage": 1, "offload_optimizer": True}, Plan(accumulate=3, clip=0.1)),
    "2 offloaded": ({"stage": 2, "offload_optimizer": True}, Plan(accumulate=2, step="token_step")),
    "3 offloaded": (
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "config": CUT_ALL},
        Plan(accumulate=2, clip=0.003, clip_algorithm="value"),
    ),
    "3 parameters offloaded": (
        {"stage": 3, "offload_parameters": True, "config": CUT_ALL},
        Plan(step="token_step", accumulate=2),
    ),
    "2 small buckets": (
        {"stage": 2, "config": {"zero_optimization": {"overlap_comm": True, "reduce_bucket_size": 50}}},
        Plan(accumulate=3),
    ),
}


def test_options_change_no_number(tmp_path: Path) -> None:
    """All on the same ranks: an import of DeepSpeed takes longer than a training."""
    plans = {name: replace(plan, precision="32-true") for name, (_, plan) in OPTIONS.items()}
    contract.run_each(
        {name: (DeepSpeed(**options), plans[name]) for name, (options, _) in OPTIONS.items()}, 2, tmp_path
    )
    for name, plan in plans.items():
        assert difference(saved_weights(tmp_path / name), reference(plan)[0]) < 1e-5, name


class Skips(Net):
    """Returns None, or a loss that counts nothing, for micro-batches that differ between ranks."""

    def __init__(self, none: bool) -> None:
        super().__init__()
        self.none = none

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        skip = batch_idx > 1 and bool(x[0, 0] > 0.5)
        if skip and self.none:
            return None
        loss = F.cross_entropy(self(x), y, reduction="sum")
        self.log("train/sum", float(len(y)) * (not skip), reduce_fx="sum", on_step=False, on_epoch=True)
        return Loss(loss * 0, 0) if skip else Loss(loss, len(y))


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.slow) if stage < 3 else stage for stage in STAGES]
)
def test_a_rank_may_return_none(stage: int) -> None:
    found = {}
    for none, strategy in ((True, STAGES[stage]()), (False, "ddp")):
        torch.manual_seed(0)
        module = Skips(none)
        trainer = quiet(strategy=strategy, devices=2, seed=1, accumulate_grad_batches=3)
        trainer.fit(module, loader(50, batch_size=4))
        found[none] = [p.detach() for p in module.parameters()], trainer.callback_metrics["train/sum"]
    assert 0 < found[False][1] < 50 and found[True][1] == found[False][1]
    for ours, theirs in zip(found[True][0], found[False][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


class NoneAfterRunning(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


def test_zero_3_says_why_a_step_that_has_run_the_model_may_not_return_none() -> None:
    with pytest.raises(RuntimeError, match=r"returned None after it had run the model.*Loss\(total \* 0, 0\)"):
        quiet(strategy="deepspeed_stage_3", devices=2).fit(NoneAfterRunning(), loader())


def test_bfloat16_weights_are_saved_from_their_float32_masters(tmp_path: Path) -> None:
    plan = Plan(precision="bf16-true", optimizer="SGD", accumulate=2)
    contract.run(DeepSpeed(stage=3, config=CUT_ALL), 2, plan, tmp_path / "end")
    saved = saved_weights(tmp_path / "end")
    assert all(value.dtype == torch.float32 for value in saved.values())
    assert any((value != value.bfloat16().float()).any() for value in saved.values())
    assert 0 < difference(saved, reference(Plan(precision="32-true", optimizer="SGD"))[0]) < 0.05


class Doubled(Callback):
    """Puts the weights together while they are cut, doubles them, and puts them back; keeps what the model then
    gives."""

    def __init__(self) -> None:
        self.output = 0.0

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        whole = gather_whole(trainer.strategy, trainer.strategy.state_dict(trainer._run.wrapped, {}))
        for tensor in whole.tensors.values():
            tensor *= 2
        trainer.strategy.load_state_dict(trainer._run.wrapped, {}, whole)
        with torch.no_grad():
            self.output = module(torch.ones(1, 8)).sum().item()

    def state_dict(self) -> dict[str, Any]:
        return {"output": self.output}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.output = state["output"]


@pytest.mark.parametrize("strategy", [pytest.param("deepspeed_stage_2", marks=pytest.mark.slow), "deepspeed_stage_3"])
def test_full_weights_during_a_run(strategy: str) -> None:
    outputs = []
    for name, callback in ((strategy, Doubled()), ("ddp", None)):
        module = net()
        quiet(strategy=name, devices=2, seed=0, callbacks=[callback] if callback else []).fit(module, loader())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter *= 1 if callback else 2
            outputs += [callback.output] if callback else []
            outputs.append(module(torch.ones(1, 8)).sum().item())
    assert outputs == pytest.approx([outputs[-1]] * 3, rel=1e-5)


class Normed(Net):
    """Checks on every rank that all have the same statistics, which under DDP they have only in the next forward."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.norm, self.checks = nn.BatchNorm1d(8), checks

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))

    def on_train_end(self) -> None:
        first, second = self.trainer.strategy.all_gather(self.norm.running_mean)
        assert torch.equal(first, second) or not self.checks


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=pytest.mark.slow) if stage != 2 else stage for stage in STAGES]
)
def test_buffers_are_those_of_rank_0(stage: int, tmp_path: Path) -> None:
    """While the run continues, in its checkpoint, and as under DDP."""
    found = []
    for name, strategy in (("zero", STAGES[stage]()), ("ddp", "ddp")):
        torch.manual_seed(0)
        module, saver = Normed(name == "zero"), ModelCheckpoint(dirpath=tmp_path / name)
        quiet(strategy=strategy, devices=2, seed=0, enable_checkpointing=True, callbacks=[saver]).fit(
            module, loader(48)
        )
        (path,) = (tmp_path / name).iterdir()
        assert torch.equal(saved_weights(path)["norm.running_mean"], module.norm.running_mean)
        found.append(module.norm.running_mean)
    torch.testing.assert_close(*found)


# ---- memory ------------------------------------------------------------------------------------------


class Allocated(TorchDispatchMode):
    """Bytes of all tensors of this process: now, and the most since it was entered."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.add(item)
        return out

    def add(self, tensor: Tensor) -> None:
        if tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._known:
            self._known[key] = weakref.finalize(storage, self._forget, key, size)
            self.bytes += size
            self.most = max(self.most, self.bytes)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.bytes -= size

    def add_all(self) -> None:
        for item in gc.get_objects():
            if isinstance(item, Tensor):
                self.add(item)


class Wide(Module):
    """Two million parameters, in layers that ZeRO-3 cuts by default, and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)  # steps in place, without temporary tensors


class Memory(Callback):
    """Bytes of tensors for each parameter on rank 0 in the third step: when the optimizer is about to step, and at
    most."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._mode: Allocated | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            gc.collect()
            self._mode = Allocated()
            self._mode.add_all()
            self._mode.__enter__()

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Any) -> None:
        if self._mode is not None:
            gc.collect()
            self._mode.add_all()  # gradients that C++ code allocated
            self.found.append(self._mode.bytes / (8 * 512 * 512))

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.found.append(self._mode.most / (8 * 512 * 512))
            self._mode = None

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


TIGHT = {"reduce_bucket_size": 2**16, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
"""Buffers for a model of 8 MB: the defaults suit models from 500 MB on."""


def measure(strategy: str | Strategy, devices: int) -> list[float]:
    memory = Memory()
    data = DataLoader(TensorDataset(torch.randn(3 * devices, 512)), batch_size=1)
    quiet(strategy=strategy, devices=devices, seed=0, callbacks=[memory]).fit(Wide(), data)
    return memory.found


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4])
def test_memory_of_a_rank(devices: int) -> None:
    """Bytes a parameter in float32 with AdamW; on the way come layers, and a copy of a rank's gradients beside the
    step."""
    found = {"ddp": measure("ddp", devices)} | {
        stage: measure(DeepSpeed(stage=stage, config={"zero_optimization": TIGHT}), devices) for stage in (1, 2, 3)
    }
    print(json.dumps({str(name): [round(value, 2) for value in values] for name, values in found.items()}))
    layer = 4 / 8
    for name, held, most in (
        ("ddp", 4 + 4 + 8, 16 + layer),  # parameters, gradients, two moments
        (
            1,
            4 + 16 / devices,
            4 + 4 + 16 / devices,
        ),  # the parameters besides cut masters, gradients and moments; gradients are whole until they met
        (2, 4 + 16 / devices, 4 + 20 / devices + layer),
        (3, 20 / devices, 24 / devices + 3 * layer),  # parameters and their masters are two tensors in float32 too
    ):
        assert found[name][0] == pytest.approx(held, abs=0.2), name
        assert held <= found[name][1] <= most + 0.2, name


class Collectives(TorchDispatchMode):
    """Bytes of the whole tensors that collectives of two ranks work on, by collective."""

    KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self.KINDS.get(func.name().removeprefix("c10d::"))
        if kind is not None:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.bytes[kind] = self.bytes.get(kind, 0) + whole * (2 if kind == "reduce-scatter" else 1)
        return func(*args, **(kwargs or {}))


class Moved(Callback):
    """What collectives work on in the third step, in sizes of the model; rank 0's, brought back to the caller."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._mode: Collectives | None = None

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and self._mode is None:
            self._mode = Collectives()
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self._mode is not None:
            self._mode.__exit__(None, None, None)
            self.found, self._mode = {kind: size / (8 * 512 * 512 * 4) for kind, size in self._mode.bytes.items()}, None

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["found"]


@pytest.mark.slow
def test_bytes_moved_in_a_step_of_two_micro_batches() -> None:
    found = {}
    for stage in (1, 2, 3):
        moved = Moved()
        strategy = DeepSpeed(stage=stage, config={"zero_optimization": TIGHT})
        quiet(strategy=strategy, devices=2, accumulate_grad_batches=2, callbacks=[moved]).fit(
            Wide(), DataLoader(TensorDataset(torch.randn(12, 512)), batch_size=1)
        )
        found[stage] = {kind: size for kind, size in moved.found.items() if size > 0.01}
    assert found == {
        1: {"all-reduce": 1, "all-gather": 1},
        2: {"all-reduce": 2, "all-gather": 1},
        3: {"all-gather": 4, "reduce-scatter": 2},
    }


# ---- the configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        (
            {"stage": 3, "config": {"zero_optimization": {"stage": 2}}},
            {},
            r"zero_optimization.stage=2, but the run has stage=3",
        ),
        ({"config": {"zero_optimization": {"stage": 0}}}, {}, r"zero_optimization.stage=0, but it must be 1, 2 or 3"),
        ({"config": {"bf16": {"enabled": True}}}, {}, r"bf16.enabled=True, but the run has precision='32-true'"),
        (
            {"config": {"fp16": {"enabled": True}}},
            {"precision": "bf16-mixed"},
            r"fp16.enabled=True, but the run has precision='bf16-mixed'",
        ),
        (
            {"config": {"bf16": {"enabled": False}}},
            {"precision": "bf16-true"},
            r"bf16.enabled=False, but the run has precision='bf16-true'",
        ),
        ({"config": {"optimizer": {"type": "AdamW"}}}, {}, r"section 'optimizer', but configure_optimizers makes it"),
        ({"config": {"scheduler": {"type": "WarmupLR"}}}, {}, r"section 'scheduler'"),
        (
            {"offload_optimizer": True, "config": {"zero_optimization": {"offload_optimizer": {"device": "none"}}}},
            {},
            r"device='none'.*offload_optimizer=True",
        ),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, {}, r"'nvme'.*give 'cpu'"),
        ({"offload_parameters": True}, {}, r"offload_parameters needs stage 3.*stage=2"),
        ({"config": {"gradient_allreduce_op": "sum"}}, {}, r"gradient_allreduce_op='sum'"),
        ({"config": "missing.json"}, {}, r"config='missing.json' cannot be read"),
        ({}, {"precision": "64-true"}, r"float32.*precision='64-true'"),
        (
            {},
            {"precision": "16-mixed"},
            r"precision must be one of 32-true, tf32-true, bf16-mixed, bf16-true, but precision='16-mixed'",
        ),
    ],
)
def test_contradictions_are_found_before_a_process_starts(
    options: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(strategy=DeepSpeed(**options), devices=2, accelerator="cpu", max_epochs=1, **run)


def test_stage_must_exist() -> None:
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3, but stage=4"):
        DeepSpeed(stage=4)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ImportError, match=r"needs the package deepspeed; install it with `pip install 'lockstep-trainer\[deepspeed\]'`"
    ):
        quiet(strategy="deepspeed", devices=2)


@pytest.mark.parametrize(
    ("config", "run", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            {"accumulate_grad_batches": 2},
            r"gradient_accumulation_steps=4, but the run has accumulate_grad_batches=2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            {},
            r"train_micro_batch_size_per_gpu=4, but the run has samples of a rank in a micro-batch=8",
        ),
        (
            {"train_batch_size": 8},
            {"accumulate_grad_batches": 2},
            r"train_batch_size=8, but the run has samples of all ranks in a step=16",
        ),
        (
            {"gradient_clipping": 1.0},
            {"gradient_clip_val": 0.5},
            r"gradient_clipping=1.0 \(by norm\), but the run has gradient_clip_val=0.5",
        ),
    ],
)
def test_what_the_loader_and_the_step_contradict(config: dict[str, Any], run: dict[str, Any], message: str) -> None:
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=message):
        quiet(strategy=DeepSpeed(config=config), **run).fit(module, loader())
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_file_for_another_trainer_fits(tmp_path: Path) -> None:
    """ "auto" leaves a value open; what agrees with the run is taken; clipping of the file holds where the run has
    none."""
    file = tmp_path / "zero.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.1,
                "bf16": {"enabled": "auto"},
                "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": True},
            }
        )
    )
    weights = []
    for strategy, clip in ((DeepSpeed(config=file), None), ("single", 0.1)):
        module = net()
        quiet(strategy=strategy, seed=0, accumulate_grad_batches=2, gradient_clip_val=clip).fit(module, loader())
        weights.append(list(module.parameters()))
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


# ---- what is refused ---------------------------------------------------------------------------------


class Refused(Net):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.spare = nn.Parameter(torch.ones(() if what == "scalar" else 2), requires_grad=what in ("unused", "scalar"))
        if what in ("double", "complex"):
            self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64 if what == "double" else torch.complex64))
        self.automatic_optimization = what != "manual"

    def configure_optimizers(self) -> Any:
        if self.what == "several":
            return [
                torch.optim.SGD(self.net[0].parameters(), lr=0.1),
                torch.optim.SGD(self.net[3].parameters(), lr=0.1),
            ]
        if self.what == "frozen":
            return torch.optim.SGD([{"params": list(self.net.parameters())}, {"params": [self.spare]}], lr=0.1)
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.Adafactor(trained) if self.what == "factored" else torch.optim.SGD(trained, lr=0.1)
        if self.what == "hooked":
            optimizer.register_step_post_hook(lambda *_: None)
        return optimizer

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.what == "stepped":
            optimizer.step()


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("several", ValueError, r"steps one optimizer; return one from configure_optimizers"),
        ("factored", ValueError, r"hands Adafactor flat pieces .* and it does not, because .*; use AdamW"),
        ("frozen", ValueError, r"group 1 of the optimizer has no trainable parameter"),
        ("scalar", ValueError, r"without dimensions, which spare is; give it the shape \(1,\)"),
        ("manual", ValueError, r"cannot optimize manually"),
        ("double", ValueError, r"keeps all parameters in float32 under precision='32-true', but spare is float64"),
        ("complex", ValueError, r"keeps all parameters in float32 under precision='32-true', but spare is complex64"),
        ("hooked", ValueError, r"SGD has a step hook, which would see flat pieces"),
        ("unused", RuntimeError, r"got no gradient in a step.*: spare; use them"),
        ("stepped", RuntimeError, r"SGD.step was called, but it holds pieces"),
    ],
)
def test_refused_by_name(what: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet(strategy="deepspeed").fit(Refused(what), loader())


def test_state_that_zero_cannot_hold_is_refused(tmp_path: Path) -> None:
    """One step count for all parameters: a checkpoint in which they differ continues elsewhere."""

    class Alternating(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net[0].requires_grad_(batch_idx % 2 == 0)
            return super().training_step(batch, batch_idx)

    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints")
    quiet(strategy="single", enable_checkpointing=True, callbacks=[saver]).fit(Alternating(), loader())
    (path,) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(
        CheckpointError, match=r"step of net.3.weight is .*, but .* of others, and ZeRO keeps one for all"
    ):
        quiet(strategy="deepspeed", max_epochs=2).fit(net(), loader(), ckpt_path=path)


# ---- the process ---------------------------------------------------------------------------------------


def test_the_caller_s_module_is_plain_again_and_another_engine_may_follow(capfd: pytest.CaptureFixture[str]) -> None:
    linear, module, twin = F.linear, net(), net()
    for stage in (3, 1):
        quiet(strategy=DeepSpeed(stage=stage, config=CUT_ALL), seed=0).fit(module, loader())
        assert not any(vars(p) for p in module.parameters()) and F.linear is linear
        quiet(strategy="single", seed=0).fit(module, loader())
    assert capfd.readouterr() == ("", ""), "the engine is quiet"
    for _ in range(4):
        quiet(strategy="single", seed=0).fit(twin, loader())
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_failed_run_takes_its_engine_off() -> None:
    class Fails(Net):
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyError("of a user")

    module = Fails()
    with pytest.raises(KeyError, match="of a user"):
        quiet(strategy="deepspeed_stage_2").fit(module, loader())
    assert not any(vars(p) for p in module.parameters())
    module.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
    quiet(strategy="single").fit(module, loader())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_under_torchrun(stage: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom tests.trainer.toy import loader, net, quiet\nfrom lockstep.strategies import DeepSpeed\n"
        f"module = net()\ntrainer = quiet(strategy=DeepSpeed(stage={stage}), seed=0, "
        "split_batches=True)\ntrainer.fit(module, loader())\n"
        "if trainer.is_global_zero: torch.save(module.state_dict(), 'weights.pt')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, timeout=100, env={**os.environ, "PYTHONPATH": str(REPO_ROOT)})
    module = net()
    quiet(strategy="single", seed=0, split_batches=True).fit(module, loader())
    for name, value in torch.load(tmp_path / "weights.pt").items():
        torch.testing.assert_close(value, module.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu(stage: int) -> None:
    weights = []
    for strategy, accelerator in ((STAGES[stage](), "gpu"), ("single", "cpu")):
        module = net()
        quiet(strategy=strategy, accelerator=accelerator, devices=1, seed=0, gradient_clip_val=0.5).fit(
            module, loader()
        )
        weights.append([p.detach().cpu() for p in module.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_names() -> None:
    for name, stage in (("deepspeed", 2), ("deepspeed_stage_1", 1), ("deepspeed_stage_2", 2), ("deepspeed_stage_3", 3)):
        strategy, _ = strategies.build(name, devices=1, accelerator="cpu")
        assert isinstance(strategy, DeepSpeed) and strategy._config["zero_optimization"]["stage"] == stage
