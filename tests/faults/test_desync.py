"""One rank that does something else than the others: stopped before a parameter changes, and named where there is a
majority.

A collective whose tensors do not fit gloo ends by itself, by an abort or at the strategy's `timeout_s`, before the
ranks could compare
anything: then it is the end that is tested, not the name. The slow run takes every case under ddp and fsdp on 2 and 3
ranks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from lockstep.strategies import DDP, FSDP
from lockstep.strategies.launch.failure import RankFailure
from tests.trainer.toy import Net, data, distance, loader, net, quiet, weights

pytestmark = pytest.mark.faults

TIMEOUT_S = 3
ODD_RANK, ODD_STEP = 1, 2


def reduces(size: int, dtype: torch.dtype = torch.float32, op: Any = dist.ReduceOp.SUM) -> Callable[[], object]:
    return lambda: dist.all_reduce(torch.ones(size, dtype=dtype), op)


def broadcasts(size: int) -> Callable[[], object]:
    return lambda: dist.broadcast(torch.ones(size), 0)


def gathers(size: int) -> Callable[[], object]:
    return lambda: dist.all_gather([torch.empty(size) for _ in range(dist.get_world_size())], torch.ones(size))


NAMED = {  # what the ranks do, what the odd one does
    "another dtype of this size": ([reduces(4)], [reduces(4, torch.int32)]),
    "another reduction": ([reduces(4)], [reduces(4, op=dist.ReduceOp.MAX)]),
    "another reduction, long before": ([reduces(4)] * 12, [reduces(4, op=dist.ReduceOp.MAX)] + [reduces(4)] * 11),
    "another shape of a broadcast": ([broadcasts(4)], [broadcasts(6)]),
    "reordered, of one size": ([reduces(4), reduces(4, torch.int32)], [reduces(4, torch.int32), reduces(4)]),
}
ENDED = {
    "skipped": ([reduces(4)], []),
    "extra": ([reduces(4)], [reduces(4), reduces(4)]),
    "extra of another kind": ([reduces(4)], [reduces(4), broadcasts(4)]),
    "reordered": ([reduces(4), broadcasts(4)], [broadcasts(4), reduces(4)]),
    "reordered sizes": ([reduces(4), reduces(8)], [reduces(8), reduces(4)]),
    "another shape": ([reduces(4)], [reduces(6)]),
    "another shape of a gather": ([gathers(4)], [gathers(6)]),
    "another dtype": ([reduces(4)], [reduces(4, torch.float64)]),
    "another kind": ([reduces(4)], [broadcasts(4)]),
    "a gather for a reduction": ([reduces(4)], [gathers(4)]),
}


class Watched(Net):
    """Leaves on the disk which steps each rank has taken, and whether its parameters are those of before when it
    fails."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.parts()

    def parts(self) -> list[torch.Tensor]:
        return [getattr(p, "_local_tensor", p).detach().clone() for p in self.parameters()]

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        self.before = self.parts()
        Path(f"stepped{self.global_rank}").write_text(str(self.global_step))

    def on_exception(self, exception: BaseException) -> None:
        rank, size = self.global_rank, self.trainer.world_size
        now = zip(self.before, self.parts(), strict=True)  # FSDP has gathered them, where the forward did not end
        same = all(
            torch.equal(part, value if value.shape == part.shape else value.chunk(size)[rank]) for part, value in now
        )
        Path(f"failed{self.global_rank}").write_text(f"{self.global_step} {same}")


class Odd(Watched):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.differ()
        return super().training_step(batch, batch_idx)

    def differ(self) -> None:
        odd = self.global_step == ODD_STEP and self.global_rank == ODD_RANK
        if self.case == "names":
            self.log("odd" if odd else "usual", 1.0)
        else:
            for call in (NAMED | ENDED)[self.case][odd]:
                call()


class OddLater(Odd):
    """Differs once the ranks have exchanged what they called."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Net.training_step(self, batch, batch_idx)

    def on_after_backward(self) -> None:
        self.differ()


class OddLast(OddLater):
    """Differs just before the optimizer steps."""

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.differ()


def failure(strategy: str, ranks: int, module: Net, batches: Any) -> Exception:
    """What a fit raises that must not continue to its end, after a check of what it has left."""
    trainer = quiet(
        strategy={"ddp": DDP, "fsdp": FSDP}[strategy](timeout_s=TIMEOUT_S), devices=ranks, accelerator="cpu"
    )
    begin = time.time()
    with pytest.raises((RuntimeError, RankFailure)) as caught:
        trainer.fit(module, batches)
    last_step = max((path.stat().st_mtime for path in Path().glob("stepped*")), default=begin)
    assert time.time() - last_step < TIMEOUT_S + 12, (
        "the timeout, 4 s to clean up and, before the first step, the start of the ranks"
    )
    for path in Path().glob("failed*"):
        assert path.read_text().endswith("True"), "a parameter has changed in the step that failed"
    return caught.value


def stepped(ranks: int) -> list[int]:
    """The last step of each rank."""
    return [int(path.read_text()) if (path := Path(f"stepped{rank}")).exists() else -1 for rank in range(ranks)]


def is_named(error: Exception, ranks: int) -> bool:
    who = f"rank {ODD_RANK} did not do what the others did" if ranks > 2 else "ranks 0 and 1 did different things"
    return who in str(error)


def check_collectives(strategy: str, ranks: int, case: str, module: type[Odd] = Odd) -> None:
    error = failure(strategy, ranks, module(case), loader(60, 2))
    assert stepped(ranks) == [ODD_STEP - 1] * ranks
    if case in ENDED:
        assert isinstance(error, RankFailure) or is_named(error, ranks) or re.search("gloo", str(error)), error
        assert not isinstance(error, RankFailure) or error.signal == "SIGABRT"
    else:
        assert is_named(error, ranks), error
        assert list(Path().glob("failed*")), "nobody checked the parameters"


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "ranks", "case"),
    [
        ("ddp", 3, "another reduction, long before"),
        ("fsdp", 2, "another shape of a broadcast"),
        ("fsdp", 3, "names"),
        ("ddp", 3, "skipped"),
        ("ddp", 2, "reordered"),
    ],
)
def test_a_rank_that_differs_is_stopped(strategy: str, ranks: int, case: str) -> None:
    check_collectives(strategy, ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*NAMED, *ENDED, "names"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_rank_that_differs_is_stopped(strategy: str, ranks: int, case: str) -> None:
    check_collectives(strategy, ranks, case)


@pytest.mark.parametrize("module", [OddLater, OddLast])
@pytest.mark.parametrize(
    ("strategy", "ranks", "case"),
    [
        ("ddp", 3, "another reduction"),
        *(
            pytest.param(strategy, ranks, case, marks=pytest.mark.slow)
            for strategy in ("ddp", "fsdp")
            for ranks in (2, 3)
            for case in NAMED
        ),
    ],
)
def test_a_rank_that_differs_after_the_backward_is_stopped(
    strategy: str, ranks: int, case: str, module: type[Odd]
) -> None:
    check_collectives(strategy, ranks, case, module)


class MayDiffer(Net):
    """What does not contradict: roots and others, uneven parts, groups of some."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rank, size = self.global_rank, self.trainer.world_size
        if self.global_step == 0 and batch_idx == 0:
            self.alone = dist.new_group([0])
        if rank == 0:
            dist.all_reduce(torch.ones(3), group=self.alone)
        dist.gather(torch.ones(4), [torch.empty(4) for _ in range(size)] if rank == 0 else None)
        dist.scatter(torch.empty(4), [torch.ones(4) for _ in range(size)] if rank == 0 else None)
        dist.all_to_all_single(
            torch.empty(size * (rank + 1)),
            torch.ones(sum(range(1, size + 1))),
            [rank + 1] * size,
            list(range(1, size + 1)),
        )
        dist.all_reduce(torch.ones(4, 1) if rank == 0 else torch.ones(4))
        dist.broadcast(torch.ones(5), 0) if rank == 0 else dist.broadcast(torch.empty(5), 0)
        return super().training_step(batch, batch_idx)


def test_what_ranks_may_do_differently_raises_nothing() -> None:
    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu")
    trainer.fit(MayDiffer(), loader(24, 4))
    assert trainer.global_step == 3


# ---- loaders ----------------------------------------------------------------------------------------------


class Own(IterableDataset):
    """Each rank has its own samples, the second one fewer."""

    shards_itself = True
    COUNTS = (20, 11, 17)

    def __init__(self) -> None:
        self.samples = data(60)

    def __iter__(self) -> Iterator[Any]:
        rank = int(os.environ.get("RANK", 0))
        return (self.samples[i] for i in range(rank * 20, rank * 20 + self.COUNTS[rank]))


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("ddp", 3), pytest.param("fsdp", 3, marks=pytest.mark.slow), ("fsdp", 2)]
)
def test_uneven_shards_give_the_mean_over_all_samples(strategy: str, ranks: int) -> None:
    module = net()
    quiet(strategy=strategy, devices=ranks, accelerator="cpu", precision="64-true").fit(
        module, DataLoader(Own(), batch_size=4)
    )
    hand, samples = net().double(), data(60)
    optimizer = hand.configure_optimizers()
    for step in range(5):
        chosen = [rank * 20 + i for rank in range(ranks) for i in range(4 * step, min(4 * step + 4, Own.COUNTS[rank]))]
        x, y = (torch.stack(parts) for parts in zip(*(samples[i] for i in chosen), strict=True))
        F.cross_entropy(hand(x.double()), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(module.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-12, atol=1e-12)


class FewOwn(Own):
    """Only the last rank has samples."""

    COUNTS = (0, 5)


class Locked(FewOwn):
    """Its samples cannot be sent."""

    def __iter__(self) -> Iterator[Any]:
        return ((*sample, threading.Lock()) for sample in super().__iter__())


def test_a_batch_that_cannot_be_sent_to_a_rank_without_one_is_refused() -> None:
    def collated(samples: list[Any]) -> Any:
        return torch.stack([x for x, *_ in samples]), torch.tensor([int(y) for _, y, _ in samples]), samples[0][2]

    trainer = quiet(strategy="ddp", devices=2, accelerator="cpu")
    with pytest.raises(TypeError, match=r"rank 1's cannot be pickled \(.*lock.*\); let batches hold tensors"):
        trainer.fit(net(), DataLoader(Locked(), batch_size=4, collate_fn=collated))


class Together(Net):
    """Its step and its hooks meet in collectives and read the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.sum_over_ranks(batch[0].square().sum().double())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.sum_over_ranks(batch[0].sum().double()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("size", float(len(batch[0])), on_step=False, on_epoch=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", DDP(sync_batchnorm=True)])
def test_a_rank_that_never_had_a_batch_of_its_own_meets_the_others(strategy: Any) -> None:
    found, alone = [], [data(60)[20 + i] for i in range(5)]
    for options, dataset in (({"strategy": strategy, "devices": 2}, FewOwn()), ({}, alone)):
        torch.manual_seed(0)
        module, own = Together(), DataLoader(dataset, batch_size=4)
        trainer = quiet(accelerator="cpu", precision="64-true", **options)
        trainer.fit(module, own, own)
        found.append([*weights(module), *(trainer.callback_metrics[name] for name in ("val", "size"))])
    assert distance(*found) < 1e-12


class Batches:
    """Ready batches; the odd rank's are smaller, or fewer."""

    def __init__(self, odd_size: int = 4, odd_length: int = 24) -> None:
        self.odd_size, self.odd_length = odd_size, odd_length

    def __iter__(self) -> Iterator[Any]:
        odd = os.environ.get("RANK") == str(ODD_RANK)
        samples = data(200)
        for i in range(self.odd_length if odd else 24):
            x, y = zip(*(samples[8 * i + j] for j in range(self.odd_size if odd else 4)), strict=True)
            yield torch.stack(x), torch.stack(y)


def check_sizes(strategy: str, ranks: int) -> None:
    error = failure(strategy, ranks, Watched(), Batches(odd_size=3))
    assert is_named(error, ranks) and "samples of the global batch" in str(error)
    assert stepped(ranks) == [-1] * ranks


def check_lengths(strategy: str, ranks: int) -> None:
    failure(strategy, ranks, Watched(), Batches(odd_length=12))
    assert stepped(ranks) == [12 // ranks - 1] * ranks, "the steps that all have batches for, and no other"


@pytest.mark.long
@pytest.mark.parametrize("check", [check_sizes, check_lengths])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 3),
        *(
            pytest.param(strategy, ranks, marks=pytest.mark.slow)
            for strategy, ranks in [("ddp", 2), ("fsdp", 2), ("fsdp", 3)]
        ),
    ],
)
def test_loaders_that_give_the_ranks_other_batches_are_stopped(
    check: Callable[[str, int], None], strategy: str, ranks: int
) -> None:
    check(strategy, ranks)
