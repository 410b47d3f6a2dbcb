"""What `on_save_checkpoint` and `on_load_checkpoint` get: a dict that refuses what would have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_WRITTEN = {
    "state_dict": "the strategy saves and loads weights; read them with trainer.whole(module), and load a part of them "
    "with load_from_checkpoint(strict=False)",
    "optimizer_states": "the state of optimizers is saved by the strategy; read it from trainer.optimizers",
    "lr_schedulers": "schedulers are saved by themselves; read them with module.lr_schedulers()",
    "callbacks": "callbacks are saved by their state_dict",
    "loops": "progress is saved by itself; read trainer.global_step and trainer.current_epoch",
}


def facts_of(progress: dict[str, Any], hyperparameters: dict[str, Any]) -> dict[str, Any]:
    """The counters and hyperparameters of a checkpoint under Lightning's names."""
    return {
        "epoch": progress["current_epoch"],
        "global_step": progress["global_step"],
        "hyper_parameters": hyperparameters,
    }


class HookContent(dict[str, Any]):
    """Entries that hooks add, or that they added when the checkpoint was saved.

    `facts` returns "epoch", "global_step" and "hyper_parameters", which can be read but are not among the entries. What
    Lightning has here besides is refused: under most strategies no rank holds it whole.
    """

    def __init__(self, entries: dict[str, Any], facts: Callable[[], dict[str, Any]]) -> None:
        super().__init__(entries)
        self._facts = facts

    def __missing__(self, key: str) -> Any:
        if key in _WRITTEN:
            raise KeyError(f"checkpoint[{key!r}] is not in what hooks get: {_WRITTEN[key]}")
        return self._facts()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key in _WRITTEN:
            raise KeyError(f"checkpoint[{key!r}] cannot be set by a hook: {_WRITTEN[key]}")
        super().__setitem__(key, value)
