"""Dicts that a step returns: without a loss, and with keys that only some samples have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import Module
from lockstep.strategies.losses import has_loss
from lockstep.strategies.pipeline.microbatches import merged
from tests.strategies.mesh.test_fsdp import fit
from tests.trainer.toy import distance, loader, weights


class Seldom(Module):
    """Returns a dict whose loss is None for the second batch of each epoch, on all ranks or on the last one."""

    alone = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        skips = batch_idx == 1 and (not self.alone or torch.distributed.get_rank() == 1)
        return {"loss": None if skips else loss, "of": str(batch_idx)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["of"] == str(batch_idx) and (outputs["loss"] is None) == (batch_idx == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Alone(Seldom):
    alone = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.long), "dp"])
def test_a_dict_without_a_loss_counts_nothing(strategy: str) -> None:
    one, several = Seldom(), Seldom()
    fit("single", 1, one, loader(20))
    fit(strategy, 2, several, loader(20))
    assert distance(weights(several), weights(one)) < 1e-12


@pytest.mark.ranks
def test_a_dict_without_a_loss_on_one_rank_is_refused_where_others_wait_for_its_backward() -> None:
    with pytest.raises(RuntimeError, match="training_step returned None on rank 1, but a loss on rank 0"):
        fit("fsdp", 2, Alone(), loader(20))


def test_what_counts_as_a_loss() -> None:
    assert has_loss(torch.ones(())) and has_loss({"loss": 1.0}) and has_loss({"one": torch.ones(())})
    assert not has_loss(None) and not has_loss({"loss": None, "other": 1})


def test_keys_that_parts_lack_are_those_of_the_others() -> None:
    parts = [{"loss": 1.0}, {"loss": 2.0, "extra": 3.0}, {"loss": 3.0, "extra": 6.0}]
    whole = merged([(part, n) for part, n in zip(parts, (2, 2, 1), strict=True)])
    assert whole == {"loss": pytest.approx(9 / 5), "extra": pytest.approx(4.0)}
    assert merged([({"loss": 1.0, "extra": 3.0}, 2), ({"loss": 1.0}, 2)]) == {"loss": 1.0, "extra": 3.0}
