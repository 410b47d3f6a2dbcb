"""Which hooks of a batch use what the step has returned, as their code shows; and what may not change before
`backward`."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from itertools import takewhile
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.strategies.launch.program.functions import variables_of
from lockstep.trainer.kept.values import MOST_ITEMS, NOTHING, Mark, attributes, is_same, mark_of
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import all_of, of_package, overrides

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_READS_ALL = {"locals", "vars", "eval", "exec"}
_SILENT = {"PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "CACHE"}
_CALLS = {"CALL", "CALL_METHOD", "CALL_FUNCTION"}
"""Of a function with positional arguments, in the versions of Python."""


def reads_outputs(run: RunState, hook: str) -> bool:
    """Whether the module or a callback of the user uses the outputs that its hook is given."""
    owners: list[tuple[Any, type, int]] = [(run.module, Module, 0)]
    owners += [(callback, Callback, 2) for callback in run.callbacks if not of_package(callback)]
    return any(overrides(owner, hook, base) and _reads(getattr(owner, hook), at) for owner, base, at in owners)


def before_backward(run: RunState) -> Callable[[Tensor], None] | None:
    """What calls `on_before_backward`. If ranks run different layers, only one of them has a loss, of a part of a
    batch: then it raises RuntimeError for an attribute of a callback that it changes, by name."""
    call = all_of(run.hooks.on_before_backward)
    users = [each for each in run.callbacks if not of_package(each) and overrides(each, "on_before_backward", Callback)]
    if call is None or not users or run.strategy.rank_of_layer is None:
        return call

    def unchanged(loss: Tensor) -> None:
        before = _marks(users)
        call(loss)
        name = next(
            (name for name, mark in _marks(users).items() if not is_same(before.get(name, NOTHING), mark)), None
        )
        if name is not None:
            raise RuntimeError(
                f"on_before_backward changes {name}, but a pipeline calls it for each part of a micro-batch, on the "
                "rank of the last stage only; use the outputs of on_train_batch_end, or measure times in "
                "on_train_batch_start"
            )

    return unchanged


def _marks(callbacks: list[Callback]) -> dict[str, Mark]:
    return {
        f"{type(each).__name__}.{name}": mark_of(value, MOST_ITEMS)
        for each in callbacks
        for name, value in attributes(each).items()
    }


def _reads(method: Any, at: int) -> bool:
    """Whether it may use the argument number `at`."""
    function = getattr(method, "__func__", method)
    if not isinstance(function, FunctionType):
        return True
    place, name = at + isinstance(method, MethodType), function.__name__
    if not _uses(function.__code__, place):
        return False
    parent = _parent(method, function)
    return parent is None or _uses(function.__code__, place, name) or _reads(parent, at)


def _parent(method: Any, function: FunctionType) -> Any:
    """What `super()` in a method has by its name."""
    owner = next((value for name, _, value in variables_of(function) if name == "__class__"), None)
    is_bound = owner is not None and isinstance(method, MethodType)
    return getattr(super(owner, method.__self__), function.__name__, None) if is_bound else None


@functools.cache
def _uses(code: CodeType, at: int, hook: str | None = None) -> bool:
    """With `hook`, otherwise than as the same argument of `super().hook(…)`."""
    if at >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name, steps = code.co_varnames[at], [each for each in dis.get_instructions(code) if each.opname not in _SILENT]
    passed = 0 if hook is None else _passes(steps, hook, name, at - 1)
    return not _READS_ALL.isdisjoint(code.co_names) or sum(_names(each).count(name) for each in steps) > passed


def _passes(steps: list[dis.Instruction], hook: str, name: str, at: int) -> int:
    """How often the variable `name` is the argument number `at` of `super().hook(…)`."""
    number = 0
    for i, step in enumerate(steps):
        of_super = steps[max(0, i - 2)].argval == "super" and steps[i - 1].opname in _CALLS  # before Python 3.12
        if step.argval != hook or not (step.opname.startswith("LOAD_SUPER") or of_super):
            continue
        given = [*takewhile(lambda each: each.opname.startswith("LOAD_FAST"), steps[i + 1 :])]
        names = [each for load in given for each in _names(load)]
        is_plain = steps[i + 1 + len(given)].opname in _CALLS  # without names or a star
        number += is_plain and names[at : at + 1] == [name] and names.count(name) == 1
    return number


def _names(step: dis.Instruction) -> tuple[Any, ...]:
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)
