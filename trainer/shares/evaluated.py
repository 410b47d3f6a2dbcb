"""What the steps and batch hooks of an evaluation may not change while shares run: the model and its optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.strategies.modules.model_changes import shortened
from lockstep.trainer.checkpoint.rank_state import torchmetrics_of
from lockstep.trainer.shares.marks import bits_of
from lockstep.trainer.shares.optimizer_values import OptimizerValues

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

_LOOKS = 4
"""Shares of an evaluation after which the bits are compared; of later ones it is seen whether torch notes a write."""


class EvaluatedModel:
    """Parameters, buffers of the state dict and what optimizers hold, while the shares of an evaluation run.

    A rank would change them once for each of its shares. Without virtual_ranks nothing is watched.
    """

    def __init__(self, run: RunState, module: nn.Module) -> None:
        self._run, self._module = run, module
        self._before: _Model | None = None

    def begin(self) -> None:
        """Called before the first share of each batch."""
        if self._before is None and (self._run.arguments.virtual_ranks or 1) > 1:
            self._before = _Model(self._run, self._module)

    def end_share(self, reads: bool = False) -> None:
        """Raise RuntimeError naming what has changed; `reads`: also past what torch notes."""
        if self._before is not None and (names := self._before.changed(reads)):
            raise RuntimeError(
                f"a step or hook of a batch changed {shortened(names)} in an evaluation, which a rank would change "
                f"once for each of its shares of virtual_ranks={self._run.arguments.virtual_ranks}; change it in a "
                "hook such as on_validation_end, or put it back by the end of the batch"
            )

    def end(self) -> None:
        """Called after the last batch."""
        self.end_share(reads=True)
        self._before = None


class _Model:
    def __init__(self, run: RunState, module: nn.Module) -> None:
        optimizers = run.optimizers.values()
        stepped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._parameters = dict(module.named_parameters())
        known = set(map(id, self._parameters.values()))
        self._parameters |= {f"parameter {i} of the optimizers": p for i, p in enumerate(stepped) if id(p) not in known}
        counted = {id(b) for metric in torchmetrics_of(module).values() for b in metric.buffers()}
        self._buffers = [
            (f"{path}.{name}".lstrip("."), part._buffers, name)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if name not in part._non_persistent_buffers_set and id(buffer) not in counted
        ]
        self._optimizers = OptimizerValues(optimizers, True, reads=True)
        self._marks = {name: _mark(tensor) for name, tensor in self._held()}
        self._bits = {name: bits_of(tensor) for name, tensor in self._held()}
        self._looks = 0

    def changed(self, reads: bool) -> list[str]:
        self._looks += 1
        reads, names = reads or self._looks <= _LOOKS, list[str]()
        for name, tensor in self._held():
            if reads or _mark(tensor) != self._marks.get(name):
                self._marks[name] = _mark(tensor)
                if bits_of(tensor) != self._bits.get(name):  # else it was put back
                    names.append(name)
        return names + (["what an optimizer holds"] if self._optimizers.are_changed(reads) else [])

    def _held(self) -> list[tuple[str, Tensor | None]]:
        return [*self._parameters.items(), *((name, held.get(key)) for name, held, key in self._buffers)]


def _mark(tensor: Tensor | None) -> Any:
    own = getattr(tensor, "_local_tensor", tensor)
    return None if own is None or own.is_inference() else (id(tensor), own._version, own.untyped_storage()._cdata)
