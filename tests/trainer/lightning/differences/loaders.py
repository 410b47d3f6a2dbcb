"""Loaders."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler, default_collate

from tests.trainer.lightning.differences.probe import QUIET, differs, fit, part, seen
from tests.trainer.lightning.projects import classifier, data, loader


@differs("first loader that is asked for", ["start", "val", "train"], ["train", "val", "start"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []

    def ask(kind: str) -> Any:
        return lambda self: (order.append(kind), loader(8))[1]

    start = {"on_fit_start": lambda self: order.append("start")}
    module = classifier(pl, train_dataloader=ask("train"), val_dataloader=ask("val"), **start)()
    pl.Trainer(**QUIET | {"num_sanity_val_steps": 1}).fit(module)
    return order


@differs("loaders and a DataModule", "MisconfigurationException", 2)
def _(pl: Any, folder: Path) -> Any:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader(16)

    trainer = pl.Trainer(**QUIET)
    return seen(lambda: trainer.fit(classifier(pl)(), loader(8), datamodule=Data()) or trainer.global_step)


@differs("`validate` and `test` with a limit of 0 batches", [], ["asked", "start", "end"])
def _(pl: Any, folder: Path) -> Any:
    order: list[str] = []
    module = classifier(
        pl,
        val_dataloader=lambda self: (order.append("asked"), loader(4))[1],
        on_validation_start=lambda self: order.append("start"),
        on_validation_end=lambda self: order.append("end"),
    )
    pl.Trainer(**QUIET, limit_val_batches=0).validate(module(), verbose=False)
    return order


@differs("`val_check_interval` within an accumulation window", 0, 1)
def _(pl: Any, folder: Path) -> Any:
    at: list[int] = []
    module = classifier(pl, on_validation_start=lambda self: at.append(self.global_step))
    fit(pl, module(), loader(16), loader(4), val_check_interval=2, accumulate_grad_batches=3, max_steps=1)
    return at[0]


class Ordered(SequentialSampler):
    epochs: list[int]

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@differs("`set_epoch` of a sampler in evaluation", {0, 1}, {0})
def _(pl: Any, folder: Path) -> Any:
    sampler = Ordered(range(8))
    sampler.epochs = []
    fit(pl, classifier(pl)(), val=DataLoader(data(8), 4, sampler=sampler), max_epochs=2)
    return set(sampler.epochs)


class Short(DataLoader):
    def __len__(self) -> int:
        return 1


@differs("a loader, dataset or sampler whose `__len__` is less than what it yields", 1, 4)
def _(pl: Any, folder: Path) -> Any:
    return fit(pl, classifier(pl)(), Short(data(16), 4)).global_step


@differs("`set_epoch` of a sampler in training", [0, 1], [0, 0, 1, 1])
def _(pl: Any, folder: Path) -> Any:
    sampler = Ordered(range(8))
    sampler.epochs = []
    fit(pl, classifier(pl)(), DataLoader(data(8), 4, sampler=sampler), max_epochs=2)
    return sampler.epochs


@differs("the first number that `set_epoch` of a sampler is given in a run resumed at the end of an epoch", 1, 0)
def _(pl: Any, folder: Path) -> Any:
    path = None
    for epochs in (1, 2):
        sampler, saver = Ordered(range(8)), part(pl, "callbacks").ModelCheckpoint(folder)
        sampler.epochs = []
        saved = {"callbacks": [saver], "enable_checkpointing": True}
        fit(pl, classifier(pl)(), DataLoader(data(8), 4, sampler=sampler), None, path, max_epochs=epochs, **saved)
        path = saver.best_model_path
    return sampler.epochs[0]


@differs(
    "a loader that ignores the state it is given, in a run resumed from the last batch of an epoch",
    False,
    "RuntimeError",
)
def _(pl: Any, folder: Path) -> Any:
    class Counts:
        done = 0

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[Any]:
            for batch in loader(12):
                self.done += 1
                yield batch

        def state_dict(self) -> dict[str, int]:
            return {"done": self.done}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.done = state["done"]

    epochs: list[int] = []
    note = {"on_train_batch_start": lambda self, batch, batch_idx: epochs.append(self.current_epoch)}
    saver = part(pl, "callbacks").ModelCheckpoint(folder, save_last=True, save_top_k=0, save_on_train_epoch_end=True)
    fit(pl, classifier(pl)(), Counts(), max_epochs=-1, max_steps=3, callbacks=[saver], enable_checkpointing=True)

    def resumed() -> bool:
        fit(pl, classifier(pl, **note)(), Counts(), None, saver.last_model_path, max_epochs=-1, max_steps=6)
        return 0 in epochs

    return seen(resumed)


@differs("a tensor as a loader", 2, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    module = classifier(pl, training_step=lambda self, batch, batch_idx: self(batch).sum())()
    return seen(lambda: fit(pl, module, torch.rand(2, 3, 4)).global_step)


@differs("`set_epoch` of a loader other than a DataLoader", [], [0, 1])
def _(pl: Any, folder: Path) -> Any:
    class Own:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def __iter__(self) -> Iterator[Any]:
            return iter(loader(8))

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    batches = Own()
    fit(pl, classifier(pl)(), batches, max_epochs=2)
    return batches.epochs


@differs("`reload_dataloaders_every_n_epochs`", 4, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    return seen(
        lambda: fit(pl, classifier(pl)(), val=loader(4), max_epochs=2, reload_dataloaders_every_n_epochs=1).global_step
    )


@differs("`overfit_batches`", [3], [4])
def _(pl: Any, folder: Path) -> Any:
    validated: list[int] = []
    module = classifier(pl, validation_step=lambda self, batch, batch_idx: validated.append(len(batch[0])))
    fit(pl, module(), loader(8), DataLoader(data(9), 3), overfit_batches=1)
    return validated


@differs("`min_epochs` above `max_epochs`", 2, "MisconfigurationException")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl)(), min_epochs=2).global_step)


@differs("Ctrl-C in `fit`", "SystemExit", "KeyboardInterrupt")
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        raise KeyboardInterrupt

    return seen(lambda: fit(pl, classifier(pl, training_step=training_step)()))


class _Unsized(IterableDataset):
    def __iter__(self) -> Any:
        yield from data(8)


@differs("`is_last_batch`", [False, True], [False, False])
def _(pl: Any, folder: Path) -> Any:
    found: list[bool] = []
    module = classifier(pl, on_train_batch_start=lambda self, *_: found.append(self.trainer.is_last_batch))
    fit(pl, module(), DataLoader(_Unsized(), 4))
    return found


@differs("a list of lists of batches as loaders", 4, 2)
def _(pl: Any, folder: Path) -> Any:
    batches = list(loader(8))
    lengths: list[int] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        lengths.append(batch_idx)
        return self(batch[0][0]).sum() if isinstance(batch[0], list | tuple) else self(batch[0]).sum()

    lists = [[batches[0][0]], [batches[1][0]]]  # a row at a time, or a batch
    fit(pl, classifier(pl, training_step=training_step)(), lists)
    return len(lengths)


@differs("a limit above the number of batches such as `1e50`", 2, "MisconfigurationException")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl)(), limit_train_batches=1e50).global_step)


@differs(
    "a name with `/dataloader_idx_` in `self.log`, or `self.log` in `on_fit_start`",
    ["MisconfigurationException"] * 2,
    [2, 2],
)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("x/dataloader_idx_0", 1.0)
        return self(batch[0]).sum()

    return [
        seen(lambda methods=methods: fit(pl, classifier(pl, **methods)()).global_step)
        for methods in ({"training_step": training_step}, {"on_fit_start": lambda self: self.log("x", 1.0)})
    ]


@differs("`batch_indices` of `BasePredictionWriter` with a sampler of your own", [[7, 6]], [None])
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []

    class Writer(part(pl, "callbacks").BasePredictionWriter):  # type: ignore[misc]
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            found.append(indices)

    batches = DataLoader(data(8), 2, sampler=[7, 6])  # type: ignore[arg-type]
    pl.Trainer(**QUIET, callbacks=[Writer("batch")]).predict(
        classifier(pl, predict_step=lambda self, batch, batch_idx: batch[1])(), batches
    )
    return found


@differs("several training loaders", "RuntimeError", 2)
def _(pl: Any, folder: Path) -> Any:
    combined = part(pl, "utilities").CombinedLoader([loader(4), loader(8)], "max_size")
    return seen(lambda: len(combined))


@differs("a loader that yields None", [[1], 1], [[0, 1], 1])
def _(pl: Any, folder: Path) -> Any:
    begun: list[int] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        begun.append(batch_idx)

    def collate(samples: list[Any]) -> Any:
        return None if samples[0][0][0] == first else default_collate(samples)

    first = data(8)[0][0][0]
    module = classifier(pl, on_train_batch_start=on_train_batch_start)()
    trainer = fit(pl, module, DataLoader(data(8), 4, collate_fn=collate))
    return [begun, trainer.global_step]


@differs("workers of a loader with `persistent_workers`", 0, 1, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    batches = DataLoader(data(4), 4, num_workers=1, persistent_workers=True)
    before = multiprocessing.active_children()
    fit(pl, classifier(pl)(), batches)
    return len(set(multiprocessing.active_children()) - set(before))


@differs('a `CombinedLoader` of the mode `"sequential"` in `fit`', "ValueError", 4)
def _(pl: Any, folder: Path) -> Any:
    loaders = part(pl, "utilities").CombinedLoader([loader(8), loader(8)], "sequential")
    return seen(lambda: fit(pl, classifier(pl)(), loaders).global_step)


@differs("a `CombinedLoader` in `predict`", "ValueError", 1)
def _(pl: Any, folder: Path) -> Any:
    def predict_step(self: Any, batch: Any, batch_idx: int) -> int:
        return len(batch)

    both = part(pl, "utilities").CombinedLoader([loader(4), loader(4)], "min_size")
    return seen(lambda: len(pl.Trainer(**QUIET).predict(classifier(pl, predict_step=predict_step)(), both)))


@differs('`num_val_batches` of a `CombinedLoader` that is not `"sequential"`', [1, 2], [1])
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        pass

    both = part(pl, "utilities").CombinedLoader([loader(4), loader(8)], "min_size")
    return fit(pl, classifier(pl, validation_step=validation_step)(), val=both).num_val_batches
