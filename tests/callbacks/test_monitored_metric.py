"""Metrics that decide about a run: one rank alone may have them, and user code may set them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.callbacks import Callback, EarlyStopping, GradientNorm, ModelCheckpoint
from tests.trainer.toy import Net, loader, quiet


class LogsOnOneRank(Net):
    """Logs numbers that do not depend on the ranks, on rank 0 alone."""

    def on_train_epoch_start(self) -> None:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.log("one", (3.0, 5.0, 2.0, 7.0)[self.global_step % 4], rank_zero_only=True, on_step=True)
            self.log("mean", float(self.current_epoch), rank_zero_only=True, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.01)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "mean"}}


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_what_rank_0_alone_has_logged_decides_on_all_ranks(devices: int, tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{step}-{one:.0f}", monitor="one", every_n_train_steps=1, save_top_k=2)
    stops = EarlyStopping("mean", patience=2)
    trainer = quiet(
        strategy="ddp" if devices > 1 else "single",
        devices=devices,
        callbacks=[stops, saved],
        max_epochs=9,
        log_every_n_steps=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(LogsOnOneRank(), loader(16, batch_size=4 // devices))
    assert trainer.current_epoch == 3  # epoch 0 stays the best
    assert sorted(path.name for path in tmp_path.glob("step=*")) == ["step=3-one=2", "step=7-one=2"]
    assert float(trainer.callback_metrics["lr"]) == pytest.approx(0.001)  # as epoch 1 was worse


class Scores(Callback):
    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.callback_metrics["own"] = torch.tensor((0.1, 0.5, 0.3)[trainer.current_epoch])


def test_what_user_code_sets_ranks_checkpoints(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{epoch}", monitor="own")
    trainer = quiet(callbacks=[Scores(), saved], max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(Net(), loader(8), loader(8))
    assert Path(saved.best_model_path).name == "epoch=0"
    assert saved.best_model_score == torch.tensor(0.1)


def test_a_resumed_run_ranks_by_what_user_code_sets(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{epoch}", monitor="own", save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    quiet(**options, max_epochs=2, callbacks=[Scores(), saved]).fit(Net(), loader(8), loader(8))
    again = ModelCheckpoint(tmp_path, "{epoch}", monitor="own", save_top_k=-1)
    trainer = quiet(**options, max_epochs=3, callbacks=[Scores(), again])
    trainer.fit(Net(), loader(8), loader(8), ckpt_path=tmp_path / "epoch=1")
    assert [float(score) for score in again.best_k_models.values()] == pytest.approx([0.1, 0.5, 0.3])


def test_gradient_norms_rank_the_weights_they_were_measured_with(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, "{step}", monitor="grad_norm", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer = quiet(**options, max_steps=4, log_every_n_steps=2, callbacks=[GradientNorm(), saved])
    with pytest.warns(UserWarning, match="no value yet"):  # after the first step
        trainer.fit(Net(), loader(32))
    known = {Path(path).name: bool(torch.isfinite(score)) for path, score in saved.best_k_models.items()}
    assert known == {"step=1": False, "step=2": True, "step=3": False, "step=4": True}
