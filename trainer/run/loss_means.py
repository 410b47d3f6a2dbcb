"""A line for a plain loss that is not a mean over the samples of its batch, by which it is weighted."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.prepare import FitLoop

_log = logging.getLogger("lockstep")

_LOOKS, _NODES = 16, 100
_FUNCTIONS = {
    "SqrtBackward0": "sqrt",
    "RsqrtBackward0": "rsqrt",
    "LogBackward0": "log",
    "Log1PBackward0": "log1p",
    "ExpBackward0": "exp",
    "PowBackward0": "a power",
    "LinalgVectorNormBackward0": "a norm",
    "TanhBackward0": "tanh",
    "SigmoidBackward0": "sigmoid",
    "LogSigmoidBackward0": "logsigmoid",
    "SoftplusBackward0": "softplus",
    "ReciprocalBackward0": "a reciprocal",
    "LogsumexpBackward0": "logsumexp",
    "MedianBackward0": "the median",
    "VarBackward0": "the variance",
    "StdBackward0": "the standard deviation",
    "ProdBackward0": "the product",
}
_FUNCTIONS |= dict.fromkeys(("MaxBackward1", "AmaxBackward0"), "the maximum")
_FUNCTIONS |= dict.fromkeys(("MinBackward1", "AminBackward0"), "the minimum")
_LINEAR = {f"{name}Backward0" for name in ("Add", "Sub", "Neg", "ToCopy", "Clone", "View", "UnsafeView", "Reshape")}
_LINEAR |= {f"{name}Backward{i}" for name in ("Squeeze", "Unsqueeze") for i in (0, 1)}
_JOINED = "StackBackward0", "CatBackward0"
_OF_PYTHON = torch.float64, torch.int64
_OF_INPUTS = "Addmm", "Mm", "Bmm", "Convolution", "Linear", "Embedding", "MkldnnRnn", "CudnnRnn", "NativeLayerNorm"
_MEAN, _SUM = 1, 2  # torch's numbers of reduction="mean" and "sum"


class FirstSteps:
    """In place of `training_step`: reads what the first losses are means over, then leaves its place to it.

    What a loss is a mean over is read from its autograd graph; a compiled loss shows nothing.
    """

    def __init__(self, run: RunState, loop: FitLoop) -> None:
        self._metrics, self._loop, self._step = run.metrics, loop, loop.training_step
        self._first: tuple[float, list[float]] | None = None
        self._last: tuple[list[float | Tensor], float, int] | None = None
        """Of the call before, which the host reads once the device has run its backward."""
        self._looks = 0

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        if self._last is not None:
            self._compare(*self._last)
            self._last = None
        if self._looks >= _LOOKS:
            self._loop.training_step = self._step
            return self._step(batch, batch_idx)
        output, samples = self._step(batch, batch_idx), self._metrics.samples_here
        if samples and not self._metrics.is_ambiguous:
            self._looks += 1
            if (found := _not_a_mean(output, samples)) is not None:
                self._looks = _LOOKS
                _log.warning(
                    f"training_step returns {found}, but a plain loss is taken for the mean over its samples, so the "
                    "numbers depend on how samples are split over batches and ranks; return Loss(total, count), such "
                    "as Loss(F.mse_loss(out, y, reduction='sum'), len(y)), or a mean of what each sample gives"
                )
                return output
            self._last = _means(output), samples, batch_idx
        return output

    def of_slice(self) -> Callable:
        """The step for slices of a micro-batch after the first, whose losses are not read."""
        return self._step

    def _compare(self, found: list[float | Tensor], samples: float, batch_idx: int) -> None:
        means = [*map(float, found)]
        if self._first is None:
            self._first = samples, means
        then, before = self._first
        if len(means) != len(before):
            return
        for now, was in zip(means, before, strict=True):
            if now != was and not math.isclose(now * then, was * samples, rel_tol=1e-6):  # sums of weights are rounded
                self._looks = _LOOKS
                _log.warning(
                    f"training_step returns a mean of {was:g} terms for {then:g} samples, and of {now:g} for "
                    f"{samples:g} in batch {batch_idx}, but means are weighted by samples, so the numbers depend on "
                    "how samples are split over batches and ranks; return Loss(total, count), such as "
                    "Loss(F.cross_entropy(…, reduction='sum'), (target != -100).sum())"
                )
                return


def watch(run: RunState, loop: FitLoop) -> None:
    """Read the first losses of a run whose steps are the mean of several parts."""
    can, topology = run.strategy.capabilities, run.strategy.topology
    parts = topology.data_size > 1 or run.shares is not None or run.accumulate_grad_batches > 1
    one_mean = can.steps_together and run.module is not None and run.module.automatic_optimization
    if one_mean and (parts or not can.runs_step_once) and topology.data_rank == 0 and topology.is_reporting_rank:
        loop.training_step = FirstSteps(run, loop)


def _means(output: Any) -> list[float | Tensor]:
    """The numbers of terms of the means that are nearest to a plain loss in its graph."""
    if isinstance(output, Mapping):
        losses = [output["loss"]] if "loss" in output else [*output.values()]  # one for each optimizer
    else:
        losses = [output]
    nodes: list[Any] = [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    seen, counts = set(nodes), list[float | Tensor]()
    for node in islice(nodes, _NODES):  # which grows meanwhile
        if (count := _terms(node)) is not None:
            counts.append(count)
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        nodes += following
    return counts


def _not_a_mean(output: Any, samples: float) -> str | None:
    """What a plain loss is if it is, or adds, a sum over samples or a nonlinear function of a mean; of what only
    weights go into, and of divisions, nothing is said."""
    losses = [*output.values()] if isinstance(output, Mapping) and "loss" not in output else [output]
    losses = [output["loss"]] if isinstance(output, Mapping) and "loss" in output else losses
    waiting = [(loss.grad_fn, 1.0) for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]
    for node, factor in islice(waiting, _NODES if samples > 1 else 0):  # which grows meanwhile
        name, edges = type(node).__name__, [after for after, _ in node.next_functions if after is not None]
        if name in _FUNCTIONS and _is_of_data(edges):
            return f"a function ({_FUNCTIONS[name]}) of what its samples add up to"
        if name in ("SumBackward0", "SumBackward1") or getattr(node, "_saved_reduction", None) == _SUM:
            shape, times = getattr(node, "_saved_self_sym_sizes", None), 1 / (factor * samples)
            is_mean = times > 0.5 and math.isclose(times, round(times), rel_tol=1e-5)
            if type(edges[0]).__name__ in _JOINED:
                waiting += [(after, factor) for after, _ in edges[0].next_functions if after is not None]
            elif not is_mean and (shape is None or math.prod(shape) % samples == 0) and _adds_samples(edges, samples):
                return "a sum over samples"
        elif name in _LINEAR:
            waiting += [(after, factor) for after in edges]
        elif name == "MulBackward0" and len(edges) == 1:
            other = _saved(node, "_raw_saved_other" if node.next_functions[0][0] is not None else "_raw_saved_self")
            if other is not None and other.numel() == 1 and other.is_cpu and other.dtype in _OF_PYTHON and other != 0:
                waiting.append((edges[0], factor * abs(float(other))))
        elif name == "MulBackward0" and all(_is_of_data([edge]) for edge in edges):
            return "a product of what its samples add up to"
    return None


def _adds_samples(edges: list[Any], samples: float) -> bool:
    """Whether what is summed has a value for each sample: no mean over them, no weights that add up to one, and no
    losses of several tasks, however they are weighted."""
    node, summed = edges[0], [*edges]
    for each in islice(summed, _LOOKS):  # grows
        if type(each).__name__ in _JOINED:
            return False
        if type(each).__name__ in (*_LINEAR, "MulBackward0", "ExpandBackward0"):
            summed += [after for after, _ in each.next_functions if after is not None]
    for _ in range(_LOOKS):
        name, following = type(node).__name__, [after for after, _ in node.next_functions if after is not None]
        if name == "DivBackward0" or (name == "MeanBackward1" and _takes_samples(node, samples)):
            return False
        if name == "MulBackward0":
            held = [_saved(node, f"_raw_saved_{side}") for side in ("self", "other")]
            if any(t is not None and math.isclose(float(t.detach().sum()), 1, rel_tol=1e-4) for t in held):
                return False
        if name not in (*_LINEAR, "MulBackward0", "MeanBackward1", "SumBackward1") or len(following) != 1:
            break
        node = following[0]
    return _is_of_data(edges)


def _takes_samples(mean: Any, samples: float) -> bool:
    """Whether a mean over dimensions is one over samples: the first, or the only one of that length."""
    sizes = [*mean._saved_self_sym_sizes]
    dims = {(dim if dim < 2**63 else dim - 2**64) % len(sizes) for dim in mean._saved_dim}  # torch shows no sign
    return 0 in dims or (
        samples in (sizes[dim] for dim in dims) and all(n != samples for i, n in enumerate(sizes) if i not in dims)
    )


def _is_of_data(nodes: list[Any]) -> bool:
    """Whether a layer that computes with an input without gradient, or what another stage has sent, goes into nodes."""
    seen, waiting = set(nodes), [*nodes]
    for node in islice(waiting, 10 * _NODES):  # grows
        name, variable = type(node).__name__, getattr(node, "variable", None)
        is_read = name.startswith(_OF_INPUTS) and not _has_one_row(node, name)
        if is_read and (name.startswith("Embedding") or node.next_functions[_input(name)][0] is None):
            return True
        if isinstance(variable, Tensor) and not isinstance(variable, nn.Parameter):
            return True
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting += following
    return False


def _has_one_row(node: Any, name: str) -> bool:
    """Whether a layer reads a single row, such as the number of a task or a constant, and so not the samples."""
    if name == "AddmmBackward0":
        read = _saved(node, "_raw_saved_mat1")
        return read is not None and len(read) == 1
    read = _saved(node, "_raw_saved_indices") if name == "EmbeddingBackward0" else None
    return read is not None and read.numel() == 1


def _input(name: str) -> int:
    return 1 if name == "AddmmBackward0" else 0


def _terms(node: Any) -> float | Tensor | None:
    """The number of terms of the mean that a node takes; None if it takes none over all of a tensor."""
    name = type(node).__name__  # a function of the user's may keep another `name` in its ctx, which is the node
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if name == "DivBackward0" and node.next_functions[0][0] is not None:  # a sum, by a number that may be a count
        summed, divisor = (after for after, _ in node.next_functions)
        is_sum = type(summed).__name__ == "SumBackward0" or getattr(summed, "_saved_reduction", None) == _SUM
        count = _saved(node, "_raw_saved_other") if is_sum and divisor is None else None
        if count is None or count.numel() != 1 or not (count.is_cpu or _is_whole(count.dtype)):
            return None
        return count if _is_whole(count.dtype) or (not count.is_complex() and float(count) % 1 == 0) else None
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    weight = _saved(node, "_raw_saved_total_weight")  # of classes: with ignored targets, or weights
    if weight is not None:
        return weight if weight.numel() == 1 else None
    values = _saved(node, "_raw_saved_self")
    return None if values is None else float(values.numel())


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _saved(node: Any, name: str) -> Tensor | None:
    """What a node keeps, unless hooks keep it, which may give it only once, to backward, or it is spread over ranks."""
    kept = getattr(getattr(node, name, None), "data", None)
    return kept if type(kept) is Tensor else None
