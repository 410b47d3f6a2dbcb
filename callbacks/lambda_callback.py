"""LambdaCallback: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.callbacks.base import Callback


class LambdaCallback(Callback):
    """A callback whose hooks are the functions that it is given, by name.

    `LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch))`. Each takes the
    arguments of the hook, or the first of them.

    Raises TypeError for a name that is not a hook of Callback and for what cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        names = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
        for name, function in hooks.items():
            if name not in names:
                raise TypeError(f"LambdaCallback has no hook {name!r}; the hooks are {', '.join(names)}")
            if not callable(function):
                raise TypeError(f"{name} must be a function, got {type(function).__name__}")
            setattr(self, name, function)
