"""Projects run through `lockstep.lightning` and through `lightning`: the same steps, epochs, names and values."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.trainer.lightning.projects import ALL, QUIET, Project


class Outcome(NamedTuple):
    steps: int
    epoch: int
    names: list[set[str]]
    values: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    seen: Any


def run(package: str, make: Callable[[Any], Project], folder: Path) -> Outcome:
    pl = importlib.import_module(package)
    steps = []
    watch = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    try:
        project = make(pl)
        arguments = QUIET | {"max_epochs": 2, "default_root_dir": folder} | project.trainer
        if arguments["logger"] == "csv":
            arguments["logger"] = importlib.import_module(f"{package}.loggers").CSVLogger(folder)
        trainer = (project.trainer_class or pl.Trainer)(**arguments)
        metrics = []
        for stage in project.stages:
            given = project.fit if stage == "fit" or "datamodule" in project.fit else {}
            if stage in ("validate", "predict") and "datamodule" not in given:
                given = {"dataloaders": project.fit.get("val_dataloaders", project.fit["train_dataloaders"])}
            getattr(trainer, stage)(project.module, **given)
            metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    finally:
        watch.remove()
    weights = {name: value.detach().clone() for name, value in project.module.state_dict().items()}
    return Outcome(
        len(steps), trainer.current_epoch, [set(values) for values in metrics], metrics, weights, project.seen()
    )


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_a_project_gives_the_same_in_both(make: Callable[[Any], Project], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's
        pytest.importorskip("lightning", reason="it is in the extra bench")
        theirs = run("lightning.pytorch", make, tmp_path / "theirs")
    ours = run("lockstep.lightning.pytorch", make, tmp_path / "ours")
    assert (ours.steps, ours.epoch, ours.names) == (theirs.steps, theirs.epoch, theirs.names)
    assert ours.values == [pytest.approx(values, rel=1e-5, abs=1e-6) for values in theirs.values]
    assert ours.weights.keys() == theirs.weights.keys()
    for name, value in theirs.weights.items():
        torch.testing.assert_close(ours.weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert _rounded(ours.seen) == _rounded(theirs.seen)


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
