"""The training loop, in the order in which things happen.

    Trainer.fit → fit → strategy.forward_backward → Module.training_step
                      → strategy.optimizer_step → optimizer.step

`callbacks/base.py` shows where every hook is called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from itertools import filterfalse
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from lockstep.strategies.base import StepHooks, StepResult, StepVote
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch.phase import CALLBACKS, END_OF_STEP, OPTIMIZER_STEP, TRAINING_STEP, set_phase
from lockstep.strategies.optimizers.numbers import hash_of_rates
from lockstep.trainer.kept.outputs import reads_outputs
from lockstep.trainer.metrics.sync import sync_made
from lockstep.trainer.run import evaluate, loss_means, publish, saving
from lockstep.trainer.run.guards import check_weight, on_any_rank
from lockstep.trainer.run.hooks import check_exchanged, is_users, refuse_skip
from lockstep.trainer.setup import assigned, prepare, reload, start_hooks
from lockstep.trainer.setup.loaders import follow_training, samples_of_all
from lockstep.trainer.setup.optimizers import step_schedulers
from lockstep.trainer.setup.own_steps import OwnStep, in_its_place, with_local_steps
from lockstep.trainer.setup.prepare import FitLoop
from lockstep.trainer.shares.ends import clear_learners, compare_counts, end_shares, turns

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.loaders import Sources

_log = logging.getLogger("lockstep")


def fit(run: RunState, module: Module, sources: Sources) -> None:
    """Train `module`; every rank calls it, in its own process."""
    loop = prepare.fit(run, module, sources)
    if not _begin(run, module, loop):
        return
    loss_means.watch(run, loop)
    strategy, wrapped, hooks, guards, progress = run.strategy, run.wrapped, run.hooks, loop.guards, run.progress
    optimizers, handles, automatic = list(run.optimizers.values()), run.user_optimizers, module.automatic_optimization
    step_hooks, clip = step_hooks_of(run, loop, automatic), None if strategy.capabilities.local_steps else loop.clip
    apart = not strategy.capabilities.synchronous
    while not saving.is_finished(run) or saving.ends_open(run, loop):
        stop, windows = _begin_epoch(run, module, loop)
        steps_before, batches_before = progress.global_step, progress.batches_seen
        while not stop:
            set_phase(progress.global_step, "loading data")
            window = next(windows, None)
            if window is None:
                break
            if not run.signals.deferred:
                run.signals.defer()
            set_phase(progress.global_step, TRAINING_STEP)
            for part in turns(run, window) if apart else (window,):
                if guards.remembers:
                    guards.remember()
                result = strategy.forward_backward(wrapped, loop.training_step, part, step_hooks)
                if part.micro_batches[-1].is_ambiguous:
                    check_weight(run, part, part.micro_batches[-1])
                skipped = (result.non_finite is not None or result.later is not None) and guards.skips(result)
                steps, stepped = automatic and result.count and not skipped, run.manually_stepped
                if result.count and not loop.learned:
                    loop.learned = True
                    if loop.backward is not None:
                        loop.backward.check_called(run, part)
                if steps:
                    set_phase(progress.global_step, OPTIMIZER_STEP)
                    if len(part.micro_batches) > 1 and not apart:  # of what hooks of the step log
                        run.metrics.weight = sum(micro_batch.num_samples for micro_batch in part.micro_batches)
                    if guards.unowned:
                        guards.check_unowned(optimizers)
                    moving = guards.watches and guards.before_step(optimizers)
                    for optimizer, handle in zip(optimizers, handles, strict=True):
                        for hook in hooks.on_before_optimizer_step:
                            hook(optimizer)
                        if clip is not None:
                            clip(optimizer)
                        if loop.own_step is None:
                            refuse = handle.hooks.pop(id(handle))  # as `handle.take`, which would be one frame more
                            stepped |= strategy.optimizer_step(wrapped, optimizer)
                            handle.hooks[id(handle)] = refuse
                        else:
                            stepped |= loop.own_step(optimizer, part)
                    if guards.watches and stepped:
                        guards.after_step(optimizers, moving)
            stop = finish_window(run, module, loop, window, result, optimizers if steps else [], stepped or apart)
        if not _finish_epoch(run, module, loop, stop, steps_before, batches_before):
            break
    _finish(run, module, loop, optimizers)


def step_hooks_of(run: RunState, loop: FitLoop, automatic: bool) -> StepHooks:
    """What a strategy calls in a step of this run."""
    prepare, can = partial(_prepared, run, loop), run.strategy.capabilities
    meets = can.synchronous and (run.world_size > 1 or not can.runs_step_once)
    hooks = StepHooks(
        vote=partial(vote, run, meets, run.world_size > 1),
        log_scope=run.metrics.part,
        before_backward=loop.before_backward,
        backward=loop.backward,
        after_backward=loop.after_backward,
        whole_gradients=any(map(is_users, run.hooks.on_after_backward)),
        parameters=loop.parameters,
        prepare=prepare if can.synchronous else in_its_place(run, prepare),
        streams=run.streams,
        log=run.metrics.log_measured,
        folder=run.log_dir,
        shares_outputs=reads_outputs(run, "on_train_batch_end"),
        automatic=automatic,
    )
    if isinstance(loop.own_step, OwnStep):  # which evaluates windows again
        loop.own_step.hooks, loop.own_step.clip = hooks, loop.clip
    return with_local_steps(run, hooks, loop.clip) if can.local_steps else hooks


def _begin(run: RunState, module: Module, loop: FitLoop) -> bool:
    """The start of training: its hooks, what loggers and the run's folder get, the sanity check; whether there is
    anything to train."""
    progress = run.progress
    assigned.call(run, module, loop, run.hooks.on_fit_start)
    publish.describe(run, module)
    if run.folder is not None:
        run.folder.begin(run, module)
        run.executed = run.folder.executed
    is_new = not progress.global_step and not progress.batches_seen
    if run.arguments.num_sanity_val_steps and loop.val_loaders and is_new:
        evaluate.sanity_check(run, module, loop.val_loaders)
    trains = 0 not in (run.max_epochs, run.max_steps)
    assigned.call(run, module, loop, run.hooks.on_train_start if trains else (), last=True)
    start_hooks.end(run, module)
    if not trains:
        if run.is_global_zero:
            _log.warning("fit trains nothing, as max_epochs, max_steps or limit_train_batches is 0")
        for hook in run.hooks.on_fit_end:
            hook()
        run.strategy.synchronize(run.wrapped)
    return trains


def _begin_epoch(run: RunState, module: Module, loop: FitLoop) -> tuple[bool, Iterator[Window]]:
    """Whether to stop at once, and the epoch's windows from where the run is."""
    progress = run.progress
    if run.reload is not None and not progress.batches_seen:
        run.reload(loop)
    if not progress.epoch_begun:
        for hook in run.hooks.on_train_epoch_start:
            hook()
        progress.epoch_begun = True
        if run.accumulate_grad_batches != loop.train_loader.plan["accumulate"]:
            reload.change_accumulation(run, loop)
    check_exchanged(run, module)
    sync_made(run, module)
    if follow_training(run, loop.train_loader):
        reload.measure_again(run, loop)
    stop = saving.agree_to_stop(run) or saving.is_at_last_step(run)
    run.should_stop, run.asked_to_stop = run.should_stop or run.asked_to_stop, False
    if loop.val_every is not None and _validation_is_due(run, loop):  # the resumed checkpoint was saved just before it
        _validate(run, module, loop)
        stop |= saving.agree_to_stop(run)
    if progress.epoch_closed and run.reload is not None and run.reload.is_due:
        return stop, iter(())  # their loaders may be shorter or longer by now
    return stop, loop.train_loader.windows(progress.current_epoch, progress.samples_seen, loop.limit)


def finish_window(
    run: RunState,
    module: Module,
    loop: FitLoop,
    window: Window,
    result: StepResult,
    stepped_optimizers: list[Optimizer],
    stepped: bool,
) -> bool:
    """All that follows the optimizers' steps; whether training is to stop."""
    progress, metrics, guards, hooks = run.progress, run.metrics, loop.guards, run.hooks
    apart = not run.strategy.capabilities.synchronous  # where a window is a step on ranks without samples too
    if stepped and run.schedulers and (stepped_optimizers or apart):
        step_schedulers(run, module, "step")
    streams = clear_learners(run, module, window) if window.num_shares > 1 else {}
    for optimizer in stepped_optimizers:
        for hook in hooks.on_before_zero_grad:
            hook(optimizer)
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:  # the user's, or an engine's
            optimizer.zero_grad()
            continue
        for group in optimizer.param_groups:  # torch's own marks itself for profilers, which takes longer than this
            for parameter in group["params"]:
                parameter.grad = None

    run.last_loss, run.manually_stepped, metrics.in_share = result.loss, False, True
    loop.windows_seen += 1
    progress.global_step += stepped
    run.executed[0] += stepped
    set_phase(progress.global_step, END_OF_STEP)
    progress.samples_seen += window.num_samples
    progress.total_samples += window.num_samples
    progress.batches_seen += window.num_batches
    progress.total_batches += window.num_batches
    progress.publishes |= stepped and progress.global_step % run.arguments.log_every_n_steps == 0
    run.validation_follows, met = bool(loop.val_loaders) and _validation_follows(run, loop), run.strategy.ranks_meet
    if progress.publishes and (met or (run.validation_follows and loop.val_every is not None)):  # else it waits
        publish.publish_due(run)
    elif met and loop.windows_seen == 1:
        publish.preview(run)
    last, run.window_is_open, run.stop_was_voted = window.micro_batches[-1], False, result.stop == 1
    if loop.windows_seen in guards.data_checks and met:
        guards.check_data(loop.train_loader, last.output, last.num_samples)
    set_phase(progress.global_step, CALLBACKS)
    ends = hooks.on_train_batch_end if window.num_shares <= 1 else end_shares(run, module, window, streams)
    metrics.weight = last.num_samples
    for hook in filterfalse(is_users, ends) if run.strategy.capabilities.local_steps else ends:
        hook(last.output, last.batch, last.batch_idx)
    if stepped and guards.compares_every is not None and progress.global_step % guards.compares_every == 0:
        guards.compare_replicas()
    metrics.in_batch, metrics.weight = False, 1.0
    done = run.max_steps is not None and progress.global_step >= run.max_steps
    if result.stop > 1 and not done:  # a signal's number, or an asynchronous save that failed
        raise saving.interrupted(run)
    meets = run.strategy.ranks_meet and not met  # as a hook has saved, which ends a round of learners
    if loop.val_every is not None and _validation_is_due(run, loop):
        _validate(run, module, loop)
        meets = True
    stop = meets and saving.agree_to_stop(run)
    return stop or (result.stop > 0 and saving.may_stop(run)) or done


def _finish_epoch(run: RunState, module: Module, loop: FitLoop, stop: bool, steps: int, batches: int) -> bool:
    """After an epoch's last window, or one after which training stops; whether training continues."""
    progress = run.progress
    run.strategy.synchronize(run.wrapped)
    loop.guards.check_data(loop.train_loader)
    compare_counts(run)
    ends = run.max_epochs is not None or (run.strategy.capabilities.local_steps and steps > 0)
    if progress.global_step == steps and not ends and not stop and not batches:
        raise ValueError(
            f"no batch of epoch {progress.current_epoch} led to an optimizer step, so the run would not end; "
            "let training_step return a loss"
        )
    if stop and not loop.epoch_is_over(progress):
        _finish_early(run, module, loop)
        return False
    _close_epoch(run, module, loop)
    return True


def _finish(run: RunState, module: Module, loop: FitLoop, optimizers: list[Optimizer]) -> None:
    """The end of training: what must hold of it, and its hooks."""
    loop.guards.finish()
    if (
        loop.windows_seen
        and run.resumed is None
        and not on_any_rank(run, loop.learned)
        and module.automatic_optimization
    ):
        raise ValueError(
            f"training_step of {type(module).__name__} returned a loss in none of the run's {loop.windows_seen} steps, "
            "so nothing was trained; return a loss, or set automatic_optimization = False and step by hand"
        )
    loop.guards.check_weights(optimizers)
    run.metrics.close()
    set_phase(None, "end of the run")
    assert run.attributes is not None
    run.attributes.modes = [(layer, layer.training) for layer in module.modules()]  # a save from here on is of training
    for hook in run.hooks.on_train_end:
        hook()
    saving.finish(run)
    saving.agree_to_stop(run)
    for hook in run.hooks.on_fit_end:
        hook()
    run.strategy.synchronize(run.wrapped)  # what these hooks changed


def vote(run: RunState, meets: bool, several: bool) -> StepVote:
    """This rank's vote in a step; with `meets` ranks are to step alike, with `several` there are other ranks."""
    stop = run.signals.number or int(run.should_stop)
    if run.saving is not None and run.saving.failure is not None:
        stop = saving.SAVE_FAILED
    rates = hash_of_rates(run.optimizers.values()) if meets else 0
    cast = StepVote(stop, run.metrics.keys_hash if run.metrics.samples else 0, run.metrics.names, rates)
    return cast._replace(order=run.train_dataloader.order) if several else cast


def _prepared(run: RunState, loop: FitLoop, window: Window) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window, on the device, with the hooks of each batch around it. Returns to the
    strategy in between, which has run backward by then; the last batch's end comes after the step."""
    metrics, hooks, progress = run.metrics, run.hooks, run.progress
    num = len(window.micro_batches) // (window.num_shares or 1)
    data_size, num_samples = run.strategy.topology.data_size, window.num_samples
    if loop.counts_manually:
        num_samples = samples_of_all(run, window) or num_samples
    run.window_is_open, run.is_accumulating, shares = True, num > 1, run.shares
    for i, micro_batch in enumerate(window.micro_batches):
        if shares is not None:
            shares.enter(micro_batch.share, "train", progress.total_batches)
        run.batch_idx = micro_batch.batch_idx = progress.batches_seen + i % num * window.num_batches // num
        micro_batch.batch = loop.transfer(micro_batch.batch)
        metrics.weight = micro_batch.num_samples
        metrics.samples += micro_batch.num_samples
        metrics.in_batch = True
        metrics.is_ambiguous = micro_batch.is_ambiguous and (data_size > 1 or shares is not None)
        run.batch_share = micro_batch.num_samples / num_samples
        for hook in hooks.on_train_batch_start:
            returned = hook(micro_batch.batch, micro_batch.batch_idx)
            if returned is not None:
                refuse_skip(returned)
        yield micro_batch
        if micro_batch.is_ambiguous:
            check_weight(run, window, micro_batch)
        is_last = i == len(window.micro_batches) - 1 and not window.more  # to which a strategy may have added some
        waits = shares is not None and window.num_shares > 1 and (i + 1) % num == 0
        if shares is not None and (run.strategy.capabilities.local_steps if is_last else not waits):
            shares.ran()
        if not is_last:
            for hook in filterfalse(is_users, hooks.on_train_batch_end) if waits else hooks.on_train_batch_end:
                hook(micro_batch.output, micro_batch.batch, micro_batch.batch_idx)
            if not loop.reevaluates and not waits:
                micro_batch.batch = micro_batch.output = None
        elif run.strategy.capabilities.local_steps:  # the last batch of the last client of this rank
            for hook in filter(is_users, hooks.on_train_batch_end):
                hook(micro_batch.output, micro_batch.batch, micro_batch.batch_idx)
    run.is_accumulating = False
    if shares is not None:
        shares.leave("train", progress.total_batches)
        metrics.in_share = not run.strategy.capabilities.synchronous  # learners have steps of their own
        metrics.weight = sum(last.num_samples for last in window.micro_batches[num - 1 :: num])  # as on as many ranks


def _validation_is_due(run: RunState, loop: FitLoop) -> bool:
    assert loop.val_every is not None
    progress = run.progress
    if run.arguments.check_val_every_n_epoch is None:
        return progress.total_batches // loop.val_every > progress.validations
    return loop.validates_in(progress.current_epoch) and progress.batches_seen // loop.val_every > progress.validations


def _validation_follows(run: RunState, loop: FitLoop) -> bool:
    """Whether the weights of now are validated before another step."""
    if loop.val_every is not None:
        return _validation_is_due(run, loop)
    progress = run.progress
    return bool(loop.val_loaders) and loop.validates_in(progress.current_epoch) and loop.epoch_is_over(progress)


def _validate(run: RunState, module: Module, loop: FitLoop, *, ends_epoch: bool = False) -> None:
    def note_done() -> None:  # a run resumed from a checkpoint saved before validates again
        progress = run.progress
        if loop.val_every is not None:
            progress.validations = (
                progress.total_batches if run.arguments.check_val_every_n_epoch is None else progress.batches_seen
            ) // loop.val_every
        progress.validated_at = progress.global_step
        progress.epoch_validated |= ends_epoch

    evaluate.validate_in_fit(run, module, loop.val_loaders, note_done)


def _close_epoch(run: RunState, module: Module, loop: FitLoop) -> None:
    """All that happens once the last window of an epoch is done; a checkpoint may be saved in each of its hooks."""
    progress, metrics, hooks = run.progress, run.metrics, run.hooks
    if not progress.epoch_validated:
        publish.publish(run, metrics.reduce(run.strategy, epoch_end=True))
        progress.publishes = False
        if loop.val_loaders and loop.val_every is None and loop.validates_in(progress.current_epoch):
            _validate(run, module, loop, ends_epoch=True)
        progress.epoch_validated = True
    if not progress.epoch_closed:
        for hook in hooks.module_train_epoch_end:
            evaluate.call_at_epoch_end(run, hook, "on_train_epoch_end")
        # The callbacks decide by what the module logged.
        publish.publish(run, metrics.reduce(run.strategy, epoch_end=True))
        progress.epoch_closed = True
        for hook in hooks.on_train_epoch_end:
            evaluate.call_at_epoch_end(run, hook, "on_train_epoch_end")
    publish.publish(run, metrics.reduce(run.strategy, epoch_end=True))  # of callbacks, before ModelCheckpoint saves
    step_schedulers(run, module, "epoch")
    progress.end_epoch()
    metrics.samples = 0
    if run.arguments.check_val_every_n_epoch is not None:
        progress.validations = 0
    saving.agree_to_stop(run)


def _finish_early(run: RunState, module: Module, loop: FitLoop) -> None:
    """Training ends within an epoch: show what it has measured and validate, but leave the epoch to a resumed run."""
    step = run.progress.global_step
    if not step or run.progress.ended_at != step:
        publish.publish(run, run.metrics.reduce(run.strategy, epoch_end=True, reset=False))
        run.progress.ended_at = step
    if loop.val_loaders and (not step or run.progress.validated_at != step):
        _validate(run, module, loop)
