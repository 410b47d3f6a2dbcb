"""ThroughputMonitor: rates over all ranks, FLOPs of any strategy, shares that add up; it changes no number of the
run."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Module
from lockstep.callbacks import Callback, CSVLogger, ModelCheckpoint, ThroughputMonitor
from lockstep.callbacks.monitors.throughput_monitor import known_peak, peak_of
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights

FLOPS = 2 * 8 * 16 * 2 + 2 * 16 * 3 * 3
"""Of a sample of Net: two matrix products of the first layer, whose input needs no gradient, and three of the
second."""


def ragged(items: list[Any]) -> tuple[Any, Any]:
    """A batch padded to as many columns as its first label says, from 8 on; the model takes the first 8."""
    x, y = (torch.stack(parts) for parts in zip(*items, strict=True))
    return torch.nn.functional.pad(x, (0, int(y[0]))), y


class Padded(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x[:, :8], y), batch_idx)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "data_size"),
    [
        ("single", 1),
        ("dp", 1),
        ("ddp", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fsdp", 2), ("tensor", 1))),
        ("pipeline", 1),
    ],
)
def test_counts_what_all_ranks_do_once(strategy: str, data_size: int) -> None:
    """The run's numbers, free of the clock, as ratios: samples a step, FLOPs a sample."""
    monitor = ThroughputMonitor(0, peak_flops_per_s=1e6)
    run = quiet(
        strategy=strategy,
        devices=1 if strategy == "single" else 2,
        accelerator="cpu",
        accumulate_grad_batches=2,
        log_every_n_steps=3,
    )
    run.callbacks.append(monitor)
    run.fit(net(), loader(8 * 2 * data_size * 6))
    found = {name.removeprefix("throughput/"): value for name, value in monitor.values.items()}
    assert found["samples_per_s"] / found["steps_per_s"] == pytest.approx(8 * 2 * data_size)
    assert found["tokens_per_s"] / found["samples_per_s"] == pytest.approx(8)
    assert found["flops_per_s"] / found["samples_per_s"] == pytest.approx(FLOPS) == monitor.measured_flops_per_sample
    assert found["mfu"] == pytest.approx(
        found["flops_per_s"] / (1e6 * run.world_size if strategy in ("single", "dp") else 2e6)
    )
    assert sum(value for name, value in found.items() if name.startswith("share_")) == pytest.approx(1)


class Tokens(Callback):
    """Rank 0's own count of the global tokens, over the steps that the monitor's last values are of."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        monitor = next(item for item in trainer.callbacks if isinstance(item, ThroughputMonitor))
        if trainer.is_global_zero and monitor.values:
            print(
                f"at {trainer.global_step}: "
                f"{monitor.values['throughput/tokens_per_s'] / monitor.values['throughput/steps_per_s']:.6f} a step",
                flush=True,
            )


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_tokens_are_exact_over_ranks_epochs_and_uneven_ends(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    """25 samples in global batches of 8: the last of an epoch has one, so with 2 ranks one of them has padding."""
    run = quiet(devices=devices, max_epochs=3, log_every_n_steps=3, callbacks=[ThroughputMonitor(0), Tokens()])
    run.fit(Padded(), DataLoader(data(25), batch_size=8 // devices, collate_fn=ragged))
    shown = capfd.readouterr().out
    dataset = data(25)
    cut = 8 // devices
    batches = [ragged([dataset[j] for j in range(i, min(i + cut, 25))])[0].numel() for i in range(0, 25, cut)]
    steps = [sum(batches[i : i + devices]) for i in range(0, len(batches), devices)] * 3
    for last in (6, 9, 12):  # the first two steps are skipped, so the third has no interval of its own
        assert f"at {last}: {sum(steps[last - 3 : last]) / 3:.6f} a step" in shown
    assert "at 3: " + f"{steps[2]:.6f} a step" in shown


class Kept(Callback):
    """What the monitor showed last, by step."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        monitor = next(item for item in trainer.callbacks if isinstance(item, ThroughputMonitor))
        self.by_step[trainer.global_step] = dict(monitor.values)


def test_a_resumed_run_counts_only_its_own_tokens() -> None:
    """It is resumed within a logging interval, whose sum holds tokens of the run before."""
    options: dict[str, Any] = {"log_every_n_steps": 4, "enable_checkpointing": True, "default_root_dir": "runs"}
    quiet(max_steps=5, callbacks=[ThroughputMonitor(0)], **options).fit(net(), loader(128))
    kept = Kept()
    quiet(callbacks=[ThroughputMonitor(0), kept], **options).fit(net(), loader(128), ckpt_path="auto")
    assert min(kept.by_step) == 6
    assert "throughput/tokens_per_s" not in kept.by_step[8]
    assert kept.by_step[12]["throughput/tokens_per_s"] / kept.by_step[12]["throughput/samples_per_s"] == pytest.approx(
        8
    )


class Slow(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2)


def slowly(items: list[Any]) -> Any:
    time.sleep(0.01)
    return torch.utils.data.default_collate(items)


def test_rates_and_shares_are_those_of_the_clock() -> None:
    """Four steps of 20 ms, with 10 ms of loading each, a save, and validations that do not count."""
    monitor = ThroughputMonitor()
    saver = ModelCheckpoint(every_n_train_steps=4)
    train = DataLoader(data(48), batch_size=8, collate_fn=slowly)
    run = quiet(
        callbacks=[monitor, saver],
        enable_checkpointing=True,
        logger=CSVLogger(),
        log_every_n_steps=6,
        val_check_interval=2,
    )
    run.fit(Slow(), train, loader(8))
    found = {name.removeprefix("throughput/"): value for name, value in monitor.values.items()}
    seconds = 4 / found["steps_per_s"]
    assert 4 * 0.03 <= seconds < 4 * 0.03 + 0.2 + run._run.saving_seconds, "validation is in the rates"
    assert found["samples_per_s"] == pytest.approx(4 * 8 / seconds)
    assert found["share_compute"] * seconds >= 4 * 0.02
    assert found["share_data"] * seconds >= 4 * 0.01
    assert 0 < found["share_saving"] * seconds <= run._run.saving_seconds
    assert found["share_optimizer"] > 0
    assert "mfu" not in found
    rows = [
        row
        for row in csv.DictReader(Path(str(run.log_dir), "metrics.csv").read_text().splitlines())
        if row["throughput/steps_per_s"]
    ]
    assert [(row["step"], float(row["throughput/steps_per_s"])) for row in rows] == [
        ("6", pytest.approx(found["steps_per_s"], rel=1e-5))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_the_numbers_of_the_run_stay(devices: int) -> None:
    modules = [net(dropout=0.2), net(dropout=0.2)]
    for module, callbacks in zip(modules, ([], [ThroughputMonitor(0)]), strict=True):
        quiet(devices=devices, seed=1, callbacks=callbacks, log_every_n_steps=2).fit(module, loader(64))
    assert equal(*map(weights, modules))


class Manual(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()


def test_manual_optimization() -> None:
    monitor = ThroughputMonitor()
    quiet(callbacks=[monitor], log_every_n_steps=4).fit(Manual(), loader(64))
    assert monitor.measured_flops_per_sample == 2 * FLOPS
    assert min(monitor.values["throughput/share_compute"], monitor.values["throughput/share_optimizer"]) > 0
    assert sum(value for name, value in monitor.values.items() if "/share_" in name) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore")  # torch warns of itself while it compiles
def test_what_is_compiled_stays_so() -> None:
    runs = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(1)
            return graph.forward(*args)

        return run

    monitor = ThroughputMonitor()
    try:
        quiet(callbacks=[monitor], compile={"backend": backend}, log_every_n_steps=4).fit(net(), loader(64))
    finally:
        torch._dynamo.reset()
    assert monitor.measured_flops_per_sample == FLOPS
    assert len(runs) == 6, "all but the two steps in which FLOPs were counted"


class Sum(Module):
    """No matrix product anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (batch[0] * self.weight - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_flops_may_be_given_or_unknown() -> None:
    given = ThroughputMonitor(flops_per_sample=1000)
    quiet(callbacks=[given], log_every_n_steps=4).fit(net(), loader(64))
    assert given.values["throughput/flops_per_s"] == pytest.approx(1000 * given.values["throughput/samples_per_s"])
    none = ThroughputMonitor()
    with pytest.warns(UserWarning, match="set flops_per_sample"):
        quiet(callbacks=[none], log_every_n_steps=4).fit(Sum(), loader(64))
    assert "throughput/flops_per_s" not in none.values


class Failing(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("mine")


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError, match="mine"):
        quiet(callbacks=[ThroughputMonitor()]).fit(Failing(), loader(16))
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("options", [{"flops_per_sample": -1}, {"peak_flops_per_s": 0}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} must .*{next(iter(options))}="):
        ThroughputMonitor(**options)


def test_no_peak_is_made_up() -> None:
    assert known_peak(torch.device("cpu"), "32-true") is None
    assert peak_of("NVIDIA L40", "bf16-mixed") is None, "which is neither an L4 nor an L40S"
    assert peak_of("NVIDIA H100 80GB HBM3", "64-true") is None
    assert [peak_of("NVIDIA H100 PCIe", precision) for precision in ("16-mixed", "tf32-true", "32-true")] == [
        756.5e12,
        378e12,
        51e12,
    ]
    assert peak_of("NVIDIA A100-SXM4-80GB", "bf16-true") == 312e12


@pytest.mark.gpu
def test_mfu_on_a_gpu() -> None:
    peak = known_peak(torch.device("cuda", 0), "bf16-mixed")
    monitor = ThroughputMonitor(0, peak_flops_per_s=peak or 1e15)
    quiet(accelerator="gpu", devices=1, precision="bf16-mixed", callbacks=[monitor], log_every_n_steps=4).fit(
        net(), loader(64)
    )
    assert 0 < monitor.values["throughput/mfu"] < 1
    assert monitor.measured_flops_per_sample == FLOPS
