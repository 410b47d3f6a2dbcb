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
_OVER = {f"{name}Backward0": _FUNCTIONS[f"{name}Backward0"] for name in ("Var", "Std", "Logsumexp", "LinalgVectorNorm")}
_OVER |= {f"{name}Backward0": name.lower() for name in ("Topk", "Sort", "Kthvalue", "Softmax")}
_OVER |= {"LogSoftmaxBackward0": "log_softmax", "MedianBackward1": "the median"}
_OVER |= dict.fromkeys(("MaxBackward0", "AmaxBackward0"), "the maximum")
_OVER |= dict.fromkeys(("MinBackward0", "AminBackward0"), "the minimum")
"""Of the dimension of samples: not a sum of what each gives."""
_SUMS = "MeanBackward1", "SumBackward1", "MmBackward0"
_BENDING = {f"{name}Backward0" for name in ("Relu", "Clamp", "ClampMin", "ClampMax", "Abs", "Softplus", "SmoothL1Loss")}
_BENDING |= {*_FUNCTIONS, *_OVER, "MseLossBackward0"}
_ALONG = {
    f"{name}Backward0" for name in ("Mean", "Sum", "Slice", "Select", "Expand", "T", "Permute", "Transpose", "Rsub")
}
_ALONG |= _LINEAR | {*_SUMS[:2]} | _BENDING | {*_OVER, "RsubBackward1", "NllLossBackward0"}
_LAYERS = (*_OF_INPUTS, "NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm", "ScaledDotProduct")
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
            if (found := _mixed(output, samples)) is not None:
                self._looks = _LOOKS
                _log.warning(
                    f"training_step returns {found}, but sees the samples of one micro-batch of one rank, so the "
                    "numbers depend on how samples are split over batches and ranks; let each sample give its own "
                    "loss, or give it all that it compares: by `self.all_gather`, and in one micro-batch a step"
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


def _ends(output: Any) -> list[Any]:
    """The nodes of plain losses."""
    losses = [output]
    if isinstance(output, Mapping):
        losses = [output["loss"]] if "loss" in output else [*output.values()]  # one for each optimizer
    return [loss.grad_fn for loss in losses if isinstance(loss, Tensor) and loss.grad_fn is not None]


def _means(output: Any) -> list[float | Tensor]:
    """The numbers of terms of the means that are nearest to a plain loss in its graph."""
    nodes = _ends(output)
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
    waiting = [(node, 1.0) for node in _ends(output)]
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


def _mixed(output: Any, samples: float) -> str | None:
    """What a plain loss is if it compares the samples of a batch, after the last layers: all pairs of them, or by a
    function over their dimension, unless it is a mean."""
    waiting: list[tuple[Any, bool, bool]] = [(node, True, False) for node in _ends(output)]
    seen = {node for node, *_ in waiting}
    for node, is_along, bends in islice(waiting, 2 * _NODES if samples > 1 else 0):  # which grows meanwhile
        name, edges = type(node).__name__, [after for after, _ in node.next_functions]
        held: list[Any] = [after for after in edges if after is not None]
        if _are_pairs(node, name, edges, samples):
            return "a function of all pairs of its samples"
        if is_along and (name in _OVER or (bends and name in _SUMS)) and _is_over(node, samples) and _is_of_data(held):
            return f"a function ({_OVER.get(name, 'of a mean')}) over its samples"
        if name.startswith(_LAYERS):
            continue
        may_be_product = is_along and name == "MulBackward0" and len(held) == 2
        is_product = may_be_product and all(_is_of_data([edge]) for edge in held)
        is_along = is_along and (name in _ALONG or len(held) == 1 or is_product)
        bends |= name in _BENDING or is_product
        following = [after for after in held if after not in seen]
        seen.update(following)
        waiting += [(after, is_along, bends) for after in following]
    return None


def _are_pairs(node: Any, name: str, edges: list[Any], samples: float) -> bool:
    """Whether a node combines each sample with each other."""
    if (
        len(edges) < 2
        or None in edges[:2]
        or name not in ("MmBackward0", "BmmBackward0", "CdistBackward0", "SubBackward0")
    ):
        return False
    if name == "SubBackward0":
        if any(type(edge).__name__ != "UnsqueezeBackward0" for edge in edges):
            return False
        is_of_one = len({edge.next_functions[0][0] for edge in edges}) == 1  # other ones may be anchors, not samples
        is_pair = is_of_one and {edge._saved_dim for edge in edges} == {0, 1}
    else:
        first, second = ("x1", "x2") if name == "CdistBackward0" else ("self", "mat2")
        sides = _saved(node, f"_raw_saved_{first}"), _saved(node, f"_raw_saved_{second}")
        shapes = [
            [*side.shape][-2:] for side in sides if side is not None and side.ndim < 4 and side.shape[:-2].numel() == 1
        ]
        rows = [shape[-1 if name != "CdistBackward0" and i else 0] for i, shape in enumerate(shapes)]
        is_pair = len(rows) == 2 and all(number in (samples, 2 * samples) for number in rows)
    return is_pair and all(_is_of_data([edge]) for edge in edges[:2])


def _is_over(node: Any, samples: float) -> bool:
    """Whether a node reduces or orders the first dimension of a tensor, which is the only one of as many as samples."""
    if type(node).__name__ == "MmBackward0":
        rows = getattr(node, "_saved_mat2_sym_sizes", ())
        others = (*getattr(node, "_saved_self_sym_sizes", ())[:1], *rows[1:])
        return (
            rows[:1] == (samples,) and samples not in others and all(_is_of_data([e]) for e, _ in node.next_functions)
        )
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    held = _saved(node, "_raw_saved_result" if type(node).__name__.endswith("oftmaxBackward0") else "_raw_saved_self")
    sizes = [*(held.shape if sizes is None and held is not None else sizes or ())]
    dims = getattr(node, "_saved_dim", None)
    dims = {*dims} if isinstance(dims, tuple) else {dims}
    dims = {dim if dim is None or dim < 2**63 else dim - 2**64 for dim in dims}  # torch shows no sign
    is_first = bool(sizes) and (dims <= {None} or not dims.isdisjoint({0, -len(sizes)}))
    return is_first and sizes[0] == samples and samples not in sizes[1:]


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
