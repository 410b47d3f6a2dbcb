"""What can be known to be wrong before any process starts, and how it is said: one sentence each."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import callbacks as own
from lockstep.callbacks.base import Callback
from lockstep.strategies.checkpoint_state import pack
from lockstep.strategies.data.open_loader import check_is_no_dataset
from lockstep.strategies.launch import environment
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.module import Module
from lockstep.trainer.run import start as run_plan
from lockstep.trainer.run.hooks import check_names, overrides
from lockstep.trainer.run.prepare import Sources, loaders_of

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


def arguments(
    *,
    max_epochs: int | None,
    max_steps: int | None,
    min_epochs: int | None,
    accumulate_grad_batches: int,
    gradient_clip_val: float | None,
    gradient_clip_algorithm: str,
    val_check_interval: int | float | None,
    check_val_every_n_epoch: int | None,
    num_sanity_val_steps: int,
    limit_train_batches: int | float | None,
    limit_val_batches: int | float | None,
    limit_test_batches: int | float | None,
    overfit_batches: int | float,
    fast_dev_run: int | bool,
    log_every_n_steps: int,
    num_nodes: int,
    seed: int | None,
    max_restarts: int,
) -> None:
    """The Trainer's arguments. Raises ValueError."""
    _at_least(
        1,
        max_epochs=max_epochs,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate_grad_batches,
        log_every_n_steps=log_every_n_steps,
    )
    _at_least(1, check_val_every_n_epoch=check_val_every_n_epoch, num_nodes=num_nodes)
    _at_least(0, min_epochs=min_epochs, fast_dev_run=int(fast_dev_run), max_restarts=max_restarts)
    _at_least(-1, num_sanity_val_steps=num_sanity_val_steps)
    _share(
        limit_train_batches=limit_train_batches,
        limit_val_batches=limit_val_batches,
        limit_test_batches=limit_test_batches,
        overfit_batches=overfit_batches,
        val_check_interval=val_check_interval,
    )
    if limit_train_batches == 0 or val_check_interval == 0:
        raise ValueError(
            "limit_train_batches and val_check_interval must be above 0; to turn validation off set limit_val_batches=0"
        )
    if check_val_every_n_epoch is None and not isinstance(val_check_interval, int):
        raise ValueError(
            f"check_val_every_n_epoch=None counts batches across epochs, so val_check_interval must be a whole number, but it is {val_check_interval!r}"
        )
    if gradient_clip_algorithm not in ("norm", "value"):
        raise ValueError(
            f"gradient_clip_algorithm must be 'norm' or 'value', but gradient_clip_algorithm={gradient_clip_algorithm!r}"
        )
    if gradient_clip_val is not None and gradient_clip_val <= 0:
        raise ValueError(
            f"gradient_clip_val must be above 0, or None for no clipping, but gradient_clip_val={gradient_clip_val}"
        )
    if max_epochs is not None and min_epochs is not None and min_epochs > max_epochs:
        raise ValueError(f"min_epochs={min_epochs} is more than max_epochs={max_epochs}; lower it")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), but seed={seed}")


def fit(trainer: Trainer, module: Module, sources: Sources) -> None:
    """What can be known before any process starts."""
    world = environment.detect() if trainer.max_restarts else None
    if world is not None:
        raise ValueError(
            f"max_restarts={trainer.max_restarts} is about ranks that Lockstep starts, but {world.launcher} started these; "
            f"leave it out, let {world.launcher} restart them (torchrun --max-restarts) and give ckpt_path='auto'"
        )
    if not isinstance(module, Module):
        raise TypeError(f"fit takes a lockstep.Module, but module is {type(module).__name__}; subclass Module")
    hooks(trainer, module, sources.datamodule)
    name = type(module).__name__
    for method in ("training_step", "configure_optimizers"):
        if not overrides(module, method, Module):
            raise TypeError(f"{name} needs the method {method}; define it")
    if trainer.max_epochs is None and trainer.max_steps is None and not trainer._limited:
        raise ValueError("fit needs an end: give the Trainer max_epochs, max_steps or max_time")
    if (
        not any(p.requires_grad for p in module.parameters())
        and not overrides(module, "configure_model", Module)
        and not overrides(module, "setup", Module)
    ):
        raise ValueError(
            f"{name} has no trainable parameter; give it layers, or set requires_grad on what is to be trained"
        )
    if not module.automatic_optimization:
        if trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} needs automatic optimization; "
                f"{name} optimizes manually, so accumulate in its training_step"
            )
        if trainer.gradient_clip_val is not None:
            raise ValueError(
                f"gradient_clip_val={trainer.gradient_clip_val} needs automatic optimization; "
                f"{name} optimizes manually, so call trainer.clip_gradients in its training_step"
            )
    validates = trainer.limit_val_batches != 0 and not trainer.overfit_batches
    if validates and not overrides(module, "validation_step", Module) and _is_given(sources, module, "val"):
        warnings.warn(
            f"{name} has no validation_step, so its validation data is not used; define it, or set limit_val_batches=0",
            UserWarning,
            stacklevel=3,
        )
    train = sources.loaders.get("train")
    if not _is_given(sources, module, "train"):
        raise ValueError(
            "fit needs training data: give train_dataloaders, or a DataModule or Module with train_dataloader"
        )
    if train is not None and not loaders_of(train):
        raise ValueError("train_dataloaders is an empty list or dict; give a loader")
    loaders(sources)
    if trainer.checkpoint_callback is not None:
        savable(module)
    savers = [item for item in trainer.callbacks if isinstance(item, own.ModelCheckpoint)]
    root = trainer.default_root_dir
    roots = {str(run_plan.place_of(trainer, item)[0].parent) for item in trainer.loggers}
    for folder in roots | {str(item.dirpath or root) for item in savers}:
        writable(folder)


def hooks(trainer: Trainer, module: Module, datamodule: DataModule | None) -> None:
    """Raise TypeError for what looks like a hook and is none."""
    check_names(module, Module)
    if datamodule is not None:
        check_names(datamodule, DataModule)
    for callback in trainer.callbacks:
        check_names(callback, Callback)


def _is_given(sources: Sources, module: Module, kind: str) -> bool:
    """Whether there is a loader of this kind; calls nothing of the user's."""
    datamodule, name = sources.datamodule, f"{kind}_dataloader"
    return (
        sources.loaders.get(kind) is not None
        or overrides(module, name, Module)
        or (datamodule is not None and overrides(datamodule, name, DataModule))
    )


def not_running(trainer: Trainer, method: str) -> None:
    """Raise RuntimeError for a run within a run: it would take the model, the ranks and the folder of the outer one."""
    if trainer.running:
        raise RuntimeError(
            f"trainer.{method} was called while this Trainer runs {trainer._stage}; call it after trainer.{trainer._stage} has returned, "
            "or measure in validation_step, with several validation loaders if need be"
        )


def not_done(trainer: Trainer) -> None:
    """Raise ValueError where the run has reached its end already."""
    for name, done in (("max_epochs", trainer.current_epoch), ("max_steps", trainer.global_step)):
        limit = getattr(trainer, name)
        if limit is not None and done >= limit:
            raise ValueError(
                f"this Trainer has trained its {name}={limit} already; set trainer.{name} higher to train on, or make a new Trainer"
            )


def unique(callbacks: list[Callback]) -> None:
    """Raise ValueError where one callback would load the state of another."""
    keys = [item.state_key for item in callbacks if overrides(item, "state_dict", Callback)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(
            f"two callbacks have the same state_key {twice!r}, so one would load the other's state; give one another state_key"
        )


def loaders(sources: Sources) -> None:
    """Raise ValueError for a loader that is known to be empty."""
    for kind, given in sources.loaders.items():
        for loader in loaders_of(given):
            check_is_no_dataset(loader)
            try:
                empty = len(loader) == 0
            except (TypeError, NotImplementedError):
                continue
            if empty:
                name = {"train": "train_dataloaders", "val": "a loader for validation"}.get(
                    kind, f"a loader for {kind}"
                )
                raise ValueError(f"{name} is empty: its dataset has no sample, or drop_last drops its only batch")


def savable(module: Module) -> None:
    """Raise TypeError for a hyperparameter that no checkpoint can hold."""
    for name, value in module.hparams.items():
        try:
            pack(value, name, {})
        except TypeError as error:
            raise TypeError(
                f"hyperparameter {name!r} cannot be saved: {error}; leave it out with save_hyperparameters(ignore=[{name!r}])"
            ) from None


def writable(folder: str) -> None:
    """Raise ValueError for a folder that cannot be written."""
    probe = Path(folder)
    try:
        probe.mkdir(parents=True, exist_ok=True)
        name = probe / f".writable-{os.getpid()}"
        name.touch()
        name.unlink()
    except OSError as error:
        raise ValueError(
            f"default_root_dir, save_dir and dirpath must be folders that can be written, but {folder!r} cannot: {error.strerror or error}; "
            "give another, or logger=False and enable_checkpointing=False"
        ) from None


def _at_least(least: int, **values: Any) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} must be a whole number of at least {least}, but {name}={value!r}")


def _share(**values: Any) -> None:
    for name, value in values.items():
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value < 0
            or (isinstance(value, float) and value > 1.0)
        ):
            raise ValueError(
                f"{name} must be a whole number of batches or a fraction in [0.0, 1.0], but {name}={value!r}"
            )
