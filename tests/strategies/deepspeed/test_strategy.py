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
from tests.strategies import contract, gpus
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.strategies.deepspeed.training import CUT_ALL, STAGES, Scheduled, scheduled, train
from tests.strategies.odd import tokens
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def single() -> tuple[list[float], Trainer, Scheduled]:
    module = scheduled()
    return *train("single", module, devices=1), module


@pytest.mark.slow  # tests/strategies/test_contract.py compares gradients and weights every day
@pytest.mark.parametrize("stage", [1, 2, 3])
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
def test_zero_3_says_why_a_step_that_has_run_the_model_may_not_return_none() -> None:
    with pytest.raises(RuntimeError, match=r"returned None after it had run the model.*Loss\(total \* 0, 0\)"):
        quiet(strategy="deepspeed_stage_3", devices=2).fit(NoneAfterRunning(), loader())


class NoneByStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_step == 2 else super().training_step(batch, batch_idx)


@pytest.mark.long
def test_a_step_that_returns_none_whatever_its_batch_is_refused() -> None:
    with pytest.raises(
        RuntimeError, match=r"returned None for a reason that is not in its batch.*Loss\(total \* 0, 0\)"
    ):
        quiet(strategy="deepspeed_stage_2", devices=2).fit(NoneByStep(), loader())


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


class ReadsItsPlace(Net):
    """A step that reads its place on the node where a launcher says it, which DeepSpeed reads as a device's."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.world_size > 1:
            assert os.environ["LOCAL_RANK"] == str(self.trainer.local_rank)
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu
@pytest.mark.timeout(150, func_only=True)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu(stage: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for strategy, accelerator, count in ((STAGES[stage](), "gpu", devices), ("single", "cpu", 1)):
        torch.manual_seed(0)
        module = ReadsItsPlace()
        with gpus.shared_by(count if accelerator == "gpu" else 0, monkeypatch):
            quiet(
                strategy=strategy,
                accelerator=accelerator,
                devices=count,
                seed=0,
                split_batches=True,
                gradient_clip_val=0.5,
            ).fit(module, loader())
        weights.append([p.detach().cpu() for p in module.parameters()])
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_names() -> None:
    for name, stage in (("deepspeed", 2), ("deepspeed_stage_1", 1), ("deepspeed_stage_2", 2), ("deepspeed_stage_3", 3)):
        strategy, _ = strategies.build(name, devices=1, accelerator="cpu")
        assert isinstance(strategy, DeepSpeed) and strategy._config["zero_optimization"]["stage"] == stage


class Marked(Net):
    """Gives itself attributes in hooks that run once the engine is built."""

    def on_fit_start(self) -> None:
        self.began = 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = torch.tensor([batch_idx])

    def on_fit_end(self) -> None:
        self.ended = [True]


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_attributes_that_hooks_create_are_the_callers_and_the_engines_are_not(stage: int) -> None:
    module = Marked()
    before = {*vars(module), "_trainer"}
    quiet(strategy=DeepSpeed(stage=stage, config=CUT_ALL), accelerator="cpu", devices=2).fit(module, loader(32))
    assert {name for name in vars(module) if name not in before} == {"began", "last", "ended"}
    assert (module.began, module.last.tolist(), module.ended) == (1, [1], [True])
