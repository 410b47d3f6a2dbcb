"""GradientNorm against the norm of a loop by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.callbacks import Callback, GradientNorm
from tests.trainer.toy import Net, loader, net, quiet


class Values(Callback):
    """The value after each step, as it travels home from rank 0."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(trainer.callback_metrics.get("grad_norm", torch.nan)))

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]


def by_hand() -> list[float]:
    module = net().double()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    norms = []
    for x, y in loader():
        optimizer.zero_grad()
        F.cross_entropy(module(x.double()), y).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return norms


def run(**options: Any) -> list[float]:
    values = Values()
    trainer = quiet(
        **{"precision": "64-true", "split_batches": True, "gradient_clip_val": 0.1, "log_every_n_steps": 1} | options,
        callbacks=[GradientNorm(), values],
    )
    trainer.fit(net(), loader())
    return values.values


def test_the_norm_is_that_before_clipping() -> None:
    assert run() == pytest.approx(by_hand(), rel=1e-12)


def test_only_logged_steps_have_one() -> None:
    norms = by_hand()
    assert run(log_every_n_steps=3)[2:] == pytest.approx([norms[2], norms[2], norms[2], norms[5], norms[5]], rel=1e-12)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_shards_have_the_whole_norm(strategy: str) -> None:
    assert run(strategy=strategy, devices=2) == pytest.approx(by_hand(), rel=1e-12)


def test_each_optimizer_has_its_own() -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            first, last = self.net[0].parameters(), self.net[3].parameters()
            return {"first": torch.optim.SGD(first, lr=0.1), "last": torch.optim.SGD(last, lr=0.1)}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            return {"first": loss, "last": loss}

    trainer = quiet(callbacks=[GradientNorm("norm")], log_every_n_steps=1, limit_train_batches=1)
    module = Two()
    x, y = next(iter(loader()))
    F.cross_entropy(module(x), y).backward()
    expected = {
        f"norm/{name}": torch.nn.utils.get_total_norm([p.grad for p in module.net[i].parameters()]).item()
        for name, i in (("first", 0), ("last", 3))
    }
    module.zero_grad()
    trainer.fit(module, loader())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("norm")}
    assert logged == pytest.approx(expected, rel=1e-6)
