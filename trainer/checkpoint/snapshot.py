"""Everything stateful of a run, gathered for a checkpoint and put back: one list for both directions.

tensors   model/<fqn>, optimizer/<name>/<fqn>/<key>, callbacks/…, module/…, datamodule/…, ranks/<rank>/…
state     progress, seed, strategy meta, schedulers, callbacks, metrics, hyperparameters, versions
rank      random streams, running sums of metrics, data position of one rank
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.strategies.checkpoint_state import Reader, State, TensorShard, pack, unpack
from lockstep.strategies.optimizers.saved_groups import is_alike
from lockstep.trainer.checkpoint import rank_state, schema, store
from lockstep.trainer.checkpoint.manifest import WeightsOnlyError, refused
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError
from lockstep.trainer.kept import numbers
from lockstep.trainer.run import hook_content, publish
from lockstep.trainer.run.hook_content import HookContent, SavedWeights, facts_of
from lockstep.trainer.setup import frozen, resume

if TYPE_CHECKING:
    from lockstep.callbacks._support.parameter_state import ParameterState
    from lockstep.callbacks.base import Callback
    from lockstep.strategies.base import Strategy
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.hooks import Calls
    from lockstep.trainer.run.state import RunState

_log = logging.getLogger("lockstep")


def save(
    run: RunState,
    module: Module,
    path: str | Path,
    *,
    wait: bool = True,
    also: Sequence[str | Path] = (),
    outdated: Sequence[str | Path] = (),
) -> store.Saving | None:
    """Write a checkpoint of the run at `path`; without `wait` return once it is copied. Every rank calls it, at the
    same place."""
    strategy = run.strategy
    kept_now = rank_state.kept_gradients(module)
    gathered = strategy.state_dict(run.wrapped, {**run.optimizers, **run.parameter_states, **kept_now})
    extra = added_by_hooks(run, module, gathered, run.hooks.on_save_checkpoint)
    tensors, mine = gathered.tensors, strategy.topology.rank == 0
    kept: dict[str, TensorShard] = tensors if mine else {}  # what all ranks hold alike, rank 0 writes
    with refused(path):
        state = _shared_state(run, module, gathered.meta, extra, kept)
        assert run.optimizer_attributes is not None
        if attributes := run.optimizer_attributes.save(run.optimizers, kept, strategy):
            state["optimizer_attributes"] = attributes
        mine_alone = rank_state.save(run, module, tensors)
    trained = {
        f"model/{name}"
        for entry in gathered.meta["optimizers"].values()
        for group in entry["param_groups"]
        for name in group["params"]
    }
    options: dict[str, Any] = {
        "rank": strategy.topology.rank,
        "world_size": strategy.topology.world_size,
        "tensors": tensors,
        "state": state,
        "rank_state": mine_alone,
        "broadcast": strategy.broadcast,
        "finite": trained
        | {  # not buffers: a mask may hold -inf, nor gradients, which are checked when they are stepped with
            name for name in tensors if name.startswith("optimizer/") and rank_state.GRADIENTS not in name
        },
        "also": also,
        "outdated": outdated,
    }
    if not wait:
        return store.begin(path, **options)
    store.save(path, barrier=strategy.barrier, **options)
    return None


def added_by_hooks(
    run: RunState, module: Module, gathered: State, hooks: Calls, *, resumable: bool = True, alone: bool = False
) -> HookContent:
    """What the `on_save_checkpoint` hooks add; takes the weights out of `gathered` that the checkpoint is not to hold.

    Every rank calls it, or with `alone` one.
    """
    frozen.omit(run, gathered, alone=alone)
    weights = SavedWeights(gathered, None if alone else run.strategy)
    extra = HookContent({}, lambda: facts_of(run.progress.state_dict(), module.saved_hparams), weights.gather)
    for hook in hooks:
        hook(extra)
    if hooks:
        trained = [name for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
        weights.take_out_removed(extra.weights, trained, resumable)
    return extra


def _shared_state(
    run: RunState, module: Module, meta: dict[str, Any], extra: dict[str, Any], tensors: dict[str, TensorShard]
) -> dict[str, Any]:
    """What all ranks hold alike, as JSON; its tensors go to `tensors`. `extra` is what hooks have added."""
    datamodule = run.datamodule
    return {
        "progress": run.progress.state_dict(),
        "seed": run.seed,
        "rng_at_setup": pack(run.rng_at_setup, "setup/rng", tensors),
        "strategy_name": run.strategy.name,
        "strategy": meta,
        "schedulers": [
            pack(config.scheduler.state_dict() or {}, f"schedulers/{i}", tensors)
            for i, config in enumerate(run.schedulers)
        ],
        "callbacks": _callback_states(run, tensors),
        "datamodule": {} if datamodule is None else pack(datamodule.state_dict(), "datamodule/state", tensors),
        "module": pack(extra, "module/extra", tensors),
        **hyperparameters(run, module, tensors),
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "measured_at": {**run.measured_at},
        "logged_metrics": {name: float(value) for name, value in run.logged_metrics.items()},
        "progress_bar_metrics": {name: float(value) for name, value in run.progress_bar_metrics.items()},
        "windows": run.train_dataloader.plan,
        "virtual_ranks": run.strategy.virtual_ranks if run.strategy.capabilities.exact else 0,
        "accumulation": {"at_start": run.accumulation_at_start, "now": run.accumulate_grad_batches},
        **({} if run.numbers is None else {"numbers": run.numbers.state_dict()}),
        "configured": run.configured,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def restore(run: RunState, module: Module, checkpoint: Checkpoint) -> dict[str, Any]:
    """Put a run back to where `checkpoint` was saved. Every rank calls it, after everything is built. Returns the
    loaders that had been made again, as `Reload.make_again` does."""
    state, made = checkpoint.state, {}
    assert run.numbers is not None
    rank_state.restore_trainability(run, module, checkpoint)
    _restore_training(run, checkpoint, resume.are_assigned(state.get("configured")))
    if run.reload is not None and run.reload.is_of_later_epoch:
        with refused(checkpoint.path):
            later = rank_state.attributes(run, checkpoint)
        made = run.reload.make_again(later)
    run.numbers.load_state_dict(numbers.saved(state))
    with refused(checkpoint.path):
        progress = run.progress
        progress.load_state_dict(state["progress"])
        for name, value in state["metrics"].items():
            run.callback_metrics[name] = torch.tensor(value, dtype=torch.float64)
        run.measured_at |= state.get("measured_at", dict.fromkeys(state["metrics"], progress.global_step))
        for shown, key in ((run.logged_metrics, "logged_metrics"), (run.progress_bar_metrics, "progress_bar_metrics")):
            shown.update({n: torch.tensor(value, dtype=torch.float64) for n, value in state.get(key, {}).items()})

        rank_state.restore(run, module, checkpoint)
    return made


def recount(run: RunState, checkpoint: Checkpoint, val_every: int | None) -> None:
    """Count batches, and the validations after each `val_every` of them, as they are now: the user may want others than
    those of the run that was saved."""
    progress, loader = run.progress, run.train_dataloader
    if loader.plan == checkpoint.state["windows"] or loader.batch_size is None:
        return
    before = progress.batches_seen
    progress.batches_seen = -(-progress.samples_seen * loader.num_micro_batches // loader.batch_size)
    if progress.batches_seen == before:
        return
    progress.total_batches += progress.batches_seen - before
    over_epochs = run.arguments.check_val_every_n_epoch is None
    batches = progress.total_batches if over_epochs else progress.batches_seen
    is_due = val_every is not None and batches % val_every == 0 and progress.validated_at != progress.global_step
    progress.validations = batches // val_every - is_due if val_every is not None else 0


def restore_datamodule(run: RunState, checkpoint: Checkpoint) -> None:
    """Give the DataModule what it had saved, before it makes loaders. Every rank calls it."""
    if run.datamodule is not None and "datamodule" in checkpoint.state:  # imported weights have none
        with refused(checkpoint.path):
            run.datamodule.load_state_dict(unpack(checkpoint.state["datamodule"], checkpoint.read))


def rewind(run: RunState, checkpoint: Checkpoint) -> None:
    """Restore weights, optimizers, schedulers and callbacks from a checkpoint of this run, but not data and metrics.

    Every rank calls it, between windows.
    """
    load_extra(run, checkpoint)
    restore_optimizers(run, checkpoint)
    run.progress.global_step = checkpoint.state["progress"]["global_step"]
    restore_callbacks(run, checkpoint, run.callbacks, within_run=True)


def load_extra(run: RunState, checkpoint: Checkpoint) -> None:
    """Call the `on_load_checkpoint` hooks of a run that is resumed; that of the module may build layers in it.

    Every rank calls it before the model is wrapped: weights, buffers and the state of optimizers are loaded afterwards.
    """
    extra = _content(checkpoint)
    for hook in run.hooks.on_load_checkpoint:
        hook(extra)
    with refused(checkpoint.path):
        hook_content.check_unchanged(checkpoint, extra.weights)
    assert run.attributes is not None
    run.attributes.note_loaded()


def weights_for(
    hooks: Iterable[Callable[[HookContent], Any]], checkpoint: Checkpoint, strategy: Strategy | None = None
) -> Reader:
    """The weights to load into a module, after the `on_load_checkpoint` of it and of callbacks, which may build layers
    in it and change them: those of rank 0 of `strategy`, of which every rank calls it before the model is wrapped."""
    if "module" not in checkpoint.state:  # imported weights have none
        return checkpoint
    extra = _content(checkpoint)
    for hook in hooks:
        hook(extra)
    with refused(checkpoint.path):
        return hook_content.edited(checkpoint, extra.weights, strategy)


def _content(checkpoint: Checkpoint) -> HookContent:
    state, read = checkpoint.state, checkpoint.read

    def facts() -> dict[str, Any]:
        with refused(checkpoint.path):
            return facts_of(state["progress"], unpack(state.get("hyperparameters", {}), read))

    def weights() -> dict[str, Any]:
        with refused(checkpoint.path):
            return hook_content.read(checkpoint)

    with refused(checkpoint.path):
        return HookContent(unpack(state["module"], read), facts, weights)


def check_configured(run: RunState, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if this run's code configures other optimizers than the saved run's did."""
    same_world = checkpoint.world_size == run.world_size
    with refused(checkpoint.path):
        saved = checkpoint.state.get("configured")
        resume.check(checkpoint.path, saved, run.configured, same_world, run.is_global_zero)


def restore_weights(run: RunState, path: str | Path, weights: Reader) -> None:
    """Load what `weights_for` returned of the checkpoint at `path` into the wrapped model. Every rank calls it."""
    with refused(path):
        frozen.check(weights, run.strategy, run.wrapped)
        run.strategy.load_state_dict(run.wrapped, {}, weights)


def restore_optimizers(run: RunState, checkpoint: Checkpoint) -> None:
    """Load weights and the state of optimizers and schedulers. Every rank calls it."""
    state, read = checkpoint.state, checkpoint.read
    with refused(checkpoint.path):
        beside = _saved_beside(run, checkpoint)
        if run.module is not None:
            beside |= rank_state.drop_gradients(run.module, run.strategy, state["strategy"])
        frozen.check(checkpoint, run.strategy, run.wrapped)
        run.strategy.load_state_dict(run.wrapped, {**run.optimizers, **beside}, checkpoint)
        assert run.optimizer_attributes is not None
        run.optimizer_attributes.load(run.optimizers, state.get("optimizer_attributes", {}), checkpoint)
        if len(state["schedulers"]) != len(run.schedulers):
            raise ValueError(f"it holds {len(state['schedulers'])} schedulers, but this run has {len(run.schedulers)}")
        for config, saved in zip(run.schedulers, state["schedulers"], strict=True):
            values, name = unpack(saved, read), type(config.scheduler).__name__
            for key, now in (config.scheduler.state_dict() or {}).items():
                if key in values and not is_alike(values[key], now):
                    raise ValueError(f"scheduler {name} has {key}={now!r:.60}, but {values[key]!r:.60} was saved")
            config.scheduler.load_state_dict(values)
            config.scheduler.optimizer._opt_called = True  # in the saved run; else torch warns at an epoch's end


def _restore_training(run: RunState, checkpoint: Checkpoint, without_optimizers: bool) -> None:
    if without_optimizers:
        restore_weights(run, checkpoint.path, checkpoint)
    else:
        restore_optimizers(run, checkpoint)
    _say_what_is_dropped(run, checkpoint)
    restore_callbacks(run, checkpoint, run.callbacks)


def restore_callbacks(
    run: RunState, checkpoint: Checkpoint, callbacks: Iterable[Callback], within_run: bool = False
) -> None:
    """Give callbacks what they had saved. Every rank calls it."""
    states = checkpoint.state.get("callbacks", {})
    given = {callback.state_key for callback in run.callbacks}
    with refused(checkpoint.path):
        for callback in callbacks:
            former = None if callback.former_state_key in given else callback.former_state_key
            key = callback.state_key if callback.state_key in states else former
            if key in states:
                publish.load_state_of(run, callback, unpack(states[key], checkpoint.read), within_run)


def _saved_beside(run: RunState, checkpoint: Checkpoint) -> dict[str, ParameterState]:
    """The parameter state of callbacks that the checkpoint has; that of others starts again."""
    saved = {name for name in checkpoint.state["strategy"]["optimizers"] if name.startswith("callbacks.")}
    lost = sorted(name.removeprefix("callbacks.") for name in saved - run.parameter_states.keys())
    if lost:
        raise ValueError(
            f"it holds the weights that {', '.join(lost)} validates and saves, beside those that train; give the same "
            "callback to continue that run, or begin a new one from its weights (load_from_checkpoint, and fit "
            "without ckpt_path)"
        )
    for name in run.parameter_states.keys() - saved:
        run.parameter_states[name].reset()
    return {name: state for name, state in run.parameter_states.items() if name in saved}


def _say_what_is_dropped(run: RunState, checkpoint: Checkpoint) -> None:
    """One line for the saved state of callbacks that this run does not have."""
    given = {key for callback in run.callbacks for key in (callback.state_key, callback.former_state_key)}
    dropped = [key for key, saved in checkpoint.state["callbacks"].items() if saved and key not in given]
    if dropped and run.is_global_zero:
        _log.info(
            f"checkpoint {checkpoint.path} holds the state of {', '.join(dropped)}, which this run does not have among "
            "its callbacks: that state is dropped; give the same callback with the same arguments to continue it"
        )


def _callback_states(run: RunState, kept: dict[str, TensorShard]) -> dict[str, Any]:
    states = {}
    for callback in run.callbacks:
        key = callback.state_key
        state = publish.state_of(run, callback, partial(pack, name=f"callbacks/{key}", tensors=kept))
        if state is not None:
            states[key] = state
    return states


def check_resumable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where a checkpoint is not one of a fit."""
    state = checkpoint.state
    if "seed" not in state:
        raise WeightsOnlyError(
            f"checkpoint {checkpoint.path} has only weights, so it cannot be resumed: load them with "
            "load_from_checkpoint, and fit without ckpt_path"
        )
    with refused(checkpoint.path):
        wrong = schema.fault(checkpoint)
    if wrong is not None:
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be resumed: {wrong}; load another one")


def hyperparameters(run: RunState, module: Module, tensors: dict[str, TensorShard]) -> dict[str, Any]:
    """Of the module and the DataModule, as JSON; its tensors go to `tensors`."""
    saved = {"": module} if run.datamodule is None else {"": module, "datamodule_": run.datamodule}
    found: dict[str, Any] = {}
    for prefix, owner in saved.items():
        place = f"{prefix.rstrip('_') or 'module'}/hparams"
        found[f"{prefix}hyperparameters"] = pack(owner.saved_hparams, place, tensors)
        found[f"{prefix}hyperparameters_name"] = owner.hparams_name
        found[f"{prefix}hyperparameters_unsaved"] = owner.unsaved_hparams
    return found
