"""The state of a user's sampler, or of a dataset among several loaders, with which a resumed run reads the order of the
epoch and of those that follow."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch.utils.data import DistributedSampler


class SamplerState:
    """What a sampler with `state_dict` and `load_state_dict` held as its epoch began, and what it holds now.

    An epoch is read from its beginning also where a run continues within it.
    """

    KEYS = ("epoch", "began", "now")

    def __init__(self, sampler: Any) -> None:
        # The order of a DistributedSampler follows from the epoch, and torchdata's would skip what it has yielded.
        own = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._sampler = sampler if own and not isinstance(sampler, DistributedSampler) else None
        self._epoch = -1
        self._began: Any = None
        self._loaded: Any = None
        """What it held in the run that is resumed, until it is read."""

    def begin(self, epoch: int) -> None:
        """Let the sampler be as when it first began `epoch`."""
        if self._sampler is None:
            return
        if epoch == self._epoch:
            self._sampler.load_state_dict(deepcopy(self._began))
        else:
            if self._loaded is not None:
                self._sampler.load_state_dict(self._loaded)
            self._epoch, self._began = epoch, deepcopy(self._sampler.state_dict())
        self._loaded = None

    def state_dict(self) -> dict[str, Any]:
        if self._sampler is None or self._epoch < 0:
            return {}
        now = deepcopy(self._sampler.state_dict()) if self._loaded is None else self._loaded
        return dict(zip(self.KEYS, (self._epoch, self._began, now), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take up `state`; whether it is that of a sampler, and there is one to take it."""
        if self._sampler is None or set(state) != set(self.KEYS):
            return False
        self._epoch, self._began, self._loaded = (state[key] for key in self.KEYS)
        return True


def other_indices(sampler: str, kind: str, place: str, first: int) -> RuntimeError:
    """What to raise where a user's sampler of the `kind` of data has not yielded in `place` what it has on rank
    `first`."""
    return RuntimeError(
        f"the ranks disagree on the order of samples: {sampler or 'a sampler'} of the {kind} data has yielded other "
        f"indices on {place} than on rank {first}, so that samples would be read twice; every rank must seed it "
        "equally, or let it decide from what all ranks know, such as trainer.callback_metrics"
    )


def hash_of(read: list[Any], before: int) -> int:
    """A hash of indices and those before them, for other processes to compare; 0 where there are none."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    return zlib.crc32(re.sub(r" at 0x\w+", "", repr(read)).encode(), before)  # an address is of one process
