"""What rank 0 brings back reaches the caller's module without code of the module's own."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from lockstep.callbacks import Callback
from tests.trainer.toy import Net, distance, loader, quiet, weights

pytestmark = pytest.mark.ranks


class TakesNoAssign(Net):
    """As of a time in which `load_state_dict` had two arguments."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=strict)


class LeavesTeacherOut(Net):
    """Its state dict has no weights of the frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 3).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("teacher")}


class Counting(nn.Linear):
    """Keeps the number of its batches beside its tensors."""

    batches = 0

    def get_extra_state(self) -> Any:
        return {"batches": [self.batches]}

    def set_extra_state(self, state: Any) -> None:
        self.batches = state["batches"][0]


class ForgetsOnLoading(Net):
    """`load_state_dict` is for checkpoints of others: what the run has counted is set back."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = Counting(8, 16)
        self.register_buffer("seen", torch.zeros(1))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        self.net[0].batches += 1

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict, assign)
        self.seen.zero_()
        return result


@pytest.mark.parametrize("kind", [TakesNoAssign, LeavesTeacherOut, ForgetsOnLoading])
def test_a_module_with_methods_of_its_own_for_its_state(kind: type[Net]) -> None:
    trained = []
    for options in ({}, {"strategy": "ddp", "devices": 2}):
        torch.manual_seed(0)
        model = kind()
        quiet(split_batches=True, precision="64-true", seed=0, **options).fit(model, loader(16, 4))
        trained.append(model)
    one, other = trained
    assert distance(weights(other), weights(one)) < 1e-12
    assert torch.equal(getattr(one, "seen", torch.ones(1)), getattr(other, "seen", torch.ones(1)))
    assert getattr(one.net[0], "batches", 0) == getattr(other.net[0], "batches", 0)


class OnMeta(Net):
    """Its two tied layers are on the meta device until a rank builds them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def configure_model(self) -> None:
        if self.first.weight.is_meta and self.trainer._run.active:  # on the rank
            self.first.weight = self.second.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.second(self.first(x)))


def test_tied_weights_on_the_meta_device_come_back_as_one() -> None:
    model = OnMeta()
    quiet(strategy="ddp", devices=2).fit(model, loader(16, 4))
    assert model.first.weight is model.second.weight and not model.first.weight.is_meta
    assert isinstance(model.first.weight, nn.Parameter) and model.first.weight.requires_grad


@dataclass
class Best:
    loss: float = 1.0


class Record:
    def __init__(self) -> None:
        self.epochs, self.seen, self.best = 0, list[int](), SimpleNamespace(step=0)


class ChangesObjects(Net):
    """Hooks change what it holds: in place, or by putting another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"alpha": 1.0, "rates": [0.5], "a.b": 1, "frozen": nn.Identity(), "gone": 1})
        self.record, self.bare, self.dated, self.best = Record(), SimpleNamespace(n=0), Decimal(0), Best()
        self.curve, self.array, self.former = torch.zeros(2), np.zeros(2), [0]
        self.alias = self.former

    def on_train_epoch_end(self) -> None:
        self.hparams.alpha *= 0.5
        self.hparams["rates"].append(self.hparams.alpha)
        self.hparams["a.b"] += 1
        self.hparams.pop("gone", None)
        self.record.epochs += 1
        self.record.seen.append(self.record.epochs)
        self.record.best.step = self.global_step
        self.bare.n += 1
        self.best.loss /= 2
        self.dated += Decimal("0.1")
        self.curve += 1
        self.array += 1
        self.former = [*self.former, 1]

    def held(self) -> list[Any]:
        return [self.hparams["rates"], self.record, self.bare, self.curve, self.array, self.best, self.alias]


class Watches(Callback):
    def __init__(self) -> None:
        self.record = Record()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.record.seen.append(trainer.current_epoch)


@pytest.mark.parametrize(
    "strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow), pytest.param("pipeline", marks=pytest.mark.slow)]
)
def test_objects_that_hooks_change_are_the_callers(strategy: str) -> None:
    def fit(**options: Any) -> list[Any]:
        torch.manual_seed(0)
        model, callback = ChangesObjects(), Watches()
        held = model.held()
        quiet(split_batches=True, max_epochs=2, callbacks=[callback], **options).fit(model, loader(16, 4))
        assert all(now is before for now, before in zip(model.held(), held, strict=True))
        own = {name: value for name, value in model.hparams.items() if name != "frozen"}
        record, bare, best = vars(model.record), vars(model.bare), vars(model.best)
        lists = [model.curve.tolist(), model.array.tolist(), model.former, model.alias, callback.record.seen]
        return [own, record, bare, best, model.dated, *lists]

    assert fit(strategy=strategy, devices=2) == fit()


class Curriculum(Dataset[Any]):
    def __init__(self) -> None:
        self.level, self.weights, self.images = 1.0, [1.0] * 16, list[torch.Tensor]()
        self.x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))

    def __getitem__(self, index: int) -> Any:
        return self.x[index] * self.level * self.weights[index], index % 3

    def __len__(self) -> int:
        return 16


class Reverses(Sampler[int]):
    """Its order depends on how often it was read."""

    def __init__(self) -> None:
        self.turns = 0

    def __iter__(self) -> Any:
        self.turns += 1
        return iter(range(16)) if self.turns % 4 < 2 else iter(range(15, -1, -1))

    def __len__(self) -> int:
        return 16

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


class Scales:
    def __init__(self) -> None:
        self.scale = 1.0

    def collate(self, samples: list[Any]) -> Any:
        return torch.stack([x for x, _ in samples]) * self.scale, torch.tensor([y for _, y in samples])


class Harder(Callback):
    """Changes what loaders read after each epoch."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        read = trainer.train_dataloader.loader
        dataset = read.dataset.dataset
        dataset.level += 0.5
        dataset.weights[3] += 1.0
        dataset.x[5] *= 2.0
        dataset.images += [torch.zeros(2**20)] * 20
        read.collate_fn.__self__.scale *= 0.9


def test_what_hooks_change_in_datasets_is_what_the_next_fit_reads() -> None:
    def fit(**options: Any) -> Any:
        torch.manual_seed(0)
        model, dataset, sampler, scales = Net(), Curriculum(), Reverses(), Scales()
        train = DataLoader(Subset(dataset, range(16)), 4, sampler=sampler, collate_fn=scales.collate)
        for _ in range(2):
            trainer = quiet(split_batches=True, precision="64-true", seed=0, callbacks=[Harder()], **options)
            trainer.fit(model, train)
        return model, [dataset.level, dataset.weights, dataset.x.tolist(), scales.scale, sampler.turns], dataset.images

    one, read, _ = fit()
    other, read_by_ranks, images = fit(strategy="ddp", devices=2)
    assert read_by_ranks == read
    assert distance(weights(other), weights(one)) < 1e-12
    assert not images  # more than 64 MB in a container stay on the ranks


class LoadsWhenUsed(Dataset[Any]):
    """Reads 80 MB with its first sample."""

    def __init__(self) -> None:
        self.is_loaded, self.images = False, None

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if not self.is_loaded:
            self.images, self.is_loaded = torch.ones(10_000_000, dtype=torch.float64), True
        return self.images[index].expand(8), index % 3  # type: ignore[index]


def test_a_dataset_that_loads_when_it_is_used_loads_again(caplog: pytest.LogCaptureFixture) -> None:
    model, dataset = Net(), LoadsWhenUsed()
    for _ in range(2):
        quiet(precision="64-true", strategy="ddp", devices=2).fit(model, DataLoader(dataset, 2))
    assert not dataset.is_loaded and dataset.images is None


class Teaches(Net):
    """A teacher in a list, and a network that a callback may hold, follow the weights and make the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Linear(8, 3).double().requires_grad_(False), nn.Linear(8, 3)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (self(batch[0]) - self.teachers[0](batch[0])).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            self.teachers[0].weight.lerp_(self.net[3].weight[:, :8], 0.1)
        self.teachers[0].eval()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_networks_in_lists_that_hooks_change_are_what_the_next_fit_uses(strategy: str) -> None:
    def fit(**options: Any) -> Teaches:
        torch.manual_seed(0)
        model = Teaches()
        untouched = model.teachers[1].weight.clone()
        for _ in range(2):
            quiet(split_batches=True, precision="64-true", seed=0, **options).fit(model, loader(16, 4))
        assert torch.equal(model.teachers[1].weight, untouched) and not model.teachers[0].training
        return model

    one, other = fit(), fit(strategy=strategy, devices=2)
    assert distance(weights(other), weights(one)) < 1e-12
    assert (one.teachers[0].weight - other.teachers[0].weight).abs().max() < 1e-12
