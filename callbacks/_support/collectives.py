"""What an operator of torch says to other ranks, if it does: the one rule by which collectives are counted."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
"""What is shown, by how the operators of torch begin, without underscores; the first that fits counts."""


class Call(NamedTuple):
    """One call of a collective."""

    kind: str
    """One of `KINDS`."""
    dtype: str
    """As torch names it, such as float32; empty for a barrier."""
    num_bytes: int
    """Of the tensor, or of the whole where one side of the call is parts of it."""


def collective(op: Any, args: tuple[Any, ...], result: Any) -> Call | None:
    """The collective that the operator `op` is, called with `args`; None if it is another operator, or waits for one.

    `result` is what it returned.
    """
    space, _, name = op.name().partition("::")
    if space not in ("c10d", "_c10d_functional"):
        return None
    plain = name.partition(".")[0].replace("_", "")
    kind = next((kind for start, kind in KINDS.items() if plain.startswith(start)), None)
    if kind is None:  # waiting for one
        return None
    sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in (*args, result)]
    most = max(
        (sum(tensor.nbytes for tensor in side) for side in sides), default=0
    )  # the whole stands on one side, parts on the other
    dtype = next((str(side[0].dtype).removeprefix("torch.") for side in sides if side), "")
    return Call(kind, dtype, most)
