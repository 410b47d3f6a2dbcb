"""The spine: the same numbers as a hand-written loop, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import Loss
from tests.trainer.toy import Net, data, distance, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks

STEPS = {"plain": {}, "accumulation": {"accumulate_grad_batches": 4}, "clip norm": {"gradient_clip_val": 0.1}}
STEPS |= {"clip value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}}
STEPS |= {"all": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}}


def by_hand(options: dict[str, Any], dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> list[torch.Tensor]:
    model = net(dropout=dropout).to(dtype)
    optimizer = model.configure_optimizers()
    x, y = data(64).tensors
    k = options.get("accumulate_grad_batches", 1)
    for _ in range(2):
        for begin in range(0, 64, 8 * k):
            for i in range(k):
                part = slice(begin + 8 * i, begin + 8 * (i + 1))
                loss = F.cross_entropy(model(x[part].to(dtype)), y[part])
                (loss / k).backward()
            clip(model, options)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def clip(model: nn.Module, options: dict[str, Any]) -> None:
    if options.get("gradient_clip_algorithm") == "value":
        nn.utils.clip_grad_value_(model.parameters(), options["gradient_clip_val"])
    elif "gradient_clip_val" in options:
        nn.utils.clip_grad_norm_(model.parameters(), options["gradient_clip_val"])


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_one_process_is_bitwise_the_hand_written_loop(options: dict[str, Any]) -> None:
    model = net(dropout=0.2)
    quiet(max_epochs=2, **options).fit(model, loader(64), loader(64))
    assert equal(weights(model), by_hand(options, dropout=0.2))


def test_double_precision_is_bitwise_the_hand_written_loop() -> None:
    model = net()
    quiet(max_epochs=2, precision="64-true").fit(model, loader(64))
    assert equal(weights(model), by_hand({}, torch.float64))


def ddp_by_hand(options: dict[str, Any]) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = net()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = model.configure_optimizers()
    x, y = data(64).tensors
    k = options.get("accumulate_grad_batches", 1)
    for _ in range(2):
        for begin in range(0, 64, 8 * size * k):
            for i in range(k):
                start = begin + 8 * (size * i + rank)
                ddp.require_backward_grad_sync = i == k - 1
                loss = F.cross_entropy(ddp(x[start : start + 8]), y[start : start + 8])
                (loss / k).backward()
            clip(model, options)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def _ddp_reference(options: dict[str, Any]) -> list[torch.Tensor]:
    from lockstep.strategies.launch import environment, process_group

    process_group.init_process_group(environment.detect(), "gloo")
    try:
        return ddp_by_hand(options)
    finally:
        process_group.destroy_process_group()


@pytest.mark.parametrize("options", [STEPS["plain"], STEPS["all"]], ids=["plain", "all"])
def test_two_ranks_are_bitwise_the_hand_written_ddp_loop(options: dict[str, Any], run_ranks: Any) -> None:
    model = net()
    quiet(max_epochs=2, strategy="ddp", devices=2, **options).fit(model, loader(64))
    assert equal(weights(model), run_ranks(_ddp_reference, 2, options))


@functools.cache
def one_process(n: int, split: bool, accumulate: int) -> tuple[list[torch.Tensor], dict[str, float]]:
    model = net()
    trainer = quiet(max_epochs=2, precision="64-true", split_batches=split, accumulate_grad_batches=accumulate)
    trainer.fit(model, loader(n, 12, shuffle=True), loader(n, 12))
    return weights(model), {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("n", "accumulate"), [(50, 1), (50, 2), (5, 1), (1, 1), (13, 3)])
def test_two_ranks_give_the_numbers_of_one(n: int, accumulate: int) -> None:
    """Uneven shards, a short last window, ranks without a sample: the split global batch has the same gradient and
    metrics."""
    model = net()
    trainer = quiet(
        max_epochs=2,
        precision="64-true",
        split_batches=True,
        accumulate_grad_batches=accumulate,
        strategy="ddp",
        devices=2,
    )
    trainer.fit(model, loader(n, 12, shuffle=True), loader(n, 12))
    reference, metrics = one_process(n, True, 1)
    assert distance(weights(model), reference) < 1e-12
    for name in ("train/loss_epoch", "val/loss", "val/acc"):
        assert trainer.callback_metrics[name].item() == pytest.approx(metrics[name], rel=1e-12)


class TokenNet(Net):
    """Averages over tokens: rows with a label below zero do not count, and some micro-batches have none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        keep = x[:, 0] > 0.5
        if not keep.any():
            return None
        return Loss(F.cross_entropy(self(x[keep]), y[keep], reduction="sum"), keep.sum())


@pytest.mark.parametrize(("devices", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 3)])
def test_loss_total_and_count_is_the_mean_over_all_tokens(devices: int, accumulate: int) -> None:
    model = TokenNet().double()
    model.load_state_dict(net().double().state_dict())
    quiet(
        strategy="ddp" if devices > 1 else "single",
        devices=devices,
        accumulate_grad_batches=accumulate,
        split_batches=True,
        precision="64-true",
    ).fit(model, loader(48, 12))

    reference = net().double()
    optimizer = reference.configure_optimizers()
    x, y = data(48).tensors
    for begin in range(0, 48, 12):
        inputs, labels = x[begin : begin + 12].double(), y[begin : begin + 12]
        keep = inputs[:, 0] > 0.5
        F.cross_entropy(reference(inputs[keep]), labels[keep]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(weights(model), weights(reference)) < 1e-12
