"""A run whose data has a state of its own is resumed from any checkpoint as if it had never stopped."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from lockstep import CombinedLoader
from lockstep.callbacks import Callback
from tests.trainer.toy import Net, data, distance, equal, net, quiet, weights

SAMPLES = list(data(22))


class Resetting(IterableDataset[Any]):
    """Begins again once it has ended."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(SAMPLES):
            self.at += 1
            yield SAMPLES[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Endless(Resetting):
    """Continues where the epoch before was limited."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.at += 1
            yield SAMPLES[self.at % len(SAMPLES)]


class EndlessBatches(Endless):
    """Makes its own batches."""

    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        while True:
            yield default_collate([next(samples) for _ in range(8)])


class WholePass(IterableDataset[Any]):
    """Its state is what the next pass begins with, wherever the last one is."""

    def __init__(self) -> None:
        self.own, self.passes = torch.Generator().manual_seed(1), 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(SAMPLES), generator=self.own).tolist()
        self.passes += 1
        yield from (SAMPLES[i] for i in order[self.passes :])

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state(), "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])
        self.passes = state["passes"]


class LatePass(WholePass):
    """Counts a pass as it ends."""

    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES[self.passes :]
        self.passes += 1


class PassOfBatches:
    """A loader."""

    def __init__(self) -> None:
        self.dataset = WholePass()

    def __iter__(self) -> Iterator[Any]:
        samples = [*self.dataset]
        return iter([default_collate(samples[i : i + 8]) for i in range(0, len(samples), 8)])

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


class Shuffling(Sampler[int]):
    """Draws each epoch's order from a generator of its own."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(SAMPLES), generator=self.own).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])


class ShufflingBatches(Shuffling):
    def __iter__(self) -> Iterator[Any]:
        indices = list(super().__iter__())
        return iter([indices[:8], indices[8:16], indices[16:]])

    def __len__(self) -> int:
        return 3


class Several(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        return sum(super(Several, self).training_step(part, batch_idx) for part in parts if part is not None)


def several(mode: str) -> Any:
    """Loaders with and without a state, of which the first is the longest."""
    own = (Shuffling(), Endless())
    loaders = {
        "long": DataLoader(SAMPLES, 4),  # type: ignore[arg-type]
        "sampler": DataLoader(SAMPLES, 8, sampler=own[0]),  # type: ignore[arg-type]
        "dataset": DataLoader(own[1], 4),
        "drawing": DataLoader(SAMPLES, 8, sampler=Drawing()),  # type: ignore[arg-type]
        "batches": DataLoader(SAMPLES, batch_sampler=ShufflingBatches()),  # type: ignore[arg-type]
    }
    if mode != "min_size":
        del loaders["dataset"]  # which has no end
    return CombinedLoader(loaders, mode)


class Drawing(Sampler[int]):
    """Draws from generators of its own and of the sampler in it, shuffles in place and counts, and says nothing of its
    state."""

    def __init__(self, inner: Any = None) -> None:
        self.numpy, self.python, self.torch = np.random.default_rng(1), random.Random(1), torch.Generator()
        self.indices, self.weights, self.seen = list(range(len(SAMPLES))), np.ones(2), {"epochs": 0}
        self.inner = inner

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        self.python.shuffle(self.indices)
        self.weights *= 2
        first = int(self.numpy.integers(9)) + int(torch.randint(9, (1,), generator=self.torch)) + self.seen["epochs"]
        first += int(self.weights.sum()) + (next(iter(self.inner)) if self.inner else 0)
        yield from (self.indices[(first + i) % len(SAMPLES)] for i in range(len(SAMPLES)))
        self.seen["epochs"] += 1


class DrawingStream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.sampler = Drawing()

    def __iter__(self) -> Iterator[Any]:
        return map(SAMPLES.__getitem__, self.sampler)


class SaveEverywhere(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:
            trainer.save_checkpoint(self.folder / f"start {trainer.current_epoch}")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer._run.window_is_open:
            trainer.save_checkpoint(self.folder / f"step {trainer.global_step}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"end {trainer.current_epoch}")


class Accumulate(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = 1 + trainer.current_epoch % 2


def fit(dataset: Any, ckpt: Path | None = None, **options: Any) -> tuple[Any, Any]:
    module, trainer = net(), quiet(accelerator="cpu", **{"max_epochs": 3, "split_batches": True} | options)
    if isinstance(dataset, str):
        module.__class__ = Several
        trainer.fit(module, several(dataset), ckpt_path=ckpt)
        return module, trainer
    given = {
        Drawing: lambda: DataLoader(SAMPLES, 8, sampler=dataset),  # type: ignore[arg-type]
        Shuffling: lambda: DataLoader(SAMPLES, 8, sampler=dataset),  # type: ignore[arg-type]
        ShufflingBatches: lambda: DataLoader(SAMPLES, batch_sampler=dataset),  # type: ignore[arg-type]
        EndlessBatches: lambda: DataLoader(dataset, None),
        PassOfBatches: lambda: dataset,
        Counting: lambda: dataset,
        Repeating: lambda: dataset,
    }
    loader = given.get(type(dataset), lambda: DataLoader(dataset, 8))()
    trainer.fit(module, loader, ckpt_path=ckpt)
    return module, trainer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Resetting, {}),
        (WholePass, {}),
        (WholePass, {"limit_train_batches": 2, "split_batches": False, "accumulate_grad_batches": 2}),
        (LatePass, {}),
        (PassOfBatches, {}),
        (Endless, {"limit_train_batches": 2}),
        (Endless, {"limit_train_batches": 2, "callbacks": Accumulate}),
        (Shuffling, {}),
        (ShufflingBatches, {"limit_train_batches": 2}),
        pytest.param(Resetting, {"strategy": "ddp", "devices": 2}, marks=pytest.mark.ranks),
        pytest.param(
            Endless,
            {"strategy": "ddp", "devices": 2, "limit_train_batches": 2},
            marks=(pytest.mark.ranks, pytest.mark.slow),
        ),
    ],
)
def test_every_checkpoint_continues_with_the_datasets_state(tmp_path: Path, kind: Any, options: dict[str, Any]) -> None:
    more = [make() for make in (options.pop("callbacks", None),) if make is not None]
    whole, trainer = fit(kind(), callbacks=[*more, SaveEverywhere(tmp_path)], **options)
    saved = [tmp_path / "step 3", tmp_path / "end 0"]
    if "devices" not in options:
        fit(kind(), max_epochs=1, callbacks=more, **options)[1].save_checkpoint(tmp_path / "after fit")
        saved = sorted(tmp_path.iterdir())
        assert len(saved) == trainer.global_step + 3 + 2 + 1
    for path in saved:
        resumed, other = fit(kind(), path, callbacks=more, **options)
        assert other.global_step == trainer.global_step, path.name
        assert equal(weights(resumed), weights(whole)), path.name


class Counting(PassOfBatches):
    """Its state counts batches, but it always begins with the first."""

    def __init__(self) -> None:
        self.done = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(0, len(SAMPLES), 8):
            self.done += 1
            yield default_collate(SAMPLES[i : i + 8])

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def test_a_loader_that_begins_again_though_its_state_says_where_it_was_is_refused(tmp_path: Path) -> None:
    whole, _ = fit(Counting(), callbacks=[SaveEverywhere(tmp_path)])
    with pytest.raises(RuntimeError, match="after 16 samples of an epoch, but begins with the first of them"):
        fit(Counting(), tmp_path / "step 2")
    assert equal(weights(fit(Counting(), tmp_path / "end 1")[0]), weights(whole))


class Repeating(Counting):
    """Continues where it was, with the same batch or sample every time, or the first of them again."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__()
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        while self.done < len(self.samples):
            self.done += 1
            yield self.samples[self.done - 1]
        self.done = 0


class RepeatingStream(Repeating, IterableDataset[Any]):
    pass


@pytest.mark.parametrize("kind", [Repeating, RepeatingStream])
def test_data_that_repeats_its_first_sample_continues_in_its_place(tmp_path: Path, kind: Any) -> None:
    given = {
        Repeating: [[default_collate(SAMPLES[:8])] * 3],
        RepeatingStream: [SAMPLES[:1] * 24, [*SAMPLES[:16], *SAMPLES[:1] * 8]],
    }
    for i, samples in enumerate(given[kind]):
        whole, trainer = fit(kind(samples), max_epochs=1, callbacks=[SaveEverywhere(tmp_path / f"{i}")])
        resumed, other = fit(kind(samples), tmp_path / f"{i}" / "step 2", max_epochs=1)
        assert other.global_step == trainer.global_step == 3 and equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 2}])
@pytest.mark.parametrize("make", [Drawing, lambda: Drawing(Drawing()), DrawingStream])
def test_what_samplers_and_streams_keep_in_attributes_continues(
    tmp_path: Path, make: Any, options: dict[str, Any]
) -> None:
    whole, _ = fit(make(), callbacks=[SaveEverywhere(tmp_path)], **options)
    for path in sorted(tmp_path.iterdir()):
        assert equal(weights(fit(make(), path, **options)[0]), weights(whole)), path.name


@pytest.mark.ranks
def test_it_continues_on_another_number_of_ranks_and_with_another_loader(tmp_path: Path) -> None:
    whole, _ = fit(Drawing(Drawing()), callbacks=[SaveEverywhere(tmp_path)], precision="64-true")
    resumed, _ = fit(Drawing(Drawing()), tmp_path / "step 5", strategy="ddp", devices=2, precision="64-true")
    assert distance(weights(resumed), weights(whole)) < 1e-12
    fit(Resetting(), tmp_path / "end 0", precision="64-true")  # which does not need it


def test_every_validation_reads_the_same_of_a_sampler_that_draws_by_itself() -> None:
    read: list[Any] = []

    class Reads(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            read[-1] += batch[1].tolist()

        def on_validation_start(self) -> None:
            read.append([])

    quiet(accelerator="cpu", max_epochs=3).fit(
        Reads(),
        DataLoader(data(8), 8),
        DataLoader(SAMPLES, 8, sampler=Drawing()),  # type: ignore[arg-type]
    )
    assert len(read) == 3 and read[0] == read[1] == read[2]


class Opening(IterableDataset[Any]):
    """Makes an object that cannot be saved as it is first read, and notes that it is there."""

    def __init__(self) -> None:
        self.is_open, self.lock, self.opened = False, None, 0

    def __iter__(self) -> Iterator[Any]:
        if not self.is_open:
            self.is_open, self.lock, self.opened = True, threading.Lock(), self.opened + 1
        assert self.lock is not None
        with self.lock:
            return iter(SAMPLES)


def test_what_says_that_an_object_is_there_is_not_saved_without_it(tmp_path: Path) -> None:
    _, trainer = fit(Opening(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "end")
    fit(resumed := Opening(), tmp_path / "end")
    quiet(max_epochs=3).fit(net(), DataLoader(data(8), 8), DataLoader(watched := Opening(), 8))
    assert resumed.opened == watched.opened == 1


class Staged(Sampler[int]):
    """What hooks set decides what is read."""

    def __init__(self) -> None:
        self.stage, self.size, self.longest, self.read = 0, np.int64(1), np.ones(1, np.longdouble), list[int]()

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.read.append(self.stage)
        self.size, self.longest = self.size + 1, self.longest * 2
        return iter(range(int(self.size), int(self.size) + 8))


class Staging(Net):
    samplers: Any
    seen: Any

    def on_train_epoch_start(self) -> None:
        self.samplers[0].stage = self.current_epoch

    def on_validation_end(self) -> None:
        self.samplers[1].stage += 10

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.samplers[1].stage)


def test_what_hooks_set_in_samplers_between_epochs_and_validations_stays(tmp_path: Path) -> None:
    def staged(max_epochs: int, ckpt: Path | None = None) -> tuple[Any, Any]:
        module = Staging()
        module.samplers, module.seen = (Staged(), Staged()), []
        loaders = [DataLoader(SAMPLES, 8, sampler=sampler) for sampler in module.samplers]  # type: ignore[arg-type]
        trainer = quiet(max_epochs=max_epochs)
        trainer.fit(module, loaders[0], loaders[1], ckpt_path=ckpt)
        return module, trainer

    first, trainer = staged(2)
    trainer.save_checkpoint(tmp_path / "end")
    assert first.samplers[0].read == [0, 1] and first.seen == [0, 10]
    resumed, _ = staged(4, tmp_path / "end")
    assert resumed.samplers[0].read == [0, 1, 2, 3] and resumed.samplers[0].size == 5


@pytest.mark.parametrize("kind", [Drawing, DrawingStream, Shuffling])
def test_validation_with_the_sampler_or_stream_of_training_leaves_it_as_it_was(kind: Any) -> None:
    orders: list[list[Any]] = []

    class Reads(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            orders[-1].append(batch[0])
            return super().training_step(batch, batch_idx)

    def read(validates: bool) -> torch.Tensor:
        orders.append([])
        shared = kind()
        stream = isinstance(shared, IterableDataset)
        given: Any = shared if stream else SAMPLES
        loader = DataLoader(given, 22, sampler=None if stream else shared)
        quiet(max_epochs=4).fit(Reads(), loader, loader if validates else None)
        return torch.stack(orders[-1])

    with_validation = read(True)
    assert torch.equal(with_validation, read(False))
    assert len({x.numpy().tobytes() for x in with_validation}) == 4


class Sharing(Sampler[int]):
    """Draws from a generator that others draw from, too."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return len(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(SAMPLES), generator=self.generator).tolist())


class SaveWithinValidation(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.losses = folder, dict[int, float]()

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step {trainer.global_step} {len(self.losses)}")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses[trainer.global_step] = float(trainer.callback_metrics["val/loss"])


@pytest.mark.parametrize("kind", [Sharing, Shuffling, Endless])
def test_what_is_saved_within_a_validation_that_reads_what_training_reads_is_the_order_of_training(
    tmp_path: Path, kind: Any
) -> None:
    def run(folder: Path, ckpt: Path | None = None) -> tuple[Any, dict[int, float]]:
        shared = [Sharing(each) for each in [torch.Generator().manual_seed(3)] * 2] if kind is Sharing else [kind()] * 2
        folder.mkdir()
        module, saver = net(), SaveWithinValidation(folder)
        limits = {"limit_train_batches": 2, "limit_val_batches": 1, "val_check_interval": 1}
        trainer = quiet(accelerator="cpu", max_epochs=2, callbacks=[saver], **limits)
        is_stream = kind is Endless
        loaders = [DataLoader(each, 8) if is_stream else DataLoader(SAMPLES, 8, sampler=each) for each in shared]
        trainer.fit(module, *loaders, ckpt_path=ckpt)
        return weights(module), saver.losses

    whole, losses = run(tmp_path / "whole")
    saved = sorted((tmp_path / "whole").iterdir())
    assert len(saved) == len({*losses.values()}) == 4
    for path in saved:
        resumed, again = run(tmp_path / path.name, path)
        assert equal(resumed, whole) and again.items() <= losses.items(), path.name


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size", "min_size", "sequential"])
def test_states_of_several_loaders_continue(tmp_path: Path, mode: str) -> None:
    whole, trainer = fit(mode, callbacks=[SaveEverywhere(tmp_path)])
    for path in sorted(tmp_path.iterdir()):
        resumed, other = fit(mode, path)
        assert other.global_step == trainer.global_step, path.name
        assert equal(weights(resumed), weights(whole)), path.name


@pytest.mark.ranks
def test_states_of_several_loaders_continue_on_ranks(tmp_path: Path) -> None:
    layout: dict[str, Any] = {"strategy": "ddp", "devices": 2, "split_batches": False, "precision": "64-true"}
    whole, _ = fit("max_size_cycle", callbacks=[SaveEverywhere(tmp_path)], **layout)
    for other in ({}, {"strategy": "single", "devices": 1}):
        resumed, _ = fit("max_size_cycle", tmp_path / "step 4", **layout | other)
        assert distance(weights(resumed), weights(whole)) < 1e-12


@pytest.mark.ranks
def test_a_samplers_state_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole, _ = fit(Shuffling(), callbacks=[SaveEverywhere(tmp_path)], precision="64-true")
    resumed, _ = fit(Shuffling(), tmp_path / "step 5", strategy="ddp", devices=2, precision="64-true")
    assert distance(weights(resumed), weights(whole)) < 1e-12


@pytest.mark.ranks
def test_copies_in_persistent_workers_begin_each_epoch_alike(tmp_path: Path) -> None:
    def run(ckpt: Path | None = None, persistent: bool = True, **options: Any) -> Any:
        module, trainer = net(), quiet(accelerator="cpu", max_epochs=3, limit_train_batches=2, **options)
        loader = DataLoader(Endless(), 8, num_workers=2, persistent_workers=persistent)
        trainer.fit(module, loader, ckpt_path=ckpt)
        return weights(module)

    whole = run(callbacks=[SaveEverywhere(tmp_path)])
    assert equal(run(tmp_path / "step 3"), whole)  # without the state of the copies
    assert equal(run(persistent=False), whole)


ALONE: dict[str, Any] = {"strategy": "single", "accumulate_grad_batches": 2, "limit_train_batches": 4}
ON_TWO: dict[str, Any] = {"strategy": "ddp", "devices": 2, "limit_train_batches": 2}
"""The global batches of `ALONE`."""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "layout", "others"),
    [
        (Endless, ALONE, ["ddp", "tensor"]),
        (Endless, ON_TWO, ["single"]),
        (EndlessBatches, ALONE, ["ddp"]),
        (EndlessBatches, ON_TWO, ["single"]),
        pytest.param(Endless, ALONE, ["fsdp", "pipeline"], marks=pytest.mark.slow),
        pytest.param(Endless, ALONE | {"strategy": "tensor", "devices": 2}, ["single", "pipeline"]),
        pytest.param(Endless, ON_TWO | {"strategy": "fsdp"}, ["ddp", "pipeline", "single"], marks=pytest.mark.slow),
    ],
)
def test_a_dataset_continues_over_epochs_on_another_layout(
    tmp_path: Path, kind: Any, layout: dict[str, Any], others: list[str]
) -> None:
    layout = {"split_batches": False, "precision": "64-true"} | layout
    whole, trainer = fit(kind(), callbacks=[SaveEverywhere(tmp_path)], **layout)
    for strategy in others:
        other = layout | {"strategy": strategy, "devices": 1 if strategy == "single" else 2}
        for name in ("step 3", "end 1"):  # of the second epoch
            resumed, again = fit(kind(), tmp_path / name, **other)
            assert again.global_step == trainer.global_step
            assert distance(weights(resumed), weights(whole)) < 1e-12


class Locked(Endless):
    """Has a state that cannot be copied."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_state_that_nobody_saves_may_be_one_that_cannot_be_copied() -> None:
    trainer = quiet(max_epochs=2, limit_train_batches=2)
    trainer.fit(net(), DataLoader(Locked(), 8), DataLoader(SAMPLES, 8))  # type: ignore[arg-type]
    assert trainer.global_step == 4
