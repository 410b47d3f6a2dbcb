"""What callbacks, users and loggers see of a run: reduced metrics, hyperparameters, and an error boundary for
loggers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback, Logger
from lockstep.callbacks.progress_bar import ProgressBar

if TYPE_CHECKING:
    from lockstep.trainer.metrics.entry import Reduced
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState


def publish(run: RunState, reduced: Iterable[Reduced]) -> None:
    """Show reduced values to callbacks, the progress bar and the loggers. Every rank calls it."""
    reduced = list(reduced)
    show(run, reduced)
    if run.is_global_zero and not run.sanity_checking:
        logged = {name: value for name, value, entry in reduced if entry.logger}
        if logged:
            log_metrics(run, {"epoch": run.progress.current_epoch, **logged})


def publish_due(run: RunState) -> None:
    """Publish the values of steps that are due, which wait until ranks meet. Every rank calls it, between steps."""
    if run.progress.publishes and run.paused is None:
        publish(run, run.metrics.reduce(run.strategy))
        run.progress.publishes = False


def show(run: RunState, reduced: Iterable[Reduced]) -> None:
    """Put reduced values where callbacks, users and the progress bar read them."""
    step = run.progress.global_step
    for name, number, entry in reduced:
        value = torch.tensor(number, dtype=torch.float64)
        run.callback_metrics[name], run.measured_at[name] = value, step
        if entry.on_step and entry.on_epoch:
            run.callback_metrics[entry.name], run.measured_at[entry.name] = value, step
        if entry.logger:
            run.logged_metrics[name] = value
        if entry.prog_bar:
            run.progress_bar_metrics[name] = value


def preview(run: RunState) -> None:
    """Show the progress bar what the run's first step has logged, before the first interval ends, but for what a
    resumed run has shown already.

    Every rank calls it. Callbacks and loggers see nothing of it, and the interval's sums stay as they are.
    """
    if not any(isinstance(item, ProgressBar) for item in run.callbacks):
        return
    for name, number, entry in run.metrics.preview(run.strategy):
        if entry.prog_bar and (run.resumed is None or name not in run.progress_bar_metrics):
            run.progress_bar_metrics[name] = torch.tensor(number, dtype=torch.float64)


def log_metrics(run: RunState, values: dict[str, float]) -> None:
    """Hand values to the loggers at the current step; rank 0 writes them, other ranks may call it too."""
    if run.is_global_zero and values:
        for logger in run.loggers:
            guarded(run, logger, _write, logger, dict(values), run.progress.global_step)


def _write(logger: Logger, metrics: dict[str, float], step: int) -> None:
    """Call `log_metrics` by the names of its arguments, so that their order is free, unless it has others."""
    method: Any = logger.log_metrics
    takes = {}
    if type(method).__module__ != "unittest.mock":  # asking a mock would count as a call of it
        takes = {name: each.kind for name, each in inspect.signature(method).parameters.items()}
    if {"metrics", "step"} <= takes.keys() or {*takes.values()} <= {inspect.Parameter.VAR_KEYWORD}:
        method(metrics=metrics, step=step)
    else:
        method(metrics, step)


def describe(run: RunState, module: Module) -> None:
    """Hand the loggers what does not change over a run: hyperparameters, the resolved configuration, the graph."""
    if not run.is_global_zero:
        return
    params = module.saved_hparams if module.logs_hparams else {}
    if run.datamodule is not None and run.datamodule.logs_hparams:
        params |= {
            (name if name not in params else f"data.{name}"): value
            for name, value in run.datamodule.saved_hparams.items()
        }
    for logger in run.loggers:
        if params:
            guarded(run, logger, logger.log_hyperparams, params)
        if run.config is not None:
            text = f"```yaml\n{run.config.rstrip()}\n```"
            guarded(run, logger, logger.log_text, "config", text, run.progress.global_step)
        if module.example_input_array is not None:
            guarded(run, logger, logger.log_graph, module, module.example_input_array)


def guarded(run: RunState, logger: Logger, method: Any, *args: Any) -> None:
    """Call a logger; an exception that it raises costs one warning and the logger for this run, never the training."""
    if logger in run.failed_loggers:
        return
    try:
        method(*args)
    except Exception as error:
        run.failed_loggers.append(logger)
        what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{type(logger).__name__} stops logging, training continues: {what}", RuntimeWarning, stacklevel=2
        )


def state_of(run: RunState, callback: Callback, pack: Callable[[Any], Any] = lambda state: state) -> Any:
    """The state of a callback, packed by `pack`; None for a logger whose state cannot be read or saved."""
    if not isinstance(callback, Logger):
        return pack(callback.state_dict())
    found: list[Any] = []
    guarded(run, callback, lambda: found.append(pack(callback.state_dict())))
    return found[0] if found else None


def load_state_of(run: RunState, callback: Callback, state: Any, within_run: bool = False) -> None:
    """Give a callback its saved state, at the start of a run or within it."""
    load = callback.roll_back if within_run else callback.load_state_dict
    if isinstance(callback, Logger):
        guarded(run, callback, load, state)
    else:
        load(state)


def print_(run: RunState, *values: Any, **options: Any) -> None:
    """`print` on rank 0, above the progress bar."""
    if run.is_global_zero:
        bar = next((item for item in run.callbacks if isinstance(item, ProgressBar)), None)
        (bar.print if bar is not None else safe_print)(*values, **options)
