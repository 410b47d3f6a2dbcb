"""Callbacks, seeds and strategies."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.trainer.lightning.differences.probe import QUIET, differs, fit, part, seen
from tests.trainer.lightning.projects import classifier, loader


@differs("`kth_best_model_path` with `save_top_k=-1`", True, False)
def _(pl: Any, folder: Path) -> Any:
    save = part(pl, "callbacks").ModelCheckpoint(folder, monitor="val_loss", save_top_k=-1)
    fit(pl, classifier(pl)(), val=loader(4), callbacks=[save], enable_checkpointing=True, default_root_dir=folder)
    return bool(save.kth_best_model_path)


@dataclasses.dataclass
class Setting:
    rate: float = 0.1


@differs("a `torch.dtype`, a dataclass or another object among hyperparameters", Setting(), "TypeError")
def _(pl: Any, folder: Path) -> Any:
    class Set(classifier(pl)):  # type: ignore[misc]
        def __init__(self, setting: Setting) -> None:
            super().__init__()
            self.save_hyperparameters("setting")

    fit(pl, Set(Setting())).save_checkpoint(folder / "x.ckpt")
    return seen(lambda: Set.load_from_checkpoint(folder / "x.ckpt", weights_only=False).hparams.setting)


@differs("seed", [None, "3"], [None, None])
def _(pl: Any, folder: Path) -> Any:
    before = os.environ.pop("PL_GLOBAL_SEED", None)
    pl.seed_everything(3)
    after = os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ.pop("PL_SEED_WORKERS", None)
    return [before and None, after]


@differs("random streams in validation", False, True)
def _(pl: Any, folder: Path) -> Any:
    found: list[float] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        found.append(torch.rand(()).item())
        return self(batch[0]).sum()

    module = classifier(pl, training_step=training_step, validation_step=lambda self, *_: torch.rand(3))
    for val in (None, loader(4)):
        pl.seed_everything(3)
        os.environ.pop("PL_GLOBAL_SEED", None)
        os.environ.pop("PL_SEED_WORKERS", None)
        fit(pl, module(), loader(4), val, max_epochs=2)
    return found[:2] == found[2:]


@differs("`trainer.train_dataloader`", True, False)
def _(pl: Any, folder: Path) -> Any:
    found: list[Any] = []
    given = loader(8)
    module = classifier(pl, on_train_start=lambda self: found.append(self.trainer.train_dataloader))
    fit(pl, module(), given)
    assert pl.__name__.split(".")[0] == "lightning" or found[0].loader is given
    return found[0] is given


@differs("`profiler`", [None, "MisconfigurationException"], ["MisconfigurationException", None])
def _(pl: Any, folder: Path) -> Any:
    return [seen(lambda word=word: pl.Trainer(**QUIET, profiler=word) and None) for word in ("advanced", "torch")]


@differs("a logger that does not derive from `Logger`", None, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: pl.Trainer(**QUIET | {"logger": object()}) and None)


@differs("a number from `training_step` in manual optimization", "MisconfigurationException", None)
def _(pl: Any, folder: Path) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> float:
        self.manual_backward(self(batch[0]).sum())
        self.optimizers().step()
        return 5.0

    module = classifier(pl, training_step=training_step)()
    module.automatic_optimization = False
    return seen(lambda: fit(pl, module) and None)


@differs("asynchronous saves", "AsyncCheckpointIO", "ImportError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: part(pl, "plugins.io").AsyncCheckpointIO.__name__)


@differs("options of a strategy", "DDPStrategy", "DDP")
def _(pl: Any, folder: Path) -> Any:
    return type(part(pl, "strategies").DDPStrategy(find_unused_parameters=True)).__name__


@differs('`strategy="ddp"` and one device', "DDPStrategy", "SingleDevice")
def _(pl: Any, folder: Path) -> Any:
    return type(pl.Trainer(**QUIET, strategy="ddp").strategy).__name__


@differs("your own handler of SIGTERM", [["called"], "SIGTERMException"], [[], "Terminated"])
def _(pl: Any, folder: Path) -> Any:
    called: list[str] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(self(batch[0]), batch[1])

    before = signal.signal(signal.SIGTERM, lambda *_: called.append("called"))
    try:
        error = seen(lambda: bool(fit(pl, classifier(pl, training_step=training_step)(), default_root_dir=folder)))
    finally:
        signal.signal(signal.SIGTERM, before)
    return [called, error]


@differs("the checkpoint that is resumed, once the `save_top_k` of its folder are others", 2, 1)
def _(pl: Any, folder: Path) -> Any:
    for steps, ckpt_path in ((1, None), (2, folder / "step=1.ckpt")):
        callback = part(pl, "callbacks").ModelCheckpoint(
            folder, "{step}", monitor="step", mode="max", every_n_train_steps=1
        )
        options = {"callbacks": [callback], "enable_checkpointing": True, "default_root_dir": folder}
        fit(pl, classifier(pl)(), ckpt_path=ckpt_path, max_steps=steps, **options)
    return len(list(folder.glob("*.ckpt")))


@differs("`sys.exit()` in a run", "SystemExit", "RuntimeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl, on_train_start=lambda self: sys.exit())()))


@differs("callbacks of the entry points `lightning.pytorch.callbacks_factory`", [1], [])
def _(pl: Any, folder: Path) -> Any:
    info = folder / "probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lightning.pytorch.callbacks_factory]\nprobe = factory_probe:made\n")
    (folder / "factory_probe.py").write_text("asked = []\ndef made():\n    asked.append(1)\n    return []\n")
    sys.path.insert(0, str(folder))
    try:
        pl.Trainer(**QUIET)
        return importlib.import_module("factory_probe").asked
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("factory_probe", None)


@differs("the module among the arguments of a callback's hook, if it is given by name", None, "TypeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: part(pl, "callbacks").Timer().on_train_start(trainer=None, pl_module=None))


@differs(
    "settings that are allowed, such as few workers, a length of an iterable dataset, fewer batches than "
    "`log_every_n_steps`, a prediction that is None, the saved state of a callback that is not given, `predict` "
    "without a module, `monitor` of a scheduler in manual optimization, a shuffled loader with `overfit_batches`",
    [True] * 8,
    [False] * 8,
)
def _(pl: Any, folder: Path) -> Any:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(torch.rand(8, 8))

        def __len__(self) -> int:
            return 8

    class Counts(pl.Callback):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {"count": 3}

    module = classifier(pl, predict_step=lambda self, *_: None)
    logs = part(pl, "loggers").CSVLogger(folder)
    cpus = unittest.mock.patch("os.sched_getaffinity", return_value=set(range(8)))
    with cpus, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = fit(pl, module(), logger=logs, log_every_n_steps=50, callbacks=[Counts()])
        first.save_checkpoint(folder / "x.ckpt")
        fit(pl, module(), ckpt_path=folder / "x.ckpt", max_epochs=2)
        pl.Trainer(**QUIET).predict(module(), DataLoader(Endless()))
        seen(lambda: first.predict(dataloaders=loader(4)))
        fit(pl, module(), DataLoader(loader(8).dataset, 4, shuffle=True), overfit_batches=1)
        seen(lambda: fit(pl, classifier(pl, automatic_optimization=False, configure_optimizers=_monitored)()))
    words = ("many workers", "`__len__` defined", "logging interval", "returned None", "Counts")
    words += ("without a model", "keys will be ignored", "requested to overfit")
    return [any(word in str(item.message) for item in caught) for word in words]


def _monitored(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return [optimizer], [{"scheduler": scheduler, "monitor": "train_loss"}]


@differs("the class of errors about what user code gives", "MisconfigurationException", "TypeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl, configure_optimizers=lambda self: 1)()))


@differs(
    "`on_sanity_check_start` and `on_predict_model_train` of a module", [], ["predict_model_train", "sanity_check"]
)
def _(pl: Any, folder: Path) -> Any:
    called = set[str]()
    hooks: dict[str, Any] = {
        "on_sanity_check_start": lambda self: called.add("sanity_check"),
        "on_predict_model_train": lambda self: called.add("predict_model_train"),
        "validation_step": lambda self, batch, batch_idx: None,
        "predict_step": lambda self, batch, batch_idx: None,
    }
    module = classifier(pl, **hooks)()
    trainer = fit(pl, module, val=loader(4), num_sanity_val_steps=1)
    trainer.predict(module, loader(4))
    return sorted(called)


@differs("`load_state_dict` of an EarlyStopping with the state of Lightning's", True, "ValueError")
def _(pl: Any, folder: Path) -> Any:
    state = {"wait_count": 1, "stopped_epoch": 0, "best_score": torch.tensor(1.0), "patience": 3}
    callback = part(pl, "callbacks").EarlyStopping("x")

    def load() -> bool:
        callback.load_state_dict(state)
        return True

    return seen(load)


@differs("`trainer.ckpt_path` set between runs", True, "AttributeError")
def _(pl: Any, folder: Path) -> Any:
    def put() -> bool:
        pl.Trainer(**QUIET).ckpt_path = "x.ckpt"
        return True

    return seen(put)


@differs("`log_every_n_steps` with `barebones=True`", 0, 50)
def _(pl: Any, folder: Path) -> Any:
    return pl.Trainer(barebones=True, accelerator="cpu", devices=1, max_epochs=1).log_every_n_steps


@differs(
    "methods that Lightning's callbacks and LightningCLI call on themselves (`lr_find`, `scale_batch_size`, "
    "`get_accumulate_grad_batches`, `instantiate_trainer`)",
    [True] * 4,
    [False] * 4,
)
def _(pl: Any, folder: Path) -> Any:
    callbacks = part(pl, "callbacks")
    named = {
        "lr_find": callbacks.LearningRateFinder,
        "scale_batch_size": callbacks.BatchSizeFinder,
        "get_accumulate_grad_batches": callbacks.GradientAccumulationScheduler,
        "instantiate_trainer": part(pl, "cli").LightningCLI,
    }
    return [hasattr(kind, name) for name, kind in named.items()]


@differs("what `print(self.optimizers())` shows", True, False)
def _(pl: Any, folder: Path) -> Any:
    shown: list[str] = []
    fit(pl, classifier(pl, on_train_start=lambda self: shown.append(repr(self.optimizers())))())
    return "lr:" in shown[0]


@differs("`fit_loop.epoch_progress.current.processed`", 1, "AttributeError")
def _(pl: Any, folder: Path) -> Any:
    return seen(lambda: fit(pl, classifier(pl)()).fit_loop.epoch_progress.current.processed)
