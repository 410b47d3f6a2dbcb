"""Profiler: where the time of training goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks._support.tables import columns
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

KINDS = ("simple", "torch")
_PARTS = ("loading data", "forward", "backward", "optimizer step", "after the step", "validation")


class Profiler(Callback):
    """Shows what training spends its time on; `Trainer(profiler="simple")` adds one.

    "simple" adds up the wall-clock time between the hooks of each batch and prints a table on rank 0 when training
    ends, with the first step, which starts engines and compilers, on its own. On accelerators the host's time is
    shown, which runs ahead of the device's. Under `pipeline` forward and backward overlap and are shown as one.

    "torch" records the steps `first_step` to `first_step + num_steps` on every rank with `torch.profiler` and writes
    `profile/rank-0.json` into the run's folder, to be opened in https://ui.perfetto.dev or chrome://tracing.

    Args:
        kind: "simple" or "torch".
        first_step: Optimizer steps of this fit before the first one that "torch" records; one more is recorded and
            thrown away, as it sets the profiler up.
        num_steps: Optimizer steps that "torch" records.
    """

    def __init__(self, kind: str = "simple", *, first_step: int = 10, num_steps: int = 3) -> None:
        if kind not in KINDS:
            raise ValueError(f"profiler must be one of {', '.join(map(repr, KINDS))}, but it is {kind!r}")
        for name, value, least in (("first_step", first_step, 1), ("num_steps", num_steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but {name}={value!r}")
        self.kind, self.first_step, self.num_steps = kind, first_step, num_steps
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds by part, the first step apart ("simple")."""
        self.first_s = 0.0
        """Seconds of the first step."""
        self.path: Path | None = None
        """The trace that this rank has written ("torch")."""
        self._mark = 0.0
        self._steps = -1
        self._profile: Any = None

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self.seconds, self._steps, self._mark = dict.fromkeys(_PARTS, 0.0), -1, time.perf_counter()
        if self.kind == "torch":
            schedule = torch.profiler.schedule(wait=self.first_step - 1, warmup=1, active=self.num_steps, repeat=1)
            folder = Path(trainer.log_dir or trainer.arguments.default_root_dir) / "profile"
            self.path = folder / f"rank-{trainer.global_rank}.json"
            self._profile = torch.profiler.profile(schedule=schedule, on_trace_ready=self._write, acc_events=True)
            self._profile.start()

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        self._add("loading data")

    def on_before_backward(self, trainer: Trainer, module: Module, loss: Tensor) -> None:
        self._add("forward")

    def on_after_backward(self, trainer: Trainer, module: Module) -> None:
        self._add("backward")

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        self._add("optimizer step")

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._add("after the step")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._add("validation")

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._add("after the step")
        if trainer._run.window_is_open:
            return
        self._steps += 1
        if self._steps == 0:
            self.first_s = sum(self.seconds.values())
            self.seconds = dict.fromkeys(_PARTS, 0.0)
        if self._profile is not None:
            self._profile.step()

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._stop()
        if self.kind == "simple" and trainer.is_global_zero and self._steps >= 0:
            safe_print(self.table())
        elif self.kind == "torch" and trainer.is_global_zero:
            written = self.path is not None and self.path.exists()
            safe_print(
                f"profile: {self.path}"
                if written
                else (
                    f"profile: not measured, because training ended before step {self.first_step + self.num_steps}; "
                    "lower first_step"
                )
            )

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._stop()

    def table(self) -> str:
        """What was measured, as text: seconds, share and milliseconds a step of each part."""
        total, steps = sum(self.seconds.values()) or 1e-12, max(self._steps, 1)
        rows = [("", "s", "share", "ms a step")]
        rows += [
            (name, f"{value:.3f}", f"{value / total:.1%}", f"{value / steps * 1e3:.3f}")
            for name, value in self.seconds.items()
        ]
        title = f"first step: {self.first_s:.3f} s; then {self._steps} steps in {total:.3f} s"
        return "\n".join([title, *columns(rows, right=range(1, 4))])

    def _add(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._mark
        self._mark = now

    def _write(self, profile: Any) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self.path))

    def _stop(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_profile": None}
