"""What the progress bar gets of a run, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.callbacks import Callback, ProgressBar
from tests.trainer.toy import Net, loader, quiet


class Logged(Net):
    """Logs the number of the step, and rank 0's batch index besides."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", batch[1].sum(), prog_bar=True)
        self.log("hidden", 1.0)
        return super().training_step(batch, batch_idx)


class Watch(Callback):
    """Copies what the bar and the callbacks could read at each batch end."""

    def __init__(self) -> None:
        self.bar: list[dict[str, float]] = []
        self.others: list[set[str]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bar.append({name: float(value) for name, value in trainer.progress_bar_metrics.items()})
        self.others.append({*trainer.callback_metrics, *trainer.logged_metrics})

    def state_dict(self) -> dict[str, Any]:
        return {"bar": self.bar, "others": [sorted(names) for names in self.others]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.bar, self.others = state_dict["bar"], [set(names) for names in state_dict["others"]]


def fitted(bar: bool, **options: Any) -> tuple[Watch, Any]:
    watch = Watch()
    trainer = quiet(callbacks=[watch, *([ProgressBar()] if bar else [])], log_every_n_steps=4, **options)
    torch.manual_seed(0)
    trainer.fit(Logged(), loader(64, 8))
    return watch, trainer


def test_the_bar_gets_the_metrics_of_the_first_step_and_nobody_else_does() -> None:
    watch, trainer = fitted(True)
    plain, reference = fitted(False)
    sums = [float(y.sum()) for _, y in loader(64, 8)]
    assert watch.bar[0] == {"seen": sums[0]} == watch.bar[2]
    assert watch.bar[3] == {"seen": sum(sums[:4]) / 4}, "the interval is whole"
    assert watch.others[:3] == [set()] * 3
    assert plain.bar[:3] == [{}] * 3 and plain.bar[3:] == watch.bar[3:]
    assert trainer.callback_metrics == reference.callback_metrics


@pytest.mark.ranks
def test_the_first_metrics_are_those_of_all_ranks() -> None:
    watch, _ = fitted(True, strategy="ddp", devices=2, accelerator="cpu", split_batches=True)
    alone, _ = fitted(True)
    assert watch.bar[0] == {"seen": alone.bar[0]["seen"] / 2}, "each rank sums its half of the batch"
    assert watch.bar[3] == {"seen": alone.bar[3]["seen"] / 2}
