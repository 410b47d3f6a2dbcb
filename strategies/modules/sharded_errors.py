"""Errors of torch about sharded tensors in user code, with what to do instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

_OURS = {Path(__file__).parents[2] / folder for folder in ("trainer", "strategies", "callbacks")}
INSTEAD = (
    "in a hook use whole ones, as in `with trainer.whole(module): ...`, module.grad_norm(), or gradient_clip_val to "
    "clip; for a step or an optimizer that needs them use strategy='ddp'"
)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Within it errors of torch about DTensors of several meshes, or beside plain tensors, say what to do instead."""
    try:
        yield
    except Exception as error:
        better = explanation(error, what)
        if better is None:
            raise
        raise better from error


_WORDS = (
    "mixed torch.Tensor and DTensor",
    "same mesh",
    "cross mesh",
    "different meshes",
    "does not have a sharding strategy registered",
    "in-place operations that require placement changes",
    "Sharding propagation failed",
)
_ALONE = ("Cannot flatten unevenly sharded", "along the sharded dimension", "for tensor subclasses, got DTensor")
"""Of what torch does not do with one sharded tensor."""
_TRANSFORMED = ("In order to use an autograd.Function with functorch transforms", "must implement the jvp function")
"""What torch says of functions of autograd, such as those of sharded layers, in torch.func and forward-mode AD."""


def explanation(error: BaseException, what: str) -> RuntimeError | None:
    """What to raise in place of an error of torch about sharded tensors in `what`; None for any other error."""
    text = str(error)
    if error.__cause__ is not None and _is_ours(error):  # it quotes torch, and says what to do itself
        return None
    if isinstance(error, AssertionError) and "does not support deepcopy" in text:
        return RuntimeError(
            f"{what} copies a module (copy.deepcopy) whose parameters are sharded over ranks; copy it in __init__ or "
            "configure_model, and bring it up to date within `with trainer.whole(module):`"
        )
    if any(words in text for words in _TRANSFORMED) and _came_through_mesh(error):
        return RuntimeError(
            f"{what} differentiates a layer that is sharded over ranks by torch.func (vmap, grad, jvp, jacrev) or "
            "forward-mode AD, and the collectives in it have no such derivatives; use torch.autograd.grad with "
            "create_graph=True, or strategy='ddp' or 'fsdp'"
        )
    if "type object 'FSDPParametrized" in text or "leave_parametrized=True for a parameter that is" in text:
        return RuntimeError(
            f"{what} removes the parametrization of a layer whose weights are sharded over ranks, which torch cannot; "
            "remove it before fit, or after it from the module that was fitted"
        )
    if "_apply(): Couldn't swap" in text:
        return RuntimeError(
            f"{what} casts or moves a layer whose weights are sharded over ranks after a forward that needs them for "
            "its backward; do it in a hook such as on_train_batch_start, or compute under torch.autocast"
        )
    if "NestedTensorImpl" in text and _came_through_mesh(error):
        return RuntimeError(
            f"{what} gives a nested tensor, as nn.TransformerEncoder makes it of src_key_padding_mask in evaluation, "
            "to a layer that is sharded over ranks; build the encoder with enable_nested_tensor=False, or use "
            "strategy='ddp' or 'fsdp'"
        )
    if "RegisterPostBackwardFunction" in text and "modified inplace" in text:
        return RuntimeError(
            f"{what} calls {_innermost_module(error)}, which changes in place a tensor that it is given, as x += y "
            "does, but FSDP ends the backward of a block at what the block is given; compute a new one, as in x = x + y"
        )
    if "setStorage" in text and "storage of size 0" in text:
        return RuntimeError(
            f"{what} runs backward through a tensor that FSDP does not know to come from a block, as the block has "
            "written it to an object instead of returning it; return it, or write it to a list, dict or dataclass that "
            "the block is given"
        )
    if not isinstance(error, (RuntimeError, ValueError)):
        return None
    found = re.search(r"aten\.\w+", text)
    if found is None and any(words in text for words in _ALONE):
        return RuntimeError(
            f"{what} takes apart or flattens weights or gradients that are sharded over ranks, where torch cannot do "
            f"it; {INSTEAD}"
        )
    if not any(words in text for words in _WORDS):
        return None
    return RuntimeError(
        f"{what} computes ({found[0] if found else text.split()[0][:40]}) with weights or gradients that are sharded "
        f"over ranks together with tensors that are whole or sharded over other ranks; {INSTEAD}"
    )


def _came_through_mesh(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and "strategies/mesh/" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace is not None


def _innermost_module(error: BaseException) -> str:
    """The class of the last module in whose code the error arose."""
    trace, found = error.__traceback__, "a block"
    while trace is not None:
        code, values = trace.tb_frame.f_code, trace.tb_frame.f_locals
        owner = values.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and code.co_name == "forward":
            found = type(owner).__name__.removeprefix("FSDP")
        trace = trace.tb_next
    return found


def _is_ours(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not _OURS.isdisjoint(Path(trace.tb_frame.f_code.co_filename).parents)


def within_step(strategy: str) -> RuntimeError:
    """The error of `whole()` where gradients are not reduced yet."""
    return RuntimeError(
        f"whole() was called within a step, where {strategy} has not reduced the gradients yet; call it in "
        "on_after_backward, on_before_optimizer_step or later"
    )
