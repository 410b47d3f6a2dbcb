"""Checkpoints of a run: when one may be saved, and how an asynchronous save ends; and when training stops."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.callbacks.base import check_local
from lockstep.callbacks.guard import check_replicas
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.base import Topology
from lockstep.strategies.checkpoint_state import State, gather_state, pack
from lockstep.strategies.launch import slurm
from lockstep.strategies.launch.failure import stop_error
from lockstep.strategies.optimizers.attributes import Attributes
from lockstep.strategies.optimizers.hidden_state import ModelParameters
from lockstep.strategies.optimizers.saved_groups import saves_itself
from lockstep.trainer.checkpoint import snapshot, store
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.run import publish
from lockstep.trainer.run.hooks import Hooks
from lockstep.trainer.seeding import rng_state, set_rng_state
from lockstep.trainer.setup import start

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.prepare import FitLoop

_log = logging.getLogger("lockstep")

INTERRUPTED = "interrupted-step="
"""How the folder of a checkpoint begins that a signal asked for."""
SAVE_FAILED = 1000
"""In place of a signal's number, from a rank that knows that an asynchronous save has failed."""


def follow_optimizers(run: RunState) -> None:
    """Note what optimizers are as the run starts. Where one saves what torch's do not, raise now what would make a
    checkpoint of it fail. Every rank calls it."""
    run.optimizer_attributes = Attributes(run.optimizers)
    if run.checkpoint_callback is not None and any(map(saves_itself, run.optimizers.values())):
        run.strategy.state_dict(run.wrapped, run.optimizers)


def save(
    run: RunState,
    path: str | Path,
    *,
    weights_only: bool = False,
    wait: bool = True,
    also: Sequence[str] = (),
    outdated: Sequence[str] = (),
) -> None:
    """`Trainer.save_checkpoint`."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save_checkpoint takes a path, but path={path!r}")
    check_local("path of save_checkpoint", path)
    if run.module is None or not (run.final or (run.optimizers and run.active) or weights_only):
        raise RuntimeError(
            "save_checkpoint was called where this Trainer has no state of a fit; call it in a hook of fit, or once "
            "fit has returned, before validate, test or predict load a checkpoint (as they do if no module is given), "
            "or give weights_only=True"
        )
    if run.active and run.stage != "fit" and not weights_only and not run.final:
        raise RuntimeError(
            f"save_checkpoint was called in a hook of {run.stage}, whose weights need not be those that the state of "
            "training belongs to; give weights_only=True, or call it in a hook of fit"
        )
    if not run.active:
        with _at_end(run) if run.final and run.at_end else nullcontext():
            _save_after(run, run.module, os.path.abspath(os.path.expanduser(path)), weights_only)
        return
    if run.window_is_open:
        raise RuntimeError(
            "save_checkpoint was called inside an accumulation window, whose gradients are not whole; "
            "call it in on_train_batch_end once global_step has moved"
        )
    if run.has_replaced:
        raise RuntimeError(
            "save_checkpoint was called beside optimizers that were just set; call it once training begins"
        )
    finish(run)
    if run.folder is not None:
        run.folder.hold(run)
    began, path = time.perf_counter(), os.path.expanduser(path)
    run.strategy.synchronize(run.wrapped)
    publish.publish_due(run)
    if run.world_size > 1 and run.guard.check_replicas_every_n_steps is not None:
        check_replicas(run.trainer, run.module)  # replicas that differ are not worth keeping
    superseded = [] if weights_only else _superseded(run, path)
    options: dict[str, Any] = {"also": also, "outdated": [*outdated, *superseded]}
    with ExitStack() as while_saving:
        for state in run.parameter_states.values():
            while_saving.enter_context(state.saving())
        if run.start_hooks is not None:
            while_saving.enter_context(run.start_hooks.as_it_will_be(run, run.module))
        if weights_only:
            while_saving.enter_context(run.strategy.evaluation_weights(run.wrapped, run.optimizers.values()))
            _save_weights(run, run.module, path, run.strategy.state_dict(run.wrapped, {}), **options)
        else:
            if run.stage != "fit" and run.at_end:
                while_saving.enter_context(_at_end(run))
            run.saving = snapshot.save(run, run.module, path, wait=wait, **options)
    run.saving_seconds += time.perf_counter() - began


def _save_after(run: RunState, module: Module, path: str, weights_only: bool) -> None:
    """A checkpoint of what `fit` has left. Where it ran on several ranks, rank 0 writes."""
    if not weights_only and _is_as_trained(run, module):
        snapshot.save(run, module, path)
    elif not run.is_global_zero:
        return
    elif weights_only:
        _save_weights(run, module, path, gather_state(module, {}), alone=True)
    else:
        store.copy(_of_the_end(run), path)


_OF_FIT: tuple[str, ...] = ("seed", "rng_at_setup", "datamodule", "metrics", "measured_at")
_OF_FIT += ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def note_end(run: RunState) -> None:
    """Called once a fit has returned: what a checkpoint of its end holds, which evaluations and other code change."""
    run.at_end = {name: vars(run)[name] for name in _OF_FIT}
    run.at_end |= {"measured_at": {**run.measured_at}, "streams": rng_state(run.streams)}


@contextmanager
def _at_end(run: RunState) -> Iterator[None]:
    """While it lasts the run is as its fit has ended."""
    now, streams = {name: vars(run)[name] for name in (*_OF_FIT, "streams")}, rng_state()
    vars(run).update({**run.at_end, "streams": {}})
    set_rng_state(run.at_end["streams"], run.streams)
    try:
        yield
    finally:
        vars(run).update(now)
        set_rng_state(streams)


def _is_as_trained(run: RunState, module: Module) -> bool:
    """Whether the optimizers step the parameters of the module, and keep their state: no strategy had put others in
    their place."""
    if run.world_size > 1 or not run.optimizers or run.had_parameter_states:
        return False
    known = set(map(id, module.parameters()))
    for optimizer in run.optimizers.values():
        params = [group["params"] for group in optimizer.param_groups]
        stepped = [*chain.from_iterable(params), *(key for key in optimizer.state if isinstance(key, Tensor))]
        if any(isinstance(each, ModelParameters) for each in params) or not known.issuperset(map(id, stepped)):
            return False
    return True


def _of_the_end(run: RunState) -> str:
    """The checkpoint that ModelCheckpoint has saved of the last step."""
    savers = [item for item in run.callbacks if isinstance(item, ModelCheckpoint)]
    for saved in [path for saver in savers for path in (*saver.best_k_models, saver.last_model_path)]:
        if store.is_checkpoint(saved):
            state = store.Checkpoint.open(saved, verify=False).state
            if "seed" in state and state["progress"]["global_step"] == run.progress.global_step:
                return saved
    raise RuntimeError(
        "save_checkpoint was called after fit, which has given up the state of optimizers on its ranks and of "
        "callbacks such as WeightAveraging; give weights_only=True, or let ModelCheckpoint(save_last=True) save the "
        "last step, which is copied then"
    )


def _save_weights(
    run: RunState, module: Module, path: str | Path, gathered: State, *, alone: bool = False, **options: Any
) -> None:
    """A checkpoint of weights, hyperparameters and what `on_save_checkpoint` adds; every rank of the run calls it."""
    topology, strategy = (Topology() if alone else run.strategy.topology), run.strategy
    hooks = Hooks.find(run, module).on_save_checkpoint
    extra = snapshot.added_by_hooks(run, module, gathered, hooks, resumable=False, alone=alone)
    tensors = gathered.tensors
    kept = tensors if topology.rank == 0 else {}
    with refused(path):
        state = {
            "progress": run.progress.state_dict(),
            "strategy": gathered.meta,
            "module": pack(extra, "module/extra", kept),
            **snapshot.hyperparameters(run, module, kept),
        }
    store.save(
        path,
        rank=topology.rank,
        world_size=topology.world_size,
        tensors=tensors,
        state=state,
        barrier=None if alone else strategy.barrier,
        broadcast=None if alone else strategy.broadcast,
        finite={f"model/{name}" for name, parameter in module.named_parameters() if parameter.requires_grad},
        **options,
    )


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


def of_others(run: RunState) -> set[Any]:
    """Of the checkpoints in the run's folder, as it starts, those that it does not begin with."""
    begun = None if run.resumed is None else store.identity(Path(run.resumed.path))
    return present(run) - {begun}


def present(run: RunState) -> set[Any]:
    """The checkpoints that are in the folders of the run now."""
    folder = folder_of(run)
    return set[Any]().union(*map(store.present, (folder, *start.folders_beside(run, folder))))


def newest(run: RunState, without: set[Any]) -> store.Checkpoint | None:
    """The newest valid checkpoint of this run that can be resumed, opened; `without` those of `of_others`. Every rank
    calls it."""
    finish(run)
    if run.checkpoint_callback is None:
        return None
    return store.open_newest(partial(start.newest, run, folder_of(run)), run.strategy, without)


def folder_of(run: RunState) -> str:
    """Where this run's checkpoints lie."""
    callback = run.checkpoint_callback
    if callback is not None and callback._given_dirpath:
        return callback._given_dirpath
    return os.path.abspath(Path(run.log_dir or run.arguments.default_root_dir) / "checkpoints")


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
    if number == signal.SIGUSR1 and path and run.is_global_zero and (requeued := slurm.requeue()):
        _log.warning(requeued)
    return stop_error(number)


def _superseded(run: RunState, path: str | Path) -> list[Path]:
    """The checkpoint that an interrupted run left and this one resumed, once another that can be resumed is saved in
    its folder."""
    resumed, saved = run.resumed, Path(os.path.abspath(path))
    if resumed is None or not resumed.path.name.startswith(INTERRUPTED) or resumed.path == saved:
        return []
    if resumed.global_step > run.progress.global_step:
        return []
    return [resumed.path] if resumed.path.parent == saved.parent else []


def may_stop(run: RunState) -> bool:
    """Whether `should_stop` has an effect by now; the same on all ranks."""
    progress, arguments = run.progress, run.arguments
    return progress.current_epoch >= (arguments.min_epochs or 0) and progress.global_step >= (arguments.min_steps or 0)


def agree_to_stop(run: RunState) -> bool:
    """Whether any rank asks to stop, for places between steps. Every rank calls it.

    Raises what `interrupted` returns if a rank got a signal, or has failed in an asynchronous save.
    """
    failed = run.saving is not None and run.saving.failure is not None
    stop = SAVE_FAILED if failed else run.signals.number or int(run.should_stop)
    stop = stop if run.world_size == 1 else int(run.strategy.all_reduce(torch.tensor(stop), "max"))
    if stop > 1:
        raise interrupted(run)
    return bool(stop) and may_stop(run)


def is_finished(run: RunState) -> bool:
    """Whether training has reached its end, or all ranks agree to stop. Every rank calls it."""
    progress = run.progress
    if run.max_epochs is not None and progress.current_epoch >= run.max_epochs:
        return True
    return is_at_last_step(run) or agree_to_stop(run)


def is_at_last_step(run: RunState) -> bool:
    return run.max_steps is not None and run.progress.global_step >= run.max_steps


def ends_open(run: RunState, loop: FitLoop) -> bool:
    """Whether a resumed run trains no more, but was saved before the end of its epoch or of training, with all that
    comes then."""
    progress = run.progress
    if not progress.batches_seen or (run.max_epochs is not None and progress.current_epoch >= run.max_epochs):
        return False
    if run.max_steps is not None and progress.global_step > run.max_steps:  # it was given fewer than before
        return False
    ended, validated = progress.ended_at == progress.global_step, progress.validated_at == progress.global_step
    return loop.epoch_is_over(progress) or not ended or (bool(loop.val_loaders) and not validated)
