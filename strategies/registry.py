"""From the one argument that a user writes to the Strategy that runs."""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn

from lockstep.strategies.base import Strategy
from lockstep.strategies.devices import resolve_accelerator, resolve_devices
from lockstep.strategies.launch import environment


def _make(module: str, name: str, **arguments: Any) -> Strategy:
    """The strategy `name` of a module of this package, which is imported where the strategy is chosen."""
    return getattr(importlib.import_module(f"lockstep.strategies.{module}"), name)(**arguments)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "single": functools.partial(_make, "single", "SingleDevice"),
    "dp": functools.partial(_make, "dp.strategy", "DataParallel"),
    "ddp": functools.partial(_make, "ddp", "DDP"),
    "fsdp": functools.partial(_make, "mesh.fsdp", "FSDP"),
    "local_sgd": functools.partial(_make, "methods.local_sgd", "LocalSGD"),
    "diloco": functools.partial(_make, "methods.diloco", "DiLoCo"),
    "model": functools.partial(_make, "model_parallel", "ModelParallel"),
    "pipeline": functools.partial(_make, "pipeline.strategy", "Pipeline"),
    "tensor": functools.partial(_make, "mesh.tensor", "TensorParallel"),
    "parameter_server": functools.partial(_make, "methods.parameter_server.strategy", "ParameterServer"),
    "deepspeed": functools.partial(_make, "deepspeed.strategy", "DeepSpeed"),
    "deepspeed_stage_1": functools.partial(_make, "deepspeed.strategy", "DeepSpeed", stage=1),
    "deepspeed_stage_2": functools.partial(_make, "deepspeed.strategy", "DeepSpeed", stage=2),
    "deepspeed_stage_3": functools.partial(_make, "deepspeed.strategy", "DeepSpeed", stage=3),
    "federated": functools.partial(_make, "methods.federated.strategy", "Federated"),
}
"""What makes each strategy, by name."""
ELSEWHERE = {
    **dict.fromkeys(
        ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_sharded", "horovod"),
        "did you mean 'ddp'? It starts ranks in scripts and notebooks alike",
    ),
    **dict.fromkeys(
        ("ddp_find_unused_parameters_true", "ddp_spawn_find_unused_parameters_true"),
        "give strategy=DDP(find_unused_parameters=True)",
    ),
    "ddp_find_unused_parameters_false": "did you mean 'ddp'?",
    **dict.fromkeys(
        ("fsdp_native", "fsdp_cpu_offload", "fsdp2", "modelparallelstrategy"),
        "did you mean 'fsdp'? Its options are arguments of FSDP(…)",
    ),
    "model_parallel": "give a mesh such as 'fsdp=2,tensor=2', or 'model' for layers on several devices of one process",
    **dict.fromkeys(
        ("deepspeed_stage_2_offload", "deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme"),
        "give strategy=DeepSpeed(…), whose arguments say what is offloaded",
    ),
    **dict.fromkeys(("single_device", "single_tpu"), "did you mean 'single'?"),
    **dict.fromkeys(("data_parallel", "dataparallel"), "did you mean 'dp'?"),
    **dict.fromkeys(("distributeddataparallel", "distributed"), "did you mean 'ddp'?"),
    "fullyshardeddataparallel": "did you mean 'fsdp'?",
    **dict.fromkeys(("tensor_parallel", "tensorparallel", "tp"), "did you mean 'tensor'?"),
    **dict.fromkeys(("pipeline_parallel", "pp"), "did you mean 'pipeline'?"),
    "zero": "did you mean 'deepspeed'?",
    **{f"zero{stage}": f"did you mean 'deepspeed_stage_{stage}'?" for stage in (1, 2, 3)},
}
"""Names that other libraries have for strategies, and what to write here."""
ENTRY_POINTS = "lockstep.strategies"
"""Entry-point group in which another distribution registers a strategy: name = "module:Class"."""


def build(
    strategy: str | Strategy = "auto",
    *,
    devices: int | str = "auto",
    accelerator: str = "auto",
    num_nodes: int = 1,
    precision: str = "32-true",
    virtual_ranks: int | None = None,
    model: nn.Module | None = None,
) -> tuple[Strategy, str]:
    """Return the configured strategy and the sentence that says why it was chosen.

    "auto" is `single` on one device and `ddp` on several; where `model` is given and does not fit a device with
    its gradients and AdamW's state, several devices get `fsdp`.

    Raises ValueError for a name that nobody registered and for a layout that the strategy refuses, TypeError
    for an object that is not a Strategy. Starts nothing.
    """
    reason = "given"
    if isinstance(strategy, str):
        name = strategy
        if name == "auto":
            name, reason = _choose(devices, accelerator, num_nodes, model)
        strategy = _find(name)()
    elif not isinstance(strategy, Strategy):
        instead = "; give 'auto'" if strategy is None else ""
        if isinstance(strategy, type) and issubclass(strategy, Strategy):
            instead = f"; write {strategy.__name__}()"
        raise TypeError(f"strategy must be a name or a Strategy object, but strategy={strategy!r}{instead}")
    if virtual_ranks is not None:
        from lockstep.strategies.virtual.choose import virtual

        strategy = virtual(strategy, virtual_ranks)
    return strategy.configure(
        devices=devices, accelerator=accelerator, num_nodes=num_nodes, precision=precision
    ), reason


def names() -> list[str]:
    """Every strategy name that `build` takes, those of other distributions included; it takes meshes such as
    "fsdp=2,tensor=2" too."""
    return [
        "auto",
        *STRATEGIES,
        *sorted(point.name for point in entry_points(group=ENTRY_POINTS) if point.name not in STRATEGIES),
    ]


def training_bytes(model: nn.Module) -> int:
    """Memory that training needs for a model's state: parameters, gradients, and two moments of each trainable
    parameter (AdamW)."""
    return sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters())


def device_memory(kind: str, ranks_on_node: int) -> int:
    """Bytes of memory of a device of this machine; on CPU its share of the machine's."""
    if kind == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks_on_node


def _choose(devices: int | str, accelerator: str, num_nodes: int, model: nn.Module | None) -> tuple[str, str]:
    world = environment.detect()
    kind = resolve_accelerator(accelerator)
    on_node = resolve_devices(devices, kind)
    if world is not None and world.world_size > 1:
        reason = f"{world.launcher} started {world.world_size} ranks"
    elif on_node * num_nodes > 1:
        reason = f"{on_node * num_nodes} {kind} devices"
    else:
        return "single", f"one {kind} device"
    if model is not None:
        needed, have = training_bytes(model), device_memory(kind, on_node)
        if needed > have:
            return (
                "fsdp",
                f"{reason}, and training needs {needed / 2**30:.1f} GiB for parameters, gradients and AdamW's state "
                f"where a device has {have / 2**30:.1f}",
            )
    return "ddp", reason


def as_class(name: str) -> dict[str, Any] | None:
    """The class of this package that a strategy's name stands for, and the arguments that it gets, as in a config file:
    `{"class": "DDP"}`. None for "auto" and the names of other distributions."""
    if name in STRATEGIES:
        made: Any = STRATEGIES[name]
        return {"class": made.args[1], **made.keywords}
    if "=" not in name and "," not in name:
        return None
    method, arguments = _of_learners(name)
    if method is not None:
        return {"class": STRATEGIES[method].args[1], **arguments}  # type: ignore[attr-defined]
    return {"class": "Pipeline", "mesh": name} if "pipeline" in name else {"class": "MeshParallel", "axes": name}


def _of_learners(name: str) -> tuple[str | None, dict[str, Any]]:
    """The method of a mesh such as "diloco=2,fsdp=2", and its arguments; None if it has no axis of learners."""
    parts = [part.strip() for part in name.split(",")]
    for part in parts:
        method, _, size = (word.strip() for word in part.partition("="))
        if method in ("local_sgd", "diloco") and (not size or size.isdecimal()):
            inner = ",".join(other for other in parts if other is not part)
            return method, {"learners": int(size) if size else None, "inner": inner or None}
    return None, {}


def _find(name: str) -> Callable[[], Strategy]:
    if name in STRATEGIES:
        return STRATEGIES[name]
    if "=" in name or "," in name:
        method, arguments = _of_learners(name)
        if method is not None:
            return functools.partial(STRATEGIES[method], **arguments)
        from lockstep.strategies.mesh.mesh import parse  # where a mesh is chosen, as every strategy

        if "pipeline" in parse(name):
            from lockstep.strategies.pipeline.strategy import Pipeline

            return functools.partial(Pipeline, mesh=name)
        from lockstep.strategies.mesh.mesh_parallel import MeshParallel

        return functools.partial(MeshParallel, name)
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            found = point.load()
            if not (isinstance(found, type) and issubclass(found, Strategy)):
                raise TypeError(
                    f"the entry point {ENTRY_POINTS}: {name} must name a Strategy class, but {point.value} is {found!r}"
                )
            return found
    lower = name.lower().removesuffix("strategy")
    instead = ELSEWHERE.get(name.lower(), ELSEWHERE.get(lower))
    if instead is None:
        near = difflib.get_close_matches(lower, names(), n=1)
        instead = f"did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"strategy must be one of {', '.join(names())}, but strategy={name!r}" + (f"; {instead}" if instead else "")
    )
