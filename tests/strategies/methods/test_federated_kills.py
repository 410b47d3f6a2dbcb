"""Federated runs that are killed at any moment, and populations that do not fit into memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.strategies import Federated
from tests.strategies.methods.federated_runs import data, fit
from tests.strategies.methods.test_federated import SPREAD, Regression, bits, layers

ROUNDS = 150


def main(folder: str, devices: int) -> None:
    """Train, from the newest checkpoint if there is one, and print the bits of the weights."""
    from lockstep.callbacks import ModelCheckpoint

    model = Regression(momentum=0.9, layers=layers())
    saver = ModelCheckpoint(dirpath=f"{folder}/saved", save_last=True)
    options: dict[str, Any] = {
        "server": "scaffold",
        "local_epochs": 2,
        "fraction": 0.75,
        "dataset": data(SPREAD),
        "seed": 1,
    }
    fit(
        model,
        devices,
        epochs=ROUNDS,
        enable_checkpointing=True,
        callbacks=[saver],
        default_root_dir=folder,
        resume="auto",
        **options,
    )
    print("bits", bits(model), flush=True)


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_25_times_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    def start(folder: Path, devices: int) -> subprocess.Popen[str]:
        code = f"from tests.strategies.methods.test_federated_kills import main; main({str(folder)!r}, {devices})"
        root = str(Path(__file__).parents[3])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def saved() -> set[str]:
        folder = tmp_path / "killed" / "saved"
        return {name for name in os.listdir(folder) if name.startswith("epoch=")} if folder.exists() else set()

    chance, killed = random.Random(0), 0
    while killed < 25:
        process = start(tmp_path / "killed", 1 + killed % 2)
        before = saved()
        while process.poll() is None and saved() == before:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.06))
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed += 1
    outputs = []
    for folder in ("killed", "whole"):
        out, err = start(tmp_path / folder, 1).communicate(timeout=300)
        assert "bits" in out, err[-2000:]
        outputs.append(out.partition("bits")[2])
    assert outputs[0] == outputs[1]


class Wide(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(200, 200)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def on_train_epoch_end(self) -> None:
        resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        self.log("resident", float(resident.split()[1]), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("server", ["fedavg", "scaffold"])
def test_ten_thousand_clients_take_the_memory_of_a_hundred(server: str, tmp_path: Path) -> None:
    """With SCAFFOLD, 600 clients have states of 160 KB each, 96 MB, after 60 rounds."""
    found = []
    for clients in (100, 10_000):
        samples = TensorDataset(torch.randn(20_000, 200), torch.arange(20_000) % clients)
        strategy = Federated(1, fraction=10 / clients, server=server, state_dir=str(tmp_path))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        trainer = Trainer(strategy=strategy, devices=2, max_epochs=60, **quiet)
        trainer.fit(Wide(), DataLoader(samples, 16, shuffle=True))
        found.append(float(trainer.callback_metrics["resident"]))
    assert found[1] < 1.05 * found[0]
