"""From a name to a strategy, also of another distribution."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep import Trainer
from lockstep.strategies import DDP, FSDP, SingleDevice, build, registry
from lockstep.strategies.registry import names
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.trainer.toy import loader, net, quiet

THIRD_PARTY = '''
"""A strategy of somebody else: DDP that adds up gradients in float64."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.strategies import SPMDStrategy
from torch.nn.parallel import DistributedDataParallel


def wide(state, bucket):
    buffer = bucket.buffer()
    future = torch.distributed.all_reduce(buffer.double(), async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


class Step(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, step_fn, batch, batch_idx):
        return step_fn(batch, batch_idx)


class Wide(SPMDStrategy):
    def wrap(self, model):
        wrapped = DistributedDataParallel(Step(model))
        wrapped.register_comm_hook(None, wide)
        return wrapped

    def run_step(self, wrapped, step_fn):
        return lambda batch, batch_idx: wrapped(step_fn, batch, batch_idx)

    def set_gradient_sync(self, wrapped, on):
        wrapped.require_backward_grad_sync = on

    def unwrap(self, wrapped):
        return wrapped.module.model
'''


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution that registers a strategy, as pip would install it."""
    (tmp_path / "wide_strategy.py").write_text(THIRD_PARTY)
    info = tmp_path / "wide-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wide\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lockstep.strategies]\nwide = wide_strategy:Wide\nbroken = wide_strategy:Step\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "wide"  # type: ignore[misc]
    sys.modules.pop("wide_strategy", None)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(accumulate=3, clip=0.1), Plan(step="token_step")],
    ids=["plain", "accumulation", "token counts"],
)
def test_a_strategy_of_another_distribution_passes_the_contract(third_party: str, plan: Plan, tmp_path: Path) -> None:
    strategy, _ = build(third_party, devices=2)
    contract.run(strategy, 2, plan, tmp_path / "end")
    assert difference(saved_weights(tmp_path / "end"), reference(plan)[0]) < 1e-11
    assert third_party in names()


def test_it_is_named_like_any_other(third_party: str) -> None:
    assert type(Trainer(strategy=third_party, devices=2, logger=False).strategy).__name__ == "Wide"
    with pytest.raises(TypeError, match="broken must name a Strategy class"):
        build("broken")


def test_auto_tells_its_choice() -> None:
    strategy, reason = build("auto", accelerator="cpu")
    assert isinstance(strategy, SingleDevice) and reason == "one cpu device"
    strategy, reason = build("auto", devices=2, accelerator="cpu")
    assert isinstance(strategy, DDP) and reason == "2 cpu devices"


@pytest.mark.ranks
def test_auto_shards_a_model_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = net()
    needed = registry.training_bytes(model)
    assert needed == 4 * 4 * sum(p.numel() for p in model.parameters())
    for memory, expected in ((needed, DDP), (needed - 1, FSDP)):
        monkeypatch.setattr(registry, "device_memory", lambda kind, ranks, memory=memory: memory)
        assert isinstance(build("auto", devices=2, accelerator="cpu", model=model)[0], expected)
    trainer = quiet(devices=2)
    trainer.fit(model, loader(16))
    assert isinstance(trainer.strategy, FSDP)
    assert "strategy FSDP: 2 cpu devices, and training needs 0.0 GiB" in capfd.readouterr().err
    assert isinstance(build("auto", devices=1, accelerator="cpu", model=model)[0], SingleDevice)


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match="strategy='ddq'; did you mean 'ddp'"):
        build("ddq")


def test_an_object_must_be_a_strategy() -> None:
    with pytest.raises(TypeError, match="must be a name or a Strategy object"):
        build(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        *(("DDP", "ddp"), ("ddp_spawn", "ddp"), ("DDPStrategy", "ddp"), ("FSDPStrategy", "fsdp")),
        *(("FullyShardedDataParallel", "fsdp"), ("DeepSpeedStrategy", "deepspeed"), ("zero3", "deepspeed_stage_3")),
        *(("tp", "tensor"), ("pp", "pipeline"), ("data_parallel", "dp")),
    ],
)
def test_names_of_other_libraries_lead_to_ours(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"strategy='{name}'; did you mean '{near}'"):
        registry.build(name)
