"""ChannelsLast changes the layout in memory and nothing that a user sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.callbacks import ChannelsLast
from tests.trainer.toy import distance, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


class Pixels(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
        )
        self.layouts: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.layouts.add(self.net[0](x).is_contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint("saved")


def pixels() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(16, 3, 8, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)), 4
    )


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_convolutions_compute_in_the_layout_and_numbers_stay(devices: int) -> None:
    plain, laid_out = Pixels(), Pixels()
    quiet(devices=devices).fit(plain, pixels())
    quiet(devices=devices, callbacks=[ChannelsLast()]).fit(laid_out, pixels())
    if devices == 1:
        assert (plain.layouts, laid_out.layouts) == ({False}, {True})
    assert distance(weights(laid_out), weights(plain)) < 1e-4
    loaded = Pixels.load_from_checkpoint(Path("saved"))
    assert equal(weights(loaded), [w.contiguous() for w in weights(laid_out)])


def test_a_module_without_convolutions() -> None:
    with pytest.raises(
        ValueError, match="ChannelsLast changes the memory format of 4-dimensional parameters, .* but Net has none"
    ):
        quiet(callbacks=[ChannelsLast()]).fit(net(), loader())


@pytest.mark.parametrize(
    "strategy",
    ["fsdp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor", "deepspeed", "fsdp=2,pipeline=2"))],
)
def test_a_strategy_that_lays_parameters_out_itself(strategy: str) -> None:
    with pytest.raises(
        ValueError,
        match=(
            "ChannelsLast has no effect under strategy .*, which sets the memory format itself; remove it, or use "
            "strategy='ddp'"
        ),
    ):
        quiet(strategy=strategy, devices=4 if "pipeline" in strategy else 2, callbacks=[ChannelsLast()]).fit(
            Pixels(), pixels()
        )
    if strategy == "fsdp":
        quiet(strategy=strategy, devices=1, callbacks=[ChannelsLast()]).fit(Pixels(), pixels())
