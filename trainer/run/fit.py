"""The training loop, in the order in which things happen.

    Trainer.fit → fit → strategy.forward_backward → Module.training_step
                      → strategy.optimizer_step → optimizer.step

`callbacks/base.py` shows where every hook is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lockstep.strategies.base import Loss, StepHooks, StepVote
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.launch.launcher import set_phase
from lockstep.trainer.run import evaluate as evaluation
from lockstep.trainer.run import prepare as setup

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.prepare import Sources
    from lockstep.trainer.trainer import Trainer


SAVE_FAILED = 1000
"""In place of a signal's number, from a rank that knows that a save beside the training has failed."""


def fit(trainer: Trainer, module: Module, sources: Sources) -> None:
    """Train `module`; every rank calls it, in its own process."""
    run = setup.fit(trainer, module, sources)
    strategy, wrapped, progress, hooks, metrics = (
        trainer.strategy,
        trainer.wrapped,
        trainer.progress,
        trainer.hooks,
        trainer.metrics,
    )
    optimizers, schedulers = list(run.optimizers.values()), trainer.lr_scheduler_configs
    clip, log_every, guards = run.clip, trainer.arguments.log_every_n_steps, run.guards
    step_hooks = StepHooks(
        vote=partial(vote, trainer),
        log_scope=metrics.part,
        before_backward=run.before_backward,
        after_backward=run.after_backward,
        parameters=run.parameters,
        prepare=partial(_prepared, trainer, run),
        automatic=module.automatic_optimization,
    )

    for hook in hooks.on_fit_start:
        hook()
    trainer.describe(module)
    trainer.begin_account(module)
    if (
        trainer.arguments.num_sanity_val_steps
        and run.val_loaders
        and not progress.global_step
        and not progress.batches_seen
    ):
        evaluation.sanity_check(trainer, module, run.val_loaders)
    for hook in hooks.on_train_start:
        hook()

    windows_seen, learned = 0, not module.automatic_optimization
    while not _finished(trainer):
        if not progress.batches_seen:
            for hook in hooks.on_train_epoch_start:
                hook()
        steps_before, batches_before, stop = progress.global_step, progress.batches_seen, trainer.agree_to_stop()
        if run.val_every is not None and _validation_is_due(
            run, trainer
        ):  # the checkpoint that this run came from was saved just before it
            _validate(trainer, module, run)

        windows = run.train_loader.windows(progress.current_epoch, progress.samples_seen, run.limit)
        while not stop:
            set_phase(progress.global_step, "loading data")
            window = next(windows, None)
            if window is None:
                break
            if not trainer.signals.deferred:
                trainer.signals.defer()
            set_phase(progress.global_step, "training step")
            if guards.remembers:
                guards.remember()
            result = strategy.forward_backward(
                wrapped,
                run.training_step,
                window,
                step_hooks,
            )
            if window.micro_batches[-1].is_ambiguous:
                _check_weight(trainer, window, window.micro_batches[-1])
            skipped = (result.non_finite is not None or result.later is not None) and guards.skips(result)
            trainer.last_loss = result.loss
            windows_seen += 1
            learned = learned or result.count > 0
            stepped = trainer.manually_stepped
            if module.automatic_optimization and result.count and not skipped:
                set_phase(progress.global_step, "optimizer step")
                moving = guards.watches and guards.before_step(optimizers)
                for optimizer, handle in zip(optimizers, trainer.user_optimizers, strict=True):
                    for hook in hooks.on_before_optimizer_step:
                        hook(optimizer)
                    if clip is not None:
                        clip(optimizer)
                    if run.own_step is None:
                        refuse = handle.hooks.pop(id(handle))  # as `handle.take`, which would be one frame more
                        stepped |= strategy.optimizer_step(wrapped, optimizer)
                        handle.hooks[id(handle)] = refuse
                    else:
                        stepped |= run.own_step(optimizer, window)
                if guards.watches and stepped:
                    guards.after_step(optimizers, moving)
                if stepped and schedulers:
                    _step_schedulers(trainer, module, "step")
                for optimizer in optimizers:
                    for hook in hooks.on_before_zero_grad:
                        hook(optimizer)
                    _zero_grad(optimizer)

            trainer.manually_stepped = False
            progress.global_step += stepped
            trainer.executed[0] += stepped
            set_phase(progress.global_step, "end of the step")
            progress.samples_seen += window.num_samples
            progress.total_samples += window.num_samples
            progress.batches_seen += window.num_batches
            progress.total_batches += window.num_batches
            if stepped and progress.global_step % log_every == 0:
                trainer.publish(metrics.reduce(strategy))
            last = window.micro_batches[-1]
            trainer.window_is_open = False
            set_phase(progress.global_step, "callbacks")
            trainer.validation_follows = bool(run.val_loaders) and _validation_follows(run, trainer)
            for hook in hooks.on_train_batch_end:
                hook(last.output, last.batch, last.batch_idx)
            if stepped and guards.compares_every is not None and progress.global_step % guards.compares_every == 0:
                guards.compare_replicas()
            metrics.in_batch, metrics.weight = False, 1.0
            done = trainer.max_steps is not None and progress.global_step >= trainer.max_steps
            if result.stop > 1 and not done:  # a signal's number, or a save beside the training that failed
                raise trainer.interrupted()
            if run.val_every is not None and _validation_is_due(run, trainer):
                _validate(trainer, module, run)
                stop = trainer.agree_to_stop()
            stop = stop or bool(result.stop) or done

        resumed_at_its_end = 0 < batches_before == progress.batches_seen
        if progress.global_step == steps_before and trainer.max_epochs is None and not stop and not resumed_at_its_end:
            raise ValueError(
                f"no batch of epoch {progress.current_epoch} led to an optimizer step, so the run would not end; let training_step return a loss"
            )
        if stop and not run.epoch_is_over(progress):
            _finish_early(trainer, module, run)
            break
        _close_epoch(trainer, module, run)

    guards.finish()
    if windows_seen and not learned:
        raise ValueError(
            f"training_step of {type(module).__name__} returned a loss in none of the run's {windows_seen} steps, so nothing was "
            "trained; return a loss, or set automatic_optimization = False and step by hand"
        )
    guards.check_weights(optimizers)
    metrics.close()
    set_phase(None, "end of the run")
    for hook in hooks.on_train_end:
        hook()
    trainer.finish_saving()
    trainer.agree_to_stop()
    for hook in hooks.on_fit_end:
        hook()


def vote(trainer: Trainer) -> StepVote:
    """What this rank tells the others in a step."""
    if trainer.saving is not None and trainer.saving.failure is not None:
        return StepVote(SAVE_FAILED, trainer.metrics.keys_hash)
    wanted = trainer.should_stop and trainer.progress.current_epoch >= (trainer.arguments.min_epochs or 0)
    metrics = trainer.metrics
    return StepVote(trainer.signals.number or int(wanted), metrics.keys_hash, metrics.names)


def _finished(trainer: Trainer) -> bool:
    progress = trainer.progress
    if trainer.max_epochs is not None and progress.current_epoch >= trainer.max_epochs:
        return True
    if trainer.max_steps is not None and progress.global_step >= trainer.max_steps:
        return True
    return trainer.agree_to_stop() and progress.current_epoch >= (trainer.arguments.min_epochs or 0)


def _prepared(trainer: Trainer, run: setup.FitRun, window: Window) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window, on the device, with the hooks of each batch around it.

    Returns to the strategy in between, which has walked back by then; the last batch's end comes after the step.
    """
    metrics, hooks, progress = trainer.metrics, trainer.hooks, trainer.progress
    num, last = len(window.micro_batches), len(window.micro_batches) - 1
    data_size, num_samples = trainer.strategy.topology.data_size, window.num_samples
    if run.counts_manually:
        num_samples = _samples_of_all(trainer, window) or num_samples
    trainer.window_is_open = True
    for i, micro_batch in enumerate(window.micro_batches):
        micro_batch.batch_idx = progress.batches_seen + i * window.num_batches // num
        micro_batch.batch = run.transfer(micro_batch.batch)
        metrics.weight = micro_batch.num_samples
        metrics.samples += micro_batch.num_samples
        metrics.in_batch, metrics.is_ambiguous = True, micro_batch.is_ambiguous and data_size > 1
        trainer.batch_share = micro_batch.num_samples / num_samples
        for hook in hooks.on_train_batch_start:
            hook(micro_batch.batch, micro_batch.batch_idx)
        yield micro_batch
        if micro_batch.is_ambiguous:
            _check_weight(trainer, window, micro_batch)
        if i < last:
            for hook in hooks.on_train_batch_end:
                hook(micro_batch.output, micro_batch.batch, micro_batch.batch_idx)
            if not run.reevaluates:
                micro_batch.batch = micro_batch.output = None


def _samples_of_all(trainer: Trainer, window: Window) -> int:
    """The samples that collate functions left in a window, over all ranks. Every rank calls it."""
    mine = sum(micro_batch.num_samples for micro_batch in window.micro_batches)
    strategy = trainer.strategy
    return int(strategy.all_reduce(torch.tensor(mine))) * strategy.topology.data_size // strategy.topology.world_size


def _check_weight(trainer: Trainer, window: Window, micro_batch: MicroBatch) -> None:
    """Raise ValueError for the mean over a batch that does not show its number of samples, where that matters."""
    module, output = trainer._module, micro_batch.output
    automatic = module is None or module.automatic_optimization
    if trainer.strategy.topology.data_size == 1 and len(window.micro_batches) == 1:
        return
    if automatic and (
        output is None
        or isinstance(output, Loss)
        or (isinstance(output, Mapping) and isinstance(output.get("loss"), Loss | None))
    ):
        return
    raise ValueError(
        f"the loader's collate function was given {micro_batch.num_samples} samples, and batch {micro_batch.batch_idx} does not "
        "show how many of them it holds, so the mean over it cannot be weighted among other micro-batches and ranks; "
        + (
            "return Loss(total, count) from training_step"
            if automatic
            else "give each batch a tensor with one row for each sample"
        )
    )


def _zero_grad(optimizer: Optimizer) -> None:
    """`optimizer.zero_grad()`, without torch's own around the loop below: in a small step its mark for a profiler takes longer than that."""
    if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:  # the user's, or an engine's
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _validation_is_due(run: setup.FitRun, trainer: Trainer) -> bool:
    assert run.val_every is not None
    progress = trainer.progress
    if trainer.arguments.check_val_every_n_epoch is None:
        return progress.total_batches // run.val_every > progress.validations
    return run.validates_in(progress.current_epoch) and progress.batches_seen // run.val_every > progress.validations


def _validation_follows(run: setup.FitRun, trainer: Trainer) -> bool:
    """Whether the weights of now are validated before another step."""
    if run.val_every is not None:
        return _validation_is_due(run, trainer)
    progress = trainer.progress
    return bool(run.val_loaders) and run.validates_in(progress.current_epoch) and run.epoch_is_over(progress)


def _validate(trainer: Trainer, module: Module, run: setup.FitRun) -> None:
    progress = trainer.progress
    if run.val_every is not None:
        progress.validations = (
            progress.total_batches if trainer.arguments.check_val_every_n_epoch is None else progress.batches_seen
        ) // run.val_every
    run.validated_at = progress.global_step
    evaluation.validate_in_fit(trainer, module, run.val_loaders)


def _close_epoch(trainer: Trainer, module: Module, run: setup.FitRun) -> None:
    """All that happens once the last window of an epoch is done; a checkpoint may be saved in each of its hooks."""
    progress, metrics, hooks = trainer.progress, trainer.metrics, trainer.hooks
    if not progress.epoch_validated:
        trainer.publish(metrics.reduce(trainer.strategy, epoch_end=True))
        progress.epoch_validated = True
        if run.val_loaders and run.val_every is None and run.validates_in(progress.current_epoch):
            _validate(trainer, module, run)
    if not progress.epoch_closed:
        for hook in hooks.module_epoch_end:
            evaluation.call_at_epoch_end(trainer, hook, "on_train_epoch_end")
        trainer.publish(
            metrics.reduce(trainer.strategy, epoch_end=True)
        )  # the callbacks decide by what the module logged
        progress.epoch_closed = True
        for hook in hooks.on_train_epoch_end:
            evaluation.call_at_epoch_end(trainer, hook, "on_train_epoch_end")
        trainer.publish(metrics.reduce(trainer.strategy, epoch_end=True))
    _step_schedulers(trainer, module, "epoch")
    progress.end_epoch()
    metrics.samples = 0
    if trainer.arguments.check_val_every_n_epoch is not None:
        progress.validations = 0
    trainer.agree_to_stop()


def _finish_early(trainer: Trainer, module: Module, run: setup.FitRun) -> None:
    """Training ends within an epoch: show what it has measured so far and validate, but leave the epoch open for a resumed run."""
    trainer.publish(trainer.metrics.reduce(trainer.strategy, epoch_end=True, reset=False))
    if run.val_loaders and run.validated_at != trainer.global_step:
        _validate(trainer, module, run)


def _step_schedulers(trainer: Trainer, module: Module, interval: str) -> None:
    """Step the schedulers that are due; in manual optimization the user's step does."""
    if not module.automatic_optimization:
        return
    done = trainer.progress.global_step if interval == "step" else trainer.progress.current_epoch
    for reader, config in enumerate(trainer.lr_scheduler_configs):
        if config.interval != interval:
            continue
        is_due = (done + 1) % config.frequency == 0
        metric: Any = None
        if config.reduce_on_plateau:
            if interval == "step":
                metric = trainer.metrics.of_this_step(str(config.monitor), reader, trainer.strategy, wanted=is_due)
            if metric is None:
                metric = trainer.callback_metrics.get(str(config.monitor))
        if not is_due:
            continue
        if config.reduce_on_plateau and metric is None:
            if config.strict:
                raise ValueError(
                    f"a scheduler monitors {config.monitor!r}, which has not been logged when it is to step; "
                    f"logged are {', '.join(sorted(trainer.callback_metrics)) or 'none'}"
                )
            continue
        module.lr_scheduler_step(config.scheduler, metric)
