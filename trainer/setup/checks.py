"""What can be known to be wrong before any process starts, and how it is said: one sentence each."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lockstep import callbacks
from lockstep.callbacks.base import Callback
from lockstep.strategies.data.open_loader import refuse_dataset
from lockstep.strategies.launch import environment
from lockstep.trainer.checkpoint.manifest import CheckpointError
from lockstep.trainer.checkpoint.reader import checkpoint_around
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.kept.left_on_ranks import refuse_left, refuse_stepped, warn_of_made
from lockstep.trainer.module import Module
from lockstep.trainer.run import saving
from lockstep.trainer.run.hooks import check_names, check_shapes, of_package, overrides
from lockstep.trainer.run.manual import HeldOptimizer
from lockstep.trainer.setup import start
from lockstep.trainer.setup.loaders import Sources, loaders_of

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.optimizers import SchedulerConfig

_log = logging.getLogger("lockstep")


def fit(run: RunState, module: Module, sources: Sources) -> None:
    """What can be known before any process starts."""
    world = environment.detect() if run.arguments.max_restarts else None
    if world is not None:
        raise ValueError(
            f"max_restarts={run.arguments.max_restarts} is about ranks that Lockstep starts, but {world.launcher} "
            f"started these; leave it out, let {world.launcher} restart them (torchrun --max-restarts) and give "
            "ckpt_path='auto'"
        )
    if not isinstance(module, Module):
        raise no_module("fit", module)
    not_run_by_another(run, module, "fit")
    hooks(run, module, sources.datamodule)
    name = type(module).__name__
    for method in ("training_step", "configure_optimizers"):
        if not overrides(module, method, Module):
            raise TypeError(f"{name} needs the method {method}; define it")
    timed = any(isinstance(item, callbacks.Timer) for item in run.callbacks)
    if run.max_epochs is None and run.max_steps is None and not timed:
        raise ValueError("fit needs an end: give the Trainer max_epochs, max_steps or max_time")
    trainable(run, module, "configure_model", "setup")
    _refused_by_strategy(run, module)
    _own_backward(module)
    if not module.automatic_optimization:
        _manual_optimization(run, module)
    if run.guard.non_finite != "raise" and not run.strategy.capabilities.synchronous:
        raise ValueError(
            f"Guard(non_finite={run.guard.non_finite!r}) needs ranks that agree in every step, but those of "
            f"{run.strategy.name} do not meet in every step; give non_finite='raise'"
        )
    validates = run.arguments.limit_val_batches != 0 and not run.arguments.overfit_batches
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
    if run.checkpoint_callback is not None:
        report_unsaved(module)
    savers = [item for item in run.callbacks if isinstance(item, callbacks.ModelCheckpoint)]
    root = run.arguments.default_root_dir
    roots = {str(start.place_of(run, item)[0].parent) for item in run.loggers}
    for item in run.loggers if any(saver.async_save for saver in savers) else ():
        if overrides(item, "after_save_checkpoint", callbacks.Logger):
            raise ValueError(
                f"after_save_checkpoint of {type(item).__name__} needs a checkpoint that is written, and "
                "ModelCheckpoint(async_save=True) continues before it is; set async_save=False"
            )
    for folder in roots | {str(item.dirpath or root) for item in savers}:
        writable(folder)


def trainable(run: RunState, module: Module, *hooks: str) -> None:
    """Raise ValueError for a module without trainable parameters, unless user code may unfreeze some in `hooks` or as
    training starts."""
    if any(p.requires_grad for p in module.parameters()):
        return
    hooks = (*hooks, "on_fit_start", "on_train_start", "on_train_epoch_start")
    unfreezes = any(overrides(module, name, Module) for name in hooks)
    for item in run.callbacks:
        if item.changes_model or not of_package(item):
            unfreezes |= any(hasattr(Callback, name) and overrides(item, name, Callback) for name in hooks)
    if not unfreezes:
        raise ValueError(
            f"{type(module).__name__} has no trainable parameter; give it layers, or set requires_grad on what is to "
            "be trained"
        )


def _refused_by_strategy(run: RunState, module: Module) -> None:
    """Raise ValueError for a method of the module or of a user's callback, or an argument, that the strategy
    refuses."""
    refuses = run.strategy.capabilities.refuses
    if run.arguments.detect_anomaly and "detect_anomaly" in refuses:
        raise ValueError(refuses["detect_anomaly"])
    users = [item for item in run.callbacks if isinstance(item, callbacks.GradientNorm) or not of_package(item)]
    asked = [name for name in refuses if hasattr(Module, name) and overrides(module, name, Module)]
    asked += [name for name in refuses for item in users if hasattr(Callback, name) and overrides(item, name, Callback)]
    for name in asked:
        raise ValueError(refuses[name])


def _own_backward(module: Module) -> None:
    """Raise TypeError for a backward of the module's own that cannot be called with a loss alone."""
    if not overrides(module, "backward", Module):
        return
    try:
        inspect.signature(module.backward).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{type(module).__name__}.backward is called with the loss alone, and cannot be ({error}); write "
            "backward(self, loss)"
        ) from None


def _manual_optimization(run: RunState, module: Module) -> None:
    name = type(module).__name__
    if overrides(module, "backward", Module):
        raise ValueError(
            f"{name} optimizes manually and overrides backward, which manual_backward does not call; write it into "
            "training_step"
        )
    refused = run.strategy.capabilities.refuses.get("manual_optimization")
    if refused is not None:
        raise ValueError(refused)
    if run.accumulate_grad_batches > 1:
        raise ValueError(
            f"accumulate_grad_batches={run.accumulate_grad_batches} needs automatic optimization; "
            f"{name} optimizes manually, so accumulate in its training_step"
        )
    if run.arguments.gradient_clip_val is not None:
        raise ValueError(
            f"gradient_clip_val={run.arguments.gradient_clip_val} needs automatic optimization; "
            f"{name} optimizes manually, so call self.clip_gradients in its training_step"
        )


def hooks(run: RunState, module: Module, datamodule: DataModule | None) -> None:
    """Raise TypeError for a method that is named like a hook but is not one, and RuntimeError for hooks of layers that
    a run has left on ranks."""
    check_names(module, Module)
    check_shapes(module)
    refuse_left(module)
    if datamodule is not None:
        if not isinstance(datamodule, DataModule):
            given, name = datamodule, getattr(datamodule, "__name__", "")
            said = f"the class {name}; write {name}(…)" if isinstance(given, type) else f"{type(given).__name__}"
            raise TypeError(f"datamodule must be a lockstep.DataModule, but it is {said}")
        check_names(datamodule, DataModule)
    for callback in run.callbacks:
        check_names(callback, Callback)


def _is_given(sources: Sources, module: Module, kind: str) -> bool:
    """Whether there is a loader of this kind; calls nothing of the user's."""
    datamodule, name = sources.datamodule, f"{kind}_dataloader"
    return (
        sources.loaders.get(kind) is not None
        or overrides(module, name, Module)
        or (datamodule is not None and overrides(datamodule, name, DataModule))
    )


def not_running(run: RunState, method: str) -> None:
    """Raise RuntimeError for a run within a run: it would take the model, the ranks and the folder of the outer one."""
    if run.active:
        raise RuntimeError(
            f"trainer.{method} was called while this Trainer runs {run.stage}; call it after trainer.{run.stage} has "
            "returned, "
            "or measure in validation_step, with several validation loaders if need be"
        )


def not_run_by_another(run: RunState, module: Module, method: str) -> None:
    """Raise RuntimeError for a module of which any part is in a run of another Trainer: it would be taken from it;
    TypeError for one that was not set up."""
    if "_modules" not in vars(module):
        kind = type(module).__name__
        raise TypeError(f"{kind} has not been set up as a Module; call super().__init__() first in {kind}.__init__")
    for name, child in module.named_modules():
        other = vars(child).get("_trainer") if isinstance(child, Module) else None
        if other is not None and other is not run.trainer and getattr(getattr(other, "_run", None), "active", False):
            raise RuntimeError(
                f"{method} was called with {f'a module whose {name}' if name else 'a module that'} is in "
                f"{other._run.stage} of another Trainer, which would lose it; give copy.deepcopy of the module, or "
                f"call {method} once that {other._run.stage} has returned"
            )


def continues(run: RunState, module: Module, resumes: bool) -> None:
    """Unless a checkpoint is resumed, raise ValueError where the run has reached its end already, and RuntimeError
    where an optimizer has lost what a run before has left in it."""
    refuse_stepped(module, resumes)
    if not resumes:
        warn_of_made(module)
        _not_done(run)


def _not_done(run: RunState) -> None:
    progress = run.progress
    for name, limit, done in (
        ("max_epochs", run.max_epochs, progress.current_epoch),
        ("max_steps", run.max_steps, progress.global_step),
    ):
        if limit and done >= limit:
            raise ValueError(
                f"this Trainer has trained its {name}={limit} already; to train on, set trainer.{name} = {2 * limit} "
                "or the like and call fit again, or make a new Trainer"
            )
    if progress.global_step and saving.may_stop(run):  # a new run has all of its time
        timers = [item for item in run.callbacks if isinstance(item, callbacks.Timer)]
        if spent := next((item for item in timers if item.time_remaining() == 0), None):
            raise ValueError(
                f"this Trainer has trained for the {timedelta(seconds=spent.duration_s or 0)} of its "
                f"{'max_time' if spent.former_state_key else 'Timer'} already; make a new Trainer, with a longer time "
                "if it resumes a checkpoint of this one"
            )


def unique(given: list[Callback]) -> None:
    """Raise ValueError where one callback would load the state of another."""
    keys = [item.state_key for item in given if overrides(item, "state_dict", Callback)]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(
            f"two callbacks have the same state_key {twice!r}, so one would load the other's state; give one another "
            "state_key"
        )


def loaders(sources: Sources) -> None:
    """Raise ValueError for a loader that is known to be empty."""
    for kind, given in sources.loaders.items():
        for loader in loaders_of(given):
            refuse_dataset(loader)
            try:
                empty = len(loader) == 0
            except (TypeError, NotImplementedError):
                continue
            if empty:
                name = {"train": "train_dataloaders", "val": "a loader for validation"}.get(
                    kind, f"a loader for {kind}"
                )
                raise ValueError(f"{name} is empty: its dataset has no sample, or drop_last drops its only batch")


def report_unsaved(module: Module) -> None:
    """Log the hyperparameters that checkpoints do not hold."""
    if unsaved := module.unsaved_hparams:
        _log.info(
            "hyperparameters that are not tensors, numbers, strings, paths, lists, tuples or dicts are not saved: "
            f"{', '.join(unsaved)}; give them to load_from_checkpoint"
        )


def writable(folder: str) -> None:
    """Raise ValueError for a folder that cannot be written, and CheckpointError for one in a checkpoint."""
    probe = Path(folder)
    if (found := checkpoint_around(probe.absolute() / "run")) is not None:
        raise CheckpointError(
            f"default_root_dir, save_dir and dirpath must not be in a checkpoint, but {folder!r} is in the checkpoint "
            f"{found}, which must not change: give another"
        )
    try:
        folder.encode()  # safetensors opens no other path
        probe.mkdir(parents=True, exist_ok=True)
        name = probe / f".writable-{os.getpid()}"
        name.touch()
        name.unlink()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"default_root_dir, save_dir and dirpath must be folders that can be written, but {folder!r} cannot: "
            f"{getattr(error, 'strerror', None) or error}; "
            "give another, or logger=False and enable_checkpointing=False"
        ) from None


def no_module(stage: str, given: Any) -> TypeError:
    """The error of a model that is not a Module."""
    said = f"{type(given).__name__}; subclass Module"
    if isinstance(given, type):
        said = f"the class {given.__name__}; write {given.__name__}(…)"
    return TypeError(f"{stage} takes a lockstep.Module, but model is {said}")


def check_schedulers(module: Module, named: Mapping[str, Optimizer], schedulers: Sequence[SchedulerConfig]) -> None:
    """Raise ValueError or TypeError for a scheduler that could not step, or would change nothing."""
    name = type(module).__name__
    for config in schedulers:
        kind = type(config.scheduler).__name__
        if config.reduce_on_plateau and config.monitor is None and module.automatic_optimization:
            raise ValueError(f"{kind} needs the name of a metric: return {{'scheduler': …, 'monitor': 'val/loss'}}")
        steps = callable(getattr(config.scheduler, "step", None)) or not module.automatic_optimization
        if not steps and not overrides(module, "lr_scheduler_step", Module):
            raise TypeError(
                f"{kind} is not a scheduler of torch: it has no step, so {name} needs lr_scheduler_step; define it"
            )
    for config in schedulers:
        kind = type(config.scheduler).__name__
        driven = getattr(config.scheduler, "optimizer", None)
        if isinstance(driven, HeldOptimizer):
            raise ValueError(f"{kind} is built on what self.optimizers() gives; build it on one of trainer.optimizers")
        if isinstance(driven, Optimizer) and not any(driven is optimizer for optimizer in named.values()):
            raise ValueError(
                f"{kind} drives a {type(driven).__name__} that {name}.configure_optimizers did not return, or that "
                "another one has replaced, so its rates would change nothing; build the scheduler on an optimizer of "
                "the run"
            )


def refuse_differentiable(named: Mapping[str, Optimizer]) -> None:
    """Raise ValueError for an optimizer that keeps a graph through its step, in which torch changes no parameter of a
    module."""
    for name, optimizer in named.items():
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"optimizer {name!r} ({type(optimizer).__name__}) has differentiable=True, and torch cannot step "
                "parameters of a module in place with gradients; leave it out, and compute a step to differentiate by "
                "hand on tensors (torch.func.functional_call)"
            )


def refuse_monitor_in_step(strategy: Strategy, schedulers: Sequence[SchedulerConfig]) -> None:
    """Raise ValueError for a scheduler that monitors a mean over ranks in steps in which they do not meet."""
    for config in schedulers:
        if config.reduce_on_plateau and config.interval == "step":
            raise ValueError(
                f"a scheduler monitors {config.monitor!r} in each step, which is a mean over ranks, but those of "
                f'{strategy.name} do not meet in every step; give it interval="epoch"'
            )
