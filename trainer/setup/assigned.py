"""Optimizers and schedulers that a hook puts in the place of those of `configure_optimizers` as a run starts.

They stand for what `configure_optimizers` returned: the code of a resumed run has to assign them again, and they then
continue with what was saved. Assigned later in a run they could not, so there their options and state may be changed.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lockstep.callbacks._support.lr_factor import share_lr_factors
from lockstep.trainer.checkpoint import snapshot
from lockstep.trainer.run.hooks import is_users
from lockstep.trainer.run.manual import HeldOptimizer
from lockstep.trainer.setup import prepare, resume
from lockstep.trainer.setup.optimizers import SchedulerConfig, scheduler_of
from lockstep.trainer.setup.start_hooks import restore_again

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.hooks import Calls
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.prepare import FitLoop


def assign(run: RunState, name: str, value: Any) -> None:
    """`trainer.optimizers = …` or `trainer.lr_scheduler_configs = …`: others than there are in `on_fit_start` and
    `on_train_start` only. Every rank calls it."""
    given = list(value) if isinstance(value, list | tuple) else [value]
    if name == "optimizers":
        held = list(run.optimizers.values())
        given = [item.optimizer if isinstance(item, HeldOptimizer) else item for item in given]
        instead = "change their param_groups, or forget their state with optimizer.state.clear()"
    else:
        held, instead = run.schedulers, "change the options of module.lr_schedulers()"
    if len(given) == len(held) and all(map(operator.is_, given, held)):
        return
    _check(run, name, instead)
    if name == "optimizers":
        for item in given:
            if not isinstance(item, Optimizer):
                raise TypeError(
                    f"trainer.optimizers takes a list of optimizers, but it was given {type(item).__name__}"
                )
        names = run.optimizers if len(given) == len(held) else map(str, range(len(given)))
        run.optimizers = dict(zip(names, given, strict=True))
    else:
        run.schedulers = [item if isinstance(item, SchedulerConfig) else scheduler_of(item) for item in given]


def call(run: RunState, module: Module, loop: FitLoop, hooks: Calls, last: bool = False) -> None:
    """Call hooks of the start, and set up what they have assigned. Every rank calls it; after the `last` ones a resumed
    run continues with what was saved of it.

    Raises ValueError if ranks assign other optimizers, or a scheduler drives one that is not the run's.
    """
    optimizers, schedulers = run.replaceable = run.optimizers, run.schedulers
    try:
        if run.start_hooks is None:
            for hook in hooks:
                hook()
        else:
            run.start_hooks.call(run, module, hooks)
        replaced = run.has_replaced
    finally:
        run.replaceable = None
    if any(map(is_users, hooks)):
        resume.check_ranks(
            run.strategy,
            module,
            {} if run.optimizers is optimizers else run.optimizers,
            [] if run.schedulers is schedulers else run.schedulers,
            "in on_fit_start or on_train_start set the same",
        )
    if replaced:
        for handle in run.user_optimizers:
            handle.close()
        ready = run.optimizers is optimizers
        found = prepare.set_up_optimizers(run, module, run.optimizers, run.schedulers, assigned=True, ready=ready)
        for optimizer in optimizers.values():
            share_lr_factors(optimizer, run.optimizers.values())
        run.strategy.adopt_changes(run.wrapped)
        for name, part in prepare.of_optimizers(run, module, loop.training_step, *found).items():
            setattr(loop, name, part)
    saved = None if run.resumed is None else run.resumed.state.get("configured")
    if last and run.resumed is not None and (resume.are_assigned(run.configured) or resume.are_assigned(saved)):
        snapshot.check_configured(run, run.resumed)
        restore_again(run, run.resumed)


def _check(run: RunState, name: str, instead: str) -> None:
    if run.replaceable is None:
        raise AttributeError(
            f"trainer.{name} can be set in on_fit_start and on_train_start, as a run that is resumed later could not "
            f"tell when else they changed; return them from configure_optimizers, and during a run {instead}"
        )
    refused = run.strategy.capabilities.refuses.get("assigned_optimizers")
    if refused is not None:
        raise AttributeError(f"trainer.{name} was set, but {refused}; return them from configure_optimizers")
