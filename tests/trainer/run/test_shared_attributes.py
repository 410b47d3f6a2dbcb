"""Attributes that others hold too come back so that they still hold the same, where that was so."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, equal, quiet, weights


class Own(Net):
    def train_dataloader(self) -> Any:
        return DataLoader(data(16), batch_size=4, shuffle=True)


class Perturbs(Own):
    """Learns what is added to its inputs, as another tensor in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = torch.zeros(8, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0] + self.delta), batch[1])

    def on_after_backward(self) -> None:
        assert self.delta.grad is not None
        self.delta = (self.delta + 0.1 * self.delta.grad.sign()).detach().requires_grad_()


class Steps(Own):
    """Renews a tensor in each epoch, and the optimizer of it."""

    def __init__(self) -> None:
        super().__init__()
        self.on_train_epoch_start()

    def on_train_epoch_start(self) -> None:
        self.z = torch.zeros(8, requires_grad=True)
        self.stepper = torch.optim.SGD([self.z], lr=0.5, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0] + self.z), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.stepper.step()
        self.stepper.zero_grad()


class Weighs(Own):
    """Hands new weights to its sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.odds = torch.ones(24, dtype=torch.double)

    def train_dataloader(self) -> Any:
        self.sampler = WeightedRandomSampler(self.odds, 24)  # type: ignore[arg-type]
        return DataLoader(data(24), batch_size=4, sampler=self.sampler)

    def on_train_epoch_end(self) -> None:
        self.odds = self.odds * torch.linspace(0.5, 2, 24, dtype=torch.double)
        self.sampler.weights = self.odds


class Noise:
    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator


class SharesGenerator(Own):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)
        self.noise = Noise(self.generator)

    def on_train_epoch_start(self) -> None:
        self.generator = torch.Generator().manual_seed(self.current_epoch)
        self.noise.generator = self.generator

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] + torch.randn(8, generator=self.generator)
        return F.cross_entropy(self(x + torch.randn(8, generator=self.noise.generator)), batch[1])


class Sees(Own):
    """Has the list of a callback, which renews it."""

    seen: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(1.0)
        callback: Any = self.trainer.callbacks[0]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * len(callback.seen))


class Gives(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        module.seen = self.seen = []


class Replaces(Net):
    """The loader keeps the list that a hook replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = list(range(16))

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(data(64), self.chosen), batch_size=4)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.chosen = [(i + 5) % 64 for i in self.chosen]


class Ranks(Own):
    """Keeps the pairs that it had first beside the best ones."""

    def __init__(self) -> None:
        super().__init__()
        self.best = self.first = [(0, 1.0), (1, 2.0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.first[0][1] + 0.1 * self.best[0][1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.best = [(i + 1, value * 0.5) for i, value in self.best]


class Pools(Own):
    """A hook of the start makes a list, which a callback holds and steps replace."""

    pool: Any = None

    def on_fit_start(self) -> None:
        self.pool = [1.0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.pool = [value + 1 for value in self.pool]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        callback: Any = self.trainer.callbacks[0]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * self.pool[0] + 0.1 * callback.pool[0])


class HoldsThePool(Callback):
    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.pool = module.pool


class Lazy(dict[str, int]):
    """A dict whose values are not to be asked for."""

    def values(self) -> Any:
        raise RuntimeError


class HasLazy(Own):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = Lazy(a=1)


class Remakes(Net):
    """The loader method makes the list to which hooks add."""

    def train_dataloader(self) -> Any:
        self.added: list[int] = []
        added = self.added

        def collate(samples: list[Any]) -> Any:
            x, y = torch.utils.data.default_collate(samples)
            return x + 0.1 * len(added), y

        return DataLoader(data(16), batch_size=4, collate_fn=collate)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.added.append(1)


class Grows(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(0, 8), persistent=False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.bank = torch.cat([self.bank, batch[0].detach()])


class Loads(Own):
    """Saves by hooks what else is in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.history = [0.0]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.history = [*self.history, 1.0]

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["history"] = [*self.history]

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.history = checkpoint["history"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.1 * len(self.history))


class Extends(Callback):
    """Adds what it had to what it has."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.values.append(1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [*self.values]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values.extend(state_dict["values"])


class Counts(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        callback: Any = self.trainer.callbacks[0]
        return super().training_step(batch, batch_idx) * (1 + 0.1 * len(callback.values))


class Saves(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(
    kind: type[Module], *callbacks: Callback, data: DataModule | None = None, path: Path | None = None, every: int = 0
) -> Module:
    torch.manual_seed(0)
    module = kind()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "reload_dataloaders_every_n_epochs": every}
    quiet(max_epochs=4, seed=0, callbacks=[*callbacks], **options).fit(module, datamodule=data, ckpt_path=path)
    return module


CASES: list[tuple[type[Module], type[Callback] | None]] = [(Sees, Gives), (Counts, Extends), (Pools, HoldsThePool)]
CASES += [
    (kind, None) for kind in (Perturbs, Steps, Weighs, SharesGenerator, Replaces, Ranks, HasLazy, Remakes, Grows, Loads)
]


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(("kind", "callback"), CASES)
def test_who_holds_an_attribute_holds_it_in_a_resumed_run(
    kind: type[Module], callback: type[Callback] | None, every: int, tmp_path: Path
) -> None:
    def run(*saves: Callback, path: Path | None = None) -> dict[str, Tensor]:
        return weights(fit(kind, *([] if callback is None else [callback()]), *saves, path=path, every=every))

    whole = run()
    for step in (6, 9):
        run(Saves(tmp_path / str(step), step))
        assert equal(run(path=tmp_path / str(step)), whole)


class Buffer:
    """A store of samples of the user's own class."""

    def __init__(self) -> None:
        self.items: list[float] = []

    def __getitem__(self, i: int) -> float:
        return self.items[i]

    def __len__(self) -> int:
        return len(self.items)


class Stores(DataModule):
    def __init__(self) -> None:
        self.buffer = Buffer()

    def train_dataloader(self) -> Any:
        return DataLoader(data(16), batch_size=4)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.buffer.items.append(1.0)
        return [batch[0] + 0.1 * len(self.buffer), batch[1]]


begun: list[Any] = []
"""Where loaders of the following began."""


class Waits(Stores):
    """Begins its next loader where it was, once."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = None

    def train_dataloader(self) -> Any:
        begun.append(self.pending)
        self.pending = None
        return super().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pending = state_dict["position"]


def test_objects_of_a_datamodule_are_saved(tmp_path: Path) -> None:
    fit(Net, Saves(tmp_path / "saved", 6), data=Stores())
    assert equal(weights(fit(Net, data=Stores(), path=tmp_path / "saved")), weights(fit(Net, data=Stores())))


def test_a_datamodule_is_given_its_state_once(tmp_path: Path) -> None:
    fit(Net, Saves(tmp_path / "saved", 6), data=Waits(), every=1)
    begun.clear()
    fit(Net, data=Waits(), path=tmp_path / "saved", every=1)
    assert begun == [3, None, None, None]  # as a new run, of its epoch, and of two more


class Drops(Own):
    """Holds a large tensor in a list as the run is set up."""

    held: Any = None

    def configure_optimizers(self) -> Any:
        self.cache = [torch.ones(8)]
        Drops.held = weakref.ref(self.cache[0])
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.cache = []


def test_what_was_replaced_is_not_kept_alive() -> None:
    fit(Drops)
    gc.collect()
    assert Drops.held() is None
