"""torchdata's StatefulDataLoader is read as a DataLoader with the same arguments, and resumed exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies.data.sharded_loader import ShardedLoader
from tests.trainer.toy import data, equal, net, quiet, weights

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 calls it


class Stream(IterableDataset):
    """Counts, with a state of its own, and says how many items it has read."""

    def __init__(self) -> None:
        self.at = self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 30:
            self.at += 1
            self.read += 1
            yield torch.tensor(self.at)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def values(loader: ShardedLoader, start: int = 0) -> list[Any]:
    return [torch.as_tensor(window.micro_batches[0].batch).tolist() for window in loader.windows(1, start)]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"drop_last": True},
        {"sampler": RandomSampler(range(30), replacement=True, num_samples=17)},
        {"batch_size": None},
    ],
    ids=["shuffle", "drop_last", "sampler", "no batches"],
)
def test_the_samples_are_those_of_a_dataloader(options: dict[str, Any]) -> None:
    options = {"batch_size": 4} | options
    numbers: Any = torch.arange(30)
    for rank in range(2):
        plain, stateful = (
            ShardedLoader(kind(numbers, **options), rank=rank, size=2, seed=3, sum_over_ranks=int)
            for kind in (DataLoader, StatefulDataLoader)
        )
        assert values(plain) == values(stateful) != []
        assert plain.num_samples == stateful.num_samples


def test_a_streams_own_state_spares_the_replay() -> None:
    def make() -> tuple[Stream, ShardedLoader]:
        stream = Stream()
        return stream, ShardedLoader(StatefulDataLoader(stream, 4), rank=0, size=1, seed=3)

    undisturbed = values(make()[1])
    assert undisturbed == values(ShardedLoader(DataLoader(Stream(), 4), rank=0, size=1, seed=3))
    first = make()[1]
    windows = first.windows(1)
    next(windows)
    stream, resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert values(resumed, 4) == undisturbed[1:] and stream.read == 26


def test_a_loader_with_a_loaded_state_is_refused() -> None:
    loader = StatefulDataLoader(data(), 4)
    next(iter(loader))
    other = StatefulDataLoader(data(), 4)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="a StatefulDataLoader with a loaded state would begin elsewhere than the run"):
        quiet().fit(net(), other)


@pytest.mark.ranks
def test_a_run_and_its_resume_equal_those_with_a_dataloader() -> None:
    def fit(kind: Any, **options: Any) -> Any:
        model, ckpt_path = net(dropout=0.3), options.pop("ckpt_path", None)
        trainer = quiet(enable_checkpointing=True, max_epochs=2, seed=0, **options)
        trainer.fit(model, kind(data(), 8, shuffle=True, num_workers=1), ckpt_path=ckpt_path)
        return trainer, weights(model)

    expected = fit(DataLoader)[1]
    assert equal(fit(StatefulDataLoader)[1], expected)
    saving = ModelCheckpoint(dirpath="saved", every_n_train_steps=3)
    fit(StatefulDataLoader, callbacks=saving, max_steps=3)
    assert equal(fit(StatefulDataLoader, ckpt_path=next(Path("saved").iterdir()))[1], expected)
