"""Validation, test and prediction: one loop for all three."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import unwrap
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks.base import Callback
from lockstep.strategies.base import StepHooks
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.launch.phase import set_phase
from lockstep.strategies.sync.collective_fingerprint import once_a_sample, refusing
from lockstep.trainer.checkpoint.rank_state import kept_tensors, put_tensors, torchmetrics_of
from lockstep.trainer.checkpoint.snapshot import restore_callbacks, restore_datamodule, restore_weights, weights_for
from lockstep.trainer.kept.outputs import reads_outputs
from lockstep.trainer.kept.owners import refuse_other_modes
from lockstep.trainer.metrics.buffers import EvaluatedBuffers
from lockstep.trainer.metrics.counts import CountsWatch
from lockstep.trainer.metrics.entry import Reduced, nowhere
from lockstep.trainer.metrics.gathering import gather_items, gather_values
from lockstep.trainer.metrics.records import on_host
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.metrics.sync import sync_made
from lockstep.trainer.module import Module
from lockstep.trainer.run import publish
from lockstep.trainer.run.hooks import Calls, Hooks, overrides, step_function, transfer_of
from lockstep.trainer.seeding import set_rng_state
from lockstep.trainer.setup import held_parameters
from lockstep.trainer.setup.loaders import (
    check_orders,
    check_rows,
    evaluation_loaders,
    follow_evaluation,
    loaders_of,
    measure_evaluation,
)
from lockstep.trainer.shares.ends import compare_counts

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.loaders import Sources

KINDS = {"validate": "val", "test": "test", "predict": "predict"}
"""Stage: kind of loader."""
_IDLE = (
    "ranks without samples of this batch of an evaluation do not call its hooks; call it in a hook of the epoch, such "
    "as on_validation_epoch_end, or use a number of samples that shares out over the ranks"
)


@dataclass(frozen=True)
class Stage:
    """What differs between validation, test and prediction."""

    name: str
    kind: str
    step: Callable[..., Any]
    to_eval: Callable[[], None]
    to_train: Callable[[], None]
    start: Calls
    end: Calls
    epoch_start: Calls
    epoch_end: Calls
    batch_start: Calls
    batch_end: Calls


def _set(hook: Callable[[], None] | None) -> Callable[[], None]:
    """The hook, or what does nothing in the place of None."""
    return (lambda: None) if hook is None else hook


def stage_of(stage: str, module: Module, hooks: Hooks) -> Stage:
    """The step and hooks of "validate", "test" or "predict"."""
    if stage == "validate":
        return Stage(
            name="validation",
            kind="val",
            step=module.validation_step,
            to_eval=_set(module.on_validation_model_eval),
            to_train=_set(module.on_validation_model_train),
            start=hooks.on_validation_start,
            end=hooks.on_validation_end,
            epoch_start=hooks.on_validation_epoch_start,
            epoch_end=hooks.on_validation_epoch_end,
            batch_start=hooks.on_validation_batch_start,
            batch_end=hooks.on_validation_batch_end,
        )
    if stage == "test":
        return Stage(
            name="test",
            kind="test",
            step=module.test_step,
            to_eval=_set(module.on_test_model_eval),
            to_train=_set(module.on_test_model_train),
            start=hooks.on_test_start,
            end=hooks.on_test_end,
            epoch_start=hooks.on_test_epoch_start,
            epoch_end=hooks.on_test_epoch_end,
            batch_start=hooks.on_test_batch_start,
            batch_end=hooks.on_test_batch_end,
        )
    return Stage(
        name="predict",
        kind="predict",
        step=module.predict_step,
        to_eval=_set(module.on_predict_model_eval),
        to_train=_set(module.on_predict_model_train),
        start=hooks.on_predict_start,
        end=hooks.on_predict_end,
        epoch_start=hooks.on_predict_epoch_start,
        epoch_end=hooks.on_predict_epoch_end,
        batch_start=hooks.on_predict_batch_start,
        batch_end=hooks.on_predict_batch_end,
    )


def check_step(module: Module, stage: str) -> None:
    """Raise ValueError if `module` has no step for the stage."""
    steps = {"validate": "validation_step", "test": "test_step"}
    if stage in steps and not overrides(module, steps[stage], Module):
        raise ValueError(f"{stage} needs {type(module).__name__}.{steps[stage]}; define it")
    if stage == "predict" and not (
        overrides(module, "predict_step", Module) or overrides(module, "forward", nn.Module)
    ):
        raise ValueError(f"predict needs {type(module).__name__}.predict_step or forward; define one")


def run_stage(run: RunState, module: Module, sources: Sources, stage: str) -> Any:
    """`Trainer.validate`, `test` and `predict` on one rank: metrics by loader, or predictions in dataset order."""
    kind, checkpoint = KINDS[stage], run.resumed
    if checkpoint is not None:
        restore_datamodule(run, checkpoint)
    source = sources.get(module, kind)
    if not loaders_of(source):
        raise ValueError(f"{stage} needs data: give dataloaders, or a DataModule or Module with {kind}_dataloader")
    run.given_loaders[kind] = source
    loaders = evaluation_loaders(run, source, kind)
    weights = None if checkpoint is None else weights_for(run.hooks.on_load_checkpoint, checkpoint, run.strategy)
    held_parameters.set_up(run, module)
    if checkpoint is not None and weights is not None:
        restore_weights(run, checkpoint.path, weights)
        restore_callbacks(run, checkpoint, filter(_has_own_state, run.callbacks))
    training_metrics = run.metrics
    outputs = evaluate(run, module, loaders, stage)
    run.metrics = training_metrics  # of a fit before, which can still be saved
    if stage != "predict":
        shown = {key: float(value) for key, value in run.callback_metrics.items()}
        return [
            {key: value for key, value in shown.items() if _belongs(key, i, len(loaders))} for i in range(len(loaders))
        ]
    if not run.keeps_predictions:
        return None
    ordered = [in_dataset_order(run, part) for part in outputs]
    if not run.is_global_zero:
        return None
    return ordered[0] if len(ordered) == 1 else ordered


def _has_own_state(callback: Callback) -> bool:
    """Whether user code reads its state, which an evaluation may need; Lockstep's callbacks keep records of a fit."""
    kind: Any = type(callback)  # which for a mock has no such name
    return not getattr(kind, "load_state_dict", Callback.load_state_dict).__module__.startswith("lockstep.")


def validate_in_fit(
    run: RunState, module: Module, loaders: list[ShardedLoader], note_done: Callable[[], None] | None = None
) -> None:
    """Validate; random streams, metrics and modes of training stay as they are. `note_done` is called before the hooks
    of its end."""
    of_training = run.pause()
    try:
        run.strategy.synchronize(run.wrapped)
        with run.strategy.evaluation_weights(run.wrapped, run.optimizers.values()):
            evaluate(run, module, loaders, "validate", note_done)
    finally:
        run.paused, run.metrics = None, of_training.metrics
        set_rng_state(of_training.streams, run.streams)


def sanity_check(run: RunState, module: Module, loaders: list[ShardedLoader]) -> None:
    """A few batches of validation before training, to find errors early; leaves no trace."""
    shown = run.callback_metrics, run.logged_metrics, run.progress_bar_metrics
    run.callback_metrics, run.logged_metrics, run.progress_bar_metrics = {}, {}, {}
    kept, run.sanity_checking = kept_tensors(module), True
    measure_evaluation(run, loaders, "val")
    for hook in run.hooks.on_sanity_check_start:
        hook()
    try:
        validate_in_fit(run, module, loaders)
        for metric in torchmetrics_of(module).values():
            metric.reset()
        put_tensors(module, kept)
        for hook in run.hooks.on_sanity_check_end:
            hook()
    finally:
        run.sanity_checking = False
        measure_evaluation(run, loaders, "val")
        run.callback_metrics, run.logged_metrics, run.progress_bar_metrics = shown


def evaluate(
    run: RunState,
    module: Module,
    loaders: list[ShardedLoader],
    stage: str,
    note_done: Callable[[], None] | None = None,
) -> list[list[Any]]:
    """Run the step of `stage` over this rank's share of each loader; return the outputs if they are predictions."""
    what, strategy = stage_of(stage, module, run.hooks), run.strategy
    several = len(loaders) > 1
    exact = run.shares is not None or strategy.capabilities.local_steps
    several_ranks = strategy.topology.data_size > 1
    metrics = run.metrics = MetricStore(module, training=False, exact=exact, several=several_ranks)
    metrics.noticed = run.noticed_names
    if stage == "predict":
        metrics.log = nowhere  # type: ignore[method-assign,assignment]
    outputs: list[list[Any]] = []
    with _evaluation_mode(run, module, what, stage):
        for hook in what.start:
            hook()
        for hook in what.epoch_start:
            hook()
        follow_evaluation(run, loaders, what.kind)
        sync_made(run, module)
        buffers = EvaluatedBuffers(strategy, module)
        counts = CountsWatch(run, module, stage, what.batch_start, what.batch_end)
        what = replace(what, batch_start=counts.starts, batch_end=counts.ends)
        for index, loader in enumerate(loaders):
            metrics.suffix = f"/dataloader_idx_{index}" if several else ""
            before = metrics.samples
            outputs.append(_evaluate_loader(run, module, what, loader, index, several, buffers))
            metrics.num_loaders += metrics.samples > before
        buffers.check(f"{what.name}_step")
        counts.compare()
        compare_counts(run)
        check_orders(run, loaders, what.kind)
        check_rows(run, loaders, metrics.weighs)
        metrics.suffix, metrics.weight = "", 1.0
        early: list[Reduced] = []
        if what.epoch_end:  # which read what the steps have logged, and log more
            early = metrics.reduce(strategy, epoch_end=True, reset=False)
            publish.show(run, early)
        for hook in what.epoch_end:
            call_at_epoch_end(run, hook, f"on_{what.name}_epoch_end")
        final = metrics.reduce(strategy, epoch_end=True)
        publish.publish(run, {reduced.name: reduced for reduced in [*early, *final]}.values())
        metrics.close()
        if note_done is not None:
            note_done()
        for hook in what.end:
            hook()
    return outputs


def _evaluate_loader(
    run: RunState,
    module: Module,
    what: Stage,
    loader: ShardedLoader,
    index: int,
    several: bool,
    buffers: EvaluatedBuffers,
) -> list[Any]:
    """Run the step over one loader; return [batch, part of it, output] of each if they are predictions to keep."""
    strategy, metrics = run.strategy, run.metrics
    limit = run.evaluation_limits[what.kind][index]
    step = once_a_sample(step_function(what.step, 3 if several else 2), strategy.topology)
    own_transfer = transfer_of(module, run.datamodule, strategy.to_device, strategy.topology.device)
    keeps = what.name == "predict" and run.keeps_predictions and strategy.topology.is_reporting_rank
    outputs: list[Any] = []
    reads = reads_outputs(run, f"on_{what.name}_batch_end")
    step_hooks = StepHooks(log_scope=metrics.part, streams=run.streams, shares_outputs=reads)
    shares, places = run.shares, (what.name, run.progress.total_batches, index)
    for batch_idx, window in enumerate(loader.windows(0, limit=limit)):
        set_phase(run.progress.global_step, f"{what.name} batch {batch_idx}")
        for micro_batch in window.micro_batches:
            if shares is not None:
                shares.enter(micro_batch.share, *places, batch_idx)
            batch = micro_batch.batch
            batch = strategy.to_device(batch) if own_transfer is None else own_transfer(batch, index)
            micro_batch.batch = batch
            metrics.weight, metrics.in_batch = micro_batch.num_samples, True
            metrics.samples += micro_batch.num_samples
            metrics.is_ambiguous = micro_batch.is_ambiguous and (shares is not None or strategy.topology.data_size > 1)
            real = micro_batch.num_samples > 0
            most = (strategy.topology.data_size - 1) * (1 if loader.is_even else micro_batch.num_samples)
            idle = window.num_samples <= most  # so that some rank may have none
            if real:
                _call(what.batch_start, batch, batch_idx, index, idle=idle)
            numbers = (batch_idx, index) if several else (batch_idx,)
            with buffers.batch(micro_batch, window.num_samples):
                output = strategy.evaluate(run.wrapped, step, micro_batch, *numbers, hooks=step_hooks)
            if shares is not None:
                shares.ran()
            if real:
                _call(what.batch_end, output, batch, batch_idx, index, idle=idle)
            metrics.in_batch = False
            if keeps and real:
                part = strategy.topology.data_rank if shares is None else micro_batch.share
                outputs.append([batch_idx, part, on_host(output)])
        if shares is not None:
            shares.leave(*places, batch_idx)
    if run.paused is not None:
        loader.put_back()
    return outputs


def _call(hooks: Calls, *args: Any, idle: bool) -> None:
    """Call the hooks of a batch. With `idle` ranks may have no sample of it, and so not meet in what a hook calls."""
    with refusing(_IDLE, every=True) if idle and hooks else nullcontext():
        for hook in hooks:
            hook(*args)


def print_metrics(stage: str, returned: list[dict[str, float]]) -> None:
    """One line for each loader."""
    for i, metrics in enumerate(returned):
        shown = ", ".join(f"{name}={value:.6g}" for name, value in metrics.items())
        safe_print(f"{stage}{f' loader {i}' if len(returned) > 1 else ''}: {shown}")


def call_at_epoch_end(run: RunState, hook: Callable[[], Any], name: str) -> None:
    """Call a hook that sums an epoch up; where it fails on a rank that has seen no sample, say why."""
    try:
        hook()
    except Exception as error:
        if run.metrics.samples or run.world_size == 1:
            raise
        raise RuntimeError(
            f"{name} failed on rank {run.rank}, which has seen no sample in this epoch "
            f"({type(error).__name__}: {error}); log in the step, which is exact on any number of ranks, let the hook "
            "do without samples, or use fewer ranks or a smaller batch_size"
        ) from error


def in_dataset_order(run: RunState, outputs: list[Any]) -> list[Any]:
    """On rank 0 the predictions of all ranks, a batch of one data rank an item, in the order of the dataset; nothing on
    other ranks. Empties `outputs`, which are [batch, part of it, prediction]. Every rank calls it."""
    strategy = run.strategy
    if strategy.topology.world_size > 1 and not strategy.topology.is_reporting_rank:
        outputs.clear()
    kept = [output.pop() for output in outputs]
    if strategy.topology.world_size == 1:
        return kept
    # A rank has no prediction of a batch that it has no sample of, so its predictions do not count the batches.
    places = gather_values(strategy, outputs, "places")
    try:
        unpacked = gather_items(strategy, kept, _globals_of_step(run))
    except TypeError as error:
        raise TypeError(
            "predict_step on several ranks must return tensors, numbers, strings, or lists, tuples, sets, dicts and "
            f"dataclasses of them: {error}"
        ) from None
    if unpacked is None:
        return []
    found = zip(chain.from_iterable(places), chain.from_iterable(unpacked), strict=True)
    return [prediction for _, prediction in sorted(found, key=lambda pair: pair[0])]


def _globals_of_step(run: RunState) -> dict[str, Any]:
    """What the names in the file of the module's `predict_step` are."""
    assert run.module is not None
    return dict(getattr(unwrap(type(run.module).predict_step), "__globals__", {}))


def _belongs(key: str, index: int, count: int) -> bool:
    return count == 1 or "/dataloader_idx_" not in key or key.endswith(f"/dataloader_idx_{index}")


@contextmanager
def _evaluation_mode(run: RunState, module: Module, what: Stage, stage: str) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule has the mode that it had."""
    modes, of_training = [(child, child.training) for child in module.modules()], getattr(run.attributes, "modes", ())
    if run.attributes is not None:
        run.attributes.modes, run.attributes.saved_modes = of_training or modes, False
    what.to_eval()
    run.evaluating = stage
    try:
        with torch.no_grad():
            yield
    finally:
        run.evaluating = None
        if modes[0][1]:
            module.train(True)  # which some override to swap weights
        for child, mode in modes:
            child.training = mode
        what.to_train()
        if run.attributes is not None:
            run.attributes.modes = of_training
    if run.attributes is not None and run.attributes.saved_modes:
        refuse_other_modes(modes)
