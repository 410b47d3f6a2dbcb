"""Replicas of a model in one process: each runs the step on a slice of the batch, and only one may remember it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from lockstep.strategies.data.batch_slices import tensors_of
from lockstep.strategies.dp.attributes import MISSING, Comparison, Copies, joined
from lockstep.strategies.dp.large import Large, read_only
from lockstep.strategies.modules.blocks import holds_states
from lockstep.strategies.modules.parameter_hooks import OF_MODULE, copy_attributes
from lockstep.strategies.sync.contents import generators, sum_of_bits

_LARGE: WeakKeyDictionary[nn.Module, dict[int, Large]] = WeakKeyDictionary()
"""By its model, what the last replica shares since it is large."""


def replica(model: nn.Module, device: torch.device) -> nn.Module:
    """A structural copy on `device` with parameters, gradients, buffers and attributes of its own; what `Copies` does
    not copy is shared.

    What a step changes in place, such as a target network or a counter, it so changes once in each replica, from the
    same values.
    """
    copies = Copies(device, _LARGE.get(model))
    for module in model.modules():
        if hasattr(module, "merge_state"):  # a torchmetrics object: counts by itself, merged afterwards
            copied = copy.deepcopy(module)
            copied.reset()  # type: ignore[operator]
            copied.to(device)
        else:
            copied = module._replicate_for_data_parallel()
            vars(copied)["replica_device"] = device  # what `Module.device` answers in its thread
        copies.add(module, copied)
    for module in model.modules():
        copied = copies.of(module)
        if hasattr(module, "merge_state"):
            continue
        for name, child in module._modules.items():
            copied._modules[name] = copies.of(child)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in copies:
                own = nn.Parameter(_copy(parameter, device), requires_grad=parameter.requires_grad)
                copy_attributes(parameter, copies.add(parameter, own))
            copied._parameters[name] = copies.of(parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in copies:
                copies.add(buffer, _copy(buffer, device))
            copied._buffers[name] = copies.of(buffer)
    for name, module in model.named_modules():
        if not hasattr(module, "merge_state"):
            own_state(name, module, copies)
    copies.fill()
    made = copies.of(model)
    vars(made)["replica_copies"] = copies  # until `join_state`
    _LARGE[model] = copies.large
    return made


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True, non_blocking=True)


def refuse_returned(output: Any, parameters: list[nn.Parameter]) -> None:
    """Raise RuntimeError for a weight of a replica, or a view of one, in what its step has returned beside the loss: it
    would not follow the weight through the optimizer's step, as on one device."""
    returned = [tensor for tensor in tensors_of(output) if tensor.layout is torch.strided and tensor.numel()]
    held = {parameter.untyped_storage().data_ptr() for parameter in parameters if returned and parameter.numel()}
    if any(tensor.untyped_storage().data_ptr() in held - {0} for tensor in returned):  # 0 where nothing is computed
        raise RuntimeError(
            "training_step returned a weight, or a view of one (.data, .detach() or a part), and strategy 'dp' joins "
            "what slices return, so that it would not follow the weight; read the weight in the hook, or return a copy "
            "(.clone())"
        )


def own_state(name: str, module: nn.Module, copies: Copies) -> None:
    """Give the copy of a module attributes and hooks of its own."""
    held = vars(copies.of(module))
    for key, value in vars(module).items():
        if _is_state(key):
            copies.place = f"{name}.{key}".lstrip(".")
            held[key] = copies.of(value)
    for kind in OF_MODULE:
        hooks = getattr(module, kind, None)
        if hooks:
            held[kind] = type(hooks)((key, copies.of(hook)) for key, hook in hooks.items())


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError for a hook that may keep what it sees outside of the replica that calls it."""
    known = {id(module) for module in model.modules()}
    for name, module in model.named_modules():
        for kind in OF_MODULE:
            for hook in (getattr(module, kind, None) or {}).values():
                owner = getattr(hook, "__self__", None)
                if id(owner) in known or not _remembers(hook):
                    continue
                raise ValueError(
                    f"{name or type(model).__name__} has a hook, {getattr(hook, '__qualname__', type(hook).__name__)}, "
                    "that strategy 'dp' would call "
                    "for each slice of a batch, in any order, and that may keep what it sees; make it a method of the "
                    "module, or use strategy='ddp'"
                )


def _remembers(hook: Any) -> bool:
    """Whether a callable holds objects of its own in which it could keep something."""
    if str(getattr(hook, "__module__", "")).startswith(("torch.", "lockstep.strategies.")):
        return False
    return (
        not hasattr(hook, "__code__") or bool(hook.__closure__) or bool(hook.__defaults__) or hasattr(hook, "__self__")
    )


def join_state(model: nn.Module, others: list[nn.Module]) -> None:
    """After a step, let what replicas remember differently be nobody's: using it raises RuntimeError.

    Raises RuntimeError for a parameter or buffer that they changed differently, but for the statistics of normalization
    layers, and for an object without attributes that was given some.
    """
    made: list[Copies] = [vars(other).pop("replica_copies") for other in others]
    for each in made:
        each.refuse_changed()
    _refuse_differing(model, others)
    for (name, module), *copies in zip(model.named_modules(), *(other.modules() for other in others), strict=True):
        if hasattr(module, "merge_state"):
            continue
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            for key, buffer in module._buffers.items():
                own = zip(copies, made, strict=True)
                if any(not Comparison(each).is_same(buffer, copied._buffers.get(key)) for copied, each in own):
                    raise _differs("buffer", f"{name}.{key}".lstrip("."))
        if type(module).__module__.startswith("torch.nn."):
            continue
        prefix = name + "." if name else ""
        for key in [key for key in vars(module) if _is_state(key)]:
            found = [vars(copied).get(key, MISSING) for copied in copies]
            vars(module)[key] = joined(vars(module)[key], found, prefix + key, made)


def _refuse_differing(model: nn.Module, others: list[nn.Module]) -> None:
    """Raise RuntimeError for a parameter whose bits differ in a replica. Waits for the devices."""
    names, own, *theirs = (
        [name for name, _ in model.named_parameters()],
        *([sum_of_bits(parameter) for parameter in parameters_of(each)] for each in (model, *others)),
    )
    for sums in theirs if names else ():
        for name, one, other in zip(names, torch.stack(own).tolist(), torch.stack(sums).tolist(), strict=True):
            if one != other:
                raise _differs("parameter", name)


def _differs(kind: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"training_step changed the {kind} {name} by the samples of a slice, and strategy 'dp' runs it on slices; "
        "change it in on_train_batch_end, or use strategy='single'"
    )


def _is_state(key: str) -> bool:
    return (
        key
        not in (
            "_parameters",
            "_buffers",
            "_modules",
            "_trainer",
            "_is_replica",
            "_former_parameters",
            "replica_device",
        )
        and "hooks" not in key
    )


def parameters_of(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model or replica, in the same order."""
    seen: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def holds_generators(model: nn.Module) -> bool:
    """Whether an attribute of a module is a random generator, which all replicas would draw from."""
    return any(isinstance(value, generators()) for module in model.modules() for value in vars(module).values())


def metrics_of(model: nn.Module) -> list[Any]:
    metrics = [m for m in model.modules() if hasattr(m, "merge_state") and hasattr(m, "_update_count")]
    return [metric for metric in metrics if holds_states(metric)]


@contextmanager
def refusing_in_threads(replicas: list[nn.Module]) -> Iterator[None]:
    """While it lasts forward-mode AD is refused: its levels are the process's, so threads would mix their tangents. So
    is a write to an array that `replicas` share."""

    def refuse() -> NoReturn:
        raise RuntimeError(
            "forward-mode AD (torch.func.jvp, torch.autograd.forward_ad) has one level for all threads, and strategy "
            "'dp' runs a step in one for each slice; use reverse mode (torch.func.vjp, torch.autograd.grad), or "
            "strategy='ddp'"
        )

    enter, forward_ad.enter_dual_level = forward_ad.enter_dual_level, refuse
    try:
        with read_only(large for other in replicas for large in vars(other)["replica_copies"].large.values()):
            yield
    finally:
        forward_ad.enter_dual_level = enter


def rebind(step_fn: Callable[..., Any], model: nn.Module, replica: nn.Module) -> Callable[..., Any]:
    """`step_fn` as a method of `replica`. Raises TypeError if it is not a method of `model`."""
    if hasattr(step_fn, "rebind"):  # an adapter around a method
        return step_fn.rebind(lambda method: rebind(method, model, replica))
    if getattr(step_fn, "__self__", None) is not model:
        raise TypeError("strategy 'dp' needs a step that is a method of the module that it wrapped")
    return step_fn.__func__.__get__(replica)  # type: ignore[attr-defined]
