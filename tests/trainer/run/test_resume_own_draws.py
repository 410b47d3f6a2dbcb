"""What a dataset, its transforms and its collate function draw or count by themselves continues in a resumed run."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset, default_collate

from lockstep import CombinedLoader, DataModule
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, equal, net, quiet, weights

SAMPLES = list(data(22))
GLOBAL = np.random.default_rng(7)
CALLS = 0


class Noise:
    """A transform that draws, counts, and has a schedule."""

    def __init__(self, kind: str = "numpy") -> None:
        self.rng: Any = {
            "numpy": lambda: np.random.default_rng(1),
            "legacy": lambda: np.random.RandomState(1),
            "python": lambda: random.Random(1),
            "torch": lambda: torch.Generator().manual_seed(1),
        }[kind]()
        self.calls, self.level = 0, 0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.level = 0.9 * self.level + 0.1
        drawn = {
            np.random.Generator: lambda: self.rng.normal(),
            np.random.RandomState: lambda: self.rng.randn(),
            random.Random: lambda: self.rng.gauss(0, 1),
            torch.Generator: lambda: float(torch.randn(1, generator=self.rng)),
        }[type(self.rng)]()
        return x + float(drawn) * self.level + self.calls % 7


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise("torch")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, x: Any) -> Any:
        for transform in self.transforms:
            x = transform(x)
        return x


class Noisy(Dataset[Any]):
    def __init__(self, transform: Any, samples: Any = SAMPLES) -> None:
        self.transform, self.samples = transform, samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return self.transform(x), y


class Lazy(Noisy):
    """Makes its generator as it is first read, and counts with an iterator."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.rng: Any = None
        self.number = itertools.count(3, 2)

    def __getitem__(self, index: int) -> Any:
        if self.rng is None:
            self.rng = np.random.default_rng(5)
        if not hasattr(self, "other"):
            self.other = random.Random(6)
        x, y = self.samples[index]
        return x * self.rng.normal() + next(self.number) % 5 + self.other.random(), y


@dataclass(slots=True)
class InSlots:
    rng: Any = field(default_factory=lambda: np.random.default_rng(3))
    calls: int = 0

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        x, y = SAMPLES[index]
        return x * self.rng.normal() + self.calls % 3, y


class Shared(Noisy):
    """Counts where all processes see it, and holds methods of generators alone."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.calls = multiprocessing.Value("i", 0)
        self.normal, self.uniform = np.random.default_rng(1).normal, random.Random(1).uniform

    def __getitem__(self, index: int) -> Any:
        self.calls.value += 1
        x, y = self.samples[index]
        return x * self.normal() + self.uniform(0, 1) + self.calls.value % 3, y


class OfClass(Noisy):
    rng = np.random.default_rng(2)
    calls = 0

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        type(self).rng, type(self).calls = np.random.default_rng(2), 0

    def __getitem__(self, index: int) -> Any:
        type(self).calls += 1
        x, y = self.samples[index]
        return x * self.rng.normal() + self.calls % 4, y


def from_globals(batch: Any) -> Any:
    global CALLS
    CALLS += 1
    x, y = default_collate(batch)
    return x * GLOBAL.normal() + CALLS % 3, y


def in_closure() -> Any:
    rng, calls = random.Random(4), 0

    def collate(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        x, y = default_collate(batch)
        return x * rng.random() + calls % 3, y

    return collate


def with_argument(rng: Any, batch: Any) -> Any:
    x, y = default_collate(batch)
    return x * rng.normal(), y


class Stream(IterableDataset[Any]):
    """What is iterated in this process is read again where a run continues."""

    def __init__(self) -> None:
        self.transform = Compose(Noise("torch"))

    def __iter__(self) -> Any:
        return ((self.transform(x), y) for x, y in SAMPLES)


class Drawing(Sampler[int]):
    """Shares its generator with the dataset."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Any:
        return iter(torch.randperm(len(SAMPLES), generator=self.rng).tolist())


def shared_with_sampler() -> Any:
    noise = Noise("torch")
    return DataLoader(Noisy(noise), 8, sampler=Drawing(noise.rng))


def of_globals() -> Any:
    global CALLS, GLOBAL
    CALLS, GLOBAL = 0, np.random.default_rng(7)
    return DataLoader(SAMPLES, 8, collate_fn=from_globals)  # type: ignore[arg-type]


def plain(dataset: Any, **options: Any) -> Any:
    return DataLoader(dataset, 8, shuffle=True, **options)


LOADERS: dict[str, Any] = {
    "numpy": lambda: plain(Noisy(Noise())),
    "legacy": lambda: plain(Noisy(Noise("legacy"))),
    "python": lambda: plain(Noisy(Compose(Noise("python"), torch.nn.Identity()))),
    "torch": lambda: plain(Noisy(torch.nn.Sequential(Layer()))),
    "nested": lambda: plain(ConcatDataset([Subset(Noisy(Compose(Noise("torch"))), range(10)), Noisy(Noise())])),
    "lazy": lambda: plain(Lazy()),
    "shared": lambda: plain(Shared()),
    "slots": lambda: plain(InSlots()),
    "class": lambda: plain(OfClass()),
    "globals": of_globals,
    "closure": lambda: plain(SAMPLES, collate_fn=in_closure()),
    "partial": lambda: plain(SAMPLES, collate_fn=partial(with_argument, np.random.default_rng(8))),
    "stream": lambda: DataLoader(Stream(), 8),
    "stream and collate": lambda: DataLoader(Stream(), 8, collate_fn=in_closure()),
    "sampler": shared_with_sampler,
    "combined": lambda: CombinedLoader(
        {"a": plain(Noisy(Noise())), "b": plain(Noisy(Noise("python"), SAMPLES[:9]), collate_fn=in_closure())}
    ),
}


class Either(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        return sum(super(Either, self).training_step(part, batch_idx) for part in parts)


class SaveEverywhere(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer._run.window_is_open:
            trainer.save_checkpoint(self.folder / f"step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end {trainer.current_epoch}")


def fit(make: Any, ckpt: Path | None = None, val: Any = None, **options: Any) -> Any:
    module = net()
    module.__class__ = Either
    trainer = quiet(accelerator="cpu", **{"max_epochs": 2} | options)
    trainer.fit(module, make(), None if val is None else val(), ckpt_path=ckpt)
    return weights(module)


@pytest.mark.parametrize("name", LOADERS)
def test_every_checkpoint_continues_with_what_the_data_draws(tmp_path: Path, name: str) -> None:
    whole = fit(LOADERS[name], callbacks=[SaveEverywhere(tmp_path)])
    for path in sorted(tmp_path.iterdir()):
        assert equal(fit(LOADERS[name], path), whole), path.name


def test_it_continues_within_accumulation_and_with_validations(tmp_path: Path) -> None:
    noise: list[Noise] = []

    def make() -> Any:
        noise.append(Noise())
        return plain(Noisy(noise[-1]))

    def val() -> Any:  # with the transform of training, and one more
        return DataLoader(Noisy(Compose(noise[-1], Noise("python"))), 4)

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    whole = fit(make, val=val, callbacks=[SaveEverywhere(tmp_path)], **options)
    assert equal(whole, fit(make, accumulate_grad_batches=2))  # validation moves nothing of it
    for path in sorted(tmp_path.iterdir()):
        assert equal(fit(make, path, val, **options), whole), path.name


@pytest.mark.parametrize("every", [0, 1])
def test_it_continues_in_loaders_of_a_datamodule(tmp_path: Path, every: int) -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.noise, self.rng = Noise(), np.random.default_rng(3)

        def collate(self, batch: Any) -> Any:
            return with_argument(self.rng, batch)

        def train_dataloader(self) -> Any:
            return plain(Noisy(self.noise), collate_fn=self.collate)

    def run(ckpt: Path | None = None, **options: Any) -> Any:
        module, trainer = net(), quiet(max_epochs=2, reload_dataloaders_every_n_epochs=every, **options)
        trainer.fit(module, datamodule=Data(), ckpt_path=ckpt)
        return weights(module)

    whole = run(callbacks=[SaveEverywhere(tmp_path)])
    for path in sorted(tmp_path.iterdir()):
        assert equal(run(path), whole), path.name


@pytest.mark.ranks
def test_each_rank_continues_with_its_own(tmp_path: Path) -> None:
    def make() -> Any:
        noise = Noise()
        return DataLoader(Noisy(noise, SAMPLES[:21]), 4)  # of which ranks read other numbers

    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    whole = fit(make, callbacks=[SaveEverywhere(tmp_path)], **options)
    for name in ("step 2", "end 0"):
        assert equal(fit(make, tmp_path / name, **options), whole), name
    fit(make, tmp_path / "end 0")  # with those of the first rank


def test_every_validation_draws_the_same() -> None:
    read: list[Any] = []

    class Reads(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            read.append(batch[0])

    quiet(max_epochs=3).fit(Reads(), plain(SAMPLES), DataLoader(Noisy(Noise()), 22))
    assert len(read) == 3 and torch.equal(read[0], read[1]) and torch.equal(read[0], read[2])


def test_what_a_hook_sets_in_a_dataset_stays(tmp_path: Path) -> None:
    class Sets(Net):
        dataset: Any
        seen: Any

        def on_train_epoch_start(self) -> None:
            self.dataset.transform.level = float(self.current_epoch)

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen.append(self.dataset.transform.level)

    class Level:
        level = -1.0

        def __init__(self) -> None:
            self.level = -1.0

        def __call__(self, x: Any) -> Any:
            return x + self.level

    def run(ckpt: Path | None = None, **options: Any) -> Any:
        module, trainer = Sets(), quiet(max_epochs=2, **options)
        module.dataset, module.seen = Noisy(Level()), []
        trainer.fit(module, plain(module.dataset), ckpt_path=ckpt)
        return module.seen

    whole = run(callbacks=[SaveEverywhere(tmp_path)])
    assert whole == [0.0] * 3 + [1.0] * 3
    for name in ("step 2", "end 0", "step 5"):
        assert run(tmp_path / name) == whole  # with what it had seen before


class Caching(Noisy):
    """Says in a number how much there is in a cache, which is not saved."""

    def __init__(self) -> None:
        super().__init__(lambda x: x)
        self.cache: dict[int, Any] = {}
        self.held = 0

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = self.samples[index]
            self.held += 1
        assert self.held == len(self.cache)
        return self.cache[index]


def test_a_number_beside_a_cache_is_not_saved_but_named(tmp_path: Path, caplog: Any) -> None:
    whole = fit(lambda: plain(Caching()), callbacks=[SaveEverywhere(tmp_path)])
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert equal(fit(lambda: plain(Caching()), tmp_path / "step 3"), whole)
    assert "begin as they are built: Caching.held" in caplog.text


@pytest.mark.parametrize("streams", [False, True])
def test_a_validation_leaves_a_number_with_its_cache(streams: bool) -> None:
    cached = Caching()

    class Cached(IterableDataset[Any]):
        def __init__(self) -> None:
            self.inner = cached

        def __iter__(self) -> Any:
            return map(self.inner.__getitem__, range(16))

    read = DataLoader(Cached() if streams else cached, 8)
    quiet(max_epochs=2, num_sanity_val_steps=1).fit(net(), plain(SAMPLES), read)
    assert cached.held == len(cached.cache) > 0


def test_nothing_is_saved_of_data_that_draws_nothing(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(net(), plain(Noisy(torch.nn.Identity())))
    assert trainer._run.train_dataloader.state_dict() == {}


VALIDATED = 0


def test_what_steps_count_stays_where_a_method_of_their_module_collates() -> None:
    class Collates(Net):
        validated = 0

        def collate(self, batch: Any) -> Any:
            return default_collate(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            global VALIDATED
            VALIDATED += 1
            type(self).validated += 1

    module = Collates()
    loaders = [DataLoader(SAMPLES, 11, collate_fn=module.collate) for _ in range(2)]  # type: ignore[arg-type]
    quiet(max_epochs=2).fit(module, *loaders)
    assert VALIDATED == Collates.validated == 4


def test_a_generator_of_the_module_whose_method_collates_is_drawn_from_on(tmp_path: Path) -> None:
    class Collates(Net):
        def __init__(self) -> None:
            super().__init__()
            self.rng, self.drawn = random.Random(3), []

        def collate(self, batch: Any) -> Any:
            return default_collate(batch)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.drawn.append(self.rng.random())

    def run(ckpt: Path | None = None, **options: Any) -> Any:
        torch.manual_seed(0)
        module = Collates()
        loaders = [DataLoader(SAMPLES, 11, collate_fn=module.collate) for _ in range(2)]  # type: ignore[arg-type]
        quiet(max_epochs=2, **options).fit(module, *loaders, ckpt_path=ckpt)
        return module.drawn

    expected = random.Random(3)
    assert run(callbacks=[SaveEverywhere(tmp_path)]) == [expected.random() for _ in range(4)]
    assert run(tmp_path / "end 0") == run()


@pytest.mark.parametrize("hook", ["on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end"])
def test_what_a_hook_of_a_validation_sets_in_a_dataset_stays(hook: str) -> None:
    class Level:
        def __init__(self) -> None:
            self.level = 0

        def __call__(self, x: Any) -> Any:
            return x + self.level

    class Sets(Net):
        def on_train_epoch_start(self) -> None:
            levels.append(level.level)

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def raise_level(self: Any) -> None:
        level.level += 1

    levels, level = list[int](), Level()
    setattr(Sets, hook, raise_level)
    quiet(max_epochs=3).fit(Sets(), plain(Noisy(level)), plain(Noisy(level)))
    assert levels == [0, 1, 2]
