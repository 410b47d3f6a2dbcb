"""Whether the strategy changes the numbers: the same training under several, step by step, against the first.

`lockstep compare CONFIG --strategies single,ddp` and the pytest fixture `assert_same_run` stand on `compare`.
What is compared are recordings: after each optimizer step the weights of the run in the checkpoint format, under
canonical names whatever wrapped or sharded the model, with the loss, the gradient's norm and the logged
metrics. `record` makes one from any loop that drives a Strategy, `differences` reads any two.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks._support.tables import columns
from lockstep.callbacks.base import Callback
from lockstep.strategies import Strategy, registry
from lockstep.strategies.precision import Precision
from lockstep.strategies.sync.contents import bytes_of
from lockstep.trainer.checkpoint import store
from lockstep.trainer.checkpoint.store import Checkpoint

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer

TOLERANCES = {"64-true": 1e-12, "32-true": 1e-5}
"""Relative difference up to which a precision's runs count as the same; others get 1e-2."""

IGNORED_METRICS = r"(^|[/_.-])(per_s(ec|econd)?|seconds|time|throughput)($|[/_.-])"
"""Names of metrics that tell of speed: they differ from run to run."""

MAX_ROWS = 60
"""Metrics and parameters that the table by name shows."""


def record(
    folder: str | Path,
    step: int,
    strategy: Strategy,
    wrapped: Any,
    optimizers: dict[str, Optimizer],
    loss: float | None,
    norms: Sequence[float] = (),
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write to `folder` what a run has after optimizer step `step`. Collective; rank 0's loss, norms and metrics
    count."""
    store.save(
        Path(folder) / f"step-{step:06d}",
        rank=strategy.topology.rank,
        world_size=strategy.topology.world_size,
        tensors={
            name: shard
            for name, shard in strategy.state_dict(wrapped, optimizers).tensors.items()
            if name.startswith("model/")
        },
        state={"progress": {"global_step": step}, "loss": loss, "norms": list(norms), "metrics": dict(metrics or {})},
        barrier=strategy.barrier,
        broadcast=strategy.broadcast,
    )


class Recorder(Callback):
    """Writes what a run has after each optimizer step to `folder`, every rank its own pieces.

    Args:
        folder: where to.
        noise: whether dropouts stay as they are.
    """

    def __init__(self, folder: str | Path, noise: bool = True) -> None:
        self.folder = str(folder)
        self.noise = noise
        self._norms: list[float] = []

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if not self.noise:
            without_noise(module)

    def on_before_optimizer_step(self, trainer: Trainer, module: Module, optimizer: Optimizer) -> None:
        norm = trainer.strategy.clip_gradients(trainer._run.wrapped, optimizer, math.inf)
        self._norms.append(math.nan if norm is None else float(norm))

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer._run.window_is_open:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        record(
            self.folder,
            trainer.global_step,
            trainer.strategy,
            trainer._run.wrapped,
            trainer._run.optimizers,
            trainer._run.last_loss,
            self._norms,
            metrics,
        )
        self._norms = []


@dataclass
class Difference:
    """How far one recording is from another: largest relative differences over all steps, by name."""

    precision: str = ""
    """In which both runs computed."""
    tolerance: float = 0.0
    steps: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    first_step: int | None = None
    """The first step at which something differs beyond the tolerance."""
    first_name: str | None = None
    """What differs there: the parameter with the largest difference, or what else does where none is beyond the
    tolerance."""
    bitwise: bool = True
    """All weights equal in every bit."""
    error: str | None = None
    """Why the run could not be made, where it could not."""

    @property
    def same(self) -> bool:
        return self.first_step is None and self.error is None


def differences(
    reference: str | Path, other: str | Path, tolerance: float, ignore: str = IGNORED_METRICS
) -> Difference:
    """Compare two recordings step by step, without the metrics whose name `ignore` (a pattern) is found in.

    Raises ValueError where they hold no step, or not the same steps or names."""
    found = Difference(tolerance=tolerance)
    steps, others = ([path.name for path in sorted(Path(folder).glob("step-*"))] for folder in (reference, other))
    if not steps:
        raise ValueError("no optimizer step was recorded, so there is nothing to compare: train for at least one")
    if steps != others:
        raise ValueError(
            f"the runs took different steps: {len(steps)} (last {steps[-1:] or 'none'}) against {len(others)} (last "
            f"{others[-1:] or 'none'})"
        )
    for step in steps:
        one, two = (
            Checkpoint.open(Path(reference) / step, verify=False),
            Checkpoint.open(Path(other) / step, verify=False),
        )
        if one.names() != two.names():
            missing = sorted(set(one.names()) ^ set(two.names()))
            raise ValueError(f"the runs hold different weights: {', '.join(missing[:5])}")
        if len(one.state["norms"]) != len(two.state["norms"]):
            raise ValueError(
                f"the runs stepped different numbers of optimizers: {len(one.state['norms'])} against "
                f"{len(two.state['norms'])}"
            )
        parameters, other_bits = _of_weights(one, two)
        loss = _relative(two.state["loss"], one.state["loss"])
        norm = max((_relative(*pair) for pair in zip(two.state["norms"], one.state["norms"], strict=True)), default=0.0)
        names = sorted(name for name in {**one.state["metrics"], **two.state["metrics"]} if not re.search(ignore, name))
        metrics = {name: _relative(two.state["metrics"].get(name), one.state["metrics"].get(name)) for name in names}

        found.loss, found.grad_norm = max(found.loss, loss), max(found.grad_norm, norm)
        found.bitwise &= not other_bits
        for known, new in ((found.metrics, metrics), (found.parameters, parameters)):
            known.update({name: max(known.get(name, 0.0), value) for name, value in new.items()})
        if found.first_step is None:
            for group in (parameters, {"loss": loss, "gradient norm": norm, **metrics}):
                worst = max(group, key=lambda name: group[name], default=None)
                if worst is not None and group[worst] > tolerance:
                    found.first_step, found.first_name = one.global_step, worst
                    break
            else:
                if tolerance == 0 and other_bits:  # as 0.0 and -0.0
                    found.first_step, found.first_name = one.global_step, other_bits[0]
        found.steps += 1
    return found


def _of_weights(one: Checkpoint, two: Checkpoint) -> tuple[dict[str, float], list[str]]:
    """How far the weights of `two` are from those of `one` by name, and the names of those whose bits differ."""
    parameters: dict[str, float] = {}
    other_bits: list[str] = []
    for saved in one.names():
        name, expected, weight = saved.removeprefix("model/"), one.read(saved), two.read(saved)
        parameters[name] = relative(weight, expected)
        if parameters[name] > 0 or not torch.equal(bytes_of(weight), bytes_of(expected)):
            other_bits.append(name)
    return parameters, other_bits


def relative(tensor: Tensor, expected: Tensor) -> float:
    """Largest difference of an element, relative to the largest element of `expected`; infinite where that is no
    number."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        return math.inf
    if torch.equal(tensor, expected):
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    tensor, expected = tensor.to(wide), expected.to(wide)
    value = (tensor - expected).abs().max().item() / (expected.abs().max().item() or 1.0)
    return math.inf if math.isnan(value) else value


def compare(
    fit: Callable[..., Any],
    strategies: Sequence[str | Strategy],
    *,
    devices: int = 2,
    precision: str = "64-true",
    tolerance: float | None = None,
    accelerator: str = "auto",
    ignore: str = IGNORED_METRICS,
    virtual_ranks: int | None = None,
) -> dict[str, Difference]:
    """Train under each strategy; return each one's difference from the first by name.

    `fit(recorder, strategy=…, devices=…, precision=…, accelerator=…)` builds everything again, from the same seed, and
    trains with these arguments of the Trainer and the recorder among its callbacks, which sets dropouts to 0 unless
    `virtual_ranks` is given. `single` has one device, a mesh as
    many as its sizes say, others `devices`. A strategy that does not compute in `precision` (DeepSpeed's engine in
    "64-true") runs in "32-true" and is held against the first one in that, with the tolerance of `TOLERANCES`, which
    is the default of `tolerance` too; with `virtual_ranks`, which `fit` gets as well, that is 0. A strategy whose run
    fails has its error in the result. The recordings of two runs are on the disk at a time, in the folder for
    temporary files.

    Raises what `layouts` raises before anything runs, and what a run of the first strategy raises."""
    results: dict[str, Difference] = {}
    chosen = layouts(strategies, devices, precision, accelerator, virtual_ranks)
    tolerance, noise = 0.0 if virtual_ranks and tolerance is None else tolerance, virtual_ranks is not None
    names = [strategy if isinstance(strategy, str) else type(strategy).__name__ for strategy in strategies]
    names = [f"{name} ({names[:i].count(name) + 1})" if name in names[:i] else name for i, name in enumerate(names)]
    with tempfile.TemporaryDirectory(prefix="lockstep-compare-") as folder:
        references: dict[str, Path] = {}
        for i, (name, layout) in enumerate(zip(names, chosen, strict=True)):
            used = layout["precision"]
            limit = TOLERANCES.get(used, 1e-2) if tolerance is None or used != chosen[0]["precision"] else tolerance
            if used not in references and i > 0:
                references[used] = Path(folder) / f"reference-{used}"
                fit(Recorder(references[used], noise), **{**chosen[0], "precision": used})
            place = Path(folder) / str(i)
            try:
                fit(Recorder(place, noise), **layout)
                results[name] = differences(references.setdefault(used, place), place, limit, ignore)
            except Exception as error:
                if i == 0:
                    raise
                results[name] = Difference(
                    error=f"{type(error).__name__}: {str(error).strip()}".splitlines()[0], tolerance=limit
                )
            results[name].precision = used
            if place not in references.values():
                shutil.rmtree(place, ignore_errors=True)
    return results


def layouts(
    strategies: Sequence[str | Strategy],
    devices: int,
    precision: str,
    accelerator: str,
    virtual_ranks: int | None = None,
) -> list[dict[str, Any]]:
    """Of each strategy the Trainer's arguments. Raises ValueError for what cannot be compared or built; starts
    nothing."""
    if len(strategies) < 2:
        raise ValueError(f"a comparison needs two strategies or more, but strategies={list(strategies)!r}")
    precision = Precision(precision).name
    found: list[dict[str, Any]] = []
    for strategy in strategies:
        sized = isinstance(strategy, str) and all("=" in axis for axis in strategy.split(","))
        layout: dict[str, Any] = {
            "strategy": strategy,
            "devices": 1 if strategy == "single" else "auto" if sized else devices,
            "accelerator": accelerator,
            **({} if virtual_ranks is None else {"virtual_ranks": virtual_ranks}),
        }
        used = precision
        try:
            built, _ = registry.build(**layout, precision=used)
        except ValueError:
            if precision != "64-true":
                raise
            used = "32-true"  # unless something else is wrong, which raises again
            built, _ = registry.build(**layout, precision=used)
        if not found and not built.capabilities.exact:
            raise ValueError(
                f"the first strategy is what the others are compared with, but {type(built).__name__} changes the "
                "numbers; name an exact one first, such as 'single'"
            )
        precision = precision if found else used  # the first one's is everyone's
        found.append({**layout, "precision": used})
    return found


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def without_noise(module: nn.Module) -> int:
    """Set every dropout of `module` to 0, as noise differs between ranks by design; return how many there were."""
    found: list[tuple[nn.Module, str]] = [(layer, "p") for layer in module.modules() if isinstance(layer, DROPOUTS)]
    found += [(layer, "dropout") for layer in module.modules() if isinstance(layer, nn.MultiheadAttention | nn.RNNBase)]
    noisy = [(layer, name) for layer, name in found if getattr(layer, name) > 0]
    for layer, name in noisy:
        setattr(layer, name, 0.0)
    return len(noisy)


def table(results: dict[str, Difference]) -> str:
    """The results as text: every metric and parameter by strategy, then a line a strategy with its verdict.

    The first strategy is what the others are compared with. Of many names those with the largest differences are shown.
    """
    first = next(iter(results.values()))
    ran = {name: found for name, found in list(results.items())[1:] if found.error is None}
    by_name = {
        name: [(found.metrics | found.parameters)[name] for found in ran.values()]
        for name in first.metrics | first.parameters
    }
    shown = sorted(by_name, key=lambda name: max(by_name[name], default=0.0), reverse=True)[:MAX_ROWS]
    lines: list[str] = []
    if ran and shown:
        lines += columns(
            [("", *ran), *((name, *map(_number, values)) for name, values in by_name.items() if name in shown)],
            right=range(1, len(ran) + 1),
        )
        lines += [f"and {len(by_name) - len(shown)} more with smaller differences"] * (len(shown) < len(by_name)) + [""]

    rows: list[tuple[str, ...]] = [("strategy", "steps", "loss", "grad norm", "metrics", "parameters", "")]
    for i, (name, found) in enumerate(results.items()):
        if found.error is not None:
            rows.append((name, "-", "-", "-", "-", "-", found.error))
            continue
        verdict = (
            "reference"
            if i == 0
            else "bitwise"
            if found.bitwise and found.same
            else "same"
            if found.same
            else f"differs: step {found.first_step}, {found.first_name}"
        )
        verdict += (
            "" if found.precision == first.precision else f" (in {found.precision}, tolerance {found.tolerance:.0e})"
        )
        worst = (max(values.values(), default=0.0) for values in (found.metrics, found.parameters))
        rows.append((name, str(found.steps), *map(_number, (found.loss, found.grad_norm, *worst)), verdict))
    in_precision = f" in {first.precision}" if first.precision else ""
    return "\n".join(
        [
            *lines,
            *columns(rows, right=range(1, 6)),
            f"largest relative differences from {next(iter(results))}{in_precision}; tolerance {first.tolerance:.0e}",
        ]
    )


def to_json(results: dict[str, Difference]) -> str:
    """The results with every metric and parameter by name; null where a difference is infinite."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        return None if value == math.inf else value

    return json.dumps(
        {name: finite({**asdict(found), "same": found.same}) for name, found in results.items()},
        indent=2,
        allow_nan=False,
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _relative(value: float | None, expected: float | None) -> float:
    """Infinite where one of two is missing or no number."""
    if value == expected or (value is not None and expected is not None and math.isnan(value) and math.isnan(expected)):
        return 0.0
    if value is None or expected is None:
        return math.inf
    difference = abs(value - expected) / (abs(expected) or 1.0)
    return math.inf if math.isnan(difference) else difference
