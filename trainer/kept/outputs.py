"""Which hooks of a batch use what the step has returned, as their code shows; and what may not change before
`backward`."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.trainer.kept.values import MOST_ITEMS, NOTHING, Mark, attributes, is_same, mark_of
from lockstep.trainer.module import Module
from lockstep.trainer.run.hooks import all_of, of_package, overrides

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_READS_ALL = {"locals", "vars", "eval", "exec"}


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
    return _uses(function.__code__, at + isinstance(method, MethodType))


@functools.cache
def _uses(code: CodeType, at: int) -> bool:
    if at >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[at]
    found = (each.argval for each in dis.get_instructions(code))
    return not _READS_ALL.isdisjoint(code.co_names) or any(
        name in (value if isinstance(value, tuple) else (value,)) for value in found
    )
