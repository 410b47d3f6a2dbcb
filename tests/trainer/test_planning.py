"""What a plan says is what the run does: collectives as integers, and what cannot be planned in one sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.digits import Digits, DigitsData
from examples.gpt import Text, TextModel
from lockstep import Module, Trainer
from lockstep.callbacks import CommunicationLedger
from lockstep.strategies import DDP, FSDP, Pipeline
from lockstep.strategies.planning.plan import Plan
from lockstep.trainer.planning import plan, without_memory
from tests.trainer.toy import Net, loader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "log_every_n_steps": 1000,
    "gradient_clip_val": 1.0,
}


def gpt() -> tuple[Module, Any]:
    return TextModel(width=32, depth=2, head_width=8, context=32, sample_bytes=0), Text(
        max_bytes=40_000, context=32, batch_size=4
    )


def digits() -> tuple[Module, Any]:
    return Digits(width=8), DigitsData(batch_size=8)


def planned(found: Plan, gathers_before_it: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Calls and bytes of a step by collective and dtype: of rank 0, and of all ranks."""
    own: dict[str, Any] = {}
    everywhere: dict[str, Any] = {}
    for rank in found.ranks:
        for call in rank.collectives:
            if gathers_before_it and call.op == "all-gather":  # before the first batch, with which a ledger begins
                continue
            key = f"{call.op} {call.dtype}"
            for table, times in ((own, rank.rank == 0), (everywhere, rank.num_ranks)):
                if times:
                    calls, size = table.get(key, (0, 0))
                    table[key] = calls + times * call.calls, size + times * call.bytes
    return own, everywhere


def counted(make: Any, strategy: Any, devices: int, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same, of a run."""
    ledger = CommunicationLedger(num_steps=1)
    module, data = make()
    Trainer(strategy=strategy, devices=devices, max_steps=3, callbacks=[ledger], **QUIET, **options).fit(
        module, datamodule=data
    )
    assert ledger.report is not None
    rows = {f"{row['collective']} {row['dtype']}": row for row in ledger.report["rows"]}
    return {key: (row["calls"], row["bytes"]) for key, row in rows.items()}, {
        key: (row["calls_all_ranks"], row["bytes_all_ranks"]) for key, row in rows.items()
    }


LAYOUTS = [
    ("gpt", "fsdp", 2, {}),
    ("digits", "pipeline", 2, {}),
    *(
        pytest.param(model, strategy, devices, options, marks=pytest.mark.slow)
        for model in ("gpt", "digits")
        for strategy, devices, options in (
            ("ddp", 2, {}),
            ("ddp", 4, {"accumulate_grad_batches": 2}),
            ("fsdp", 2, {"accumulate_grad_batches": 2}),
            ("fsdp", 4, {}),
            ("fsdp", 2, {"precision": "bf16-mixed"}),
            ("tensor", 2, {}),
            ("pipeline", 2, {"accumulate_grad_batches": 2}),
            ("ddp=2,fsdp=2", 4, {}),
            ("fsdp=2,tensor=2", 4, {}),
            ("ddp=2,tensor=2", 4, {}),
            ("ddp=2,pipeline=2", 4, {}),
            ("fsdp=2,pipeline=2", 4, {}),
        )
        if (model, strategy, len(options)) != ("digits", "pipeline", 0)
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "strategy", "devices", "options"),
    LAYOUTS,
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_collectives_are_those_of_a_run(model: str, strategy: str, devices: int, options: dict[str, Any]) -> None:
    make = {"gpt": gpt, "digits": digits}[model]
    module, data = make()
    found = plan(Trainer(strategy=strategy, devices=devices, max_epochs=1, **QUIET, **options), module, datamodule=data)
    assert planned(found, gathers_before_it="fsdp=2,pipeline" in strategy) == counted(
        make, strategy, devices, **options
    )


def of_net(strategy: Any = "ddp", devices: int = 2, module: Module | None = None, **options: Any) -> Plan:
    trainer = Trainer(strategy=strategy, devices=devices, max_steps=1, **QUIET, **options)
    return plan(trainer, module or Net(), loader(8))


@pytest.mark.unit
def test_bytes_of_a_rank_by_kind() -> None:
    """Net under AdamW-less SGD: whole under DDP, a half of it under FSDP."""
    numel = sum(p.numel() for p in Net().parameters())
    for strategy, share in ((DDP(), 1), (FSDP(), 2)):
        (rank,) = of_net(strategy).ranks
        assert rank.parameters == rank.gradients, strategy
        assert 4 * numel / share <= rank.parameters < 4 * numel / share + 512, strategy
        assert rank.peak == sum(size for _, size in rank.peak_by_kind)
        assert rank.peak >= rank.parameters + rank.inputs
        assert rank.role == "all ranks" and rank.num_ranks == 2


@pytest.mark.unit
def test_a_thousand_ranks_and_a_model_without_memory() -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 100_000), nn.Linear(100_000, 100_000), nn.Linear(100_000, 4))

    with without_memory():
        module = Wide()  # 40 GB
    found = of_net("fsdp", 1024, module)
    assert found.num_parameters > 10**10
    assert found.ranks[0].parameters < 4 * found.num_parameters // 1000
    assert found.axes == (("fsdp", 1024),)


@pytest.mark.unit
def test_the_module_that_is_planned_is_not_changed() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    of_net("fsdp", 2, module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not torch.distributed.is_initialized()


@pytest.mark.unit
def test_activation_checkpointing_trades_activations_for_work() -> None:
    module, data = gpt()
    found = [
        plan(Trainer(strategy=DDP(activation_checkpointing=on), devices=2, max_steps=1, **QUIET), module, None, data)
        for on in (False, True)
    ]
    kept, recomputed = (one.ranks[0] for one in found)
    assert recomputed.activations < kept.activations / 3
    assert recomputed.flops > 1.1 * kept.flops
    assert [block.name for block in kept.blocks][-2:] == ["gpt.blocks.0", "gpt.blocks.1"]


@pytest.mark.unit
def test_each_stage_of_a_pipeline_is_planned() -> None:
    module, data = gpt()
    found = plan(Trainer(strategy=Pipeline(), devices=2, max_steps=1, **QUIET), module, datamodule=data)
    assert sorted(rank.role for rank in found.ranks) == ["pipeline rank 0", "pipeline rank 1"]
    assert found.ranks[0].peak >= found.ranks[1].peak
    assert sum(rank.parameters for rank in found.ranks) == 4 * found.num_parameters


class Reads(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.after(loss, batch)

    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss


class Branches(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss * 2 if loss > 1 else loss


class Selects(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        return loss + batch[0][batch[0] > 0].sum() * 0


class Logs(Reads):
    def after(self, loss: Tensor, batch: Any) -> Tensor:
        self.log("loss", loss.item())
        return loss


@pytest.mark.unit
@pytest.mark.parametrize("module", [Branches, Selects])
def test_a_step_that_depends_on_values_is_refused_with_its_line(module: type[Module]) -> None:
    with pytest.raises(ValueError, match=r"test_planning.py:\d+ (branches on|calls nonzero|calls index)"):
        of_net("ddp", 2, module())


@pytest.mark.unit
def test_a_number_that_is_read_is_said_with_its_line() -> None:
    assert any("test_planning.py:" in note and "reads the value" in note for note in of_net("ddp", 2, Logs()).notes)


@pytest.mark.unit
def test_a_layout_that_cannot_be_is_refused_by_the_strategy() -> None:
    with pytest.raises(ValueError, match="the mesh fsdp=3 = 3 ranks is not the number of ranks, 4"):
        of_net("fsdp=3", 4)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("strategy", "why"),
    [("deepspeed", "reads values"), ("dp", "several devices in one process"), ("federated", "changes the method")],
)
def test_what_cannot_be_planned_is_refused_by_name(strategy: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be planned: .*{why}"):
        of_net(strategy, 2)


@pytest.mark.unit
def test_counts_add_up() -> None:
    (rank,) = of_net("ddp", 2).ranks
    calls = Counter(work.phase for work in rank.work)
    assert set(calls) == {"forward", "backward", "optimizer"}
    assert rank.flops == sum(rank.flops_by_dtype.values()) > 0
    assert rank.memory_traffic > 0
