"""The optimizer that DeepSpeed's engine steps, as user code finds it: with the parameters of the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.deepspeed.refusals import refuse_group, refuse_params, refuse_state_dict
from lockstep.strategies.deepspeed.zero_step import ZeroStep
from lockstep.strategies.optimizers.hidden_state import ModelParameters, StateOfShards, others_of

_FLAT = (
    "the state of {} was asked for a parameter of the model, but DeepSpeed's engine keeps it in flat parts, of which "
    "each rank has its own; read it from a checkpoint (trainer.save_checkpoint), or use strategy='ddp' or 'fsdp'"
)


class OptimizerView:
    """Lets the groups of `optimizer` have `parameters`, those of the model, but for `of_engine`, which steps flat parts
    of them, and refuses what would see or change the parts. `saves` are the keys of its `state_dict`."""

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[list[Tensor]], saves: Iterable[str], wrapped: ZeroStep
    ) -> None:
        self._saves = dict.fromkeys(saves)
        self._optimizer, self._wrapped, self._zero_grad = optimizer, wrapped, optimizer.zero_grad
        self.stepped = False
        """Whether the gradients of the last window were stepped along."""
        self._params = [
            ModelParameters(mine, group["params"], refuse_params)
            for mine, group in zip(parameters, optimizer.param_groups, strict=True)
        ]
        for group, params in zip(optimizer.param_groups, self._params, strict=True):
            group["params"] = params
        self._of_model = {*map(id, wrapped.model.parameters())}
        self._guard_state()
        optimizer.add_param_group = refuse_group  # type: ignore[method-assign,assignment]
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.register_state_dict_pre_hook(refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(refuse_state_dict)

    def _guard_state(self) -> None:
        """Guard the state, and again where user code put another in its place; it may hold none of the model's."""
        if not isinstance(self._optimizer.state, StateOfShards):
            state = StateOfShards(self._optimizer, self._of_model, _FLAT)
            for key in [*state]:
                state.check(key)
            self._optimizer.state = state

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """While it lasts the groups have what the engine steps. Raises RuntimeError if user code gave them others."""
        groups = list(zip(self._optimizer.param_groups, self._params, strict=True))
        if any(group.get("params") is not params for group, params in groups):
            refuse_params()
        self._guard_state()
        for group, params in groups:
            group["params"] = params.held
        try:
            yield
        finally:
            for group, params in groups:
                params.held, group["params"] = group["params"], params

    def check_saved(self, key: str) -> None:
        """Raise ValueError where the optimizer saves what a checkpoint would not have."""
        of_none: dict[Any, Any] = {}
        for owner, value in self._optimizer.state.items():
            if not isinstance(owner, Tensor):
                of_none[owner] = value
            elif not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
                raise ValueError(
                    f"optimizer {key!r} ({type(self._optimizer).__name__}) keeps state of a parameter without a name "
                    "for it, which a checkpoint of DeepSpeed cannot hold; keep it in a dict, as in "
                    "self.state[p]['momentum'], or use strategy='ddp' or 'fsdp'"
                )
            elif odd := [name for name, held in value.items() if not _fits(held, owner)]:
                raise ValueError(
                    f"optimizer {key!r} ({type(self._optimizer).__name__}) keeps {odd[0]!r} in the state of a "
                    "parameter, which is neither a number nor a tensor of the parameter's shape, so a checkpoint of "
                    "DeepSpeed, which steps many parameters in one tensor, cannot hold it; keep each tensor under a "
                    "name of its own and numbers as numbers, or use strategy='ddp' or 'fsdp'"
                )
        saved = {name: of_none if name == "state" else None for name in self._saves}
        others_of(key, self._optimizer, saved, is_spread=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._wrapped.has_gradients or (self._wrapped.access.hides_gradients and not self.stepped):
            raise RuntimeError(
                "zero_grad was called before the optimizer's step, but the gradients of the window are in DeepSpeed's "
                "engine; set them to zeros within `with trainer.whole(module):`, or use strategy='ddp' or 'fsdp'"
            )
        with self.of_engine():
            self._zero_grad(set_to_none)


def _fits(value: Any, flat: Tensor) -> bool:
    """Whether state of a flat tensor is that of each of its parameters: a number, or a tensor of its shape."""
    if isinstance(value, Tensor):
        return not value.dim() or value.shape == flat.shape
    return value is None or isinstance(value, bool | int | float | str)
