"""Guard: what a run does about numbers that are not finite and replicas that drift apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.callbacks._support.monitored_metric import check_state, is_count
from lockstep.callbacks._support.parameter_state import is_held
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

ACTIONS = ("raise", "skip", "roll_back")


class Guard(Callback):
    """Choose what happens at a loss or gradient that is NaN or infinite, and check that replicas stay equal.

    Without this callback a loss or gradient that is not finite, on any rank, ends the run with FloatingPointError
    on all of them before a parameter changes. "skip" leaves the optimizer step of that window out instead, with all
    that the window has logged by `self.log`, and counts no step; "roll_back" also puts weights, optimizers,
    schedulers and callbacks back to the newest checkpoint of the run and continues with the samples that follow the
    window. What torchmetrics objects and buffers have taken in stays. Both say so each time.

    On accelerators "skip" and "roll_back" wait for the device in each step; "raise" does not: a bad step is left
    out there and the error comes one step later.

    Args:
        non_finite: "raise", "skip" or "roll_back".
        max_in_a_row: Steps in a row that may be skipped; one more raises FloatingPointError.
        check_replicas_every_n_steps: Optimizer steps between comparisons of the parameters over ranks; None for none.
            Every parameter, or part of one, that several ranks hold must be equal on them in every bit. Also compared
            before a checkpoint and at the end. Reads the parameters once and sends 16 bytes a tensor. A difference
            raises RuntimeError, on every rank.
    """

    def __init__(
        self, *, non_finite: str = "raise", max_in_a_row: int = 10, check_replicas_every_n_steps: int | None = 100
    ) -> None:
        if non_finite not in ACTIONS:
            raise ValueError(
                f"non_finite must be one of {', '.join(map(repr, ACTIONS))}, but non_finite={non_finite!r}"
            )
        for name, value in (
            ("max_in_a_row", max_in_a_row),
            ("check_replicas_every_n_steps", check_replicas_every_n_steps),
        ):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, but {name}={value!r}")
        self.non_finite = non_finite
        self.max_in_a_row = max_in_a_row
        self.check_replicas_every_n_steps = check_replicas_every_n_steps
        self.skipped_steps = 0
        """Steps skipped so far."""
        self.in_a_row = 0
        """Steps skipped since the last optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": self.skipped_steps, "in_a_row": self.in_a_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("Guard", state_dict, {"skipped_steps": is_count, "in_a_row": is_count})
        self.skipped_steps, self.in_a_row = state_dict["skipped_steps"], state_dict["in_a_row"]

    def roll_back(self, state_dict: dict[str, Any]) -> None: ...  # steps that were skipped since then stay counted

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit" and trainer.global_step == 0:  # a run of its own, perhaps the second with this callback
            self.skipped_steps = self.in_a_row = 0


def check_replicas(trainer: Trainer, module: Module, gradients: bool = False) -> bool:
    """Raise RuntimeError if a parameter that several ranks hold, or with `gradients` its gradient, differs on them;
    whether there are any. Every rank calls it."""
    strategy = trainer.strategy
    held: list[tuple[str, Tensor]] = [(name, p) for name, p in module.named_parameters() if is_held(p)]
    if gradients:
        held += [(f"the gradient of {name}", found) for name, p in held if (found := _gradient(p)) is not None]
    mine = {_place(name, tensor): (name, fingerprint(tensor)) for name, tensor in held}
    longest = int(
        strategy.all_reduce(torch.tensor(len(mine)), "max")
    )  # a pipeline's ranks have the layers of their stage only
    rows = [(place, content) for place, (_, content) in mine.items()] + [(0, 0)] * (longest - len(mine))
    holders: dict[int, tuple[int, int]] = {}
    has_replicas = False
    for rank, table in enumerate(strategy.all_gather(torch.tensor(rows, dtype=torch.int64)).tolist()):
        for place, content in table:
            holder, expected = holders.setdefault(place, (rank, content))
            has_replicas = has_replicas or (place != 0 and holder != rank)
            if content != expected:
                name = strategy.broadcast(mine[place][0] if rank == strategy.topology.rank else None, rank)
                raise RuntimeError(
                    f"the replicas have drifted apart: after step {trainer.global_step} {name} on rank {rank} is not "
                    f"what it is on rank {holder}; "
                    "look for code that changes parameters or gradients, or draws random numbers for them, differently "
                    "by rank; an optimizer that draws with a closure, or by functions of other files later than in its "
                    "first 16 steps, needs a torch.Generator of its own, seeded alike on all ranks"
                )
    return has_replicas


def _gradient(parameter: Tensor) -> Tensor | None:
    try:
        return parameter.grad
    except RuntimeError:  # there is none to see between steps of DeepSpeed
        return None


def fingerprint(tensor: Tensor) -> int:
    """A number that changes with the tensor's bits: the wrapped sum of its elements' bits. Costs a host sync."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.contiguous().view(bits).sum(dtype=torch.int64))


def _place(name: str, parameter: Tensor) -> int:
    """Which part of which parameter this rank holds: a hash, equal on the ranks that hold the same."""
    local = getattr(parameter, "_local_tensor", parameter)
    offset: tuple[int, ...] = ()
    if local is not parameter:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        layout = parameter.shape, parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        offset = compute_local_shape_and_global_offset(*layout)[1]
    return (
        int.from_bytes(
            hashlib.blake2b(f"{name} {tuple(offset)} {tuple(local.shape)}".encode(), digest_size=7).digest(), "big"
        )
        + 1
    )
