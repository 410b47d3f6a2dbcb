"""Sharding the layers of a plan, and a check that a module found by its names computes what it did."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils._pytree import tree_leaves

from lockstep.strategies.mesh.tensor_plan.first_call import FirstCall, agree, kind_of
from lockstep.strategies.mesh.tensor_plan.linear import in_features, is_linear
from lockstep.strategies.mesh.tensor_plan.plan import Plan
from lockstep.strategies.mesh.tensor_plan.styles import STYLES, Column, caller, differentiable_twice, writable
from lockstep.strategies.modules.blocks import shared
from lockstep.strategies.modules.forwards import is_called
from lockstep.strategies.modules.side_effect_free import side_effect_free


def apply_plan(unit: nn.Module, prefix: str, mesh: DeviceMesh, plan: Plan) -> None:
    """Cut the layers of `unit` (named `prefix` in the model) that are still whole. All ranks of `mesh` hold the same
    values."""

    def inside(names: Any) -> Iterator[tuple[str, str, nn.Module]]:
        for name in names:
            if name == prefix or name.startswith(prefix + ".") or not prefix:
                relative = name[len(prefix) + 1 :] if prefix else name
                yield name, relative, unit.get_submodule(relative)

    todo = {relative: plan.styles[name] for name, relative, module in inside(plan.styles) if not _is_cut(module)}
    modules = [
        module
        for name, _, module in inside(plan.checked)
        if any(not _is_cut(layer) for _, _, layer in inside(plan.checked[name]))
    ]
    names = [name for name, _, module in inside(plan.checked) if module in modules]
    expected = [_computed(module) for module in modules]
    first_calls = [
        (module, first)
        for module, name in _untried(modules, names, expected)
        if (first := _first_call(module, name, plan))
    ]
    ties = [[(module, leaf) for module, leaf in places] for places in shared(unit).values()]
    torch_plan = _torch_plan(unit, todo, plan)
    if torch_plan:  # values are the same on all ranks, so that nothing needs to be sent
        layers = [unit.get_submodule(name) for name in torch_plan]
        hooks = [[*layer._forward_hooks] for layer in layers]
        parallelize_module(unit, mesh, torch_plan, src_data_rank=None)
        for layer, before in zip(layers, hooks, strict=True):
            layer.register_forward_pre_hook(differentiable_twice)
            layer.register_forward_hook(writable)
            hooks_of: Any = layer._forward_hooks
            for key in before:  # the user's, which see the whole output
                hooks_of.move_to_end(key)
    for name, _, module in inside(plan.heads):
        for attribute, count in plan.heads[name].items():
            setattr(module, attribute, count)
    for name, _, module in inside(plan.dropouts):
        module.forward = SlicedDropout(module, plan.dropouts[name], plan.within[module], mesh)
    for places in ties:
        _tie(places, prefix, unit)
    for name, module in zip(names, modules, strict=True):
        guard = Guard(name or type(module).__name__)
        module.register_forward_pre_hook(guard.enter)
        module.register_forward_hook(guard.leave, always_call=module not in plan.traced)
        for layer_name, _, layer in inside(plan.checked[name]):
            if plan.styles[layer_name] == "column":
                layer.register_forward_pre_hook(functools.partial(guard.check, layer_name))
    for name, module, wanted in zip(names, modules, expected, strict=True):
        if wanted is not None and not _agrees(_computed(module), wanted):
            raise ValueError(
                f"the automatic plan cuts {', '.join(plan.checked[name])}, but {name or type(unit).__name__} then "
                "computes something else; "
                "give strategy=TensorParallel(plan={...}) or define tensor_plan() in a module"
            )
    for module, first in first_calls:
        first.watch(module)


def _torch_plan(unit: nn.Module, todo: dict[str, Any], plan: Plan) -> dict[str, ParallelStyle]:
    """torch's styles of the layers `todo`; the column-wise ones of a module share one."""
    torch_plan: dict[str, ParallelStyle] = {}
    columns: dict[str, Column] = {}
    for name, style in todo.items():
        if style == "column":  # one for the layers of a module
            parent = name.rpartition(".")[0]
            if parent not in columns:
                holder = unit.get_submodule(parent)
                columns[parent] = Column(plan.sequence, plan.within.get(unit.get_submodule(name)))
                plan.columns.append(columns[parent])
                holder.register_forward_hook(columns[parent].forget, always_call=holder not in plan.traced)
            torch_plan[name] = columns[parent]
        else:
            torch_plan[name] = STYLES[style](plan.sequence) if isinstance(style, str) else style
    return torch_plan


def _untried(modules: list[nn.Module], names: list[str], expected: list[Tensor | None]) -> list[tuple[nn.Module, str]]:
    return [(m, name) for m, name, wanted in zip(modules, names, expected, strict=True) if wanted is None]


def _first_call(module: nn.Module, name: str, plan: Plan) -> FirstCall | None:
    """What compares the first call of a module that took other arguments than one tensor; None if it is not called by
    itself, or another one of its kind is compared."""
    if not is_called(module) or module in plan.traced:
        return None
    kind = kind_of(module, plan.checked[name])
    if kind in plan.kinds:
        return None
    plan.kinds.add(kind)
    if plan.sequence is not None:
        raise ValueError(
            f"the automatic plan cannot check {name} under sequence_parallel=True, as it takes more than one tensor; "
            "give strategy=TensorParallel(plan={...}, sequence_parallel=True)"
        )
    return FirstCall(module, name, plan.checked[name])


class Guard:
    """Refuses the call of a layer whose outputs are cut from anywhere but the module for which the automatic plan cut
    it."""

    def __init__(self, name: str) -> None:
        self._name, self._running = name, 0

    def enter(self, module: nn.Module, args: Any) -> None:
        self._running += not torch.compiler.is_compiling()  # what is compiled makes the module's own calls

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running -= not torch.compiler.is_compiling()

    def check(self, layer: str, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:  # or recomputed by a backward
            return
        if not self._running:
            raise RuntimeError(
                f"{layer} was called without {self._name}, but strategy tensor has cut its outputs over ranks for "
                f"{self._name} to use; "
                "give strategy=TensorParallel(plan={...}) that leaves it whole"
            )


class SlicedDropout:
    """Dropout between the layers of a sequence: of a sharded activation this rank's part of the noise that the whole
    would get, so that ranks do not repeat it. Whoever else calls the layer has a tensor of its own dropped out."""

    def __init__(self, layer: nn.Module, width: int, within: nn.Sequential, mesh: DeviceMesh) -> None:
        self._layer, self._width, self._within = layer, width, within
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def __call__(self, x: Tensor) -> Tensor:
        layer: Any = self._layer
        is_shard = x.shape[-1] * self._size == self._width
        if not layer.training or not layer.p or not is_shard or not self._is_called_within():
            return nn.Dropout.forward(layer, x)
        whole = nn.functional.dropout(x.new_ones(*x.shape[:-1], self._width), layer.p)
        return x * whole.narrow(-1, self._rank * x.shape[-1], x.shape[-1])

    def _is_called_within(self) -> bool:
        return torch.compiler.is_compiling() or caller(self._layer) is self._within


def _is_cut(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


@torch.no_grad()
def _computed(module: nn.Module) -> Tensor | None:
    """What a module makes of fixed random numbers, or None where it takes something else than one tensor."""
    first = next((layer for layer in module.modules() if is_linear(layer)), None)
    if first is None:
        return None
    x = torch.randn(2, 8, in_features(first), generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(
        first.weight  # type: ignore[arg-type]
    )
    modes = [(child, child.training) for child in module.modules()]
    with side_effect_free(module), torch.compiler.set_stance("force_eager"):
        try:
            module.eval()
            output = module(x)
        except Exception:  # whatever a forward raises that wants other arguments
            return None
        finally:
            for child, mode in modes:
                child.training = mode
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)


def _agrees(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and agree(found, wanted)


def _tie(places: list[tuple[nn.Module, str]], prefix: str, unit: nn.Module) -> None:
    """Make what was one parameter one again, once its layers are cut."""
    parameters = [module._parameters[leaf] for module, leaf in places]
    kinds = {(p.placements if isinstance(p, DTensor) else None) for p in parameters}
    if len(kinds) > 1:
        names = {id(module): name for name, module in unit.named_modules()}
        shown = " and ".join(".".join(filter(None, (prefix, names[id(module)], leaf))) for module, leaf in places)
        raise ValueError(
            f"{shown} are one parameter, but the plan cuts them in different ways; name both layers in the plan, cut "
            "alike, or neither"
        )
    for module, leaf in places:
        module._parameters[leaf] = parameters[0]
