"""examples/federated.py: whose digits they are, and what the rounds reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.federated import Client, ClientData
from lockstep import Trainer
from lockstep.callbacks import ClientMetrics
from lockstep.strategies import Federated
from tests.conftest import REPO_ROOT


def test_each_client_has_two_digits() -> None:
    data = ClientData()
    data.setup("fit")
    _, labels, clients = data.train.tensors
    assert len(labels) + len(data.val) == 1797
    kinds = [set(labels[clients == k].tolist()) for k in range(20)]
    assert all(len(kind) == 2 for kind in kinds)
    assert len({frozenset(kind) for kind in kinds}) == 20
    assert set(data.val.tensors[2].tolist()) == set(range(20))


def test_the_example_has_at_most_150_lines() -> None:
    assert len((REPO_ROOT / "examples" / "federated.py").read_text().splitlines()) <= 150


@pytest.mark.slow
@pytest.mark.unit
@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", ["fedavg", "fedprox=0.01", "scaffold"])
def test_rounds_reach_95_percent_in_a_fifth_of_those_of_fedsgd(server: str, tmp_path: Path) -> None:
    """FedSGD with the same learning rate takes 288 rounds (`python -m benchmarks.federated rounds`)."""
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    strategy, metrics = Federated(2, fraction=1.0, local_epochs=5, server=server), ClientMetrics(2)
    trainer = Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_epochs=288 // 5, seed=0, callbacks=[metrics], **quiet
    )
    torch.manual_seed(0)
    trainer.fit(Client(), datamodule=ClientData())
    assert float(trainer.callback_metrics["val/acc"]) >= 0.945
    assert len(metrics.values["acc"]) == 20
