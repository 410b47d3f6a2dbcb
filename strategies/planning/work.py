"""What operators compute and move, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lockstep.strategies.planning.plan import Work

aten = torch.ops.aten


class Tally:
    """Calls, floating point operations and bytes of the operators of a step, those that compute apart by size."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, float, int], list[float]] = {}
        self._moves_nothing: dict[Any, bool] = {}

    def add(
        self, func: Any, args: Sequence[Any], output: Any, inputs: list[Tensor], results: list[Tensor], phase: str
    ) -> None:
        """Count one call. `inputs` and `results` are the tensors in `args` and `output`."""
        if self._is_view(func):
            return
        moved = {id(tensor): _bytes(tensor) for tensor in (*inputs, *results)}
        dtype = next((str(t.dtype).removeprefix("torch.") for t in (*inputs, *results) if t.is_floating_point()), "")
        flops, size = _flops(func, args, output), sum(moved.values())
        name = func.name().replace("::", ".")  # of those that compute each size has a roofline of its own
        entry = self._found.setdefault((name, dtype, phase, flops, size if flops else 0), [0, 0.0, 0])
        entry[0] += 1
        entry[1] += flops
        entry[2] += size

    def entries(self) -> tuple[Work, ...]:
        """The most work first."""
        found = [
            Work(op, dtype, phase, int(calls), flops, int(size))
            for (op, dtype, phase, *_), (calls, flops, size) in self._found.items()
        ]
        return tuple(sorted(found, key=lambda work: (-work.flops, -work.bytes, work.op, work.phase)))

    def _is_view(self, func: Any) -> bool:
        if func not in self._moves_nothing:
            aliases = [value.alias_info for value in (*func._schema.arguments, *func._schema.returns)]
            writes = any(alias is not None and alias.is_write for alias in aliases)
            shares = any(value.alias_info is not None for value in func._schema.returns)
            is_named = func.name().startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view"))
            self._moves_nothing[func] = (shares and not writes) or is_named
        return self._moves_nothing[func]


def _flops(func: Any, args: Sequence[Any], output: Any) -> float:
    packet = func.overloadpacket
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return sdpa_flop_count(*(tuple(tensor.shape) for tensor in args[:3]))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(*(tuple(tensor.shape) for tensor in args[:4]))
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, out_val=output))


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # what is expanded is read once
