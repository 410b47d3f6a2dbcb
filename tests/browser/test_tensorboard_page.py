"""TensorBoard shows a run: a real server on loopback, looked at in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.browser.page import CHROMEDRIVER, CHROMIUM, Page, open_browser, open_tensorboard
from trainer import Module, Trainer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),  # a cold start of Chromium on a busy machine
    pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason="Chromium and chromedriver are not installed"),
]


class Fit(Module):
    def __init__(self, width: int = 12, lr: float = 0.0625) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def assert_not_blank(page: Page, path: Path) -> None:
    page.screenshot(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100, "the window shows next to nothing"


def test_scalars_hparams_and_text(tmp_path: Path) -> None:
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    trainer = Trainer(max_epochs=2, log_every_n_steps=1, enable_progress_bar=False, default_root_dir=tmp_path / "runs")
    trainer.fit(Fit(), loader, loader)
    final_loss = trainer.callback_metrics["val/loss"].item()

    with open_tensorboard(tmp_path / "runs") as url, open_browser() as page:
        page.open(url + "#timeseries")
        text = page.wait_for("Fit/version_0", "/loss")
        assert "train" in text
        assert "val" in text
        assert_not_blank(page, tmp_path / "timeseries.png")

        page.open(url + "#scalars")
        page.wait_for("tag: train/loss", "tag: val/loss")
        assert_not_blank(page, tmp_path / "scalars.png")

        page.open(url + "#hparams")
        text = page.wait_for("Trial ID", "lr", "width", "val/loss", "0.0625", "12.000")
        assert f"{final_loss:.5g}" in text, "the metric to compare runs by is that of the end of the run"

        page.open(url + "#text")
        page.wait_for("config", "max_epochs", "log_every_n_steps")
