"""How fast training is, and what its time goes to, beside the other curves of a run."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks._support.local_ops import LocalOps, watching
from lockstep.callbacks._support.monitored_metric import Checks, check_state, is_number
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "B200": (2250.0, 1100.0, 75.0),
    "H200 NVL": (835.5, 417.5, 60.0),
    "H200": (989.5, 494.5, 67.0),
    "H100 NVL": (835.5, 417.5, 60.0),
    "H100 PCIe": (756.5, 378.0, 51.0),
    "H100": (989.5, 494.5, 67.0),
    "A100": (312.0, 156.0, 19.5),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 183.0, 91.6),
    "L4": (121.0, 60.0, 30.3),
}
"""Peak of dense matrix products in 10^12 FLOP/s, in 16 bits, TensorFloat-32 and 32 bits, by words of the device's name.

From the data sheets at https://www.nvidia.com/en-us/data-center, half of what they say with sparsity. The first match
counts.
"""

PARTS = ("data", "compute", "optimizer", "saving", "rest")
_TOKENS = "throughput/tokens"
_NUM_MEASURED = 2
_SAVED: Checks = {
    "values": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    "measured_flops_per_sample": lambda value: value is None or is_number(value),
}


class ThroughputMonitor(Callback):
    """Logs every `log_every_n_steps` optimizer steps how fast training was since the last time, over all ranks.

    - `throughput/samples_per_s`, `steps_per_s`, and with `tokens` `tokens_per_s`. Samples that several ranks share
      count once, padding not at all.
    - `throughput/flops_per_s`: FLOPs of matrix products, convolutions and attention of forward and backward, and
      `throughput/mfu`, their share of what the devices could do at most.
    - `throughput/share_data`, `share_compute` (forward, backward and the communication in them), `share_optimizer`,
      `share_saving` (what training waits for checkpoints) and `share_rest`: of rank 0's wall-clock time; they sum to 1.
      Data begins at the end of a step, so callbacks that come after this one are in it.

    Validation is excluded from all of them, as are the first two steps of a fit, in which engines and compilers start
    and FLOPs are counted: operation by operation, which is slower, and without torch.compile. Accelerators work behind
    the host, whose clock this is: the device is waited for once, when values are logged, so rates are right, but what
    the host waits for in one part may be the device's work of another.

    Args:
        tokens: Counts the tokens of a batch: a function of it, or the key, index or attribute of the tensor whose
            elements they are.
        flops_per_sample: FLOPs of forward and backward of one sample; None counts what the ranks compute for the second
            step (under `dp` the first), recomputed activations included. 0 logs no FLOPs.
        peak_flops_per_s: What one rank's devices can do at most, for MFU; None looks the GPU up in `PEAK_TFLOPS` by the
            precision of the run, and leaves MFU out for others and on CPUs. Give it where a rank has several (`dp`,
            `model`).
    """

    def __init__(
        self,
        tokens: Callable[[Any], int | Tensor] | str | int | None = None,
        *,
        flops_per_sample: float | None = None,
        peak_flops_per_s: float | None = None,
    ) -> None:
        if flops_per_sample is not None and flops_per_sample < 0:
            raise ValueError(f"flops_per_sample must not be negative, but flops_per_sample={flops_per_sample}")
        if peak_flops_per_s is not None and peak_flops_per_s <= 0:
            raise ValueError(f"peak_flops_per_s must be above zero, but peak_flops_per_s={peak_flops_per_s}")
        self.tokens, self.flops_per_sample, self.peak_flops_per_s = tokens, flops_per_sample, peak_flops_per_s
        self.values: dict[str, float] = {}
        """What was logged last."""
        self.measured_flops_per_sample = flops_per_sample
        """FLOPs of one sample over all ranks, once they are known."""
        self._peak: float | None = None
        self._seconds = dict.fromkeys((*PARTS, "validation"), 0.0)
        self._part, self._mark, self._waited = "rest", 0.0, 0.0
        self._begun: tuple[int, int] = (0, 0)  # steps and samples when the interval began
        self._steps = 0  # of this fit, with those that were not measured
        self._last_step = 0
        self._num_tokens, self._uncollected, self._knows_tokens = 0.0, False, True
        self._counts: list[tuple[float, int]] = []  # FLOPs of this rank and samples of all, by window
        self._watch: tuple[ExitStack, Any] | None = None

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._steps, self._counts, self._last_step = 0, [], trainer.global_step
        self._num_tokens, self._uncollected = 0.0, False
        self._knows_tokens = (
            trainer.global_step % trainer.arguments.log_every_n_steps == 0
        )  # else the sum continues that of the resumed run
        self.measured_flops_per_sample = self.flops_per_sample
        self._peak = self.peak_flops_per_s or known_peak(
            trainer.strategy.topology.device, str(trainer.arguments.precision)
        )
        self._restart(trainer)

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        self._enter(trainer, "compute")
        if self.tokens is not None:  # summed by the logging of the run, in the exchange that it has anyway
            counts = (
                trainer._run.batch_share and self._steps >= _NUM_MEASURED
            )  # padding and what the clock skips do not
            self.log(
                _TOKENS,
                self._count(batch) if counts else 0,
                reduce_fx="sum",
                on_step=True,
                on_epoch=False,
                logger=False,
            )
            self._uncollected = True
        if self.flops_per_sample is None and self._steps < _NUM_MEASURED and self._watch is None:
            from torch.utils.flop_counter import FlopCounterMode

            counter = FlopCounterMode(display=False)
            self._watch = watching(counter, LocalOps()), counter
            self._counts.append((0.0, trainer._run.progress.total_samples))

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        self._enter(trainer, "optimizer")

    def on_before_zero_grad(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        self._enter(trainer, "rest" if module.automatic_optimization else "compute")

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer._run.window_is_open:
            self._enter(trainer, "data")
            return
        self._steps += 1
        if self._steps <= _NUM_MEASURED:
            self._measure(trainer)
            self._restart(trainer)
        if self._counts and self._steps >= _NUM_MEASURED and trainer.strategy.ranks_meet:
            self._add_up(trainer)
        stepped, self._last_step = trainer.global_step != self._last_step, trainer.global_step
        every = trainer.arguments.log_every_n_steps
        if stepped and trainer.strategy.ranks_meet and self._last_step // every > self._begun[0] // every:
            self._collect(trainer)
            if self._steps > _NUM_MEASURED:
                self._show(trainer)
            self._restart(trainer)
            self._knows_tokens = True
        self._enter(trainer, "data")

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        self._enter(trainer, "rest")
        self._collect(trainer)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._enter(trainer, "data")

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        self._enter(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        self._enter(trainer, "data")

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._stop_counting()

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._stop_counting()

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values), "measured_flops_per_sample": self.measured_flops_per_sample}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("ThroughputMonitor", state_dict, _SAVED)
        self.values, self.measured_flops_per_sample = (
            dict(state_dict["values"]),
            state_dict["measured_flops_per_sample"],
        )

    def _enter(self, trainer: Trainer, part: str) -> None:
        """The part that has run so far ends here, but for the time in which a checkpoint was waited for."""
        now, waited = time.perf_counter(), trainer._run.saving_seconds
        self._seconds[self._part] += now - self._mark - (waited - self._waited)
        self._seconds["saving"] += waited - self._waited
        self._part, self._mark, self._waited = part, now, waited

    def _restart(self, trainer: Trainer) -> None:
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._mark, self._waited = time.perf_counter(), trainer._run.saving_seconds
        self._begun = trainer.global_step, trainer._run.progress.total_samples
        self._num_tokens = 0.0

    def _show(self, trainer: Trainer) -> None:
        if trainer.strategy.topology.device.type != "cpu":
            # the only host sync: the device is up to half an interval behind
            torch.accelerator.synchronize()
        self._enter(trainer, "rest")
        seconds = sum(self._seconds[part] for part in PARTS)
        samples_per_s = (trainer._run.progress.total_samples - self._begun[1]) / seconds
        values = {"samples_per_s": samples_per_s, "steps_per_s": (trainer.global_step - self._begun[0]) / seconds}
        if self.tokens is not None and self._knows_tokens:
            values["tokens_per_s"] = self._num_tokens / seconds
        if self.measured_flops_per_sample:
            values["flops_per_s"] = self.measured_flops_per_sample * samples_per_s
            if self._peak is not None:
                values["mfu"] = values["flops_per_s"] / (self._peak * trainer.world_size)
        values |= {f"share_{part}": self._seconds[part] / seconds for part in PARTS}
        self.values = {f"throughput/{name}": value for name, value in values.items()}
        trainer._run.log_metrics(self.values)

    def _count(self, batch: Any) -> int | Tensor:
        if callable(self.tokens):
            return self.tokens(batch)
        found = (
            batch[self.tokens]
            if isinstance(batch, Mapping) or isinstance(self.tokens, int)
            else getattr(batch, str(self.tokens))
        )
        return found.numel()

    def _collect(self, trainer: Trainer) -> None:
        """Add what the run's logging has just summed over ranks; at the end of an epoch it shows the rest of the
        interval."""
        if self._uncollected:
            self._num_tokens += float(trainer.callback_metrics[_TOKENS])
            self._uncollected = False

    def _measure(self, trainer: Trainer) -> None:
        """The end of one of the first windows."""
        if self._watch is None:
            return
        samples = trainer._run.progress.total_samples - self._counts[-1][1]
        self._counts[-1] = float(self._watch[1].get_total_flops()), samples
        self._stop_counting()

    def _add_up(self, trainer: Trainer) -> None:
        """After the first windows the ranks add up what they have counted, once."""
        counts, self._counts = self._counts, []
        totals = trainer.strategy.all_reduce(torch.tensor([flops for flops, _ in counts], dtype=torch.float64)).tolist()
        # The last one: in the first some engines compute shapes besides. Threads that exist from then on are not
        # looked into.
        known = [total / samples for total, (_, samples) in zip(totals, counts, strict=True) if total and samples]
        self.measured_flops_per_sample = known[-1] if known else None
        if not known and trainer.is_global_zero:
            warnings.warn(
                "ThroughputMonitor counted no FLOPs; set flops_per_sample (0 for none)",
                stacklevel=2,
            )

    def _stop_counting(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch[0].close()


def known_peak(device: torch.device, precision: str) -> float | None:
    """The most FLOP/s that `device` reaches in matrix products of `precision`, from `PEAK_TFLOPS`; None where it is not
    known."""
    if device.type != "cuda":
        return None
    rounds = torch.get_float32_matmul_precision() != "highest"
    return peak_of(
        torch.cuda.get_device_name(device), "tf32-true" if precision.startswith("32") and rounds else precision
    )


def peak_of(name: str, precision: str) -> float | None:
    """The same by the name of the device."""
    if precision.startswith("64"):
        return None
    peaks = next((peaks for words, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None)
    return None if peaks is None else peaks[0 if "16" in precision else 1 if precision == "tf32-true" else 2] * 1e12
