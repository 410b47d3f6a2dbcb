"""Federated averaging: the papers' algorithms to 1e-12, FedSGD as the limit case, the same bits on any ranks."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import Federated
from lockstep.strategies.methods.federated.loader import FederatedLoader
from tests.strategies.methods.federated_runs import Regression, bits, data, fit, simulated
from tests.strategies.methods.toys import Fading

SERVERS = ("fedavg", "fedprox=0.3", "fedadam", "scaffold")


def drawn(rounds: int, fraction: float = 0.5, seed: int = 0) -> list[list[int]]:
    from lockstep.trainer.seeding import derive

    loader = FederatedLoader(DataLoader(data(), 4), 2, rank=0, size=1, seed=derive(seed, "train"), fraction=fraction)
    return [loader.participants(number) for number in range(rounds)]


@pytest.mark.unit
@pytest.mark.parametrize("server", SERVERS)
def test_a_round_is_that_of_the_paper(server: str) -> None:
    momentum = 0.0 if server == "scaffold" else 0.9
    model = Regression(momentum=momentum)
    fit(model, epochs=10, server=server, local_epochs=3, shuffle=False)
    expected = simulated(server, drawn(10), 0.1, momentum, 3)
    for got, wanted in zip(model.weights, expected, strict=True):
        assert (got - wanted).abs().max() < 1e-12


@pytest.mark.unit
@pytest.mark.parametrize("weighted", [False, True])
def test_one_step_of_all_clients_on_all_their_data_is_a_step_on_all_data(weighted: bool) -> None:
    federated, single = Regression(weighted=weighted), Regression(weighted=weighted)
    fit(federated, epochs=50, fraction=1.0, batch_size=100)
    trainer = Trainer(
        devices=1, accelerator="cpu", max_epochs=50, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(single, DataLoader(data(), 100))
    differences = [(a - b).abs().max() for a, b in zip(federated.weights, single.weights, strict=True)]
    assert len(differences) == 50
    assert max(differences) < 1e-12


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1)).double()


SPREAD = (200, 1, 1, 30, 2, 70, 1, 5)
"""Clients of 1 to 200 samples; BatchNorm cannot train on one, so some raise and are dropped."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("server", "devices"),
    [
        pytest.param(server, devices, marks=[] if (server, devices) == ("scaffold", 2) else pytest.mark.slow)
        for server in SERVERS
        for devices in (2, 4)
    ],
)
def test_every_bit_is_the_same_on_any_number_of_ranks(server: str, devices: int) -> None:
    found = []
    for ranks in (1, devices):
        model = Regression(momentum=0.9, layers=layers())
        trainer = fit(
            model,
            ranks,
            epochs=3,
            server=server,
            local_epochs=2,
            dataset=data(SPREAD),
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            batch_size=16,
            seed=2,
        )
        found.append((bits(model), {name: float(value) for name, value in trainer.callback_metrics.items()}))
    assert found[0] == found[1]


@pytest.mark.unit
def test_clients_weigh_what_they_counted() -> None:
    class Mean(Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0.5 * (self.value - batch[1].double()).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    client = torch.tensor([0] * 99 + [1])
    model = Mean()
    fit(model, epochs=1, clients=0, fraction=1.0, batch_size=99, dataset=TensorDataset(client, client * 64))
    assert model.value.item() == 64 * 1 / 100


class Fragile(Regression):
    """Raises for some clients, in their second step, after it has logged."""

    failing: tuple[int, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and int(batch[2][0]) in self.failing:
            raise ValueError("the phone is off")
        return loss


@pytest.mark.unit
@pytest.mark.parametrize("server", ["fedavg", "scaffold"])
def test_a_client_that_raises_is_dropped_as_if_it_had_not_been_drawn(
    server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Fragile(momentum=0.9)
    model.failing = (3, 7)
    with caplog.at_level(logging.WARNING, "lockstep"):
        trainer = fit(model, epochs=3, server=server, fraction=1.0)
    assert "client 3 raised in round 0 and is dropped from it: ValueError: the phone is off" in caplog.text
    assert trainer.strategy.last_round.dropped == 2
    draw = FederatedLoader.participants
    monkeypatch.setattr(FederatedLoader, "participants", lambda self, n: [c for c in draw(self, n) if c not in (3, 7)])
    without = Fragile(momentum=0.9)
    other = fit(without, epochs=3, server=server, fraction=1.0)
    assert bits(model) == bits(without)
    assert trainer.callback_metrics["loss"] == other.callback_metrics["loss"]
    assert trainer.callback_metrics["federated/dropped"] == 2


@pytest.mark.unit
def test_a_round_in_which_every_client_raises_raises() -> None:
    model = Fragile()
    model.failing = tuple(range(8))
    before = bits(model)
    with pytest.raises(ValueError, match="the phone is off"):
        fit(model, epochs=1, fraction=1.0, batch_size=1, dataset=data((3, 3, 3)))
    assert bits(model) == before


class Unreadable(TensorDataset):
    """Sample 12 cannot be read, or the worker that reads it is killed."""

    error: Exception | None = None

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise self.error
        return super().__getitem__(index)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("error", "workers"), [(None, 1), (OSError(5, "no"), 1), (OSError(5, "no"), 0), (EOFError("no more data"), 0)]
)
def test_what_the_machine_cannot_read_ends_the_run_and_drops_no_client(error: Exception | None, workers: int) -> None:
    dataset = Unreadable(*data().tensors)
    dataset.error = error
    strategy = Federated(clients=lambda index: index // 8, fraction=1.0)
    trainer = Trainer(strategy=strategy, devices=1, accelerator="cpu", max_epochs=1, logger=False, seed=0)
    model = Regression()
    before = bits(model)
    with pytest.raises(RuntimeError, match="reading a batch of a client failed|DataLoader worker"):
        trainer.fit(model, DataLoader(dataset, 4, num_workers=workers))
    assert bits(model) == before


@pytest.mark.unit
def test_weights_that_are_not_finite_are_named_with_their_client() -> None:
    class Diverges(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if int(batch[2][0]) == 5 else loss

    model = Diverges()
    before = bits(model)
    with pytest.raises(FloatingPointError, match=r"net.0.weight of client 5 is NaN or infinite in step 0"):
        fit(model, fraction=1.0)
    assert bits(model) == before


class Counting(torch.optim.SGD):
    """Counts its steps in a number, as optimizers of third parties do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                number = self.state[parameter]["number"] = self.state[parameter].get("number", 0) + 1
                parameter.add_(parameter.grad, alpha=-1 / number)


def resumed(folder: Path, server: Any, save_on: int, resume_on: int) -> tuple[str, str]:
    """The bits of a run of 6 rounds, and of one that was saved after 3 and resumed."""
    options: dict[str, Any] = {"server": server, "local_epochs": 2, "fraction": 0.5}
    whole = Regression(momentum=0.9, layers=layers())
    fit(whole, epochs=6, dataset=data(SPREAD), **options)
    saver = ModelCheckpoint(dirpath=str(folder), save_top_k=-1, filename="{epoch}")
    first = Regression(momentum=0.9, layers=layers())
    options["enable_checkpointing"] = True
    fit(first, save_on, epochs=3, dataset=data(SPREAD), callbacks=[saver], **options)
    second = Regression(momentum=0.9, layers=layers())
    fit(second, resume_on, epochs=6, dataset=data(SPREAD), resume=str(folder / "epoch=2"), **options)
    return bits(whole), bits(second)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("server", "save_on", "resume_on"),
    [
        ("scaffold", 1, 2),
        ("fedadam", 1, 1),
        (Counting, 1, 1),
        (Fading, 1, 1),
        pytest.param("scaffold", 2, 1, marks=pytest.mark.slow),
        pytest.param("fedadam", 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed_to_the_bit_on_other_ranks(server: Any, save_on: int, resume_on: int, tmp_path: Path) -> None:
    whole, second = resumed(tmp_path, server, save_on, resume_on)
    assert whole == second


@pytest.mark.unit
@pytest.mark.parametrize("server", ["scaffold", "fedadam"])
def test_a_checkpoint_that_is_saved_after_the_run_has_the_server(server: str, tmp_path: Path) -> None:
    whole, first, second = (Regression() for _ in range(3))
    fit(whole, epochs=4, server=server)
    fit(first, epochs=2, server=server).save_checkpoint(tmp_path / "after")
    fit(second, epochs=4, server=server, resume=tmp_path / "after")
    assert bits(whole) == bits(second)


class Some(Regression):
    """Counts the samples of every other client only."""

    def training_step(self, batch: Any, batch_idx: int) -> Loss:
        counted = (batch[2] % 2).sum()
        return Loss((self.net(batch[0]) - batch[1]).square().mean() * counted, counted)


@pytest.mark.unit
def test_a_round_whose_clients_count_nothing_is_followed_by_others() -> None:
    trainer = fit(Some(), epochs=None, fraction=0.01, max_steps=4)  # type: ignore[arg-type]
    assert trainer.global_step == 4 < trainer.current_epoch


class Scheduled(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@pytest.mark.ranks
def test_a_rank_without_a_client_in_a_round_does_not_warn_of_its_scheduler(capfd: pytest.CaptureFixture[str]) -> None:
    fit(Scheduled(), epochs=2, fraction=0.01, devices=2)
    assert "lr_scheduler" not in capfd.readouterr().err
