"""Runs, checkpoints, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.trainer.lightning.differences.probe import QUIET, differs, fit, part, seen
from tests.trainer.lightning.projects import classifier, data, loader


@differs("a `Trainer(num_nodes=2)` without a launcher", None, "MisconfigurationException")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: pl.Trainer(**QUIET, num_nodes=2) and None)


@differs("checkpoints", [True, False], [False, True])
def _(pl: Any, folder: Path) -> Any:
    path = folder / "x.ckpt"
    fit(pl, classifier(pl)()).save_checkpoint(path)
    return [path.is_file(), (path / "manifest.json").is_file()]


@differs("`checkpoint` in `on_save_checkpoint`", [3, 2, True], [3, 2, "KeyError"])
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []

    def on_save_checkpoint(self: Any, checkpoint: Any) -> None:
        checkpoint["mine"] = 3
        found.extend(
            (checkpoint["mine"], checkpoint["global_step"], seen(lambda: bool(checkpoint["optimizer_states"])))
        )

    fit(pl, classifier(pl, on_save_checkpoint=on_save_checkpoint)()).save_checkpoint(folder / "x.ckpt")
    return found


def _files(folder: Path) -> list[str]:
    """The files and checkpoints below a folder, without the logger's own."""
    found = [path.relative_to(folder) for path in folder.rglob("*")]
    kept = [path for path in found if path.suffix in (".ckpt", ".json", ".yaml", ".lock")]
    return sorted(str(path) for path in kept if not any(parent.suffix == ".ckpt" for parent in path.parents))


@differs(
    "location of runs",
    ["checkpoints/epoch=0-step=2.ckpt"],
    [
        f"Classifier/version_0/{name}"
        for name in ("checkpoints/epoch=0-step=2.ckpt", "config.yaml", "run.lock", "summary.json", "versions.json")
    ],
)
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)(), default_root_dir=folder, enable_checkpointing=True)
    return _files(folder)


@differs("a second `fit` with the limit that is reached", 2, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    trainer = fit(pl, classifier(pl)())
    return seen(lambda: trainer.fit(trainer.lightning_module, loader(8)) or trainer.global_step)


@differs("`ckpt_path`", ["ValueError", "FileNotFoundError"], ["MissingCheckpointError", 2])
def _(pl: Any, folder: Path) -> Any:
    module = classifier(pl)
    return [
        seen(lambda word=word: fit(pl, module(), ckpt_path=word, default_root_dir=folder).global_step)
        for word in ("hpc", "auto")
    ]


@differs('`ckpt_path="last"`', [False, False], ["CheckpointError", True])
def _(pl: Any, folder: Path) -> Any:
    def resumes() -> bool:
        options = {"enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 2}
        return bool(fit(pl, classifier(pl)(), ckpt_path="last", **options).ckpt_path)

    first = seen(resumes)
    fit(pl, classifier(pl)(), enable_checkpointing=True, default_root_dir=folder)
    return [first, seen(resumes)]


@differs(
    "an epoch that `max_steps` or `should_stop` cuts short",
    [["train_end"], False, 1],
    [[], True, 0],
)
def _(pl: Any, folder: Path) -> Any:
    ends: list[str] = []
    module = classifier(pl, on_train_epoch_end=lambda self: ends.append("train_end"))
    trainer = fit(pl, module(), loader(16), loader(4), max_steps=2)
    return [ends, "val_loss" in trainer.callback_metrics, trainer.current_epoch]


@differs("a checkpoint of an epoch's end, resumed", [1, 1], [0, 1])
def _(pl: Any, folder: Path) -> Any:
    epochs: list[int] = []
    save = part(pl, "callbacks").ModelCheckpoint(folder, "x")
    fit(pl, classifier(pl)(), callbacks=[save], enable_checkpointing=True, default_root_dir=folder)

    def note(self: Any) -> None:
        epochs.append(self.current_epoch)

    module = classifier(pl, on_train_start=note, on_train_epoch_start=note)
    fit(pl, module(), ckpt_path=folder / "x.ckpt", max_epochs=2)
    return epochs


@differs("other options in `configure_optimizers` of a resumed run, such as `lr`", 0.1, "CheckpointError")
def _(pl: Any, folder: Path) -> Any:
    fit(pl, classifier(pl)()).save_checkpoint(folder / "x.ckpt")

    def rate() -> float:
        trainer = fit(pl, classifier(pl)(lr=0.5), ckpt_path=folder / "x.ckpt", max_epochs=2)
        return trainer.optimizers[0].param_groups[0]["lr"]

    return seen(rate)


@differs("the validation before training of a resumed run", 2, 0)
def _(pl: Any, folder: Path) -> Any:
    seen_: list[bool] = []
    fit(pl, classifier(pl)()).save_checkpoint(folder / "x.ckpt")
    module = classifier(pl, validation_step=lambda self, *_: seen_.append(self.trainer.sanity_checking))
    fit(pl, module(), val=loader(8), ckpt_path=folder / "x.ckpt", max_epochs=2, num_sanity_val_steps=2)
    return sum(seen_)


def on_two_ranks(pl: Any, module: Any, **given: Any) -> dict[str, float]:
    """The metrics of a fit on two processes."""
    trainer = fit(pl, module, strategy="ddp_fork", devices=2, **given)
    return {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}


@differs("evaluation on several ranks", 6, 5, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    return on_two_ranks(pl, classifier(pl, validation_step=validation_step)(), val=DataLoader(data(5), 4))["samples"]


@differs("`sync_dist`", 0.0, 0.5, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("rank", float(self.global_rank))

    return on_two_ranks(pl, classifier(pl, validation_step=validation_step)(), val=loader(8))["rank"]


@differs("rank-zero-only values", [1.0, 1.0], ["RuntimeError", 1.0], ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def on_if(self: Any) -> None:
        if self.trainer.is_global_zero:
            self.log("x", 1.0)

    def on_all(self: Any) -> None:
        self.log("x", 1.0, rank_zero_only=True)

    return [
        seen(lambda hook=hook: on_two_ranks(pl, classifier(pl, on_train_epoch_end=hook)())["x"])
        for hook in (on_if, on_all)
    ]


@differs("a training loader with `shuffle=False` on several ranks", False, True, ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.log("place", batch[1].float().mean(), reduce_fx="max")
        return self(batch[0]).sum()

    places = TensorDataset(torch.randn(16, 4), torch.arange(16))
    found = on_two_ranks(pl, classifier(pl, training_step=training_step)(), train=DataLoader(places, 4))
    return found["place"] in (11.5, 13.5)


@differs("`self.all_gather(sync_grads=True)`", 1.0, "ValueError", ranks=True)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        scores = self.all_gather(self(batch[0]), sync_grads=True)
        self.log("flows", float(scores.requires_grad))
        return scores.sum()

    return seen(lambda: on_two_ranks(pl, classifier(pl, training_step=training_step)())["flows"])


@differs(
    "`load_state_dict` that a module overrides, and its load hooks", ["override", "hook"] * 2, ["override", "hook"]
)
def _(pl: Any, folder: Path) -> Any:
    called: list[str] = []
    base = classifier(pl)

    class Loads(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.register_load_state_dict_post_hook(lambda module, keys: called.append("hook"))

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            called.append("override")
            return super().load_state_dict(*args, **options)

    saver = pl.callbacks.ModelCheckpoint(folder, "one")
    fit(pl, Loads(), callbacks=saver, enable_checkpointing=True, default_root_dir=folder)
    fit(pl, Loads(), ckpt_path=folder / "one.ckpt", max_epochs=2)
    Loads.load_from_checkpoint(folder / "one.ckpt")
    return called


@differs("saves of the same name with `save_top_k=-1`", ["same.ckpt"], ["same-v1.ckpt", "same.ckpt"])
def _(pl: Any, folder: Path) -> Any:
    callback = pl.callbacks.ModelCheckpoint(folder, "same", save_top_k=-1)
    fit(pl, classifier(pl)(), callbacks=callback, enable_checkpointing=True, max_epochs=2)
    return _files(folder)


@differs("`check_val_every_n_epoch` above 1, or None, without validation", [], ["a.ckpt", "b.ckpt"])
def _(pl: Any, folder: Path) -> Any:
    for name, options in (
        ("a", {"check_val_every_n_epoch": 2}),
        ("b", {"check_val_every_n_epoch": None, "val_check_interval": 2}),
    ):
        callback = pl.callbacks.ModelCheckpoint(folder, name)
        fit(pl, classifier(pl)(), callbacks=callback, enable_checkpointing=True, **options)
    return _files(folder)


@differs(
    "a ModelCheckpoint or EarlyStopping that monitors a training metric, and validations that are not once an epoch",
    [["step=4.ckpt"], 4],
    [["step=2.ckpt", "step=4.ckpt"], 2],
)
def _(pl: Any, folder: Path) -> Any:
    options = {"max_epochs": 2, "val": loader(4), "check_val_every_n_epoch": 2}
    saver = pl.callbacks.ModelCheckpoint(folder, "{step}", monitor="train_loss", save_top_k=-1)
    fit(pl, classifier(pl)(), callbacks=saver, enable_checkpointing=True, **options)
    stopper = pl.callbacks.EarlyStopping("train_loss", stopping_threshold=100.0)
    return [_files(folder), fit(pl, classifier(pl)(), callbacks=stopper, **options).global_step]


@differs("`save_last` with `fast_dev_run`", ["last.ckpt"], [])
def _(pl: Any, folder: Path) -> Any:
    callback = pl.callbacks.ModelCheckpoint(folder, save_last=True)
    fit(pl, classifier(pl)(), callbacks=callback, enable_checkpointing=True, fast_dev_run=True)
    return _files(folder)


@differs("`dirpath` of ModelCheckpoint changed for a resumed run", ["b.ckpt"], [])
def _(pl: Any, folder: Path) -> Any:
    def on_train_epoch_end(self: Any) -> None:
        self.log("score", float(self.current_epoch))

    def saver(name: str) -> Any:
        return pl.callbacks.ModelCheckpoint(folder / name, name, monitor="score")

    module = classifier(pl, on_train_epoch_end=on_train_epoch_end)
    fit(pl, module(), callbacks=saver("a"), enable_checkpointing=True)
    again = {"max_epochs": 2, "ckpt_path": folder / "a" / "a.ckpt", "enable_checkpointing": True}
    fit(pl, module(), callbacks=saver("b"), **again)
    return _files(folder / "b") if (folder / "b").exists() else []


@differs("`current_epoch` and `global_step` in `on_fit_start` of a resumed run", [0, 0], [1, 2])
def _(pl: Any, folder: Path) -> Any:
    found: list[int] = []

    def on_fit_start(self: Any) -> None:
        found[:] = self.current_epoch, self.global_step

    module = classifier(pl, on_fit_start=on_fit_start)
    fit(pl, module()).save_checkpoint(folder / "x.ckpt")
    fit(pl, module(), ckpt_path=folder / "x.ckpt", max_epochs=2)
    return found


@differs("an attribute of a module that training changes, in a resumed run", 2, 4)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        self.batches += 1
        return self(batch[0]).sum()

    for epochs, ckpt_path in ((1, None), (2, folder / "x.ckpt")):
        module = classifier(pl, training_step=training_step)()
        module.batches = 0
        fit(pl, module, ckpt_path=ckpt_path, max_epochs=epochs).save_checkpoint(folder / "x.ckpt")
    return module.batches
