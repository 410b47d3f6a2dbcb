"""Random numbers of stages: one stream that resumes, and dropout that differs by stage and microbatch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Module
from lockstep.strategies import Pipeline
from tests.strategies.pipeline.models import SaveAtEnd
from tests.trainer.toy import loader, quiet, weights

pytestmark = pytest.mark.ranks


class Noisy(Module):
    """The step draws before it calls the net and uses that afterwards, as diffusion models do; layers draw as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 8, bias=False), nn.Dropout(0.5)
        )
        self.folder = str(folder)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch[0])
        with (Path(self.folder) / f"noise {self.global_rank}").open("a") as file:  # on each stage
            print(noise.sum().item(), file=file)
        return (self.net(batch[0] + noise) - noise).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.long
def test_noise_is_one_over_stages_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    def fit(
        max_epochs: int, ckpt_path: Path | None = None, save_to: Path | None = None, seed: int = 1
    ) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Noisy(tmp_path)
        if save_to is not None:
            module.on_train_end = SaveAtEnd(save_to, module)  # type: ignore[method-assign,assignment]
        quiet(strategy="pipeline", devices=2, max_epochs=max_epochs, seed=seed).fit(
            module, loader(), ckpt_path=ckpt_path
        )
        first, second = [(tmp_path / f"noise {rank}").read_text() for rank in (0, 1)]
        assert first and first == second, "all stages draw the same before the net"
        return weights(module)

    whole = fit(2)
    fit(1, save_to=tmp_path / "half")
    resumed = fit(2, ckpt_path=tmp_path / "half")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert not torch.equal(whole[0], fit(2, seed=2)[0])


seen: list[torch.Tensor] = []


class Recorded(nn.Dropout):
    """A layer that shows what it drops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if type(output) is torch.Tensor:
            seen.append(output == 0)
        return output


def dropped(rank_count: int) -> list[list[bool]]:
    """What the dropout layers of both stages drop for two parts."""
    strategy = Pipeline()
    strategy.configure(devices=rank_count, accelerator="cpu")
    strategy.setup()
    try:
        model = nn.Sequential(
            nn.Linear(64, 64, bias=False), Recorded(0.5), nn.Linear(64, 64, bias=False), Recorded(0.5)
        )
        seen.clear()
        for layer in model[::2]:
            nn.init.ones_(layer.weight)
        holder = nn.ModuleDict({"net": model})
        wrapped = strategy.setup_module(holder)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(holder.parameters(), lr=0.1)})
        window = next(strategy.shard_loader(DataLoader(torch.ones(2, 64), 2), seed=5).windows(0))
        strategy.forward_backward(wrapped, lambda batch, _: model(batch).mean(), window)
        assert len(seen) == 2
        return strategy.all_gather(torch.stack(seen)).flatten(0, 2).tolist()
    finally:
        strategy.teardown()


def test_dropout_differs_by_stage_and_part(run_ranks: Callable[..., Any]) -> None:
    masks = [tuple(mask) for mask in run_ranks(dropped, 2, 2)]
    assert len(set(masks)) == len(masks) == 4 and all(10 < sum(mask) < 54 for mask in masks)
