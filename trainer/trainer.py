"""Trainer: what the user calls and sees. What a run owns is its RunState."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep import strategies
from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.base import Strategy
from lockstep.trainer.arguments import TrainerArguments, takes_arguments
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.lightning_names import TRAINER, missing
from lockstep.trainer.module import Module
from lockstep.trainer.run import evaluate, fit, publish, ranks, saving
from lockstep.trainer.run.lifecycle import attached
from lockstep.trainer.run.state import RunState
from lockstep.trainer.setup import checks, compilation, start
from lockstep.trainer.setup.loaders import Sources

_ARGUMENTS = frozenset(field.name for field in fields(TrainerArguments))


class Trainer:
    """Runs a Module: training, validation, test and prediction under one strategy.

    It takes the arguments that TrainerArguments lists, by keyword; `arguments` holds those of this Trainer.
    """

    _run: RunState
    """What its runs own; for this package alone."""

    @takes_arguments(TrainerArguments)
    def __init__(self, given: TrainerArguments) -> None:
        strategy, reason = strategies.build(given.strategy, **given.layout)
        arguments = given.effective()
        callbacks = arguments.all_callbacks()
        checks.unique(callbacks)
        self._run = RunState(
            trainer=self,
            arguments=arguments,
            given=given.described(),
            strategy=strategy,
            strategy_reason=f"strategy {type(strategy).__name__}: {reason}" if given.strategy == "auto" else None,
            callbacks=callbacks,
            compile_options=compilation.check(given.compile, strategy),
            max_epochs=arguments.max_epochs,
            max_steps=arguments.max_steps,
            accumulate_grad_batches=arguments.accumulate_grad_batches,
        )

    # ---- what the user calls -----------------------------------------------------------------------

    def fit(
        self,
        module: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train `module`; afterwards it holds the trained weights and this Trainer the metrics.

        Called again without `ckpt_path` it counts on from where it was, with new optimizers: raise
        `max_epochs` or `max_steps` before.
        `ckpt_path`: a checkpoint to resume, "last" (the newest of this run's folder), "best" (of the
        ModelCheckpoint), or "auto" (the newest valid one, or a fresh start; the decision is printed).
        Raises what a hook or step raises, as itself; RankFailure if a rank died; SystemExit(143) or
        KeyboardInterrupt after SIGTERM or SIGINT, once a checkpoint is committed.
        """
        run = self._run
        checks.not_running(run, "fit")
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        run.failed_loggers.clear()
        run.verified = None
        sources = Sources({"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        checks.fit(run, module, sources)
        if ckpt_path is None:
            checks.not_done(run)
        path = start.checked(run, ckpt_path)
        if run.arguments.strategy == "auto":  # now that the model is known
            strategy, reason = strategies.build("auto", **run.arguments.layout, model=module)
            if type(strategy) is not type(run.strategy):
                run.strategy, run.strategy_reason = strategy, f"strategy {type(strategy).__name__}: {reason}"
        if run.arguments.max_restarts or run.strategy.starts_ranks:
            ranks.launch_fit(run, module, sources, path)
            return
        with attached(run, module, sources, "fit", path):
            fit.fit(run, module, sources)

    def validate(
        self,
        module: Module,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation data; return the metrics, a dict for each loader."""
        return self._evaluate("validate", module, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        module: Module,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test data; return the metrics, a dict for each loader."""
        return self._evaluate("test", module, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        module: Module,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        return_predictions: bool = True,
    ) -> list[Any] | None:
        """Return what `predict_step` returned for each batch, on the CPU, in the loader's order, each sample once.

        A list for each loader if there are several. On several ranks the last batches may be split
        differently from one process, so concatenate the items to compare runs. Every rank holds the predictions of
        all ranks: for more than fits into memory give `return_predictions=False`, which returns None, and write them
        in `predict_step` or a callback's `on_predict_batch_end`, rank by rank.
        """
        self._run.keeps_predictions = return_predictions
        return self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, False)

    def save_checkpoint(
        self, path: str | Path, *, wait: bool = True, also: Sequence[str] = (), outdated: Sequence[str] = ()
    ) -> None:
        """Write a checkpoint folder at `path`, replacing one that is there. Every rank calls it, while `fit` runs.

        With `wait` False it returns once the state is copied to host memory, and the files are written asynchronously.
        A new save waits for the previous one to finish. What fails is raised on all ranks in the next step, save or at
        the end.
        `also` are paths beside `path` for the same checkpoint; `outdated` are checkpoints to remove once this one is
        committed. Raises CheckpointError if it cannot be written (what was there stays), FloatingPointError if a
        trainable parameter or the state of an optimizer is NaN or infinite, RuntimeError inside an accumulation window.
        """
        saving.save(self._run, path, wait=wait, also=also, outdated=outdated)

    def whole(self, module: Module) -> AbstractContextManager[None]:
        """While it lasts `module` has whole parameters on every rank, with their whole `.grad`, under any strategy.

        `with trainer.whole(module): …` in a hook, on every rank, to read or change weights and gradients, or for a
        complete
        `module.state_dict()`. Each change must be the same on all ranks; it holds afterwards. Needs the memory of the
        whole model. Raises RuntimeError within a step, and for a `module` that is not the module that runs.
        """
        run = self._run
        if module is not run.module or run.wrapped is None:
            raise RuntimeError(
                "whole() was called outside of a run, or with another module; give it the module in a hook"
            )
        return run.strategy.whole(run.wrapped)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0, above the progress bar."""
        publish.print_(self._run, *values, **options)

    # ---- what the user sees ------------------------------------------------------------------------

    @property
    def arguments(self) -> TrainerArguments:
        """What this Trainer was given, with what `fast_dev_run` implies."""
        return self._run.arguments

    @property
    def strategy(self) -> Strategy:
        return self._run.strategy

    @property
    def callbacks(self) -> list[Callback]:
        """The run's callbacks in the order in which they are called: loggers first, ModelCheckpoint last."""
        return self._run.callbacks

    @callbacks.setter
    def callbacks(self, value: list[Callback]) -> None:
        self._run.callbacks = value

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Every logged value, reduced over ranks, as of the last logging interval or epoch end (0-dim, CPU)."""
        return self._run.callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """Of `callback_metrics` those that loggers get."""
        return self._run.logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """Of `callback_metrics` those that the progress bar shows."""
        return self._run.progress_bar_metrics

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self._run.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed; while one runs, its index."""
        return self._run.progress.current_epoch

    @property
    def max_epochs(self) -> int | None:
        """Where training ends; None for no limit. Raise it to train on."""
        return self._run.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._run.max_epochs = value

    @property
    def max_steps(self) -> int | None:
        """Where training ends, in optimizer steps; None for no limit. Raise it to train on."""
        return self._run.max_steps

    @max_steps.setter
    def max_steps(self, value: int | None) -> None:
        self._run.max_steps = value

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches of each rank in one optimizer step."""
        return self._run.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._run.accumulate_grad_batches = value

    @property
    def should_stop(self) -> bool:
        """Set it on any rank: training ends after the next step at the latest, on all ranks alike."""
        return self._run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._run.should_stop = value

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation before training runs."""
        return self._run.sanity_checking

    @property
    def global_rank(self) -> int:
        return self._run.rank

    @property
    def local_rank(self) -> int:
        return self._run.strategy.topology.local_rank

    @property
    def world_size(self) -> int:
        return self._run.world_size

    @property
    def is_global_zero(self) -> bool:
        return self._run.is_global_zero

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self._run.optimizers.values())

    @property
    def datamodule(self) -> DataModule | None:
        return self._run.datamodule

    @property
    def train_dataloader(self) -> Any:
        """This rank's share of the training data."""
        return self._run.train_dataloader

    @property
    def val_dataloaders(self) -> list[Any]:
        """This rank's share of the validation data, for each loader."""
        return self._run.val_dataloaders

    @property
    def num_training_batches(self) -> int | float:
        """Batches of each rank in an epoch; infinite if the loader's length is not known."""
        return self._run.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each rank in a validation, for each loader."""
        return self._run.evaluation_batches["val"]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run if the loader's length and an end are known, else infinity."""
        run = self._run
        by_epochs = float("inf")
        if run.max_epochs is not None and run.windows_per_epoch is not None:
            by_epochs = run.max_epochs * run.windows_per_epoch
        return by_epochs if run.max_steps is None else min(by_epochs, run.max_steps)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint, or None."""
        return self._run.checkpoint_callback

    @property
    def loggers(self) -> list[Logger]:
        return self._run.loggers

    @property
    def logger(self) -> Logger | None:
        """The first logger; in a `fast_dev_run` one that writes nothing."""
        return next(iter(self._run.loggers), _Silent() if self._run.arguments.fast_dev_run else None)

    @property
    def log_dir(self) -> str | None:
        """Folder of the run; None if nothing is written."""
        return self._run.log_dir

    # ---- helpers -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _ARGUMENTS:
            return getattr(self._run.arguments, name)
        raise AttributeError(
            missing("Trainer has no attribute", name, TRAINER, () if name.startswith("_") else dir(self))
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and not hasattr(type(self), name):
            raise AttributeError(
                f"{name} of a Trainer is fixed once it is made; make a new Trainer({name}={value!r:.60})"
            )
        super().__setattr__(name, value)

    def _evaluate(
        self,
        stage: str,
        module: Module,
        dataloaders: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> Any:
        run = self._run
        checks.not_running(run, stage)
        if not isinstance(module, Module):
            raise TypeError(f"{stage} takes a lockstep.Module, but module is {type(module).__name__}; subclass Module")
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        run.failed_loggers.clear()
        run.verified = None
        sources = Sources({evaluate.KINDS[stage]: dataloaders}, datamodule)
        checks.hooks(run, module, datamodule)
        checks.loaders(sources)
        path = start.checked(run, ckpt_path)
        run.callback_metrics, run.logged_metrics, run.progress_bar_metrics = {}, {}, {}
        if run.strategy.starts_ranks:
            returned = ranks.launch_evaluation(run, stage, module, sources, path)
        else:
            with attached(run, module, sources, stage, path):
                returned = evaluate.run_stage(run, module, sources, stage)
        if verbose and run.is_global_zero:
            evaluate.print_metrics(stage, returned)
        return returned


class _Silent(Logger):
    """Stands for the loggers in a `fast_dev_run`, so that user code that writes to one can be tried; does nothing."""

    @property
    def experiment(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: None
