"""Whether the strategy changes the numbers: the same training under several, step by step, against the first.

`lockstep compare CONFIG --strategies single,ddp` and the pytest fixture `assert_same_run` stand on `compare`.
What is compared are recordings: after each optimizer step the weights of the run in the checkpoint format, under
canonical names whatever wrapped or sharded the model, with the loss, the gradient's norm and the logged
metrics. `differences` reads any two recordings, whoever made them.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from callbacks.base import Callback
from strategies import Strategy
from trainer import checkpoint as files
from trainer.checkpoint import Checkpoint
from trainer.module import Module
from trainer.trainer import Trainer

TOLERANCES = {"64-true": 1e-12, "32-true": 1e-5}
"""Relative difference up to which a precision's runs count as the same; others get 1e-2."""


IGNORED_METRICS = r"per_s|seconds|time|throughput"
"""Names of metrics that tell of speed: they differ from run to run."""


class Recorder(Callback):
    """Writes what a run has after each optimizer step to `folder`, every rank its own pieces."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        norm = trainer.strategy.clip_gradients(trainer.placed, optimizer, math.inf)
        self._norms.append(math.nan if norm is None else float(norm))

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.window_is_open:
            return
        strategy = trainer.strategy
        state = strategy.state_dict(trainer.placed, trainer.named_optimizers)
        files.save(
            Path(self.folder) / f"step-{trainer.global_step:06d}",
            rank=strategy.rank,
            world_size=strategy.world_size,
            tensors={name: shard for name, shard in state.tensors.items() if name.startswith("model/")},
            state={
                "progress": {"global_step": trainer.global_step},
                "loss": trainer.last_loss,
                "norms": self._norms,
                "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            },
            barrier=strategy.barrier,
            broadcast=strategy.broadcast,
        )
        self._norms = []


@dataclass
class Difference:
    """How far one recording is from another: largest relative differences over all steps, by name."""

    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    first_step: int | None = None
    """The first step at which something differs beyond the tolerance."""
    first_name: str | None = None
    """What differs there, the largest difference first."""
    bitwise: bool = True
    """All weights equal in every bit."""
    error: str | None = None
    """Why the run could not be made, where it could not."""

    @property
    def same(self) -> bool:
        return self.first_step is None and self.error is None


def differences(reference: str | Path, other: str | Path, tolerance: float, ignore: str = IGNORED_METRICS) -> Difference:
    """Compare two recordings step by step, without the metrics whose name `ignore` (a pattern) is found in.

    Raises ValueError where they do not hold the same steps or names."""
    found = Difference()
    steps, others = ([path.name for path in sorted(Path(folder).glob("step-*"))] for folder in (reference, other))
    if steps != others:
        raise ValueError(f"the runs took different steps: {len(steps)} (last {steps[-1:] or 'none'}) against {len(others)} (last {others[-1:] or 'none'})")
    for step in steps:
        one, two = Checkpoint.open(Path(reference) / step, verify=False), Checkpoint.open(Path(other) / step, verify=False)
        if one.names() != two.names():
            missing = sorted(set(one.names()) ^ set(two.names()))
            raise ValueError(f"the runs hold different weights: {', '.join(missing[:5])}")
        beyond: list[tuple[float, str]] = []

        def note(name: str, value: float, beyond: list[tuple[float, str]] = beyond) -> float:
            if not value <= tolerance:
                beyond.append((value, name))
            return value

        for name in one.names():
            expected, tensor = one.read(name), two.read(name)
            found.bitwise &= torch.equal(expected, tensor)
            short = name.removeprefix("model/")
            found.parameters[short] = max(found.parameters.get(short, 0.0), note(short, relative(tensor, expected)))
        if one.state["loss"] is not None and two.state["loss"] is not None:
            found.loss = max(found.loss, note("loss", _relative(two.state["loss"], one.state["loss"])))
        for expected_norm, norm in zip(one.state["norms"], two.state["norms"], strict=False):
            found.grad_norm = max(found.grad_norm, note("gradient norm", _relative(norm, expected_norm)))
        for name in sorted(name for name in set(one.state["metrics"]) | set(two.state["metrics"]) if not re.search(ignore, name)):
            value = _relative(two.state["metrics"].get(name, math.nan), one.state["metrics"].get(name, math.nan))
            found.metrics[name] = max(found.metrics.get(name, 0.0), note(name, value))
        if beyond and found.first_step is None:
            found.first_step, found.first_name = one.global_step, max(beyond, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])[1]
        found.steps += 1
    return found


def relative(tensor: Tensor, expected: Tensor) -> float:
    """Largest difference of an element, relative to the largest element of `expected`."""
    if tensor.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().item() or 1.0
    return (tensor.double() - expected.double()).abs().max().item() / scale


def compare(
    fit: Callable[[str | Strategy, Recorder], Any], strategies: Sequence[str | Strategy], tolerance: float, ignore: str = IGNORED_METRICS
) -> dict[str, Difference]:
    """Let `fit(strategy, recorder)` train under each strategy; return each one's difference from the first by name.

    `fit` builds everything anew, from the same seed, and gives the recorder to the Trainer's callbacks. A strategy
    whose run fails has its error in the result; a failure of the first one is raised.
    """
    results: dict[str, Difference] = {}
    with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as folder:
        reference = None
        for i, strategy in enumerate(strategies):
            name = strategy if isinstance(strategy, str) else type(strategy).__name__
            place = Path(folder) / str(i)
            try:
                fit(strategy, Recorder(place))
                results[name] = differences(reference or place, place, tolerance, ignore)
            except Exception as error:
                if reference is None:
                    raise
                results[name] = Difference(error=f"{type(error).__name__}: {error}".splitlines()[0])
            reference = reference or place
    return results


def without_noise(module: nn.Module) -> int:
    """Set every dropout of `module` to 0, as noise differs between ranks by design; return how many there were."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0]
    for layer in layers:
        layer.p = 0.0
    return len(layers)


def table(results: dict[str, Difference], tolerance: float) -> str:
    """The results as text, a line a strategy; the first one is what the others are compared with."""
    rows: list[tuple[str, ...]] = [("strategy", "steps", "loss", "grad norm", "metrics", "parameters", "")]
    for i, (name, found) in enumerate(results.items()):
        if found.error is not None:
            rows.append((name, "-", "-", "-", "-", "-", found.error))
            continue
        verdict = "reference" if i == 0 else "bitwise" if found.bitwise else "same" if found.same else f"differs: step {found.first_step}, {found.first_name}"
        worst = (max(values.values(), default=0.0) for values in (found.metrics, found.parameters))
        rows.append((name, str(found.steps), *(f"{value:.1e}" for value in (found.loss, found.grad_norm, *worst)), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(7)]
    lines = [
        "  ".join(cell.ljust(width) if i in (0, 6) else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, f"largest relative differences from {next(iter(results))}; tolerance {tolerance:.0e}"])


def to_json(results: dict[str, Difference], tolerance: float) -> str:
    """The results with every metric and parameter by name."""
    return json.dumps({"tolerance": tolerance, "strategies": {name: {**asdict(found), "same": found.same} for name, found in results.items()}}, indent=2)


def _relative(value: float, expected: float) -> float:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) / (abs(expected) or 1.0)
