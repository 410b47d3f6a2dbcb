"""Cutting a module into stages: which layers it is made of, what they cost, and which stage gets which."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.strategies.modules.activation_checkpointing import find_recomputed
from lockstep.strategies.modules.blocks import Layer, Rule, balance, find_layers, measures
from lockstep.strategies.modules.forwards import is_compiled
from lockstep.strategies.modules.model_changes import refuse_frequencies, refuse_unready
from lockstep.strategies.modules.parameter_hooks import copy_module
from lockstep.strategies.modules.source_order import call_order


class Cut(NamedTuple):
    """A module taken apart."""

    name: str
    """Name of the pipelined module in the model; empty for the model itself."""
    net: nn.Module
    layers: list[Layer]
    """Those with parameters or statistics of batches, in the order in which the forward calls them, if its source shows
    it, else of their definition."""
    shells: list[tuple[str, nn.Module]]
    """The modules around the layers, by name; parameters of their own belong to the first stage."""

    def free(self) -> set[nn.Module]:
        """The modules beside the layers and the shells, without parameters: each stage runs them where it calls
        them."""
        held = {child for layer in self.layers for child in layer.module.modules()}
        return {*self.net.modules()} - held - {shell for _, shell in self.shells}


def cut(model: nn.Module, module: str | None = None) -> Cut:
    """Find the pipelined module of `model` and take it apart.

    It is the outermost submodule that holds every trainable parameter, or the model itself where these are in
    several; `module` names another. Raises ValueError naming what does not fit.
    """
    name, net = _named(model, module) if module is not None else _found(model)
    inside = {id(p) for p in net.parameters()}
    outside = next((n for n, p in model.named_parameters() if p.requires_grad and id(p) not in inside), None)
    if outside is not None:
        raise ValueError(
            f"every trainable parameter must be in the pipelined module, but {outside} is outside of {name!r}; "
            "move it inside, freeze it, or name a module that holds both"
        )
    layers, shells = find_layers(name, net)
    for shell_name, shell in shells:
        prefix = f"{shell_name}." if shell_name else ""
        places = {layer.name.removeprefix(prefix): i for i, layer in enumerate(layers) if layer.name.startswith(prefix)}
        if _is_callable(shell) and places:  # they follow each other in the list
            found = [layers[places[inner]] for inner in call_order(shell, [*places])]
            layers[min(places.values()) : max(places.values()) + 1] = found
    return Cut(name, net, layers, shells)


def check(
    model: nn.Module,
    module: str | None,
    num_stages: int,
    split: Sequence[str] | None,
    sample: Any,
    recomputed: bool | Rule,
) -> None:
    """Raise ValueError for a model that cannot be cut into so many stages, as far as its modules show.

    `module`, `split`, `sample` and `recomputed` (False for none): as given to `Pipeline`.
    """
    refuse_unready(model, "a pipeline")
    parts = cut(model, module)
    _refuse_compiled(model, parts)
    # Where stages begin is known without what layers cost if there are as many of them.
    if split is not None or sample is None or len(parts.layers) <= num_stages:
        stages(parts, num_stages, split)
    if recomputed is not False:
        for name in find_recomputed(model, recomputed):  # type: ignore[arg-type]
            if any(layer.name.startswith(f"{name}.") for layer in parts.layers):
                raise ValueError(
                    f"a pipeline recomputes its layers one by one, but activation_checkpointing finds {name}, which "
                    "holds several; name them, or submodules of them"
                )


def advice(names: Sequence[str], order: Sequence[int], num_stages: int) -> str:
    """What to do where layers, of these names, are called in another `order` than they are defined."""
    last = {index: place for place, index in enumerate(order)}
    first = {index: len(order) - 1 - place for place, index in enumerate(reversed(order))}
    good = [
        names[k]
        for k in sorted(first)
        if any(i < k for i in last) and max(last[i] for i in last if i < k) < min(first[i] for i in first if i >= k)
    ]
    if len(good) < num_stages - 1:
        return (
            f"no split into {num_stages} stages works: define layers in the order in which they are called, use fewer "
            "stages, or use strategy='ddp' or 'fsdp'"
        )
    return (
        f"define layers in the order in which they are called, or give split: stages can begin with {', '.join(good)}"
    )


def stages(
    parts: Cut, num_stages: int, split: Sequence[str] | None = None, costs: Sequence[float] | None = None
) -> list[int]:
    """The stage of each layer: contiguous, none empty.

    `split` names the layers with which stages 1, 2, ... begin; otherwise the most expensive stage is made as
    cheap as possible by `costs` (by default a layer's number of parameters). Raises ValueError if there are
    too few layers, for a name that is not a layer's, and for statistics that two stages would share.
    """
    names = [layer.name for layer in parts.layers]
    if len(names) < num_stages:
        raise ValueError(
            f"a pipeline of {num_stages} stages needs as many layers, "
            f"but {parts.name or type(parts.net).__name__} has {len(names)} with parameters "
            f"({', '.join(names) or 'none'}); "
            "use fewer devices, or a module with a list of blocks"
        )
    if split is not None:
        first = [0] + [_index(names, parts.name, wanted) for wanted in split]
        if len(first) != num_stages or sorted(set(first)) != first:
            raise ValueError(
                f"split must name the layers with which stages 1 to {num_stages - 1} begin, in order, "
                f"but split={list(split)}; the layers are {', '.join(names)}"
            )
    else:
        first = balance(
            [max(1.0, sum(p.numel() for p in layer.module.parameters())) for layer in parts.layers]
            if costs is None
            else costs,
            num_stages,
        )
    stage_of = [sum(start <= i for start in first) - 1 for i in range(len(names))]
    _refuse_shared(parts, stage_of)
    return stage_of


def measure(parts: Cut, sample: Any, device: torch.device, repeats: int = 3) -> list[float]:
    """Seconds of forward and backward of each layer on `device`, for the module's input `sample` (a tensor or a tuple
    of arguments).

    Works on copies; the module and the random streams stay as they are.
    """
    calls: dict[str, tuple[Any, ...]] = {}
    hooks = [
        layer.module.register_forward_pre_hook(
            lambda _, args, kwargs, name=layer.name: calls.setdefault(name, (args, kwargs)) and None, with_kwargs=True
        )
        for layer in parts.layers
    ]
    modes = [(child, child.training) for child in parts.net.modules()]
    with torch.random.fork_rng():
        try:
            parts.net.eval()
            with torch.no_grad():
                parts.net(*(sample if isinstance(sample, tuple) else (sample,)))
        finally:
            for child, mode in modes:
                child.training = mode
            for hook in hooks:
                hook.remove()
        return [_seconds(layer, calls.get(layer.name), device, repeats) for layer in parts.layers]


# ---- helpers -------------------------------------------------------------------------------------------


def _named(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    try:
        return name, model.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in model.named_children())
        raise ValueError(
            f"module must name a submodule of {type(model).__name__}, but module={name!r}; it has {known or 'none'}"
        ) from None


def _found(model: nn.Module) -> tuple[str, nn.Module]:
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    name, net = "", model
    while True:
        holder = next(
            (
                (n, child)
                for n, child in net.named_children()
                if trainable.keys() <= {id(p) for p in child.parameters()}
            ),
            None,
        )
        if holder is not None:
            name, net = (f"{name}.{holder[0]}" if name else holder[0]), holder[1]
        if _is_callable(net):
            return name, net
        if holder is None:
            places = sorted({n.split(".")[0] for n in trainable.values()})
            raise ValueError(
                f"a pipeline needs one module that holds every trainable parameter and is called once a step, "
                f"but they are in {', '.join(places)} of {type(model).__name__}, "
                "which has no forward; put them into one submodule, define forward and call self(...) in "
                "training_step, or freeze what no optimizer steps, such as a target network (requires_grad_(False))"
            )


def _is_callable(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is not nn.Module.forward


def _index(names: list[str], net: str, wanted: str) -> int:
    for candidate in (wanted, f"{net}.{wanted}"):
        if candidate in names:
            return names.index(candidate)
    raise ValueError(
        f"split must name layers that have parameters, but {wanted!r} is not among them; the layers are "
        f"{', '.join(names)}"
    )


def _refuse_compiled(model: nn.Module, parts: Cut) -> None:
    layers = {layer.module for layer in parts.layers}
    for name, module in model.named_modules():
        if is_compiled(module) and not layers.isdisjoint({*module.modules()} - {module}):
            raise ValueError(
                f"{name or type(module).__name__} is compiled, and strategy 'pipeline' runs the layers in it where "
                "their stage is; give the plain module, and compile=True to the Trainer, which compiles each layer"
            )


def _refuse_shared(parts: Cut, stage_of: list[int]) -> None:
    """Raise ValueError for a layer that is on several stages, and for a tensor of several stages that the forward of
    one changes, unseen by the others."""
    stage_of_layer = {layer.module: (layer.name, stage) for layer, stage in zip(parts.layers, stage_of, strict=True)}
    for layer, stage in zip(parts.layers, stage_of, strict=True):
        for name, child in layer.module.named_modules(prefix=layer.name):
            other, its = stage_of_layer.get(child, (name, stage))
            if its != stage:
                raise ValueError(
                    f"{name} on stage {stage} of the pipeline is the same module as {other} on stage {its}, and a "
                    "layer runs on one stage; give each a module of its own, whose parameters may be the same, or "
                    "choose split so that both are on one stage"
                )
    holders = holding_stages(parts, stage_of)
    for layer in parts.layers:
        for name, module in layer.module.named_modules(prefix=layer.name, remove_duplicate=False):
            refuse_frequencies(name, module, "a pipeline")
            if not measures(module) or getattr(module, "max_norm", 1.0) is None:
                continue
            held = module._parameters if hasattr(module, "max_norm") else module._buffers
            for key, tensor in held.items():
                if tensor is not None and len(holders[id(tensor)]) > 1:
                    stages = " and ".join(map(str, sorted(holders[id(tensor)])))
                    raise ValueError(
                        f"{name} changes its {key} in the forward, which stages {stages} of the pipeline share, so "
                        "their copies would drift apart; untie it, or use strategy='ddp' or 'fsdp'"
                    )


def holding_stages(parts: Cut, stage_of: Sequence[int]) -> dict[int, set[int]]:
    """The stages that use each parameter and buffer of the pipelined module's layers, by `id`; 0 for parameters and
    buffers beside layers."""
    found: dict[int, set[int]] = {}
    for _, shell in parts.shells:
        for tensor in (*shell.parameters(recurse=False), *shell.buffers(recurse=False)):
            found.setdefault(id(tensor), set()).add(0)
    for layer, stage in zip(parts.layers, stage_of, strict=True):
        for tensor in (*layer.module.parameters(), *layer.module.buffers()):
            found.setdefault(id(tensor), set()).add(stage)
    return found


def _seconds(layer: Layer, call: tuple[Any, ...] | None, device: torch.device, repeats: int) -> float:
    if call is None:
        return 0.0

    def ready(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to(device)
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    module, times = copy_module(layer.module).to(device), []
    for _ in range(repeats):
        args, kwargs = tree_map_only(Tensor, ready, call)
        started = time.perf_counter()
        outputs: list[Tensor] = []
        tree_map_only(Tensor, outputs.append, module(*args, **kwargs))
        roots = [t for t in outputs if t.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the time of the work, not of its launch
        times.append(time.perf_counter() - started)
    return min(times)
