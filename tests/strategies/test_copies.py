"""Batches on their way to a GPU: beside what that computes, and there before they are read."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lockstep.strategies import SingleDevice
from lockstep.strategies.data.batch_slices import move
from tests.trainer.toy import data, equal, net, quiet, weights

Pair = namedtuple("Pair", "first second")


def leaves(batch: Any) -> list[Tensor]:
    return (
        [batch]
        if isinstance(batch, Tensor)
        else [leaf for part in (batch.values() if isinstance(batch, dict) else batch) for leaf in leaves(part)]
    )


def test_structure_and_integers_stay() -> None:
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(2, dtype=torch.long)]), "text": (torch.ones(3),)}
    moved = move(batch, torch.device("meta"), torch.float64)
    assert type(moved["pair"]) is Pair and type(moved["pair"].second) is list and type(moved["text"]) is tuple
    assert [(leaf.device.type, leaf.dtype) for leaf in leaves(moved)] == [
        ("meta", dtype) for dtype in (torch.float64, torch.long, torch.float64)
    ]
    tensor = torch.ones(2)
    assert move(tensor, tensor.device, None) is tensor and move(tensor, tensor.device, tensor.dtype) is tensor


def test_what_is_to_stay_on_a_kind_of_device_stays() -> None:
    here, there = torch.ones(2), torch.ones(2, device="meta")
    moved = move({"a": [here, there], "b": Pair(here, 3)}, torch.device("meta"), None, kept="cpu")
    assert moved["a"][0] is here and moved["b"].first is here and moved["a"][1].is_meta
    assert move(here, torch.device("meta"), None).is_meta


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_what_the_gpu_computes() -> None:
    strategy = SingleDevice()
    strategy.configure(accelerator="gpu", devices=1)
    strategy.setup()
    try:
        batch = {"images": torch.randn(64, 1024).pin_memory(), "labels": torch.arange(64).pin_memory()}
        torch.cuda._sleep(2_000_000_000)  # about a second
        computing = torch.cuda.Event()
        computing.record()
        moved = strategy.to_device(batch)
        assert strategy._copies is not None
        strategy._copies.synchronize()
        assert not computing.query(), "the copy has come before the end of what was begun before it"
        assert all(torch.equal(there.cpu(), here) for there, here in zip(leaves(moved), leaves(batch), strict=True))
    finally:
        strategy.teardown()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_no_batch_is_overwritten_while_it_is_read(pinned: bool) -> None:
    """Many batches in a row, more than are on the GPU at once: each sum is that of its own batch."""
    strategy = SingleDevice()
    strategy.configure(accelerator="gpu", devices=1)
    strategy.setup()
    try:
        sums = []
        for i in range(200):
            batch = torch.full((1 << 20,), float(i))
            moved = strategy.to_device(batch.pin_memory() if pinned else batch)
            torch.cuda._sleep(1_000_000)
            sums.append(moved.sum())
            del moved
        assert [total.item() / 2**20 for total in sums] == list(range(200))
    finally:
        strategy.teardown()


@pytest.mark.gpu
def test_a_fit_from_pinned_memory_is_that_from_the_gpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        module = net()
        samples = TensorDataset(*(tensor.to(device) for tensor in data().tensors))
        quiet(accelerator="gpu", devices=1, max_epochs=3).fit(
            module, DataLoader(samples, 8, pin_memory=device == "cpu")
        )
        found.append(weights(module))
    assert equal(*found)
