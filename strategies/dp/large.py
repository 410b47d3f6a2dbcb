"""What replicas share since it is large: tensors, arrays and containers of plain values that a step only reads."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.strategies.sync.contents import same_values

_BYTES, _ITEMS, _COMPARED, _LOOKS, _VALUES = 1 << 20, 1000, 20_000, 2, 1000
"""Above how many bytes or items a value is large; up to how many items are compared in each step, and in how many first
steps all are; how many values of a tensor are compared."""
_DICTS = (dict, OrderedDict, Counter, defaultdict)
_CONTAINERS = (*_DICTS, list, set, deque)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


@dataclass
class Large:
    """A large value that an attribute, `place`, holds. `num_items`: of a container; `looks`: steps that it was seen
    in."""

    value: Any
    place: str
    num_items: int = 0
    looks: int = 0
    mark: Any = field(init=False)

    def __post_init__(self) -> None:
        self.mark = self._mark()

    @classmethod
    def of(cls, value: Any, place: str, device: torch.device, before: Large | None) -> Large | None:
        """None of what replicas on `device` do not share. `before`: that of the step before."""
        kind: Any = type(value)
        if kind is Tensor:
            return cls(value, place) if _is_large_tensor(value, device) else None
        if kind is np.ndarray or kind is np.memmap:
            is_own = value.flags.owndata or not (value.flags.writeable or isinstance(value.base, np.ndarray))
            return cls(value, place) if value.nbytes > _BYTES and is_own and not value.dtype.hasobject else None
        if kind not in _CONTAINERS or len(value) <= _ITEMS:
            return None
        if before is not None and before.value is value and before.num_items == len(value):
            return cls(value, place, len(value), before.looks + 1)
        parts = (value, value.values()) if kind in _DICTS else (value,)
        return cls(value, place, len(value)) if all(set(map(type, part)) <= _PLAIN for part in parts) else None

    def refuse_changed(self) -> None:
        """Raise RuntimeError if the value changed since this was made."""
        before, now = self.mark, self._mark()
        if isinstance(self.value, Tensor):
            is_same = before[0] == now[0] and same_values(before[1], now[1])
        else:
            is_same = before == now
        if not is_same:
            raise self.changed()

    def changed(self) -> RuntimeError:
        return RuntimeError(
            f"training_step changed what {self.place} holds, which is large, and strategy 'dp' runs it on slices, "
            "which share that; change it in on_train_batch_end, register a tensor as a buffer, or use strategy='single'"
        )

    def _mark(self) -> Any:
        """What a change changes. An array has none, as it cannot be written in a step."""
        if isinstance(self.value, Tensor):
            flat = self.value.detach().view(-1)
            return self.value._version, flat[:: len(flat) // _VALUES + 1].clone()
        if isinstance(self.value, np.ndarray):
            return None
        if len(self.value) > _COMPARED and self.looks >= _LOOKS:
            return len(self.value)
        return [*(self.value.values() if isinstance(self.value, dict) else self.value)]


@contextmanager
def read_only(shared: Iterable[Large]) -> Iterator[None]:
    """While it lasts shared arrays cannot be written: raises RuntimeError where numpy refuses it."""
    arrays = {id(large.value): large for large in shared if isinstance(large.value, np.ndarray)}
    locked = [large for large in arrays.values() if large.value.flags.writeable]
    for large in locked:
        large.value.flags.writeable = False
    try:
        yield
    except ValueError as error:
        if not locked or "read-only" not in str(error):
            raise
        raise locked[0].changed() from error
    finally:
        for large in locked:
            large.value.flags.writeable = True


def _is_large_tensor(value: Tensor, device: torch.device) -> bool:
    is_dense = value.layout is torch.strided and value.is_contiguous() and not value.is_inference()
    is_here = value.device.type == "cpu" or value.device == device
    return value.nbytes > _BYTES and is_dense and is_here and value._base is None and not value.requires_grad
