"""Trainer: what the user calls, and the state of a run."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep import callbacks as own
from lockstep import strategies
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.guard import check_replicas
from lockstep.strategies.launch import environment
from lockstep.strategies.launch import launcher as processes
from lockstep.strategies.launch import restart as restarts
from lockstep.trainer.arguments import TrainerArguments, takes_arguments
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.checkpoint import store as files
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module, attach
from lockstep.trainer.progress import Progress
from lockstep.trainer.run import checks, compilation, guards
from lockstep.trainer.run import evaluate as evaluation
from lockstep.trainer.run import fit as loop
from lockstep.trainer.run import start as run_plan
from lockstep.trainer.run.folder import RunFolder, conclude
from lockstep.trainer.run.hooks import Hooks
from lockstep.trainer.run.prepare import Sources, attached
from lockstep.trainer.run.signals import Signals
from lockstep.trainer.seeding import deterministic, rng_state, seed_everything, set_rng_state

RESULTS: tuple[str, ...] = ("callback_metrics", "logged_metrics", "progress_bar_metrics", "log_dir", "should_stop")
RESULTS += ("num_training_batches", "windows_per_epoch", "evaluation_batches", "run_seed")
"""Attributes that rank 0 brings back to the process that called `fit`."""

_INTERRUPTED = "interrupted-step="


class Trainer:
    """Runs a Module: training, validation, test and prediction under one strategy.

    It takes the arguments that TrainerArguments lists, by keyword; `arguments` holds those of this Trainer.
    """

    @takes_arguments(TrainerArguments)
    def __init__(self, given: TrainerArguments) -> None:
        self.given = given.described()
        """The arguments, as they are written into the run's folder."""
        self._chooses = given.strategy == "auto"
        self.strategy, reason = strategies.build(given.strategy, **given.layout)
        self._chosen = f"strategy {type(self.strategy).__name__}: {reason}" if self._chooses else None
        self.compile = compilation.check(given.compile, self.strategy)
        """Arguments of torch.compile; None where nothing is compiled."""
        self.arguments = arguments = given.effective()
        """What this Trainer was given, with what `fast_dev_run` implies."""
        self.max_epochs, self.max_steps = arguments.max_epochs, arguments.max_steps
        self.accumulate_grad_batches = arguments.accumulate_grad_batches
        self.callbacks: list[Callback] = arguments.all_callbacks()
        checks.unique(self.callbacks)
        self._limited = any(isinstance(item, own.Timer) for item in self.callbacks)

        self.progress = Progress()
        self.should_stop = False
        """Set it on any rank: training ends after the next step at the latest, on all ranks alike."""
        self.callback_metrics: dict[str, Tensor] = {}
        """Every logged value, reduced over ranks, as of the last logging interval or epoch end (0-dim, CPU)."""
        self.logged_metrics: dict[str, Tensor] = {}
        self.progress_bar_metrics: dict[str, Tensor] = {}
        self.config: str | None = None
        """The resolved configuration as YAML, where the run has one; loggers write it."""
        self.last_loss: float | None = None
        """The loss of the last optimizer step over all ranks; None where knowing it would cost a host synchronisation."""
        self.log_dir: str | None = None
        """Folder of the run; None where nothing is written."""
        self.sanity_checking = False
        self.running = False
        self.datamodule: DataModule | None = None
        self.train_dataloader: Any = None
        self.val_dataloaders: list[Any] = []
        self.num_training_batches: int | float = 0
        self.windows_per_epoch: int | None = None
        self.verified: str | None = None
        """The checkpoint of which this run has read every byte against its checksum: started ranks need not do so again."""
        self.validation_follows = False
        """In `on_train_batch_end`: whether the weights of now are validated before another step."""
        self.measured_at: dict[str, int] = {}
        """By name in `callback_metrics`: `global_step` when its value was measured."""
        self.keeps_predictions = True
        """Whether `predict` returns what `predict_step` returned."""
        self.evaluation_limits: dict[str, list[int | None]] = {"val": [], "test": [], "predict": []}
        self.evaluation_batches: dict[str, list[int | float]] = {"val": [], "test": [], "predict": []}
        self.named_optimizers: dict[str, Optimizer] = {}
        self.configured: dict[str, Any] = {}
        """What `configure_optimizers` gave: classes and initial values."""
        self.trainable_at_start: dict[str, bool] = {}
        """Which parameters the code trains before the run, by name."""
        self.lr_scheduler_configs: list[Any] = []
        self.user_optimizers: list[Any] = []
        self.metrics = MetricStore()
        self.noticed_names: set[str] = set()
        self.manually_stepped = False
        self.window_is_open = False
        self.batch_share = 1.0
        self.run_seed = 0
        self.streams: dict[str, torch.Generator] = {}
        self.wrapped: Any = None
        self.resumed: Checkpoint | None = None
        self.hooks: Hooks
        """What is overridden; set while a run is on."""
        self._module: Module | None = None
        self._stage = "fit"
        self.saving: files.Saving | None = None
        self.saving_s = 0.0
        """Seconds that training has waited for checkpoints on this rank."""
        self.signals = Signals()
        self._failed_loggers: list[Logger] = []
        self._undeterministic: Callable[[], None] | None = None
        self._folder: RunFolder | None = None
        self.executed: Any = [0]
        """Its first item counts optimizer steps computed, those that were lost included."""

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
        Raises what a hook or step raises, as itself; RankFailure where a rank died; SystemExit(143) or
        KeyboardInterrupt after SIGTERM or SIGINT, once a checkpoint is committed.
        """
        checks.not_running(self, "fit")
        if isinstance(train_dataloaders, DataModule):
            train_dataloaders, datamodule = None, train_dataloaders
        self._failed_loggers.clear()
        self.verified = None
        sources = Sources({"train": train_dataloaders, "val": val_dataloaders}, datamodule)
        checks.fit(self, module, sources)
        if ckpt_path is None:
            checks.not_done(self)
        path = run_plan.checked(self, ckpt_path)
        if self._chooses:  # now that the model is known
            strategy, reason = strategies.build("auto", **self.arguments.layout, model=module)
            if type(strategy) is not type(self.strategy):
                self.strategy, self._chosen = strategy, f"strategy {type(strategy).__name__}: {reason}"
        if self.arguments.max_restarts or self.strategy.starts_ranks:
            self._adopt(module, self._fit_on_ranks(module, sources, path))
            return
        with attached(self, module, sources, "fit", path):
            loop.fit(self, module, sources)

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

        A list for each loader where there are several. On several ranks the last batches may be cut
        differently from one process, so concatenate the items to compare runs. Every rank holds the predictions of
        all ranks: for more than fits into memory give `return_predictions=False`, which returns None, and write them
        in `predict_step` or a callback's `on_predict_batch_end`, rank by rank.
        """
        self.keeps_predictions = return_predictions
        return self._evaluate("predict", module, dataloaders, datamodule, ckpt_path, False)

    def save_checkpoint(
        self, path: str | Path, *, wait: bool = True, also: Sequence[str] = (), outdated: Sequence[str] = ()
    ) -> None:
        """Write a checkpoint folder at `path`, replacing one that is there. Every rank calls it, while `fit` runs.

        With `wait` False it returns once the state is copied to host memory, and the files are written beside the training.
        A save that is under way is waited for first. What fails is raised on all ranks in the next step, save or at the end.
        `also` are paths beside `path` for the same checkpoint; `outdated` are checkpoints to remove once this one is committed.
        Raises CheckpointError where it cannot be written (what was there stays), FloatingPointError where a trainable parameter
        or the state of an optimizer is NaN or infinite, RuntimeError inside an accumulation window.
        """
        if not self.running or self._module is None or not self.named_optimizers:
            raise RuntimeError(
                "save_checkpoint was called outside of fit; call it in a hook, or give ModelCheckpoint to callbacks"
            )
        if self.window_is_open:
            raise RuntimeError(
                "save_checkpoint was called inside an accumulation window, whose gradients are not whole; "
                "call it in on_train_batch_end once global_step has moved"
            )
        self.finish_saving()
        if self._folder is not None:
            self._folder.hold(self)
        began, path = time.perf_counter(), os.path.expanduser(path)
        if self.world_size > 1 and guards.options_of(self).check_replicas_every_n_steps is not None:
            check_replicas(self, self._module)  # what has drifted apart is not worth keeping
        self.saving = snapshot.save(
            self, self._module, path, wait=wait, also=also, outdated=[*outdated, *self._superseded(path)]
        )
        self.saving_s += time.perf_counter() - began

    def finish_saving(self) -> None:
        """Wait for a save that goes on beside the training, and raise what failed in it. Every rank calls it."""
        if self.saving is None:
            return
        began = time.perf_counter()
        try:
            self.saving.finish(self.strategy.barrier, self.strategy.broadcast)
        finally:
            self.saving_s += time.perf_counter() - began
            if not self.saving.is_running:  # else the meeting broke: `settle_saving` waits for the files
                self.saving = None

    def is_checkpoint(self, path: str | Path) -> bool:
        """Whether `path` is a committed checkpoint."""
        return files.is_checkpoint(os.path.expanduser(path))

    def whole(self, module: Module) -> AbstractContextManager[None]:
        """While it lasts `module` has whole parameters on every rank, with their whole `.grad`, under any strategy.

        `with trainer.whole(module): …` in a hook, on every rank, to read or change weights and gradients, or for a complete
        `module.state_dict()`. Each change must be the same on all ranks; it holds afterwards. Needs the memory of the whole
        model. Raises RuntimeError within a step, and where `module` is not the module that runs.
        """
        if module is not self._module or self.wrapped is None:
            raise RuntimeError(
                "whole() was called outside of a run, or with another module; give it the module in a hook"
            )
        return self.strategy.whole(self.wrapped)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0, above the progress bar."""
        if self.is_global_zero:
            bar = next((item for item in self.callbacks if isinstance(item, own.ProgressBar)), None)
            (bar.print if bar is not None else safe_print)(*values, **options)

    def log_metrics(self, values: dict[str, float]) -> None:
        """Hand values to the loggers at the current step; rank 0 writes them, other ranks may call it too."""
        if self.is_global_zero and values:
            for logger in self.loggers:
                self.guarded(logger, logger.log_metrics, dict(values), self.global_step)

    # ---- facts ---------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps completed."""
        return self.progress.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed; while one runs, its index."""
        return self.progress.current_epoch

    @property
    def global_rank(self) -> int:
        return self.strategy.topology.rank

    @property
    def local_rank(self) -> int:
        return self.strategy.topology.local_rank

    @property
    def world_size(self) -> int:
        return self.strategy.topology.world_size

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def optimizers(self) -> list[Optimizer]:
        return list(self.named_optimizers.values())

    @property
    def loggers(self) -> list[Logger]:
        return [item for item in self.callbacks if isinstance(item, Logger)]

    @property
    def logger(self) -> Logger | None:
        return next(iter(self.loggers), _Silent() if self.arguments.fast_dev_run else None)

    @property
    def checkpoint_callback(self) -> Any:
        """The first ModelCheckpoint, or None."""
        return next((item for item in self.callbacks if isinstance(item, own.ModelCheckpoint)), None)

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each rank, for each loader."""
        return self.evaluation_batches["val"]

    @property
    def num_test_batches(self) -> list[int | float]:
        return self.evaluation_batches["test"]

    @property
    def num_predict_batches(self) -> list[int | float]:
        return self.evaluation_batches["predict"]

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run, where the loader's length and an end are known, else infinity."""
        by_epochs = (
            float("inf")
            if self.max_epochs is None or self.windows_per_epoch is None
            else self.max_epochs * self.windows_per_epoch
        )
        return by_epochs if self.max_steps is None else min(by_epochs, self.max_steps)

    # ---- what the loop uses --------------------------------------------------------------------------

    def start_run(self, module: Module, stage: str) -> None:
        """Seed the streams and choose the run's folder. Every rank calls it once the strategy is set up."""
        self._module, self._stage = module, stage
        self.should_stop = False
        self.window_is_open = self.manually_stepped = False
        self.streams.clear()
        if self.arguments.seed is not None:
            seed_everything(self.arguments.seed)
        self.run_seed = int(
            self.strategy.broadcast(
                self.arguments.seed if self.arguments.seed is not None else torch.initial_seed() % 2**63
            )
        )
        if self.arguments.deterministic:
            self._undeterministic = deterministic()
        if self._chosen is not None and self.is_global_zero:
            safe_print(self._chosen, file=sys.stderr)
            self._chosen = None

    def begin_account(self, module: Module) -> None:
        """Note in the run's folder what is about to happen, and count what happens."""
        if self._folder is not None:
            self._folder.begin(self, module)
            self.executed = self._folder.executed

    def end_run(self, status: str, error: BaseException | None = None) -> None:
        """Close the loggers and the run's folder."""
        for logger in self.loggers:
            self.guarded(logger, logger.finalize, status)
        if self._folder is not None:
            self.executed = list(self.executed)
            self._folder.end(self, error)
            self._folder = None
        if self._undeterministic is not None:
            self._undeterministic()
            self._undeterministic = None

    def publish(self, values: dict[str, float]) -> None:
        """Show reduced values: to callbacks, the progress bar and the loggers. Every rank calls it."""
        if not values:
            return
        self.show_values(values)
        if self.is_global_zero and not self.sanity_checking:
            logged = {
                name: value for name, value in values.items() if (entry := self._entry(name)) is None or entry.logger
            }
            if logged:
                self.log_metrics({"epoch": self.current_epoch, **logged})

    def show_values(self, values: dict[str, float]) -> None:
        """`show` for numbers."""
        self.show({name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()})

    def show(self, tensors: dict[str, Tensor]) -> None:
        """Put values where callbacks, users and the progress bar look."""
        for name, value in tensors.items():
            self.callback_metrics[name], self.measured_at[name] = value, self.global_step
            entry = self._entry(name)
            if entry is None:
                continue
            if entry.on_step and entry.on_epoch:
                self.callback_metrics[entry.name], self.measured_at[entry.name] = value, self.global_step
            if entry.logger:
                self.logged_metrics[name] = value
            if entry.prog_bar:
                self.progress_bar_metrics[name] = value

    def describe(self, module: Module) -> None:
        """Hand the loggers what does not change over a run: hyperparameters, the resolved configuration, the graph."""
        if not self.is_global_zero:
            return
        params = dict(module.hparams) if module.logs_hparams else {}
        if self.datamodule is not None and self.datamodule.logs_hparams:
            params |= {
                (name if name not in params else f"data.{name}"): value
                for name, value in self.datamodule.hparams.items()
            }
        for logger in self.loggers:
            if params:
                self.guarded(logger, logger.log_hyperparams, params)
            if self.config is not None:
                self.guarded(
                    logger, logger.log_text, "config", f"```yaml\n{self.config.rstrip()}\n```", self.global_step
                )
            if module.example_input_array is not None:
                self.guarded(logger, logger.log_graph, module, module.example_input_array)

    def guarded(self, logger: Logger, method: Any, *args: Any) -> None:
        """Call a logger; any exception that it raises costs one warning and the logger for this run, never the training."""
        if logger in self._failed_loggers:
            return
        try:
            method(*args)
        except Exception as error:
            self._failed_loggers.append(logger)
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{type(logger).__name__} stops logging, training continues: {what}", RuntimeWarning, stacklevel=2
            )

    def state_of(self, callback: Callback, pack: Callable[[Any], Any] = lambda state: state) -> Any:
        """The state of a callback, packed by `pack`; None of a logger whose state cannot be had or saved."""
        if not isinstance(callback, Logger):
            return pack(callback.state_dict())
        found: list[Any] = []
        self.guarded(callback, lambda: found.append(pack(callback.state_dict())))
        return found[0] if found else None

    def manual_backward(self, loss: Tensor) -> None:
        """`Module.manual_backward`."""
        for hook in self.hooks.on_before_backward:
            hook(loss)
        self.strategy.backward(self.wrapped, loss, self.batch_share)
        for hook in self.hooks.on_after_backward:
            hook()

    def agree_to_stop(self) -> bool:
        """Whether any rank asks to stop, for places between steps. Every rank calls it.

        Raises what `interrupted` returns where a rank got a signal, or has failed in a save beside the training.
        """
        stop = loop.vote(self).stop
        stop = stop if self.world_size == 1 else int(self.strategy.all_reduce(torch.tensor(stop), "max"))
        if stop > 1:
            raise self.interrupted()
        return bool(stop)

    def interrupted(self) -> BaseException:
        """Commit a checkpoint, once a step has been done; return what ends the process with 143 or 130. Every rank calls it.

        Raises what failed in a save that went on beside the training, which may be why the ranks are here.
        """
        self.finish_saving()
        number = int(self.strategy.all_reduce(torch.tensor(self.signals.number), "max"))
        path = None
        if self.checkpoint_callback is not None and self.signals.deferred:
            path = Path(self.checkpoint_dir()) / f"{_INTERRUPTED}{self.global_step}"
            self.save_checkpoint(path)
        if self.is_global_zero and self.signals.deferred:
            safe_print(
                f"stopped by {signal.Signals(number).name} after step {self.global_step}"
                + (f"; resume with ckpt_path='{path}' or 'auto'" if path else ""),
                file=sys.stderr,
            )
        if number == signal.SIGUSR1 and path and self.is_global_zero and (said := environment.requeue()):
            safe_print(said, file=sys.stderr)
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + signal.SIGTERM)

    def newest_checkpoint(self) -> str | None:
        """The newest valid checkpoint that this run has saved. Every rank calls it."""
        self.finish_saving()
        found = (
            files.newest(self.checkpoint_dir())
            if self.is_global_zero and self.checkpoint_callback is not None
            else None
        )
        return self.strategy.broadcast(None if found is None else str(found))

    def settle_saving(self, error: BaseException) -> None:
        """Let a save that goes on beside the training end, on a rank that leaves with `error`. Calls no collective."""
        saving, self.saving = self.saving, None
        lost = saving.settle() if saving is not None else None
        if lost and hasattr(error, "add_note"):
            error.add_note(f"besides, a checkpoint was not saved: {lost}")

    def checkpoint_dir(self) -> str:
        """Where this run's checkpoints lie."""
        callback = self.checkpoint_callback
        if callback is not None and callback.dirpath:
            return str(callback.dirpath)
        return str(Path(self.log_dir or self.arguments.default_root_dir) / "checkpoints")

    def open_checkpoint(self, ckpt_path: str | None) -> Checkpoint | None:
        """Choose the run's folder and open what `ckpt_path` means, verified. Every rank calls it."""
        plan = run_plan.plan(self, ckpt_path) if self.is_global_zero else None
        plan = run_plan.carried_out(self.strategy.broadcast(plan))
        self.log_dir = plan["log_dir"]
        for logger, folder in zip(self.loggers, plan["loggers"], strict=True):
            self.guarded(logger, setattr, logger, "log_dir", folder)
        # rank 0 has read every byte against its checksum
        return None if plan["checkpoint"] is None else Checkpoint.open(plan["checkpoint"], verify=False)

    # ---- helpers -------------------------------------------------------------------------------------

    def _evaluate(
        self,
        stage: str,
        module: Module,
        dataloaders: Any,
        datamodule: DataModule | None,
        ckpt_path: str | Path | None,
        verbose: bool,
    ) -> Any:
        checks.not_running(self, stage)
        if not isinstance(module, Module):
            raise TypeError(f"{stage} takes a lockstep.Module, but module is {type(module).__name__}; subclass Module")
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        self._failed_loggers.clear()
        self.verified = None
        sources = Sources({evaluation.KINDS[stage][1]: dataloaders}, datamodule)
        checks.hooks(self, module, datamodule)
        checks.loaders(sources)
        path = run_plan.checked(self, ckpt_path)
        self.callback_metrics, self.logged_metrics, self.progress_bar_metrics = {}, {}, {}
        if self.strategy.starts_ranks:
            result = self.strategy.launch(_on_rank, self, stage, module, sources, path, rng_state())
            self._adopt(module, result)
            returned = result["returned"]
        else:
            with attached(self, module, sources, stage, path):
                returned = evaluation.run(self, module, sources, stage)
        if verbose and self.is_global_zero:
            for i, metrics in enumerate(returned):
                safe_print(
                    f"{stage}{f' loader {i}' if len(returned) > 1 else ''}: "
                    + ", ".join(f"{name}={value:.6g}" for name, value in metrics.items())
                )
        return returned

    def _superseded(self, path: str | Path) -> list[Path]:
        """The checkpoint that an interrupted run left and this one resumed, once a later one is in its folder."""
        resumed = self.resumed
        if resumed is None or not resumed.path.name.startswith(_INTERRUPTED) or resumed.global_step >= self.global_step:
            return []
        return [resumed.path] if resumed.path.parent == Path(os.path.abspath(path)).parent else []

    def _fit_on_ranks(self, module: Module, sources: Sources, ckpt_path: str | None) -> dict[str, Any]:
        """Launch ranks, and launch them again from the newest checkpoint when they die; return what rank 0 brought back."""
        before, streams = self.log_dir, rng_state()
        self._module, self._stage = module, "fit"
        plan = run_plan.carried_out(run_plan.plan(self, ckpt_path))  # here, so that every attempt has the same folder
        self.log_dir, first = plan["log_dir"], plan["checkpoint"]
        of_others = files.present(self.checkpoint_dir())

        def newest(restart: int) -> str | None:
            found = (
                files.newest(self.checkpoint_dir(), of_others)
                if restart and self.log_dir and self.checkpoint_callback is not None
                else None
            )
            if found:
                self.verified = str(found)
            return str(found) if found else first

        def attempt(restart: int) -> dict[str, Any]:
            work = (self, "fit", module, sources, newest(restart), streams)
            try:
                return (
                    self.strategy.launch(_on_rank, *work)
                    if self.strategy.starts_ranks
                    else processes.launch(_on_rank, work, 1)
                )
            except BaseException as error:
                if self.log_dir:
                    conclude(Path(self.log_dir), error)
                raise

        try:
            return restarts.keep_going(
                attempt, self.arguments.max_restarts, name=lambda restart: newest(restart) or "the beginning"
            )
        except BaseException:
            self.log_dir = before
            raise

    def _entry(self, name: str) -> Any:
        return self.metrics.origins.get(name) or self.metrics.entries.get(name)

    def _result(self, returned: Any) -> dict[str, Any]:
        """What rank 0 brings back to the process that called `fit`."""
        module = self._module
        return {
            "returned": returned,
            "weights": {
                name: value.detach().cpu() if isinstance(value, Tensor) else value
                for name, value in module.state_dict().items()  # type: ignore[union-attr]
            },
            "progress": self.progress.state_dict(),
            "callbacks": [self.state_of(item) for item in self.callbacks],
            "log_dirs": [item.log_dir for item in self.loggers],
            "attributes": {name: getattr(self, name) for name in RESULTS},
        }

    def _adopt(self, module: Module, result: dict[str, Any]) -> None:
        """Take over what rank 0 brought back."""
        if set(module.state_dict()) != set(result["weights"]):
            module.configure_model()
        for name, tensor in module.state_dict(keep_vars=True).items():
            trained = result["weights"][name]
            if isinstance(tensor, Tensor) and (tensor.dtype != trained.dtype or tensor.shape != trained.shape):
                tensor.data = trained.to(tensor.device)  # in the run's precision; a buffer may have grown
        module.load_state_dict(result["weights"], assign=any(p.is_meta for p in module.parameters()))
        self.progress.load_state_dict(result["progress"])
        for item, state in zip(self.callbacks, result["callbacks"], strict=True):
            if isinstance(item, Logger):
                if state is not None:
                    self.guarded(item, item.load_state_dict, state)
            else:
                item.load_state_dict(state)
        for logger, folder in zip(self.loggers, result["log_dirs"], strict=True):
            self.guarded(logger, setattr, logger, "log_dir", folder)
        for name, value in result["attributes"].items():
            setattr(self, name, value)
        attach(module, self)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to the ranks: the arguments and results, not what belongs to a running fit."""
        empty: dict[str, Any] = dict.fromkeys(
            ("wrapped", "resumed", "saving", "_module", "datamodule", "train_dataloader")
        )
        empty |= {
            "streams": {},
            "val_dataloaders": [],
            "lr_scheduler_configs": [],
            "user_optimizers": [],
            "named_optimizers": {},
        }
        empty["_folder"] = None
        return {**{name: value for name, value in self.__dict__.items() if name not in ("hooks", "metrics")}, **empty}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.metrics = MetricStore()


class _Silent(Logger):
    """Stands for the loggers in a `fast_dev_run`, so that user code that writes to one can be tried; does nothing."""

    @property
    def experiment(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: None


def _on_rank(
    trainer: Trainer,
    stage: str,
    module: Module,
    sources: Sources,
    ckpt_path: str | None,
    random_streams: dict[str, Any],
) -> dict[str, Any]:
    """What a started rank does; only rank 0's result is brought back."""
    set_rng_state(random_streams)
    returned = None
    with attached(trainer, module, sources, stage, ckpt_path):
        if stage == "fit":
            loop.fit(trainer, module, sources)
        else:
            returned = evaluation.run(trainer, module, sources, stage)
    return trainer._result(returned) if trainer.global_rank == 0 else {}
