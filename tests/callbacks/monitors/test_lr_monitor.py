"""LearningRateMonitor: names, and that each rate stands at the step it was used for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from lockstep.callbacks import Callback
from lockstep.callbacks._support.lr_factor import add_lr_factor
from lockstep.callbacks.monitors.lr_monitor import LearningRateMonitor
from lockstep.strategies import LocalSGD
from tests.trainer.toy import Net, loader, net, quiet

MODULE: Any = nn.Identity()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1))


def run(
    monitor: LearningRateMonitor,
    optimizers: list[Any],
    schedulers: list[Any] = [],  # noqa: B006 - read only
    *,
    num_steps: int = 4,
    every: int = 1,
) -> dict[int, dict[str, float]]:
    """Two epochs of `num_steps` optimizer steps in the order of the Callback contract; what was logged, by step."""
    logged: dict[int, dict[str, float]] = {}
    trainer: Any = SimpleNamespace(
        global_step=0,
        arguments=SimpleNamespace(log_every_n_steps=every),
        optimizers=optimizers,
        _run=SimpleNamespace(schedulers=schedulers, window_is_open=False),
        callback_metrics={},
    )
    trainer._run.show_measured = lambda metrics: logged.setdefault(trainer.global_step, {}).update(metrics)
    for _ in range(2):
        monitor.on_train_epoch_start(trainer, MODULE)
        for batch_idx in range(num_steps):
            monitor.on_train_batch_start(trainer, MODULE, None, batch_idx)
            for optimizer in optimizers:
                monitor.on_before_optimizer_step(trainer, MODULE, optimizer)
                optimizer.step()
            for config in schedulers:
                if config.interval == "step":
                    config.scheduler.step()
            trainer.global_step += 1
            monitor.on_train_batch_end(trainer, MODULE, None, None, batch_idx)
        monitor.on_train_epoch_end(trainer, MODULE)
        for config in schedulers:
            if config.interval == "epoch":
                config.scheduler.step()
    return logged


def config(scheduler: Any, interval: str, name: str | None = None) -> Any:
    return SimpleNamespace(scheduler=scheduler, interval=interval, name=name)


def test_a_rate_stands_at_the_step_it_was_used_for() -> None:
    optimizer = SGD([parameter()], lr=1.0)
    logged = run(LearningRateMonitor(), [optimizer], [config(ExponentialLR(optimizer, 0.5), "step")], every=2)
    assert logged == {2: {"lr-SGD": 0.5}, 4: {"lr-SGD": 0.125}, 6: {"lr-SGD": 0.5**5}, 8: {"lr-SGD": 0.5**7}}


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"},
        }


def test_learners_of_one_rank_have_a_rate_a_step() -> None:
    monitor = LearningRateMonitor()
    quiet(
        strategy=LocalSGD(learners=2, period=2),
        max_steps=2,
        accumulate_grad_batches=2,
        log_every_n_steps=1,
        callbacks=[monitor],
    ).fit(Scheduled(), loader())
    assert monitor.lrs == {"lr-SGD": [1e-3, 5e-4]}


def test_by_epoch_it_follows_the_scheduler() -> None:
    optimizer = SGD([parameter()], lr=1.0)
    logged = run(LearningRateMonitor(), [optimizer], [config(ExponentialLR(optimizer, 0.5), "epoch", "my-rate")])
    assert logged == {0: {"my-rate": 1.0}, 4: {"my-rate": 0.5}}


def test_names_of_groups_and_of_several_optimizers() -> None:
    groups = AdamW(
        [
            {"params": [parameter()], "lr": 0.1},
            {"params": [parameter()], "lr": 0.2},
            {"params": [parameter()], "lr": 0.3, "name": "head"},
        ]
    )
    optimizers = [groups, AdamW([parameter()], lr=0.4), SGD([parameter()], lr=0.5, momentum=0.9, weight_decay=0.01)]
    logged = run(LearningRateMonitor("step", log_momentum=True, log_weight_decay=True), optimizers, num_steps=1)
    assert {name: value for name, value in logged[1].items() if name.count("-") == 1 or name.endswith("-1")} == {
        "lr-AdamW/pg1": 0.1,
        "lr-AdamW/pg2": 0.2,
        "lr-AdamW/head": 0.3,
        "lr-AdamW-1": 0.4,
        "lr-SGD": 0.5,
    }
    assert (logged[1]["lr-SGD-momentum"], logged[1]["lr-SGD-weight_decay"], logged[1]["lr-AdamW/pg1-momentum"]) == (
        0.9,
        0.01,
        0.9,
    )


def test_what_was_logged_can_be_read() -> None:
    optimizer = SGD([parameter()], lr=1.0, momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.5)
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    run(monitor, [optimizer], [config(scheduler, "epoch")])
    assert (monitor.lrs, monitor.last_momentum_values) == ({"lr-SGD": [1.0, 0.5]}, {"lr-SGD-momentum": 0.9})
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.0}
    optimizer.add_param_group({"params": [parameter()], "lr": 3.0})
    run(monitor, [optimizer], [config(scheduler, "epoch")])
    assert {name: len(rates) for name, rates in monitor.lrs.items()} == {"lr-SGD/pg1": 4, "lr-SGD/pg2": 2}
    monitor = LearningRateMonitor()
    logged = run(monitor, [SGD([parameter()], lr=1.0)], every=3)
    assert sorted(logged) == [0, 3, 4, 6] and monitor.lrs == {"lr-SGD": [1.0] * 4}


def test_an_optimizer_without_momentum_is_named() -> None:
    trainer: Any = SimpleNamespace(optimizers=[torch.optim.ASGD([parameter()])], is_global_zero=True)
    with pytest.warns(RuntimeWarning, match="log_momentum=True of LearningRateMonitor logs 0 for ASGD"):
        LearningRateMonitor(log_momentum=True).on_fit_start(trainer, MODULE)


def test_warmup_shows() -> None:
    """The rate that is shown is the one that moved the parameters, factors of other callbacks included."""
    optimizer = SGD([parameter()], lr=1.0)
    steps = iter([0.25, 0.25, 0.5, 0.5])  # asked by the monitor and by the step
    remove = add_lr_factor(optimizer, lambda: next(steps, 1.0))
    logged = run(LearningRateMonitor("step"), [optimizer], num_steps=3)
    remove()
    assert [logged[step]["lr-SGD"] for step in (1, 2, 3)] == [0.25, 0.5, 1.0]


def test_the_interval_is_checked() -> None:
    with pytest.raises(ValueError, match="logging_interval must be 'step', 'epoch' or None, but it is 'batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_rates_are_callback_metrics_on_every_rank(interval: Any) -> None:
    class Reads(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            assert float(trainer.callback_metrics["lr-AdamW"]) == 1e-2, trainer.global_rank

    monitor = LearningRateMonitor(interval)
    trainer = quiet(
        callbacks=[monitor, Reads()],
        log_every_n_steps=1,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
    )
    trainer.fit(net(), loader(32))
    assert trainer.callback_metrics["lr-AdamW"].dtype == torch.float64
    assert set(monitor.lrs["lr-AdamW"]) == {1e-2}


def test_groups_of_one_name_are_refused() -> None:
    optimizer = SGD([{"params": [parameter()], "name": "head"}, {"params": [parameter()], "name": "head"}], lr=0.1)
    with pytest.raises(
        ValueError, match="2 parameter groups of SGD with the name 'head'.*give each group another name"
    ):
        LearningRateMonitor().on_fit_start(SimpleNamespace(optimizers=[optimizer]), MODULE)  # type: ignore[arg-type]


def test_groups_of_one_name_that_a_hook_sets_are_refused() -> None:
    class Sets(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            groups = [{"params": [p], "name": "head"} for p in module.parameters()]
            trainer.optimizers = [SGD(groups, lr=0.1)]

    trainer = quiet(callbacks=[LearningRateMonitor(), Sets()], accelerator="cpu", devices=1)
    with pytest.raises(ValueError, match="4 parameter groups of SGD with the name 'head'"):
        trainer.fit(net(), loader())
    assert trainer.global_step == 0
