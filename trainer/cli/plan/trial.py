"""From a config to its plan, by a trial on fake tensors."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import Plan
from lockstep.strategies.planning.timing import Estimate
from lockstep.trainer import planning
from lockstep.trainer.cli import config
from lockstep.trainer.cli.errors import ConfigError, Resolved


def resolve(files: Sequence[str], overrides: Sequence[str], devices: int | None) -> Resolved:
    """The config for a run on `devices` in all (None: as many as it says), whatever this machine has."""
    settings = config.resolve(files, overrides).values.get("trainer") or {}
    settings = settings if isinstance(settings, dict) else {}
    if devices is None:
        given = settings.get("devices", "auto")
        on_node = len(given) if isinstance(given, list) else given
        nodes = settings.get("num_nodes", 1)
        if isinstance(on_node, int) and isinstance(nodes, int) and on_node > 0:
            devices = on_node * nodes
    fixed = [
        "trainer.accelerator=cpu",
        "trainer.num_nodes=1",
        "trainer.logger=false",
        "trainer.enable_progress_bar=false",
    ]
    return config.resolve(files, [*overrides, *fixed, *([] if devices is None else [f"trainer.devices={devices}"])])


def try_config(resolved: Resolved, *, picture: bool = False) -> tuple[Plan, str]:
    """The plan of a resolved config; with `picture` what a pipeline's stages and schedule look like, else "".

    Raises what the strategy and the user's step raise, and ConfigError for a step that cannot be planned.
    """
    logger = logging.getLogger("lockstep")
    logger.setLevel(logging.WARNING)  # a trial starts as a run does, which says on how many devices
    with planning.without_memory():
        run = config.build(resolved)
    try:
        plan = planning.plan(run.trainer, run.module, datamodule=run.datamodule)
    except ValueError as error:
        if _raised_by_the_planner(error):  # within the user's step, of what it does
            raise ConfigError(str(error)) from error
        raise
    finally:
        logger.setLevel(logging.INFO)
    if plan.pipeline is None or not picture:
        return plan, ""
    from lockstep.strategies.pipeline import timeline

    strategy: Any = run.trainer.strategy
    with planning.without_memory() if strategy.sample is None else contextlib.nullcontext():
        run.module.configure_model()
    return plan, timeline.plan(strategy, run.module)


def timed(plan: Plan, device: Device) -> Estimate:
    """The time of a step. Raises ConfigError if the numbers of the device do not suffice."""
    try:
        return timing.estimate(plan, device)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _raised_by_the_planner(error: ValueError) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return Path(frame.f_code.co_filename).resolve().parent == Path(timing.__file__).resolve().parent


def num_steps(resolved: Resolved) -> int | None:
    """Optimizer steps of the run, if the config says how many."""
    steps = (resolved.values.get("trainer") or {}).get("max_steps")
    return steps if isinstance(steps, int) and steps > 0 else None
