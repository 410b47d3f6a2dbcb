"""TensorBoard shows a run: a real server on loopback, checked in a real browser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import DataModule, Module
from lockstep.trainer.cli import config
from tests.browser.page import CHROMEDRIVER, CHROMIUM, Page, open_browser, open_tensorboard

pytestmark = [
    pytest.mark.ranks,
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


class Noisy(DataModule):
    def train_dataloader(self) -> DataLoader:
        x = torch.randn(64, 4)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(64, 1)), batch_size=4)

    val_dataloader = train_dataloader


CONFIG = """
module: {class: tests.browser.test_tensorboard_page.Fit, width: 12}
data: {class: tests.browser.test_tensorboard_page.Noisy}
trainer: {max_epochs: 2, log_every_n_steps: 1, enable_progress_bar: false}
"""


def assert_not_blank(page: Page, path: Path) -> None:
    page.screenshot(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 100, "the window shows next to nothing"


@pytest.mark.slow  # tests/callbacks/loggers/test_tensorboard.py reads with TensorBoard's own reader
def test_scalars_hparams_and_text(tmp_path: Path) -> None:
    Path("run.yaml").write_text(CONFIG)
    run = config.build(config.resolve(["run.yaml"], []))
    run.trainer.fit(run.module, datamodule=run.datamodule)
    final_loss = run.trainer.callback_metrics["val/loss"].item()

    with open_tensorboard(tmp_path / "runs") as url, open_browser() as page:
        page.open(url + "?tagFilter=loss#timeseries")
        page.wait_for("Fit/version_0", "2 cards", "train /loss", "val /loss")  # group and name are separate words there
        assert_not_blank(page, tmp_path / "timeseries.png")

        page.open(url + "#scalars")
        page.wait_for("Fit/version_0", "tag: train/loss")
        assert_not_blank(page, tmp_path / "scalars.png")

        page.open(url + "#hparams")
        text = page.wait_for("Trial ID", "lr", "width", "val/loss", "0.0625", "12.000")
        assert f"{final_loss:.5g}" in text, "the metric to compare runs by is that of the end of the run"

        page.open(url + "#text")
        page.wait_for("width: 12", "max_epochs: 2", "log_every_n_steps: 1")
