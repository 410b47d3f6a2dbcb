"""What DeepSpeed's engine puts on a model, to take it off again."""

from __future__ import annotations

from torch import nn

from lockstep.strategies.modules.parameter_hooks import OF_DEEPSPEED

_LATER = frozenset(
    ("_external_params", "applied_pre_backward_ref_cnt", "ds_grads_remaining", "post_bwd_fn", "pre_bwd_fn")
)
"""Attributes that the engine gives modules once they run."""


class Additions:
    """Attributes that the engine gives modules and parameters; those that user code gives them stay."""

    def __init__(self, model: nn.Module) -> None:
        """Before the engine is built."""
        self._modules = {module: set(vars(module)) for module in model.modules()}
        self._parameters = [(parameter, set(vars(parameter)), set[str]()) for parameter in model.parameters()]
        self._added: dict[nn.Module, set[str]] = {}

    def seal(self) -> None:
        """The engine is built: what they get from now on is the user's, but for what it gives them as they run."""
        self._added = {module: (set(vars(module)) | _LATER) - names for module, names in self._modules.items()}
        self._parameters = [(p, before, set(vars(p)) - before) for p, before, _ in self._parameters]

    def remove(self) -> None:
        for module, names in self._added.items():
            for name in names & set(vars(module)):
                del vars(module)[name]
            vars(module)["_parameters"] = dict(module._parameters.items())  # the engine's [] may gather
        for parameter, before, built in self._parameters:
            added = set(vars(parameter)) - before
            for name in added & built | {name for name in added if name.startswith(OF_DEEPSPEED)}:
                del vars(parameter)[name]
