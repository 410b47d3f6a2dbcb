"""StochasticWeightAveraging against a loop by hand, on ranks, and over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

import lockstep.lightning.pytorch as pl
from tests.trainer.lightning.projects import loader
from tests.trainer.lightning.test_pruning import QUIET, Net
from tests.trainer.toy import distance, weights


class Stepped(Net):
    """Momentum, and a rate that falls after each epoch, or each step."""

    interval = "epoch"

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.4, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.8**done)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


class SteppedOften(Stepped):
    interval = "step"


def averaging(**options: Any) -> Any:
    return pl.callbacks.StochasticWeightAveraging(
        **{"swa_lrs": 0.05, "swa_epoch_start": 3, "annealing_epochs": 2} | options
    )


def fit(module: Any, callback: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
    callbacks = [callback or averaging(), *options.pop("callbacks", [])]
    trainer = pl.Trainer(**QUIET | {"max_epochs": 5} | options, callbacks=callbacks)
    trainer.fit(module, loader(), loader(8), ckpt_path=ckpt_path)
    return module


def by_hand(kind: Any, annealing: int = 2) -> tuple[Any, list[float]]:
    """What a loop of torch gives: the mean of the weights before epochs 2, 3 and 4."""
    module = kind().double()
    configured = module.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    average, rates, often = AveragedModel(module), [], module.interval == "step"
    for epoch in range(5):
        if epoch == 2:
            scheduler, often = SWALR(optimizer, 0.05, anneal_epochs=annealing), False
        if epoch >= 2:
            average.update_parameters(module)
        for i, batch in enumerate(loader()):
            optimizer.zero_grad()
            module.training_step(batch, i).backward()
            optimizer.step()
            if often:
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        if not often:
            scheduler.step()
    return average.module, rates


@pytest.mark.parametrize("annealing", [0, 1, 2])
@pytest.mark.parametrize("kind", [Stepped, SteppedOften])
def test_weights_and_rates_are_those_of_torch(kind: Any, annealing: int) -> None:
    expected, rates = by_hand(kind, annealing)
    module = fit(kind(), averaging(annealing_epochs=annealing))
    assert distance(weights(module), weights(expected)) <= 1e-12
    assert module.rates == pytest.approx(rates, rel=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "tensor"])
def test_a_strategy_changes_nothing_and_a_resumed_run_is_the_whole_run(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "devices": 2}
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=20, filename="{step}")
    whole = fit(Stepped(), callbacks=[saver], enable_checkpointing=True, **options)
    one = fit(Stepped())
    assert distance(weights(whole), weights(one)) <= 1e-12
    path = tmp_path / "step=20.ckpt"
    assert all(map(torch.equal, weights(fit(Stepped(), ckpt_path=path, **options)), weights(whole)))
    assert distance(weights(fit(Stepped(), ckpt_path=path)), weights(one)) <= 1e-12


@pytest.mark.parametrize("step", [9, 12, 15, 18, 30])
def test_one_process_resumes_anywhere(step: int, tmp_path: Path) -> None:
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    end = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="end")
    more = {"max_epochs": 6 if step == 30 else 5}
    whole = fit(Stepped(), callbacks=[saver], enable_checkpointing=True, **more)
    path = tmp_path / f"step={step}.ckpt"
    if step == 30:
        fit(Stepped(), callbacks=[end], enable_checkpointing=True)
        path = tmp_path / "end.ckpt"
    resumed = fit(Stepped(), ckpt_path=path, **more)
    assert all(map(torch.equal, weights(resumed), weights(whole)))


class SavesAsEpochsStart(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}")


def test_a_run_that_is_killed_as_an_epoch_starts_takes_its_weights_once(tmp_path: Path) -> None:
    callback = averaging()
    whole = fit(Stepped(), callback, callbacks=[SavesAsEpochsStart(tmp_path)])
    assert callback.n_averaged == 3
    for epoch in (2, 3):
        resumed = fit(Stepped(), callback, ckpt_path=tmp_path / f"{epoch}")
        assert callback.n_averaged == 3
        assert all(map(torch.equal, weights(resumed), weights(whole)))
    again = averaging()
    fit(fit(Stepped(), again), again)
    assert again.n_averaged == 3


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 10}])
def test_a_run_that_ends_before_its_averages_warns(options: Any) -> None:
    with pytest.warns(UserWarning, match="keeps the weights of training: fit ended after [12] epochs.*from epoch 2 on"):
        fit(Net(), **options)


def test_rates_of_groups_and_a_share_of_epochs() -> None:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters(), "lr": 0.1}, {"params": self.net[2].parameters(), "lr": 0.2}]
            return torch.optim.Adam(groups)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                seen.append([(group["lr"], group.get("swa_lr")) for group in self.trainer.optimizers[0].param_groups])

    seen: list[Any] = []
    callback = averaging(swa_lrs=[0.3, 0.4], swa_epoch_start=0.8, annealing_strategy="linear", annealing_epochs=1)
    fit(Groups(), callback)
    assert seen[2] == [(0.1, None), (0.2, None)] and seen[3] == [(0.1, 0.3), (0.2, 0.4)]
    assert seen[4] == [(0.3, 0.3), (0.4, 0.4)]


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)


def test_a_norm_without_statistics_is_averaged() -> None:
    module = Normed()
    module.norm = nn.BatchNorm1d(3, track_running_stats=False)
    module.net.append(module.norm)
    fit(module)


class Two(Net):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]


@pytest.mark.parametrize(
    ("module", "options", "more", "error"),
    [
        (Normed, {}, {}, "Normed has layers of BatchNorm, and Stochastic"),
        (Net, {"swa_lrs": [0.1, 0.2]}, {}, "swa_lrs has 2 rates, but the optimizer has 1 groups; give one for each"),
        (Net, {"swa_epoch_start": 0.5}, {"max_epochs": None, "max_steps": 3}, "swa_epoch_start=0.5 is a share"),
        pytest.param(
            Net,
            {"avg_fn": max},
            {"strategy": "fsdp", "devices": 2},
            "avg_fn of WeightAveraging would see parts of the model under FSDP",
            marks=pytest.mark.ranks,
        ),
        (
            Two,
            {},
            {},
            "needs automatic optimization with one optimizer and at most one scheduler, but there are 2 and 0",
        ),
    ],
)
def test_what_it_cannot_average_is_refused(module: Any, options: Any, more: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        fit(module(), averaging(**options), **more)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"swa_lrs": [0.2, 1]}, "swa_lrs must be a float above 0"),
        ({"swa_epoch_start": 0}, "swa_epoch_start must be an int of at least 1.*got 0"),
        ({"swa_epoch_start": 1.5}, "swa_epoch_start must be.*got 1.5"),
        ({"avg_fn": 3}, "avg_fn must be a function, got 3"),
        ({"annealing_strategy": "exp"}, "annealing_strategy must be 'cos' or 'linear', got 'exp'"),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=error):
        averaging(**options)
