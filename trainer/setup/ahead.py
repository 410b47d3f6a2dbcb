"""What the set-up on ranks would refuse of a model and its training data: found before any rank starts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from lockstep.callbacks.base import Callback
from lockstep.callbacks.training.finetuning import BaseFinetuning
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import overrides
from lockstep.trainer.setup import reload
from lockstep.trainer.setup.loaders import combined

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.loaders import Sources


def check(run: RunState, module: Module, sources: Sources, stage: str, resumes: bool = False) -> None:
    """Raise what each rank would raise. Changes nothing and reads no sample; the ranks check again.

    A model that hooks will change before it is wrapped is left to them, and so is data that methods will load. A run
    that `resumes` has the batches of the run that began, which may have had more ranks or fewer.
    """
    if not _is_changed_later(run, module):
        run.strategy.check(module)
    if stage != "fit":
        return
    reload.Reload.of(run, module, sources)
    given = combined(sources.loaders.get("train"))
    if given is None or run.strategy.capabilities.local_steps:  # whose loader reads every sample to know its clients
        return
    trial = copy.copy(run)  # of rank 0
    trial.accumulation_at_start = run.accumulate_grad_batches
    trial.strategy = copy.copy(run.strategy)
    trial.strategy.topology = run.strategy.expected_topology
    num_batches = reload.train_loader(trial, module, given)[2]
    if not resumes and sources.loaders.get("val") is not None and reload.validates(run, module):
        reload.validation_interval(run, num_batches)


def _is_changed_later(run: RunState, module: Module) -> bool:
    """Whether user code runs between here and the strategy's `setup_module` that may build or change layers."""
    return any(overrides(module, name, Module) for name in ("configure_model", "setup")) or any(
        overrides(item, "setup", Callback)
        for item in run.callbacks
        if isinstance(item, BaseFinetuning) or not type(item).__module__.startswith("lockstep.callbacks.")
    )
