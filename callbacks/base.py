"""The Callback contract: every moment of a run at which code can be hung in.

A callback is an object whose class overrides some of the methods below. The Trainer looks once, before
the loop, which methods are overridden, so a hook that nobody overrides costs nothing. `Module` has the
same hooks without the `trainer` and `module` arguments; for each moment the module is called first, then
the callbacks in the order in which they were given, ModelCheckpoint last: what it saves is complete.

All hooks are called on every rank, at the same place of the loop. An exception raised in a hook comes
out of `fit` as itself.

The loop, with every hook in its place::

    setup(stage)                                    # "fit", "validate", "test" or "predict"
    on_fit_start                                    # model wrapped, optimizers built, checkpoint loaded
    on_sanity_check_start; <validation>; on_sanity_check_end
    on_train_start
    for epoch in epochs:
        on_train_epoch_start
        for window in epoch:                        # one optimizer step
            for batch in window:                    # accumulate_grad_batches micro-batches
                on_train_batch_start(batch, batch_idx)
                training_step(batch, batch_idx)
                on_before_backward(loss)
                backward
                on_after_backward
                on_train_batch_end(outputs, batch, batch_idx)   # of the last one: after the step below
            for optimizer in optimizers:
                on_before_optimizer_step(optimizer)
                clip, optimizer.step
            step-wise schedulers
            on_before_zero_grad(optimizer); zero_grad           # once for every optimizer
            global_step += 1
            <metrics are reduced and logged> every log_every_n_steps
            <validation> where val_check_interval says so
        <epoch metrics are reduced>
        <validation> at the end of the epoch
        on_train_epoch_end                          # what the module logs here, the callbacks see
        epoch-wise schedulers; current_epoch += 1
    on_train_end
    on_fit_end
    teardown(stage)

    <validation>:                                   # also `validate`; `test` and `predict` alike
        on_validation_start
        on_validation_epoch_start
        for dataloader_idx, loader in enumerate(loaders):
            for batch_idx, batch in enumerate(loader):
                on_validation_batch_start(batch, batch_idx, dataloader_idx)
                validation_step(batch, batch_idx[, dataloader_idx])
                on_validation_batch_end(outputs, batch, batch_idx, dataloader_idx)
        on_validation_epoch_end
        <metrics are reduced>
        on_validation_end                           # callback_metrics hold this run's values

    on_exception(exception)                         # fit, validate, test or predict is leaving with it
    on_save_checkpoint(checkpoint), on_load_checkpoint(checkpoint)   # a dict of tensors and JSON data
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from lockstep import Module, Trainer
    from lockstep.callbacks._support.parameter_state import ParameterState
    from lockstep.callbacks.model_checkpoint import ModelCheckpoint


class Callback:
    """Base of all callbacks; override what you need."""

    changes_model = False
    """Whether a callback of this package freezes, unfreezes or adds layers or hooks; of others that is assumed."""
    former_state_key: str | None = None
    """The `state_key` in checkpoints that were saved when it had another; read if no callback of the run has it."""
    keeps_a_record = False
    """Whether the caller's object gets the attributes that a callback of this package has on started ranks, as others
    do."""
    _module: Module | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: everything but the module that is running."""
        return {name: value for name, value in self.__dict__.items() if name != "_module"}

    def log(self, name: str, value: Any, *flags: Any, **options: Any) -> None:
        """`Module.log` of the module that is running. Raises RuntimeError outside of a run."""
        if self._module is None:
            raise RuntimeError(f"{type(self).__name__}.log({name!r}) was called outside of a run; call it in a hook")
        self._module.log(name, value, *flags, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *flags: Any, **options: Any) -> None:
        """`log` for each entry; the other arguments are those of `log`."""
        for name, value in dictionary.items():
            self.log(name, value, *flags, **options)

    @property
    def state_key(self) -> str:
        """The name under which this callback's state is saved; unique among the run's callbacks."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: tensors and JSON data. Called on every rank, rank 0's is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned. Called on every rank."""

    def roll_back(self, state_dict: dict[str, Any]) -> None:
        """Take it back within the run that has saved it, in which `Guard(non_finite="roll_back")` goes back to a
        checkpoint, whose step `trainer.global_step` is. Called on every rank."""
        self.load_state_dict(state_dict)

    def parameter_state(self, trainer: Trainer, module: Module) -> ParameterState | None:
        """State beside the parameters, such as averages of them, that checkpoints hold sharded as the parameters are.

        Called on every rank once the optimizers are set up, before a checkpoint is loaded.
        """
        return None

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None: ...
    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None: ...
    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None: ...

    def on_fit_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_fit_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_sanity_check_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None: ...

    def on_train_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_train_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None: ...
    def on_after_backward(self, trainer: Trainer, module: Module) -> None: ...
    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None: ...
    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None: ...

    def on_validation_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_validation_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_validation_epoch_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_validation_epoch_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_validation_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_validation_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_test_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_test_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_test_epoch_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_test_epoch_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_test_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_test_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_predict_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_predict_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_predict_epoch_start(self, trainer: Trainer, module: Module) -> None: ...
    def on_predict_epoch_end(self, trainer: Trainer, module: Module) -> None: ...
    def on_predict_batch_start(
        self, trainer: Trainer, module: Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...
    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None: ...

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None: ...


class Logger(Callback):
    """Base of the callbacks that receive what `self.log` collects.

    The Trainer calls the `log_*` methods on rank 0 only. All that it calls of a logger is behind an error
    boundary: an exception costs one warning and what that logger would write in this run, never the training.
    """

    save_dir: str | None = None
    """Folder above all runs; None takes the Trainer's `default_root_dir`."""
    name: str | None = None
    """Folder of this experiment below `save_dir`; None takes the module's class name."""
    version: str | int | None = None
    """Folder of this run below `name`; None takes the next free `version_N`."""
    run_dir: str | None = None
    """Folder of this run; the Trainer sets it, equal on all ranks, before `setup`."""

    @property
    def given_version(self) -> str | int | None:
        """`version`, which a subclass may choose only as it is read."""
        return self.version

    @property
    def log_dir(self) -> str | None:
        """The folder to write to: `run_dir`, if a subclass does not define another."""
        return self.run_dir

    @log_dir.setter
    def log_dir(self, folder: str | None) -> None:
        self.run_dir = folder

    @property
    def experiment(self) -> Any:
        """The underlying writer, opened at first use on rank 0; on other ranks an object that does nothing."""
        raise NotImplementedError

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write scalars at `step`, which counts optimizer steps; None takes the last one."""

    def forget_held(self) -> None:
        """Drop what was logged before a run, as started ranks have written it."""

    def log_hyperparams(self, params: Any, metrics: dict[str, float] | None = None, step: int | None = None) -> None:
        """Write hyperparameters (nested dicts of JSON data) and the metrics to compare runs by, which are at `step`."""

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        """Write a text, Markdown allowed."""

    def log_graph(self, module: Module, example_input: Any) -> None:
        """Write the graph of `module` as traced on `example_input`."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """A ModelCheckpoint has saved, as `best_k_models` and `last_model_path` of it show; called on rank 0."""

    def save(self) -> None:
        """Flush to disk."""

    def finalize(self, status: str) -> None:
        """Close the writer; `status` is "success", "failed" or "interrupted"."""


def check_number(
    owner: str, name: str, value: Any, least: float = -math.inf, *, whole: bool = False, optional: bool = False
) -> None:
    """Raise ValueError unless `value` is a number of at least `least`, no NaN, and whole if asked; None if
    `optional`."""
    if value is None and optional:
        return
    if hasattr(value, "__index__" if whole else "__float__") and not isinstance(value, bool) and value >= least:
        return
    kind = "a whole number" if whole else "a number"
    bound = "" if least == -math.inf else f" of at least {least:g}"
    raise ValueError(f"{name} of {owner} must be {kind}{bound}{', or None' if optional else ''}, got {value!r}")


def check_local(name: str, folder: str | os.PathLike[str]) -> None:
    """Raise ValueError for an address such as s3://bucket, which would be a folder of that name on this machine;
    TypeError for what is not a path."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {folder!r}")
    if re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(folder)):
        raise ValueError(
            f"{name} must be a folder, got the address {os.fspath(folder)!r}; mount it as a folder, or copy what a run "
            "has written in on_fit_end of a callback"
        )
