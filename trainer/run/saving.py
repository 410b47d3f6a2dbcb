"""Checkpoints of a run: when one may be saved, and how an asynchronous save ends."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lockstep.callbacks.guard import check_replicas
from lockstep.strategies.launch import environment
from lockstep.trainer.checkpoint import snapshot, store

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")

INTERRUPTED = "interrupted-step="
"""How the folder of a checkpoint begins that a signal asked for."""


def save(
    run: RunState, path: str | Path, *, wait: bool = True, also: Sequence[str] = (), outdated: Sequence[str] = ()
) -> None:
    """`Trainer.save_checkpoint`."""
    if not run.active or run.module is None or not run.optimizers:
        raise RuntimeError(
            "save_checkpoint was called outside of fit; call it in a hook, or give ModelCheckpoint to callbacks"
        )
    if run.window_is_open:
        raise RuntimeError(
            "save_checkpoint was called inside an accumulation window, whose gradients are not whole; "
            "call it in on_train_batch_end once global_step has moved"
        )
    finish(run)
    if run.folder is not None:
        run.folder.hold(run)
    began, path = time.perf_counter(), os.path.expanduser(path)
    if run.world_size > 1 and run.guard.check_replicas_every_n_steps is not None:
        check_replicas(run.trainer, run.module)  # replicas that differ are not worth keeping
    run.saving = snapshot.save(
        run, run.module, path, wait=wait, also=also, outdated=[*outdated, *_superseded(run, path)]
    )
    run.saving_seconds += time.perf_counter() - began


def finish(run: RunState) -> None:
    """Wait for an asynchronous save, and raise what failed in it. Every rank calls it."""
    if run.saving is None:
        return
    began = time.perf_counter()
    try:
        run.saving.finish(run.strategy.barrier, run.strategy.broadcast)
    finally:
        run.saving_seconds += time.perf_counter() - began
        if not run.saving.is_running:  # else the ranks did not meet: `settle` waits for the files
            run.saving = None


def settle(run: RunState, error: BaseException) -> None:
    """Let an asynchronous save end, on a rank that leaves with `error`. Calls no collective."""
    saving, run.saving = run.saving, None
    lost = saving.settle() if saving is not None else None
    if lost and hasattr(error, "add_note"):
        error.add_note(f"besides, a checkpoint was not saved: {lost}")


def newest(run: RunState) -> str | None:
    """The newest valid checkpoint that this run has saved. Every rank calls it."""
    finish(run)
    found = store.newest(folder_of(run)) if run.is_global_zero and run.checkpoint_callback is not None else None
    return run.strategy.broadcast(None if found is None else str(found))


def folder_of(run: RunState) -> str:
    """Where this run's checkpoints lie."""
    callback = run.checkpoint_callback
    if callback is not None and callback.dirpath:
        return str(callback.dirpath)
    return str(Path(run.log_dir or run.arguments.default_root_dir) / "checkpoints")


def interrupted(run: RunState) -> BaseException:
    """Commit a checkpoint if a step has been done; return what ends the process with 143 or 130. Every rank calls it.

    Raises what failed in an asynchronous save, which may be why the ranks are here.
    """
    finish(run)
    number = int(run.strategy.all_reduce(torch.tensor(run.signals.number), "max"))
    step, path = run.progress.global_step, None
    if run.checkpoint_callback is not None and run.signals.deferred:
        path = Path(folder_of(run)) / f"{INTERRUPTED}{step}"
        save(run, path)
    if run.is_global_zero and run.signals.deferred:
        resume = f"; resume with ckpt_path='{path}' or 'auto'" if path else ""
        _log.warning(f"stopped by {signal.Signals(number).name} after step {step}{resume}")
    if number == signal.SIGUSR1 and path and run.is_global_zero and (requeued := environment.requeue()):
        _log.warning(requeued)
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + signal.SIGTERM)


def _superseded(run: RunState, path: str | Path) -> list[Path]:
    """The checkpoint that an interrupted run left and this one resumed, once a later one is in its folder."""
    resumed = run.resumed
    if resumed is None or not resumed.path.name.startswith(INTERRUPTED):
        return []
    if resumed.global_step >= run.progress.global_step:
        return []
    return [resumed.path] if resumed.path.parent == Path(os.path.abspath(path)).parent else []
