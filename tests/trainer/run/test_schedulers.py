"""When schedulers step, and what they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lockstep.callbacks import ModelCheckpoint
from tests.trainer.module_toys import Lrs, Warm
from tests.trainer.toy import Net, loader, quiet


@pytest.mark.parametrize("interval", ["step", "epoch"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers_step_as_in_a_hand_written_loop(interval: str, frequency: int, accumulate: int) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1e-3)
            return [optimizer], [
                {"scheduler": ExponentialLR(optimizer, 0.5), "interval": interval, "frequency": frequency}
            ]

    lrs = Lrs()
    quiet(max_epochs=4, accumulate_grad_batches=accumulate, callbacks=lrs).fit(Scheduled(), loader(24))

    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1e-3)
    scheduler, expected, steps = ExponentialLR(optimizer, 0.5), [], 0
    for epoch in range(1, 5):
        for _ in range(0, 3, accumulate):
            expected.append([optimizer.param_groups[0]["lr"]])
            optimizer.step()
            steps += 1
            if interval == "step" and steps % frequency == 0:
                scheduler.step()
        if interval == "epoch" and epoch % frequency == 0:
            scheduler.step()
    assert lrs.seen == expected


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_plateau_follows_a_metric_of_the_validation(devices: int) -> None:
    class Plateau(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/score", [3.0, 2.0, 2.0, 2.0, 1.0][self.current_epoch])

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": ReduceLROnPlateau(optimizer, factor=0.1, patience=0),
                "monitor": "val/score",
            }

        def on_train_epoch_start(self) -> None:
            assert self.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(
                [1.0, 1.0, 1.0, 0.1, 0.01][self.current_epoch]
            )

    trainer = quiet(max_epochs=5, devices=devices)
    trainer.fit(Plateau(), loader(16, 4), loader(8))
    assert trainer.current_epoch == 5


def test_missing_monitor_is_an_error_unless_not_strict() -> None:
    class Plateau(Net):
        strict = True

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": ReduceLROnPlateau(optimizer),
                    "monitor": "val/typo",
                    "strict": self.strict,
                },
            }

    with pytest.raises(
        ValueError, match="a scheduler monitors 'val/typo', which has not been logged.* train/loss_epoch"
    ):
        quiet().fit(Plateau(), loader(8))
    lenient = Plateau()
    lenient.strict = False
    quiet().fit(lenient, loader(8))


def test_schedulers_of_other_makes_step_through_lr_scheduler_step(tmp_path: Path) -> None:
    class Custom(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": Warm(optimizer), "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            assert metric is None
            scheduler.step_update(self.global_step + 1)

    lrs = Lrs()
    trainer = quiet(callbacks=[lrs, ModelCheckpoint(dirpath=tmp_path)], enable_checkpointing=True)
    trainer.fit(Custom(), loader(24))
    assert lrs.seen == [[1.0], [1 / 2], [1 / 3]]
    again = quiet(max_epochs=2)
    again.fit(Custom(), loader(24), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert again._run.schedulers[0].scheduler.last == 6


def test_scheduler_step_sees_the_metric_it_declares() -> None:
    """`reduce_on_plateau` marks a scheduler that is stepped on a metric but is not a ReduceLROnPlateau."""
    seen = []

    class Custom(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": Warm(optimizer), "monitor": "val/loss", "reduce_on_plateau": True}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append((metric, self.trainer.callback_metrics["val/loss"]))

    quiet().fit(Custom(), loader(8), loader(8))
    assert len(seen) == 1 and seen[0][0] == seen[0][1]
