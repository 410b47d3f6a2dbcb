"""Gradient hooks that users register on parameters, run once an accumulation window on the final gradient.

`parameter.register_hook(fn)` and `parameter.register_post_accumulate_grad_hook(fn)` are called by autograd with what one
backward on one rank has computed, of the tensor that was registered. Under a strategy that is a part of the gradient, or the
tensor takes no part in the backward at all, so a hook that is not linear (a clamp, a norm) would change the numbers. The hooks
are therefore taken off the parameters before anything wraps them, and called with the gradient that the optimizer gets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Dicts = list[tuple[str, dict[int, Any]]]


class ParameterHooks:
    """The hooks of one model's parameters, by the parameter's name."""

    def __init__(self) -> None:
        self.taken: dict[str, Dicts] = {}
        """By name: the attribute in which torch keeps hooks, and these. Empty as long as no user registered any."""

    @property
    def names(self) -> list[str]:
        """The parameters that have hooks, in the order in which these were taken."""
        return [name for name, dicts in self.taken.items() if any(hooks for _, hooks in dicts)]

    def take(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Take the users' hooks off the parameters. The handles that users hold still remove them."""
        for name, parameter in named_parameters:
            for attribute in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                hooks = getattr(parameter, attribute)
                theirs = {key: hook for key, hook in (hooks or {}).items() if not _is_of_an_engine(hook)}
                if not theirs:
                    continue
                if len(theirs) == len(hooks):  # keep the dict itself: the users' handles remove from it
                    setattr(parameter, attribute, None)
                    theirs = hooks
                else:
                    for key in theirs:
                        del hooks[key]
                self.taken.setdefault(name, []).append((attribute, theirs))

    def put_back(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Register what was taken on these parameters, so that a plain backward calls it."""
        for name, parameter in named_parameters:
            for attribute, hooks in self.taken.pop(name, ()):
                known = getattr(parameter, attribute)
                if known is None:
                    setattr(parameter, attribute, hooks)  # the same dict: the users' handles stay valid
                else:
                    known.update(hooks)
        self.taken.clear()

    @torch.no_grad()
    def run(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        gradient_of: Callable[[nn.Parameter], Tensor | None],
        put_gradient: Callable[[nn.Parameter, Tensor], None],
    ) -> None:
        """Call the hooks of these parameters. Ranks that share a parameter call it alike.

        `gradient_of` gives the whole gradient as a plain tensor, None where there is none; `put_gradient` takes the new one.
        """
        parameters = dict(named_parameters)
        for name in self.names:
            if name not in parameters:  # another rank's
                continue
            parameter = parameters[name]
            gradient = gradient_of(parameter)
            if gradient is None:
                continue
            for hook in self._of(name, "_backward_hooks"):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            put_gradient(parameter, gradient)
            for hook in self._of(name, "_post_accumulate_grad_hooks"):
                hook(parameter)

    def _of(self, name: str, wanted: str) -> list[Callable[[Any], Any]]:
        return [hook for attribute, hooks in self.taken[name] if attribute == wanted for hook in hooks.values()]


def _is_of_an_engine(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(("strategies.", "deepspeed.", "torch.distributed."))
