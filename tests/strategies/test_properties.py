"""Whatever the numbers are: each sample once, in the same global batches, with the gradient of one process on the whole
of them.

The sampling alone, over all ranks in one process, has its properties in `test_data.py`,
`test_resume_windows.py` and `test_combined.py`. Here the strategies train, on one set of real ranks for all examples:
rank 0 makes them up and compares, the others do as it does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import strategies
from lockstep.strategies import Loss, Strategy
from lockstep.strategies.data.sharded_loader import ShardedLoader, Window

pytestmark = pytest.mark.ranks


class Rows(Dataset[Any]):
    """Sample i: its features, its target, and how many tokens it counts, which differ a hundredfold."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(n)
        self.x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        self.y = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        self.tokens = torch.randint(1, 200, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], self.tokens[index], index


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    def mean(self, batch: Any, batch_idx: int) -> Any:
        x, y, _, _ = batch
        return (self.net(x) - y).square().mean()

    def over_tokens(self, batch: Any, batch_idx: int) -> Any:
        x, y, tokens, _ = batch
        return Loss(((self.net(x) - y).square().mean(1) * tokens).sum(), tokens.sum())


EXAMPLES = st.fixed_dictionaries(
    {
        "n": st.integers(1, 50),
        "batch_size": st.integers(1, 12),
        "accumulate": st.integers(1, 4),
        "split": st.booleans(),
        "drop_last": st.booleans(),
        "shuffle": st.booleans(),
        "step": st.sampled_from(["mean", "over_tokens"]),
        "began": st.integers(1, 4),
    }
)


def loader_of(example: dict[str, Any]) -> Any:
    return DataLoader(
        Rows(example["n"]), example["batch_size"], shuffle=example["shuffle"], drop_last=example["drop_last"]
    )


def windows_of(example: dict[str, Any], loader: ShardedLoader) -> list[Window]:
    loader.resume_windows(loader.plan | {"ranks": example["began"]})
    return list(loader.windows(1))


def is_empty(example: dict[str, Any], size: int) -> bool:
    """Whether drop_last leaves nothing, which is an error."""
    unit = example["batch_size"] * (1 if example["split"] else max(size, example["began"]))
    return example["drop_last"] and example["n"] < unit


def gradients(strategy: Strategy, example: dict[str, Any]) -> list[list[Tensor]]:
    """Those of each window of an epoch; every rank calls it."""
    torch.manual_seed(0)
    model = Step().double()
    wrapped = strategy.setup_module(model)
    loader = strategy.shard_loader(loader_of(example), seed=3, accumulate=example["accumulate"], split=example["split"])
    found = []
    for window in windows_of(example, loader):
        strategy.forward_backward(wrapped, getattr(model, example["step"]), window)
        mine = [parameter.grad for parameter in model.parameters()]
        found.append([grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in mine])
        for parameter in model.parameters():
            parameter.grad = None
    strategy.teardown_module(wrapped)
    return found


def check(example: dict[str, Any], size: int, found: list[list[Tensor]]) -> None:
    """Against plain torch on one process: its global batches, and the gradient of each on the whole of it."""

    def windows(rank: int, size: int) -> list[Window]:
        return windows_of(
            example,
            ShardedLoader(
                loader_of(example),
                rank=rank,
                size=size,
                seed=3,
                accumulate=example["accumulate"],
                split=example["split"],
            ),
        )

    torch.manual_seed(0)
    model, rows = Step().double(), Rows(example["n"])
    seen: list[int] = []
    for of_ranks, alone, grads in zip(
        zip(*(windows(rank, size) for rank in range(size)), strict=True), windows(0, 1), found, strict=True
    ):
        numbers = torch.cat(
            [micro.batch[3] for window in of_ranks for micro in window.micro_batches if micro.num_samples]
        )
        assert set(numbers.tolist()) == {number for micro in alone.micro_batches for number in micro.batch[3].tolist()}
        seen += numbers.tolist()
        output = getattr(model, example["step"])((rows.x[numbers], rows.y[numbers], rows.tokens[numbers], numbers), 0)
        expected = torch.autograd.grad(
            output.total / output.count if isinstance(output, Loss) else output, list(model.parameters())
        )
        for grad, other in zip(grads, expected, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-14)
    unit = example["batch_size"] * (1 if example["split"] else example["began"])
    assert len(seen) == len(set(seen)) == (len(rows) - len(rows) % unit if example["drop_last"] else len(rows))


def on_ranks(name: str, size: int, num_examples: int) -> int:
    """Rank 0 makes examples, and smaller ones where one fails; the others follow until there are no more."""
    strategy = strategies.build(name, devices=size, accelerator="cpu", precision="64-true")[0]
    strategy.setup()
    tried = 0
    try:
        if strategy.topology.rank:
            while (example := strategy.broadcast(None)) is not None:
                gradients(strategy, example)
            return 0

        @settings(max_examples=num_examples, database=None, deadline=None, derandomize=True)
        @given(EXAMPLES)
        def one(example: dict[str, Any]) -> None:
            nonlocal tried
            if not is_empty(example, strategy.topology.data_size):
                strategy.broadcast(example)
                check(example, strategy.topology.data_size, gradients(strategy, example))
                tried += 1

        try:
            one()
        finally:
            strategy.broadcast(None)
        return tried
    finally:
        strategy.teardown()


MANY = [(name, size) for name in ("ddp", "fsdp") for size in (2, 3, 4)] + [("tensor", 2), ("fsdp=2,tensor=2", 4)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "num_examples"),
    [("ddp", 3, 30), *(pytest.param(*many, 100, marks=pytest.mark.slow) for many in MANY)],
)
def test_gradients_are_those_of_one_process(name: str, size: int, num_examples: int, run_ranks: Any) -> None:
    assert run_ranks(on_ranks, size, name, size, num_examples) > num_examples // 2
