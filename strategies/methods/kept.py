"""What an optimizer of a method's own, such as DiLoCo's outer one, keeps beside the state of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.checkpoint_state import Reader, TensorShard
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers.attributes import Attributes
from lockstep.strategies.optimizers.numbers import changes, numbers_of, put

if TYPE_CHECKING:
    from lockstep.strategies.base import Strategy


class Kept:
    """The numbers of parameter groups that steps change, and attributes; compared with those of a new optimizer."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._made = {key: [numbers_of(group) for group in o.param_groups] for key, o in optimizers.items()}
        self._attributes = Attributes(self._optimizers)

    def save(self, tensors: dict[str, TensorShard], strategy: Strategy) -> dict[str, Any]:
        """As JSON data what has changed; its tensors go to `tensors`. Every rank calls it.

        Raises ValueError for state that belongs to no parameter.
        """
        for optimizer in self._optimizers.values():
            if strange := [repr(name) for name in optimizer.state if not isinstance(name, Tensor)]:
                raise ValueError(
                    f"{type(optimizer).__name__}, which the strategy steps, keeps {shortened(strange)} in its state, "
                    "which is not a parameter; keep it in param_groups or in an attribute"
                )
        groups = {
            key: [
                changes(numbers_of(group), made) for group, made in zip(o.param_groups, self._made[key], strict=False)
            ]
            for key, o in self._optimizers.items()
        }
        return {"groups": groups, "attributes": self._attributes.save(self._optimizers, tensors, strategy)}

    def load(self, saved: Mapping[str, Any], reader: Reader) -> None:
        """Put back what `save` returned; {} for a new optimizer."""
        for key, optimizer in self._optimizers.items():
            changed = saved.get("groups", {}).get(key, [])
            for i, (group, made) in enumerate(zip(optimizer.param_groups, self._made[key], strict=False)):
                put(group, changes(made, numbers_of(group)) | (changed[i] if i < len(changed) else {}))
        self._attributes.load(self._optimizers, saved.get("attributes", {}), reader)
