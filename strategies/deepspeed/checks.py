"""What DeepSpeed's engine cannot train exactly: refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.deepspeed.zero_step import ZeroStep
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.optimizers.copies import INSTEAD, Contents, steps_by_own_code, steps_with
from lockstep.strategies.optimizers.modes import has_modes
from lockstep.strategies.optimizers.probe import is_plain, probe, reads_attributes, steps_groups_alike
from lockstep.strategies.precision import Precision
from lockstep.strategies.sync.contents import checksum


def check_optimizer(optimizer: Optimizer, stage: int) -> None:
    """Raise ValueError for an optimizer that would step flat pieces of the parameters differently from the whole."""
    found = probe(optimizer)
    if found.kind == "elementwise" and not is_plain(optimizer):
        _check_beside(optimizer)
    if found.kind != "elementwise" or not found.flattens:
        raise ValueError(
            f"ZeRO hands {type(optimizer).__name__} flat pieces of the parameters, which is exact only if it treats "
            f"each element by itself, and it does not, because "
            f"{found.reason or 'it moves flattened tensors differently'}; use AdamW, SGD or another such optimizer, "
            "strategy='ddp', or set zero_allow_untested_optimizer to true in DeepSpeed's config"
        )
    if reads_attributes(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} reads what is set on parameters as attributes, but ZeRO hands it flat parts "
            "of many parameters, which have none; set it in parameter groups, or use strategy='fsdp' or 'ddp'"
        )
    if has_modes(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} switches the weights between train() and eval(), but ZeRO steps copies of "
            "them that are not switched; use strategy='fsdp' or 'ddp'"
        )
    if hooked := steps_with(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} has {hooked}, which would see flat pieces of the parameters; {INSTEAD}"
        )
    if not steps_groups_alike(optimizer, empties=stage == 3):
        raise ValueError(
            f"ZeRO-{stage} steps {type(optimizer).__name__} once for each of its {len(optimizer.param_groups)} "
            "parameter groups, and so it moves other than once for all, as an optimizer does that counts its steps "
            "besides the state of parameters; give it one group, or use strategy='fsdp' or 'ddp'"
        )


def _check_beside(optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that knows the parameters of the model by more than its groups."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim.") and not steps_by_own_code(optimizer)
    if any("param_names" in group for group in optimizer.param_groups) and not is_torchs:  # torch's do not read them
        why = "has param_names in its groups"
    elif Contents(optimizer).elsewhere:
        why = "keeps parameters, or values for each of them, outside of param_groups and state"
    else:
        return
    raise ValueError(
        f"{type(optimizer).__name__} {why}, but ZeRO hands it flat parts of many parameters, for which that does not "
        "hold; set options in groups without names, or use strategy='fsdp' or 'ddp'"
    )


def check_groups(optimizer: Optimizer) -> None:
    """Raise ValueError for a parameter group in which nothing is trained."""
    trained = [any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups]
    if not all(trained):
        raise ValueError(
            f"group {trained.index(False)} of the optimizer has no trainable parameter, and ZeRO has nothing to shard "
            "there; drop the group"
        )


def check_parameters(model: nn.Module, precision: Precision) -> None:
    """Raise ValueError for parameters that the engine cannot send, or would convert to another dtype."""
    wanted = str(precision.dtype).removeprefix("torch.")
    named = list(model.named_parameters())
    scalar = next((name for name, parameter in named if not parameter.dim()), None)
    if scalar is not None:
        raise ValueError(
            f"DeepSpeed cannot send a parameter without dimensions, which {scalar} is; give it the shape (1,)"
        )
    for name, parameter in named:
        if parameter.dtype != precision.dtype and (parameter.is_floating_point() or parameter.is_complex()):
            raise ValueError(
                f"DeepSpeed keeps all parameters in {wanted} under precision={precision.name!r}, but {name} is "
                f"{str(parameter.dtype).removeprefix('torch.')}; give it that dtype, or use strategy='fsdp' or 'ddp'"
            )


def check_used(
    wrapped: ZeroStep,
    gather: Callable[[float], Sequence[float]] | None,
    all_reduce: Callable[[Tensor, str], Tensor],
) -> None:
    """Raise RuntimeError for parameters that no rank used in this window: the engine would step them all the same.

    Also if ranks used them in different orders, by which they exchange tensors. `gather` is a number from every rank,
    None if there is one rank. Every rank calls it.
    """
    unused = wrapped.unused()
    if gather is not None:
        said = gather(wrapped.order() * 2 + bool(unused))
        if any(number // 2 != said[0] // 2 for number in said):
            raise RuntimeError(
                f"ranks used the layers of {type(wrapped.model).__name__} in different orders or numbers, by which "
                f"ZeRO-{wrapped.stage} exchanges {'parameters and ' if wrapped.stage == 3 else ''}gradients, so "
                "those are wrong now; use the same layers for the samples of every rank, or strategy='ddp' or "
                "'deepspeed_stage_1'"
            )
        if any(number % 2 for number in said):
            used = torch.ones(len(wrapped.trained), device=wrapped.engine.device)
            used[unused] = 0
            unused = (all_reduce(used, "max") == 0).nonzero()[:, 0].tolist()
    if unused:
        names = wrapped.names(unused)
        raise RuntimeError(
            f"these parameters got no gradient in a step, but ZeRO steps them with the others: {shortened(names)}; "
            "use them in each step, freeze them before fit (requires_grad=False), or use strategy='ddp' or 'fsdp'"
        )


def check_weights_alike(wrapped: ZeroStep, all_gather: Callable[[Tensor], Tensor]) -> None:
    """Raise RuntimeError for weights that user code has set to other values than on other ranks, each of which steps
    its part of them. Every rank calls it."""
    held = wrapped.partitions.held_whole()
    names = {id(parameter): name for name, parameter in wrapped.model.named_parameters()}
    with wrapped.access.of_engine():
        numbers = all_gather(torch.tensor([checksum(parameter) for parameter in held]))
    differ = (numbers != numbers[0]).any(0).tolist()
    if bad := [names[id(parameter)] for parameter, differs in zip(held, differ, strict=True) if differs]:
        raise RuntimeError(
            f"the weights {shortened(bad)} were changed in a hook to values that are not the same on all ranks, each "
            "of which steps its part of them; make the change depend on what all ranks share, and draw random numbers "
            "within `with trainer.whole(module):`"
        )
