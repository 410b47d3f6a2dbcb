"""Building what a config describes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from lockstep.trainer.cli.config.check import Call, checked_calls
from lockstep.trainer.cli.errors import ConfigError, Resolved
from lockstep.trainer.datamodule import DataModule
from lockstep.trainer.module import Module
from lockstep.trainer.seeding import seed_everything
from lockstep.trainer.trainer import Trainer


class Run(NamedTuple):
    """What a config describes."""

    trainer: Trainer
    module: Module
    datamodule: DataModule | None
    ckpt_path: str | None


def build(resolved: Resolved) -> Run:
    """Check everything, then make Trainer, module and datamodule, in this order; the weights follow `trainer.seed`."""
    calls = checked_calls(resolved)
    trainer = make(calls.trainer)
    trainer._run.config = resolved.text
    if calls.seed is not None:
        seed_everything(calls.seed)
    return Run(trainer, make(calls.module), make(calls.data), calls.ckpt_path)


def make(calls: Any) -> Any:
    if isinstance(calls, Call):
        arguments = {name: make(value) for name, value in calls.arguments.items()}
        if calls.as_factory:
            return functools.partial(calls.target, **arguments)
        try:
            return calls.target(**arguments)
        except SystemExit as error:  # with code 0 the command would end as if it were done
            name = calls.target.__name__
            raise ConfigError(f"building {name} ended in sys.exit({error.code}); raise an error instead") from error
    if isinstance(calls, dict):
        return {name: make(value) for name, value in calls.items()}
    return type(calls)(make(value) for value in calls) if isinstance(calls, list | tuple) else calls
