"""Losses that count in a tensor: on an accelerator the host does not read it before the device has the backward to
do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lockstep.strategies import DDP, FSDP, LocalSGD, Loss, SingleDevice
from lockstep.strategies.step import weighted_losses
from lockstep.strategies.virtual.replicas import VirtualReplicas
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.trainer.toy import Net, loader, quiet


class AsOnAnAccelerator:
    """Goes the ways of an accelerator, on which host and device work beside each other, with tensors of the CPU."""

    def setup(self) -> None:
        super().setup()  # type: ignore[misc]
        self._on_cpu = False


class Single(AsOnAnAccelerator, SingleDevice): ...


class Replicas(AsOnAnAccelerator, DDP): ...


class Shards(AsOnAnAccelerator, FSDP): ...


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "devices"), [(Single, 1), (Replicas, 2), (Shards, 2)])
def test_the_numbers_are_those_of_the_loop_by_hand(strategy: Any, devices: int, tmp_path: Path) -> None:
    """Also with batches that count nothing, in windows of one micro-batch and of several, and on ranks without
    samples."""
    plans = {
        "one": Plan(step="token_step"),
        "accumulated": Plan(step="token_step", accumulate=3, clip=0.1),
        "without samples": Plan(step="token_step", num_samples=18, global_batch=4, accumulate=3),
    }
    found = contract.run_each({name: (strategy(), plan) for name, plan in plans.items()}, devices, tmp_path)
    for name, plan in plans.items():
        model, expected = reference(plan)
        assert found[name]["counts"] == expected["counts"]
        assert difference(saved_weights(tmp_path / name), model) < 1e-12


class HostReads(TorchDispatchMode):
    """Notes which of `events` a read of a tensor's number by the host came after."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.events.append("read")
        return func(*args, **(kwargs or {}))


def test_the_count_is_read_once_and_after_the_backward() -> None:
    events: list[str] = []
    strategy = Single()
    strategy.configure(devices=1, accelerator="cpu")
    strategy.setup()
    try:
        model = strategy.setup_module(nn.Linear(6, 4))
        model.weight.register_hook(lambda gradient: events.append("backward"))
        loader = strategy.shard_loader(DataLoader(contract.dataset(12), 4), seed=0, accumulate=3)
        (window,) = loader.windows(0)

        def step(batch: Any, batch_idx: int) -> Loss:
            weight = (batch[0][:, 0] > 0).float()
            return Loss((model(batch[0])[:, 0] * weight).sum(), weight.sum())

        with HostReads(events):
            result = strategy.forward_backward(model, step, window)
        before_the_end = events[: len(events) - events[::-1].index("backward")]
        assert "read" not in before_the_end and events.count("read") == 1
        assert result.count == float((contract.dataset(12).tensors[0][:, 0] > 0).sum())
    finally:
        strategy.teardown()


class Learners(AsOnAnAccelerator, LocalSGD): ...


class OfShares(AsOnAnAccelerator, VirtualReplicas): ...


@pytest.mark.parametrize(
    ("make", "on_host"),
    [
        (partial(Learners, period=2, learners_per_rank=[2]), partial(LocalSGD, period=2, learners_per_rank=[2])),
        (partial(OfShares, 2, on_one_device=True), partial(VirtualReplicas, 2, on_one_device=True)),
    ],
)
def test_learners_and_shares_go_backward_before_the_host_reads_their_loss(make: Any, on_host: Any) -> None:
    events: list[str] = []

    class Marks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            loss.register_hook(lambda gradient: events.append("backward"))
            events.append("step")
            return loss

    def weights(strategy: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Marks()
        with HostReads(events):
            quiet(strategy=strategy, devices=1, accelerator="cpu", max_epochs=1).fit(module, loader(48))
        return [p.detach() for p in module.parameters()]

    found = weights(make())
    assert "step read" not in " ".join(events)
    events.clear()
    assert all(map(torch.equal, found, weights(on_host())))
    assert "step read backward" in " ".join(events)


@pytest.mark.parametrize("count", [0, 0.0, torch.zeros(()), torch.zeros((), dtype=torch.int64), torch.tensor([0.0])])
@pytest.mark.parametrize("reads_counts", [True, False])
def test_a_micro_batch_that_counts_nothing_has_no_weight(count: Any, reads_counts: bool) -> None:
    value = torch.ones((), requires_grad=True)
    ((weighed, *_),), counted = weighted_losses(Loss(value, count), 3, None, None, reads_counts)
    assert weighed.item() == float(counted) == 0.0


@pytest.mark.parametrize("count", [torch.tensor(3), torch.tensor(3.0), torch.tensor([3.0])])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_counts_of_any_dtype_weigh_the_same(count: torch.Tensor, scale: float | None) -> None:
    value = torch.tensor(6.0, requires_grad=True)
    found = [weighted_losses(Loss(value, count), 3, scale, None, reads) for reads in (True, False)]
    assert [losses[0][0].item() for losses, _ in found] == [2.0 if scale is None else 1.5] * 2
    assert all(losses[0][0].dtype == torch.float32 for losses, _ in found)
    assert [float(counted) for _, counted in found] == [3.0, 3.0]
