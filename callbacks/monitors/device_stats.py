"""DeviceStats: memory and load of the devices of a run, as curves."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

MIB = 2**20


class DeviceStats(Callback):
    """Log memory and load in the steps that are logged (`log_every_n_steps`), each the largest of all ranks.

    `device/process_memory_mib` is the resident memory of a rank's process (where /proc has it) and
    `device/process_cpus` the CPU cores that it has kept busy since the last value, loader workers that have ended
    included. On CUDA devices also `device/allocated_mib`, `device/reserved_mib` and `device/peak_allocated_mib` of
    torch's allocator, the peak since the last value. Every rank takes part in one small collective for each value
    that is logged; other steps cost nothing.
    """

    def __init__(self) -> None:
        self._last_step = 0
        self._since: tuple[float, float] | None = None  # wall clock and CPU seconds at the last value

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._last_step, self._since = trainer.global_step, (time.monotonic(), _cpu_seconds())

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, trainer.arguments.log_every_n_steps
        if step // every == self._last_step // every or not trainer.strategy.ranks_meet:
            return
        self._last_step = step
        own = self._measure(trainer.strategy.topology.device)
        largest = trainer.strategy.all_reduce(torch.tensor(list(own.values()), dtype=torch.float64), "max").tolist()
        values = dict(zip(own, largest, strict=True))
        trainer._run.show_measured(values)

    def _measure(self, device: torch.device) -> dict[str, float]:
        values = {}
        memory = _resident_bytes()
        if memory is not None:
            values["device/process_memory_mib"] = memory / MIB
        now = (time.monotonic(), _cpu_seconds())
        if self._since is not None and now[0] > self._since[0]:
            values["device/process_cpus"] = (now[1] - self._since[1]) / (now[0] - self._since[0])
        self._since = now
        if device.type == "cuda":
            values["device/allocated_mib"] = torch.cuda.memory_allocated(device) / MIB
            values["device/reserved_mib"] = torch.cuda.memory_reserved(device) / MIB
            values["device/peak_allocated_mib"] = torch.cuda.max_memory_allocated(device) / MIB
            torch.cuda.reset_peak_memory_stats(device)
        return values

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_since": None}


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _resident_bytes() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
