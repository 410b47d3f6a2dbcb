"""CommunicationLedger: what it counts is what docs/strategies says that each strategy exchanges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.callbacks import CommunicationLedger, Guard, ModelCheckpoint
from lockstep.strategies import DDP, Federated, Strategy, TensorParallel
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.ranks

WIDTH, BATCH, RANKS = 16, 8, 2
BLOCK = 4 * (WIDTH * 4 * WIDTH + 4 * WIDTH + 4 * WIDTH * WIDTH + WIDTH)
"""Bytes of a block of Deep, in float32."""
BLOCKS = 3 * BLOCK
WHOLE = BLOCKS + 4 * (8 * WIDTH + WIDTH + WIDTH * 4 + 4)
ACTIVATIONS = BATCH * WIDTH * 4


class Block(nn.Module):
    """A perceptron beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Deep(Net):
    """All sizes are even, so that nothing is padded when sharded over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 4))


class Profiled(CommunicationLedger):
    """Has torch's profiler count what gloo runs, in any thread, in the first of its steps."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if self._steps == self.first_step and batch_idx % 2 == 0:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
            self.profile.start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._steps == self.first_step and not trainer._run.window_is_open:
            self.profile.stop()
            self.by_gloo = sum(
                event.name().startswith("gloo:") for event in self.profile.profiler.kineto_results.events()
            )
        super().on_train_batch_end(trainer, module, None, batch, batch_idx)  # a pipeline sends `outputs` to all readers

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "by_gloo": getattr(self, "by_gloo", None)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.by_gloo = state_dict.pop("by_gloo")
        super().load_state_dict(state_dict)


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says on the terminal when it begins."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


def counted(strategy: str | Strategy, devices: int = RANKS, **options: Any) -> dict[str, tuple[float, float]]:
    """Calls and bytes a step on rank 0 of two micro-batches; that none is missed and the ranks' sum are checked."""
    ledger = Profiled(first_step=17, num_steps=2)  # a pipeline compares what its ranks set in earlier ones
    run = quiet(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        callbacks=[ledger],
        accumulate_grad_batches=2,
        max_steps=19,
        **options,
    )
    run.fit(Deep(), loader(2 * BATCH * RANKS * 20, batch_size=BATCH))
    report = ledger.report
    assert report is not None
    assert report == json.loads(Path("runs/communication.json").read_text())
    assert report["world_size"] == devices
    assert sum(row["calls"] for row in report["rows"]) == ledger.by_gloo
    for row in report["rows"]:
        assert (row["calls_all_ranks"], row["bytes_all_ranks"]) == (devices * row["calls"], devices * row["bytes"])
    return {f"{row['collective']} {row['dtype']}": (row["calls"], row["bytes"]) for row in report["rows"]}


@pytest.mark.long
def test_ddp_exchanges_each_gradient_once_a_step() -> None:
    assert counted(DDP(bucket_cap_mb=100)) == {"all-reduce float32": (1, WHOLE)}


@pytest.mark.long
def test_fsdp_gathers_blocks_twice_and_the_rest_once_a_micro_batch() -> None:
    assert counted("fsdp") == {
        "all-gather float32": (2 * (3 + 1 + 3), 2 * (WHOLE + BLOCKS)),
        "reduce-scatter float32": (4, WHOLE),
    }


@pytest.mark.long
def test_tensor_exchanges_activations_for_each_pair_of_layers() -> None:
    """A perceptron that is sharded by columns, then rows: one all-reduce forward and one backward, in every
    micro-batch."""
    plan = {"net.*.up": "column", "net.*.down": "row"}
    assert counted(TensorParallel(plan=plan)) == {"all-reduce float32": (2 * 3 * 2, 2 * 3 * 2 * ACTIVATIONS)}


@pytest.mark.long
def test_a_pipeline_sends_activations_and_their_gradients() -> None:
    assert counted("pipeline") == {"send float32": (4, 2 * ACTIVATIONS), "recv float32": (4, 2 * ACTIVATIONS)}


def test_a_rank_without_clients_in_a_round_is_counted_too() -> None:
    ledger = CommunicationLedger()
    strategy = Federated(lambda index: index % 4, fraction=0.25)
    quiet(strategy=strategy, devices=2, accelerator="cpu", max_epochs=6, callbacks=[ledger]).fit(net(), loader(64))
    assert ledger.report is not None and ledger.report["rows"]
    for row in ledger.report["rows"]:
        assert (row["calls_all_ranks"], row["bytes_all_ranks"]) == (2 * row["calls"], 2 * row["bytes"])


def test_one_process_exchanges_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert counted("single", devices=1) == {}
    assert "communication in a step, over 2 steps on 1 rank: none" in capsys.readouterr().out


@pytest.mark.long
def test_the_table_is_shown_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    quiet(devices=2, callbacks=[CommunicationLedger()]).fit(net(), loader(128))
    shown = capfd.readouterr().out
    assert "communication in a step, over 3 steps on 2 ranks" in shown
    assert any(
        line.split() == ["all-reduce", "float32", "1.00", "0.0007", "2.00", "0.0015"] for line in shown.splitlines()
    )


def test_a_run_that_is_too_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(callbacks=[CommunicationLedger(first_step=20)]).fit(net(), loader(64))
    assert (
        "communication: not measured, because training ended before step 23; lower first_step"
        in capsys.readouterr().out
    )


class Breaks(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == 6 else 1)


def test_a_report_holds_when_the_run_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    ledger, saver = CommunicationLedger(num_steps=2), ModelCheckpoint(tmp_path, every_n_train_steps=3)
    quiet(callbacks=[ledger, saver, Guard(non_finite="roll_back")], enable_checkpointing=True).fit(Breaks(), loader(64))
    assert ledger.report is not None and ledger.report["num_steps"] == 2


@pytest.mark.parametrize("options", [{"first_step": 1}, {"num_steps": True}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        CommunicationLedger(**options)
    with pytest.raises(RuntimeError, match=r"nothing has been measured before step 5; call table\(\) later"):
        CommunicationLedger().table()
