"""Trainer: what the user calls and sees. What a run owns is its RunState."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lockstep.trainer.arguments import TrainerArguments, takes_arguments
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.facts import Facts
from lockstep.trainer.module import Module

# What runs need is imported by the methods that use it, so that importing the Trainer costs little.


class Trainer(Facts):
    """Runs a Module: training, validation, test and prediction under one strategy.

    It takes the arguments that TrainerArguments lists, by keyword; `arguments` holds those of this Trainer.
    """

    @takes_arguments(TrainerArguments)
    def __init__(self, given: TrainerArguments) -> None:
        from lockstep.strategies.registry import build
        from lockstep.trainer.run.state import RunState
        from lockstep.trainer.setup import checks, compilation

        strategy, reason = build(given.strategy, **given.layout)
        arguments = given.effective()
        callbacks = arguments.all_callbacks()
        checks.unique(callbacks)
        self._run = RunState(
            trainer=self,
            arguments=arguments,
            given=given.described(),
            strategy=strategy,
            strategy_reason=f"strategy {strategy.name}: {reason}" if given.strategy == "auto" else None,
            callbacks=callbacks,
            compile_options=compilation.check(given.compile, strategy),
            max_epochs=arguments.max_epochs,
            max_steps=arguments.max_steps,
            accumulate_grad_batches=arguments.accumulate_grad_batches,
        )

    # ---- what the user calls -----------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train `model`; afterwards it holds the trained weights and this Trainer the metrics.

        Called again without `ckpt_path` it counts on from where it was, with new optimizers: raise
        `max_epochs` or `max_steps` before.
        `ckpt_path`: a checkpoint to resume, "last" (the newest of this run's folder), "best" (of the
        ModelCheckpoint), or "auto" (the newest valid one, or a fresh start; the decision is printed).
        Raises what a hook or step raises, as itself; RankFailure if a rank died; SystemExit(143) or
        KeyboardInterrupt after SIGTERM or SIGINT, once a checkpoint is committed.
        """
        from lockstep.strategies.registry import build
        from lockstep.trainer import tuner
        from lockstep.trainer.run import fit, lifecycle, ranks
        from lockstep.trainer.setup import checks, loaders, start

        run = self._run
        checks.not_running(run, "fit")
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        run.failed_loggers.clear()
        sources = loaders.Sources({"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        path = start.checked(run, ckpt_path)
        self._take_callbacks(model)
        checks.fit(run, model, sources)
        checks.continues(run, model, resumes=ckpt_path is not None)
        if not run.arguments.fast_dev_run:
            tuner.prepare(run, model, sources, path)
        if run.arguments.strategy == "auto":  # now that the model is known
            strategy, reason = build("auto", **run.arguments.layout, model=model)
            if type(strategy) is not type(run.strategy):
                run.strategy, run.strategy_reason = strategy, f"strategy {strategy.name}: {reason}"
        with lifecycle.noted(run, model, "fit", sources):
            if run.arguments.max_restarts or run.strategy.starts_ranks or run.apart:
                ranks.launch_fit(run, model, sources, path)
                return
            with lifecycle.attached(run, model, sources, "fit", path):
                fit.fit(run, model, sources)

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run `validation_step` over the validation data; return the metrics, a dict for each loader.

        `model`: None takes the module that ran last, with the weights of ModelCheckpoint's best checkpoint unless
        `ckpt_path` says otherwise, or with its own if none was saved.
        """
        return self._evaluate("validate", model, dataloaders, datamodule, ckpt_path, verbose)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        verbose: bool = True,
    ) -> list[dict[str, float]]:
        """Run `test_step` over the test data; return the metrics, a dict for each loader. `model` as in `validate`."""
        return self._evaluate("test", model, dataloaders, datamodule, ckpt_path, verbose)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        return_predictions: bool = True,
    ) -> list[Any] | None:
        """Return what `predict_step` returned for each batch, on the CPU, in the loader's order, each sample once.

        `model` as in `validate`.
        A list for each loader if there are several. On several ranks the last batches may be split
        differently from one process, so concatenate the items to compare runs. Rank 0 gets the predictions of all
        ranks and the others None, which shows if torchrun or a cluster has started the ranks. For more than fits
        into rank 0's memory give `return_predictions=False`, which returns None, and write them in `predict_step` or a
        callback's `on_predict_batch_end`, rank by rank.
        """
        self._run.keeps_predictions = return_predictions
        return self._evaluate("predict", model, dataloaders, datamodule, ckpt_path, False)

    def save_checkpoint(
        self,
        filepath: str | Path,
        weights_only: bool = False,
        *,
        wait: bool = True,
        also: Sequence[str] = (),
        outdated: Sequence[str] = (),
    ) -> None:
        """Write a checkpoint folder at `filepath`, replacing one that is there. Every rank calls it, in or after `fit`.

        After `fit` it is the state that `fit` has ended with. Where several ranks ran, the state of the optimizers is
        gone with them: then the checkpoint that a ModelCheckpoint has saved of the last step is copied by rank 0, and
        RuntimeError raised if there is none. With `weights_only` it holds weights and hyperparameters, which
        `load_from_checkpoint`, `validate`, `test` and `predict` take, but `fit` cannot resume.
        With `wait` False it returns once the state is copied to host memory, and the files are written asynchronously.
        A new save waits for the previous one to finish. What fails is raised on all ranks in the next step, save or at
        the end.
        `also` are paths beside `filepath` for the same checkpoint; `outdated` are checkpoints to remove once this one
        is committed. Raises CheckpointError if it cannot be written (what was there stays), FloatingPointError if a
        trainable parameter or the state of an optimizer is NaN or infinite, RuntimeError inside an accumulation window.
        """
        from lockstep.trainer.run import saving

        saving.save(self._run, filepath, weights_only=weights_only, wait=wait, also=also, outdated=outdated)

    @contextmanager
    def whole(self, module: Module) -> Iterator[None]:
        """While it lasts `module` has whole parameters on every rank, with their whole `.grad`, under any strategy.

        `with trainer.whole(module): …` in a hook, on every rank, to read or change weights and gradients, or for a
        complete `module.state_dict()`. A change holds afterwards. Random numbers are those of rank 0 on all ranks, and
        of a run on one process; in the step of a learner of local updates, the learner's. Needs the memory of the whole
        model. Raises RuntimeError for a change that is not the same on all ranks, within a step (on several ranks its
        accumulation window, or the batch of an evaluation, included), and for a `module` that is not the one that runs.
        """
        run = self._run
        if module is not run.module or run.wrapped is None:
            raise RuntimeError(
                "whole() was called outside of a run, or with another module; give it the module in a hook"
            )
        from lockstep.callbacks.guard import check_replicas
        from lockstep.strategies.launch.rng import shared_streams
        from lockstep.strategies.sync.collective_fingerprint import counting_once

        alone = run.world_size == 1
        run.refuse_within_window("whole()")
        run.refuse_within_evaluated_batch("whole()")
        own = alone or run.strategy.in_turn
        streams = nullcontext() if own else shared_streams(run.strategy.broadcast, run.is_global_zero)
        with run.strategy.whole(run.wrapped), streams:
            yield
            if not alone and run.strategy.capabilities.synchronous:
                with counting_once():
                    check_replicas(self, module, gradients=True)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0, above the progress bar."""
        from lockstep.trainer.run import publish

        publish.print_(self._run, *values, **options)

    # ---- helpers -----------------------------------------------------------------------------------

    def _take_callbacks(self, module: Any) -> None:
        from lockstep.trainer.run import hooks
        from lockstep.trainer.setup import checks

        if isinstance(module, Module):
            self._run.callbacks = hooks.with_those_of(module, self._run.callbacks)
            checks.unique(self._run.callbacks)

    def _evaluate(
        self,
        stage: str,
        module: Module | None,
        dataloaders: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> Any:
        from lockstep.trainer.run import evaluate, lifecycle, ranks
        from lockstep.trainer.setup import checks, loaders, start

        run = self._run
        checks.not_running(run, stage)
        if module is None:
            module, ckpt_path = start.last_module(run, stage, ckpt_path)
        if not isinstance(module, Module):
            raise checks.no_module(stage, module)
        checks.not_run_by_another(run, module, stage)
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        run.failed_loggers.clear()
        sources = loaders.Sources({evaluate.KINDS[stage]: dataloaders}, datamodule)
        path = start.checked(run, ckpt_path)
        if module is not run.module:  # else the run has its callbacks, with what they know of its fit
            self._take_callbacks(module)
        checks.hooks(run, module, datamodule)
        checks.loaders(sources)
        evaluate.check_step(module, stage)
        run.final = run.final and path is None  # else the module gets other weights
        with lifecycle.noted(run, module, stage, sources):
            if run.strategy.starts_ranks:
                returned = ranks.launch_evaluation(run, stage, module, sources, path)
            else:
                with lifecycle.attached(run, module, sources, stage, path):
                    returned = evaluate.run_stage(run, module, sources, stage)
        if verbose and run.is_global_zero:
            evaluate.print_metrics(stage, returned)
        return returned
