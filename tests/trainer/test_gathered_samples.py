"""What a step gathers or adds over ranks, of which some share samples: each sample counts once, or it is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torchmetrics import SumMetric

from lockstep import Module
from tests.trainer.toy import Net, distance, loader, quiet, weights

RANKS = {"ddp": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "fsdp=2,tensor=2": 4, "ddp=2,tensor=2": 4}
HOW = ["self.all_gather", "self.sum_over_ranks", "the maximum"]


class Centred(Module):
    """Subtracts a mean of what was computed for all samples so far, kept in a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.how = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), how
        self.register_buffer("total", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(()))

    def statistics(self, values: Tensor) -> tuple[Tensor, Any]:
        if self.how == "self.all_gather":
            gathered = self.all_gather(values).flatten(0, 1)
            return gathered.sum(0), len(gathered)
        if self.how == "self.sum_over_ranks":
            return self.sum_over_ranks(values.sum(0)), self.sum_over_ranks(len(values))
        if self.how == "the maximum":
            return self.trainer.strategy.all_reduce(values.amax(0), "max"), 1
        if self.how == "strategy.all_reduce":
            return self.trainer.strategy.all_reduce(values.sum(0)), 1
        everywhere = [torch.empty_like(values) for _ in range(self.trainer.world_size)]
        dist.all_gather(everywhere, values)
        return torch.stack(everywhere).sum((0, 1)), 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(batch[0])
        total, count = self.statistics(output.detach())
        self.total += total
        self.count += count
        return (output - self.total / self.count).square().mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def trained(how: str, strategy: str) -> list[Tensor]:
    module, devices = Centred(how), RANKS.get(strategy, 1)
    different = {"tensor": 1, "pipeline": 1, "single": 1}.get(strategy, 2)
    options = {"strategy": strategy, "devices": devices, "accelerator": "cpu", "precision": "64-true"}
    quiet(**options).fit(module, loader(32, 8 // different))
    return [*weights(module), module.total, module.count]


@pytest.mark.ranks
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "strategy",
    ["tensor", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", *[*RANKS][-2:]))],
)
def test_each_sample_counts_once(strategy: str, how: str) -> None:
    assert distance(trained(how, strategy), trained(how, "single")) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["strategy.all_reduce", "torch.distributed"])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("tensor", "2 ranks each share samples, .* use self.sum_over_ranks"),
        ("pipeline", "a pipeline runs a step in parts"),
    ],
)
def test_own_collectives_that_would_count_them_twice_are_refused(strategy: str, why: str, how: str) -> None:
    with pytest.raises(RuntimeError, match=f"of torch.distributed was called here, but {why}"):
        trained(how, strategy)


class ByHand(Centred):
    """The same by manual optimization: what Lockstep itself sums over ranks is not refused, nor is what a hook does."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.5)
        self.log("norm", self.grad_norm())
        with self.trainer.whole(self):
            self.log("weights", sum(p.norm() for p in self.parameters()))
        optimizer.step()

    def on_after_backward(self) -> None:
        if dist.is_initialized():
            dist.all_reduce(torch.ones(()))


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["self.sum_over_ranks", "torch.distributed"])
def test_manual_optimization_counts_each_sample_once(how: str) -> None:
    refused = pytest.raises(RuntimeError, match="of torch.distributed was called here, but 2 ranks each share")
    with refused if how == "torch.distributed" else nullcontext():
        found = []
        for strategy, devices in (("tensor", 2), ("single", 1)):
            module, options = ByHand(how), {"strategy": strategy, "devices": devices, "accelerator": "cpu"}
            quiet(**options, precision="64-true").fit(module, loader(32, 8))
            found.append([*weights(module), module.total, module.count])
        assert distance(*found) < 1e-12


class InAClosure(Net):
    """Calls a collective in the closure of a manual step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor:
            loss = self.net(batch[0]).square().mean()
            dist.all_reduce(loss.detach().clone())
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)


@pytest.mark.ranks
def test_a_closure_is_a_part_of_the_step() -> None:
    with pytest.raises(RuntimeError, match="allreduce of torch.distributed was called here, but 2 ranks each"):
        quiet(strategy="tensor", devices=2, accelerator="cpu").fit(InAClosure(optimizer="SGD"), loader(16, 4))


class Counts(Net):
    """A step of an evaluation that adds its samples up by itself, or as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        size = torch.tensor(len(batch[0]))
        self.log("loss", self.net(batch[0]).mean())
        if self.how == "self.all_gather":
            self.seen += int(self.all_gather(size).sum())
        elif self.how == "self.sum_over_ranks":
            self.seen += int(self.sum_over_ranks(size))
        elif self.how == "the maximum":
            dist.all_reduce(size, dist.ReduceOp.MAX)
        else:
            dist.all_reduce(size)

    def on_validation_epoch_end(self) -> None:
        assert self.seen == 16


@pytest.mark.ranks
@pytest.mark.parametrize("how", [*HOW[:2], "torch.distributed"])
def test_a_step_of_an_evaluation_counts_each_sample_once(how: str) -> None:
    refused = pytest.raises(RuntimeError, match="allreduce of torch.distributed was called here, but 2 ranks each")
    with refused if how == "torch.distributed" else nullcontext():
        quiet(strategy="tensor", devices=2, accelerator="cpu").validate(Counts(how), loader(16, 4), verbose=False)


@pytest.mark.ranks
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_a_step_of_an_evaluation_calls_no_collective_where_only_the_last_stage_ends_it(how: str) -> None:
    with pytest.raises(RuntimeError, match="was called here, but a pipeline runs a step in parts"):
        quiet(strategy="pipeline", devices=2, accelerator="cpu").validate(Counts(how), loader(16, 4), verbose=False)


class CountsInHook(Counts):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


@pytest.mark.ranks
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("how", "devices", "last"), [(HOW[0], 2, (4, 1)), (HOW[1], 2, (4, 1)), (HOW[0], 3, (4, 2))], ids=str
)
def test_a_hook_of_a_batch_calls_no_collective_where_ranks_without_samples_do_not_call_it(
    how: str, devices: int, last: tuple[int, int]
) -> None:
    """The last batch has `last` samples, of which every rank has some, or not."""
    trainer = quiet(strategy="ddp", devices=devices, accelerator="cpu", split_batches=True)
    trainer.validate(CountsInHook(how), loader(12 + last[0], 6), verbose=False)
    with pytest.raises(
        RuntimeError, match="ranks without samples of this batch of an evaluation do not call its hooks"
    ):
        trainer.validate(CountsInHook(how), loader(12 + last[1], 6), verbose=False)


class Measured(Net):
    """Computes a metric of all ranks within each step."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counted.update(len(batch[0]))
        self.log("samples", self.counted.compute())
        return super().training_step(batch, batch_idx)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["tensor", pytest.param("ddp=2,tensor=2", marks=pytest.mark.slow)])
def test_a_metric_that_a_step_computes_counts_them_once(strategy: str) -> None:
    trainer = quiet(strategy=strategy, devices=RANKS[strategy], accelerator="cpu", split_batches=True)
    trainer.fit(Measured(), loader(16, 8))
    assert float(trainer.callback_metrics["samples"]) == 12.0, "the mean of 8 and 16"


class Gathers(Net):
    """Gathers in a hook, where stages of a pipeline meet too."""

    def on_train_epoch_end(self) -> None:
        topology = self.trainer.strategy.topology
        gathered = self.all_gather({"rank": torch.tensor(self.global_rank), "two": (1.0, [2])})
        assert gathered["rank"].tolist() == ([1] if topology.world_size == 2 else [0, 2])
        assert gathered["two"][0].shape == (topology.data_size,)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["pipeline", pytest.param("ddp=2,tensor=2", marks=pytest.mark.slow)])
def test_the_rank_that_reports_stands_for_those_that_share_its_samples(strategy: str) -> None:
    quiet(strategy=strategy, devices=RANKS[strategy], accelerator="cpu").fit(Gathers(), loader(16, 4))


class GathersDifferent(Net):
    """Gathers what `made` says for each rank."""

    def __init__(self, *made: Any) -> None:
        super().__init__()
        self.made = made

    def on_train_epoch_end(self) -> None:
        self.all_gather(self.made[self.global_rank])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((torch.ones(3), torch.ones(2)), r"float32\[3\] on rank 0 and float32\[2\] on rank 1"),
        ((torch.ones(2, 3), torch.ones(3, 2)), r"float32\[2, 3\] on rank 0 and float32\[3, 2\] on rank 1"),
        ((1, 1.0), r"int64\[\] on rank 0 and float32\[\] on rank 1"),
        (({"a": [1, 2]}, {"a": [1]}), r"\{a: \(int64\[\], int64\[\]\)\} on rank 0 and \{a: \(int64\[\]\)\} on rank 1"),
    ],
    ids=["length", "shape", "dtype", "number"],
)
def test_what_differs_in_shape_is_refused_by_rank(made: Any, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"must be equal on all ranks, and was given {said}; pad them"):
        quiet(strategy="ddp", devices=2, accelerator="cpu").fit(GathersDifferent(*made), loader(16, 4))
