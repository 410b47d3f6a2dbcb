"""The pytest fixture `assert_same_run`: that a module's numbers do not depend on the strategy, in a user's own
tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def assert_same_run() -> Callable[..., Any]:
    """`assert_same_run(make_module, make_loader, strategies=("single", "ddp"), devices=2, steps=20, …)`.

    `make_module()` builds the module, of which each strategy trains a copy, and `make_loader()` the training loader,
    again for each strategy; the loader's batch size is the global batch. Other keywords go to the Trainer. Raises
    AssertionError with the table of differences where a run differs from the first one by more than `tolerance`
    (relative), by default 1e-12 in "64-true", which is the default precision here, and 1e-5 in "32-true", in which
    strategies are compared that do not compute in float64 (DeepSpeed). Returns the differences by strategy.
    """
    from lockstep.trainer.seeding import seed_everything
    from lockstep.trainer.testing import compare
    from lockstep.trainer.trainer import Trainer

    def check(
        make_module: Callable[[], Any],
        make_loader: Callable[[], Any],
        strategies: Sequence[Any] = ("single", "ddp"),
        *,
        devices: int = 2,
        steps: int = 20,
        precision: str = "64-true",
        tolerance: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> dict[str, Any]:
        seed_everything(seed)
        first = make_module()
        own = list(options.pop("callbacks", ()))
        accelerator = options.pop("accelerator", "auto")

        def fit(recorder: Any, **layout: Any) -> None:
            quiet = {
                "logger": False,
                "enable_checkpointing": False,
                "enable_progress_bar": False,
                "split_batches": True,
                "log_every_n_steps": 1,
            }
            callbacks = [*copy.deepcopy(own), recorder]
            Trainer(**quiet | options, **layout, max_steps=steps, seed=seed, callbacks=callbacks).fit(
                copy.deepcopy(first), make_loader()
            )

        results = compare.compare(
            fit, strategies, devices=devices, precision=precision, tolerance=tolerance, accelerator=accelerator
        )
        if not all(found.same for found in results.values()):
            raise AssertionError("the strategy changes the numbers:\n" + compare.table(results))
        return results

    return check
