"""The published algorithms in plain single-process Python, a loop over workers: what ranks compute is compared with it.

Each takes the state of a run (a dict that it keeps), the gradients of all workers, `[workers, *shape]` in float64, and
`draw(shape, worker)`, numbers in [0, 1) or normal ones; it returns the mean of what is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[..., Tensor]


def with_feedback(state: dict, grads: Tensor, compress: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Error feedback: Karimireddy and others (2019), algorithm 2, at a learning rate of one."""
    errors = state.setdefault("errors", torch.zeros_like(grads))
    sent = torch.zeros_like(grads[0])
    for worker, gradient in enumerate(grads):
        corrected = gradient + errors[worker]
        decoded = compress(corrected, worker)
        errors[worker] = corrected - decoded
        sent = sent + decoded
    return sent / len(grads)


def top_k(state: dict, grads: Tensor, draw: Draw, share: float) -> Tensor:
    """Stich and others (2018), "Sparsified SGD with Memory"; vectors are sent whole."""
    if grads.dim() < 3:
        return grads.mean(0)

    def compress(tensor: Tensor, worker: int) -> Tensor:
        values = tensor.flatten().tolist()
        first = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[: math.ceil(share * len(values))]
        return torch.tensor([v if i in first else 0.0 for i, v in enumerate(values)], dtype=tensor.dtype).view_as(
            tensor
        )

    return with_feedback(state, grads, compress)


def deep_gradient_compression(
    state: dict, grads: Tensor, draw: Draw, share: float, momentum: float, start: int = 0
) -> Tensor:
    """Lin and others (2018), algorithm 4 without clipping: momentum correction and momentum factor masking.

    Vectors, and all gradients before `start`, are sent whole: by ordinary momentum, without masks.
    """
    step = state["step"] = state.get("step", -1) + 1
    velocity = state.setdefault("velocity", torch.zeros_like(grads))
    left = state.setdefault("left", torch.zeros_like(grads))
    sent = torch.zeros_like(grads)
    for worker, gradient in enumerate(grads):
        velocity[worker] = momentum * velocity[worker] + gradient
        left[worker] += velocity[worker]
        values = left[worker].flatten().tolist()
        chosen = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[: math.ceil(share * len(values))]
        mask = torch.tensor([i in chosen for i in range(len(values))]).view_as(gradient)
        whole = grads.dim() < 3 or step < start
        sent[worker] = left[worker] if whole else left[worker] * mask
        left[worker] = 0 * left[worker] if whole else left[worker] * ~mask
        velocity[worker] = velocity[worker] if whole else velocity[worker] * ~mask
    return sent.mean(0)


def random_k(state: dict, grads: Tensor, draw: Draw, share: float) -> Tensor:
    """The same with coordinates at random, the same of all workers."""
    if grads.dim() < 3:
        return grads.mean(0)
    order = draw("permutation", grads[0].numel(), None)
    chosen = order[: math.ceil(share * len(order))]
    mask = torch.zeros(len(order), dtype=grads.dtype).index_fill(0, chosen, 1.0).view_as(grads[0])
    return with_feedback(state, grads, lambda tensor, worker: tensor * mask)


def sign(state: dict, grads: Tensor, draw: Draw) -> Tensor:
    """EF-signSGD: Karimireddy and others (2019), algorithm 1."""

    def compress(tensor: Tensor, worker: int) -> Tensor:
        signs = torch.tensor([1.0 if v >= 0 else -1.0 for v in tensor.flatten().tolist()], dtype=tensor.dtype)
        return signs.view_as(tensor) * tensor.abs().sum() / tensor.numel()

    return with_feedback(state, grads, compress)


def int8(state: dict, grads: Tensor, draw: Draw) -> Tensor:
    """Dettmers (2015), "8-Bit Approximations for Parallelism in Deep Learning", with linear steps in blocks of 256."""

    def compress(tensor: Tensor, worker: int) -> Tensor:
        values, decoded = tensor.flatten().tolist(), []
        for start in range(0, len(values), 256):
            block = values[start : start + 256]
            scale = max(map(abs, block)) / 127
            decoded += [round(v / scale) * scale if scale else 0.0 for v in block]
        return torch.tensor(decoded, dtype=tensor.dtype).view_as(tensor)

    return with_feedback(state, grads, compress)


def half(state: dict, grads: Tensor, draw: Draw, dtype: torch.dtype) -> Tensor:
    return with_feedback(state, grads, lambda tensor, worker: tensor.to(dtype).double())


def qsgd(state: dict, grads: Tensor, draw: Draw, bits: int, bucket: int = 512) -> Tensor:
    """Alistarh and others (2017), section 3.1, with the maximum for the norm as in section 5, in buckets."""
    levels, sent = 2 ** (bits - 1) - 1, torch.zeros_like(grads[0]).flatten()
    for worker, gradient in enumerate(grads):
        values, chances = gradient.flatten().tolist(), draw("uniform", gradient.numel(), worker).tolist()
        for start in range(0, len(values), bucket):
            norm = max(map(abs, values[start : start + bucket]))
            for i in range(start, min(start + bucket, len(values))):
                exact = values[i] / norm * levels
                below = math.floor(exact)
                sent[i] += norm / levels * (below + (chances[i] >= 1 - (exact - below)))
    return (sent / len(grads)).view_as(grads[0])


def terngrad(state: dict, grads: Tensor, draw: Draw) -> Tensor:
    """Wen and others (2017): a sign, sent with the chance of the magnitude over the largest one."""
    return qsgd(state, grads, draw, bits=2, bucket=grads[0].numel())


def power_sgd(state: dict, grads: Tensor, draw: Draw, rank: int, start: int = 0) -> Tensor:
    """Vogels and others (2019), algorithms 1 and 2; of matrices that are not taller than wide."""
    step = state["step"] = state.get("step", -1) + 1
    if grads.dim() < 3 or step < start:
        return grads.mean(0)
    matrices = grads.flatten(2)
    is_tall = matrices.shape[1] > matrices.shape[2]
    matrices = matrices.transpose(1, 2) if is_tall else matrices
    rows, columns = matrices.shape[1:]
    q = state.get("q")
    q = draw("normal", (columns, min(rank, rows)), None) if q is None else q
    errors = state.setdefault("errors", torch.zeros_like(matrices))
    corrected = [matrix + error for matrix, error in zip(matrices, errors, strict=True)]
    p = torch.linalg.qr(sum(m @ q for m in corrected) / len(grads)).Q
    qs = [m.T @ p for m in corrected]
    state["errors"] = torch.stack([m - p @ q.T for m, q in zip(corrected, qs, strict=True)])
    state["q"] = sum(qs) / len(grads)
    mean = p @ state["q"].T
    return (mean.T if is_tall else mean).reshape(grads[0].shape)
