"""Finding, once before a run, which hooks the module and the callbacks override, and calling user code by its own signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from callbacks.base import Callback, Logger
from trainer.module import Module

if TYPE_CHECKING:
    from trainer.trainer import Trainer

NAMES = [name for name in vars(Callback) if name.startswith("on_")]
UNWATCHED = {"on_before_backward", "on_after_backward", "on_exception", "on_save_checkpoint", "on_load_checkpoint"}
"""Hooks after which the strategy does not look for what they changed in the model: a window is under way, or none follows."""


class Hooks:
    """One attribute a hook: a tuple of what to call, the module's first, then the callbacks' in their order.

    At the end of a training epoch metrics are reduced in between, so the module's hook stands apart.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable, ...]: ...

    def __init__(self, trainer: Trainer, module: Module) -> None:
        for name in NAMES:
            found: list[Callable] = []
            if overrides(module, name, Module):
                found.append(accept(getattr(module, name)))
            for callback in trainer.callbacks:
                if overrides(callback, name, Callback) and not (
                    isinstance(callback, Logger) and getattr(type(callback), name) is getattr(Logger, name)
                ):
                    call = partial(getattr(callback, name), trainer, module)
                    found.append(partial(trainer.guarded, callback, call) if isinstance(callback, Logger) else call)
            adopt = [partial(_adopt_changes, trainer)] if name not in UNWATCHED else []
            if name == "on_train_epoch_end":
                own = int(overrides(module, name, Module))
                self.module_epoch_end: tuple[Callable, ...] = (*found[:own], *adopt[:own])
                found = found[own:]
            setattr(self, name, (*found, *adopt) if any(map(_is_users, found)) else tuple(found))


def _is_users(hook: Callable) -> bool:
    """Whether a hook is the module's or a callback's of the user; those of the package change no model."""
    owner = getattr(hook.func if isinstance(hook, partial) else hook, "__self__", None)
    return owner is None or not type(owner).__module__.startswith(("callbacks.", "trainer."))


def _adopt_changes(trainer: Trainer, *_: Any) -> None:
    if trainer.placed is not None:
        trainer.strategy.adopt_changes(trainer.placed)


def overrides(owner: Any, name: str, base: type) -> bool:
    """Whether `owner` has its own `name`, in its class or as an attribute of the object."""
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name)


def accept(fn: Callable) -> Callable:
    """`fn` as a hook: given only as many of the arguments as it takes."""
    takes = positional(fn)
    return fn if takes is None else lambda *args: fn(*args[:takes])


@dataclass(frozen=True)
class Adapted:
    """A step called with fewer arguments than the loop gives, or with the last one by name."""

    method: Callable
    takes: int
    keyword: str | None = None

    def __call__(self, *args: Any) -> Any:
        options = {} if self.keyword is None else {self.keyword: args[-1]}
        return self.method(*args[: self.takes], **options)

    def rebind(self, bound: Callable[[Callable], Callable]) -> Adapted:
        """The same for what `bound` makes of the method (a replica's)."""
        return replace(self, method=bound(self.method))


def step_function(fn: Callable, num_args: int) -> Callable:
    """`fn` itself where it takes the `num_args` positional arguments that the loop gives, else `Adapted`."""
    takes = positional(fn)
    parameters = inspect.signature(fn).parameters
    kinds = inspect.Parameter
    by_name = "dataloader_idx" in parameters and parameters["dataloader_idx"].kind is kinds.KEYWORD_ONLY
    if num_args == 3 and (
        by_name or (takes is not None and takes < 3 and any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()))
    ):
        return Adapted(fn, 2 if takes is None else takes, "dataloader_idx")
    if takes is None or takes == num_args:
        return fn
    if takes == 0:
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} must take the batch as its first argument, but it takes none"
        )
    if takes < num_args:
        return Adapted(fn, takes)
    required = [p for p in list(parameters.values())[num_args:takes] if p.default is inspect.Parameter.empty]
    if required:
        given = "(batch, batch_idx, dataloader_idx)" if num_args == 3 else "(batch, batch_idx)"
        raise TypeError(
            f"{getattr(fn, '__qualname__', fn)} has the argument {required[0].name!r}, which the loop does not give; it gives {given}"
        )
    return fn


def positional(fn: Callable) -> int | None:
    """How many positional arguments `fn` takes; None for any number."""
    parameters = inspect.signature(fn).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(
        p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters
    )
