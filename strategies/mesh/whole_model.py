"""A sharded model made whole for a while: plain parameters with plain gradients, written back afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from lockstep.strategies.mesh.dtensors import cut_like, local
from lockstep.strategies.mesh.mixed_tensors import note_copy
from lockstep.strategies.modules.model_changes import refuse_shared_memory
from lockstep.strategies.modules.parameter_hooks import share_attributes
from lockstep.strategies.optimizers.hidden_state import of_shards


@contextmanager
def whole_model(model: nn.Module, strategy: str, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Replace each parameter that is a DTensor by the whole, with its whole gradient; write both back at the end.
    `optimizers` hold the shards.

    Every rank of the parameters' meshes calls it. Within, calling a module of `model` raises RuntimeError.
    """
    places = [
        (module, name, sharded)
        for module in model.modules()
        for name, sharded in module._parameters.items()
        if isinstance(sharded, DTensor)
    ]
    gathered: dict[int, tuple[Any, nn.Parameter]] = {}
    for _, _, sharded in places:
        if id(sharded) not in gathered:
            gathered[id(sharded)] = sharded, _gather(sharded)
    names = {module: name or type(model).__name__ for name, module in model.named_modules()}

    def refuse(module: nn.Module, args: Any) -> None:
        if module in names:
            raise RuntimeError(
                f"{names[module]} was called within whole(), where {strategy} has its parameters whole and not as it "
                "computes "
                "with them; call it outside of the block"
            )

    handle, hooks = register_module_forward_pre_hook(refuse), take_hooks(model)
    for module, name, sharded in places:
        module._parameters[name] = gathered[id(sharded)][1]
    replaced = []
    try:
        with of_shards(optimizers, {id(whole) for _, whole in gathered.values()}):
            yield
        refuse_shared_memory(model, strategy)
    finally:
        handle.remove()
        for held, theirs in hooks:
            held.update(theirs)
        for module, name, sharded in places:
            if module._parameters.get(name) is not gathered[id(sharded)][1]:
                replaced.append(f"{names[module]}.{name}")
            module._parameters[name] = sharded
        for sharded, whole in gathered.values():
            _write_back(sharded, whole)
            note_copy(local(sharded), whole)
    if replaced:
        raise RuntimeError(
            f"within whole() the parameters {', '.join(replaced[:5])} were replaced by other ones, which {strategy} "
            "cannot take "
            "over; copy values into the existing ones, as in weight.data.copy_(values)"
        )


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """The whole gradient of a parameter as a plain tensor; every rank of its mesh calls it."""
    gradient = parameter.grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def put_gradient(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Let `gradient`, the whole, be the gradient of a parameter; each rank takes its shard."""
    parameter.grad = None if gradient is None else cut_like(gradient.detach().to(parameter.dtype), parameter)


def take_hooks(model: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Take off torch's own hooks on loading a state dict, which expect shards; returns what to put back where."""
    taken = []
    for module in model.modules():
        held = module._load_state_dict_post_hooks
        theirs = {key: hook for key, hook in held.items() if hook.__module__.startswith("torch.distributed.")}
        if theirs:
            taken.append((held, theirs))
            for key in theirs:
                del held[key]
    return taken


@torch.no_grad()
def _gather(sharded: Any) -> nn.Parameter:
    # Cloned, as what is replicated comes back as it is, and is not to change before it is written back.
    whole = nn.Parameter(sharded.detach().full_tensor().clone(), requires_grad=sharded.requires_grad)
    share_attributes(sharded, whole)
    gradient = gradient_of(sharded)
    whole.grad = gradient.clone() if gradient is not None else None
    return whole


@torch.no_grad()
def _write_back(sharded: Any, whole: nn.Parameter) -> None:
    local(sharded).copy_(local(cut_like(whole.detach(), sharded)))
    if sharded.requires_grad != whole.requires_grad:
        sharded.requires_grad_(whole.requires_grad)
    put_gradient(sharded, whole.grad)


class Lender:
    """Makes a unit's parameters whole while a layer runs that was called without the unit."""

    def __init__(self, wrapped: Any, unit: Any, own: set[int]) -> None:
        self._wrapped, self._unit = wrapped, unit
        self._lent: list[nn.Module] = []
        self._places = [
            (module._parameters, name, p)
            for module in unit.modules()
            for name, p in module._parameters.items()
            if id(p) in own
        ]
        """Where the unit's parameters are found, and what is found there while they are cut."""

    def watch(self, module: nn.Module, traced: bool) -> None:
        """Lend to `module`, which is `traced` where it lies within a compiled block (see `Plan`)."""
        module.register_forward_pre_hook(self._before, prepend=True)
        module.register_forward_hook(self._after, always_call=not traced)

    def _before(self, module: nn.Module, args: Any) -> None:
        parameters, name, cut = self._places[0]
        if parameters[name] is cut:
            self._unit.unshard()
            self._lent.append(module)
        elif self._wrapped.depth and self._unit in self._wrapped.reused:
            self._lent.append(module)
        elif self._wrapped.manual:
            self._wrapped.follow_flags()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._lent and self._lent[-1] is module:
            self._lent.pop()
            if not self._wrapped.depth:  # within a step, and where a backward recomputes, the backward frees it
                if torch._C._current_graph_task_id() == -1:
                    self._wrapped.close()
            elif torch.is_grad_enabled():
                self._wrapped.reuse(self._unit, output)
                self._wrapped.watch(output)
