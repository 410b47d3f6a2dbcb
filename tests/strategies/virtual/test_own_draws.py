"""What a dataset, a transform or a collate function draws or counts by itself is refused before it depends on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lockstep.strategies import Federated
from tests.trainer.toy import Net, data, net, quiet

SAMPLES = list(data(48))


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.rng, self.level = np.random.default_rng(0), 0.0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        x, y = SAMPLES[index]
        return x + float(self.rng.normal()), y


class Leveled(Noisy):
    """Keeps what hooks set, and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        x, y = self.cache.setdefault(index, SAMPLES[index])
        return x + self.level + torch.randn(8), y


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        x, y = default_collate(batch)
        return x * 0.99**self.calls, y


class Leveling(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.level = float(self.current_epoch)


def fit(module: Any, train: Any, val: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 2, "virtual_ranks": 4} | options
    ckpt_path = given.pop("ckpt_path", None)
    trainer = quiet(**given)
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (lambda: DataLoader(Noisy(), 4), None, r"Noisy\.rng is drawn from"),
        (lambda: DataLoader(Leveled(), 4, collate_fn=Counting()), None, r"Counting\.calls is changed"),
        (lambda: DataLoader(Leveled(), 4), lambda: DataLoader(Noisy(), 4), r"Noisy\.rng is drawn from"),
    ],
)
def test_it_is_refused_by_name_in_the_first_step(train: Any, val: Any, said: str) -> None:
    module = net()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(ValueError, match=f"{said} as samples are read, which a rank does.*virtual_ranks"):
        fit(module, train(), None if val is None else val(), num_sanity_val_steps=2)
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [0, 1])
def test_it_is_refused_on_several_ranks(workers: int) -> None:
    with pytest.raises(ValueError, match=r"Noisy\.rng is drawn from as samples are read"):
        fit(net(), DataLoader(Noisy(), 4, num_workers=workers), strategy="ddp", devices=2)


def test_it_ends_a_federated_run_and_drops_no_client() -> None:
    with pytest.raises(RuntimeError, match=r"Noisy\.rng is drawn from as samples are read"):
        fit(
            net(),
            DataLoader(Noisy(), 4),
            strategy=Federated(clients=lambda index: index // 24, fraction=1.0),
            devices=1,
            virtual_ranks=None,
        )


@pytest.mark.ranks
def test_what_hooks_set_and_caches_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    def weights(**options: Any) -> Any:
        torch.manual_seed(0)
        module = Leveling()
        trainer = fit(module, DataLoader(Leveled(), 4, shuffle=True), seed=1, **options)
        return trainer, [p.detach() for p in module.parameters()]

    _, whole = weights()
    first, _ = weights(max_steps=5)
    first.save_checkpoint(tmp_path / "step 5")
    _, ranks = weights(strategy="ddp", devices=2)
    assert all(map(torch.equal, whole, ranks))
    _, resumed = weights(strategy="ddp", devices=2, ckpt_path=tmp_path / "step 5")
    assert all(map(torch.equal, whole, resumed))
