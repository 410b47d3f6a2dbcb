"""Applying the axes of a mesh to a model, and taking them off again.

    ranks of one `tensor` group hold shards of layers       (torch's parallelize_module, `tensor_plan/` beside this)
    ranks along `fsdp` hold shards of every parameter       (torch's fully_shard)
    ranks along `ddp` hold the same                         (torch's replicate, or fully_shard on both axes)

Values come from the mesh's first rank, block by block, so that no rank but that one ever needs the whole model.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from lockstep.strategies.launch.program.functions import codes_of, named_by
from lockstep.strategies.mesh.mesh_model import MeshModel
from lockstep.strategies.mesh.options import Options
from lockstep.strategies.mesh.tensor_plan.altered import watch_hooks
from lockstep.strategies.mesh.tensor_plan.apply import apply_plan
from lockstep.strategies.modules.activation_checkpointing import is_recomputed
from lockstep.strategies.modules.blocks import users_classes
from lockstep.strategies.modules.parameter_hooks import FORWARD, keeping_attributes, share_attributes, users_hooks
from lockstep.strategies.sync.call_order import GATHER, REDUCE
from lockstep.strategies.sync.tree import reduce_scatter


def apply_axes(
    model: nn.Module,
    mesh: DeviceMesh,
    options: Options,
    compute_dtype: torch.dtype | None,
    *,
    in_tree: bool,
    replicas_apart: bool,
) -> MeshModel:
    """Distribute `model` over `mesh`, in place; return what brackets its steps. Every rank of the mesh calls it.

    `mesh` has the axes ddp, fsdp and tensor or some of them, in this order. `compute_dtype` is what parameters
    are cast to for the forward, or None for their own. With `in_tree` gradients are summed along fsdp in a fixed tree,
    with `replicas_apart` along ddp not at all. Values are those of the mesh's first rank, whatever the
    others hold; there, and nowhere else, parameters must not be on the meta device. Raises ValueError naming the
    layer, parameter or option that does not fit.
    """
    names = tuple(mesh.mesh_dim_names or ())
    wrapped = MeshModel(model, True if options.reshard_after_forward is None else options.reshard_after_forward)
    blocks, plan = options.applied_to(model, mesh["tensor"].size() if "tensor" in names else None)
    # Ranks that use different parameters can only exchange them all at once.
    gathered = {} if options.find_unused_parameters and options.wrap == "auto" else blocks
    filler = Filler(mesh)
    data = tuple(name for name in names if name == "fsdp" or (name == "ddp" and not replicas_apart))
    units = [*blocks.values(), wrapped]
    stays = options.reshard_after_forward is False and options.low_precision_gather != "all"  # for the rest of a step
    if compute_dtype is not None and stays and _computes_with_weights(model):
        compute_dtype = None
    for name, unit in zip([*blocks, ""], units, strict=True):
        filler.fill(unit)
        if plan is not None:
            with keeping_attributes(unit):
                apply_plan(model if unit is wrapped else unit, name, mesh["tensor"], plan)
        if data and (unit is wrapped or name in gathered):
            data_mesh = mesh[data] if len(data) > 1 else mesh[data[0]]
            with keeping_attributes(unit):
                _shard(wrapped, unit, data_mesh, "fsdp" in data, options, compute_dtype, in_tree)
    if plan is not None and plan.sequence is not None:
        plan.sequence.watch(mesh["tensor"])
        for module in model.modules():
            if is_recomputed(module):
                module.recompute_sequence = plan.sequence  # type: ignore[assignment]
    if data:
        wrapped.names = [*gathered]
        wrapped.lend(gathered)
        if options.find_unused_parameters:
            wrapped.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
            wrapped.watch_used()
        with torch.no_grad():
            wrapped(lambda: None)  # torch finds the root by the first forward
        wrapped.close()
    if plan is not None:
        wrapped.plan = plan
        wrapped.watched_hooks = watch_hooks(model, plan)
    wrapped.structure.seal()
    return wrapped


class Filler:
    """Brings parameters and buffers to the device with the values of the mesh's first rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self._device = torch.device(mesh.device_type)
        if mesh.device_type == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._real: dict[int, nn.Parameter] = {}
        self._done: set[nn.Module] = set()
        self._keep: list[Any] = []

    def fill(self, root: nn.Module) -> None:
        for module in root.modules():
            if module in self._done:
                continue
            self._done.add(module)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._parameter(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._value(buffer)
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise ValueError(
                        f"{type(module).__name__}.{name} was made on the meta device and holds no values; "
                        "make it a buffer (self.register_buffer) in configure_model"
                    )

    def _parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._real.get(id(parameter))
        if known is not None:
            return known
        value = self._value(parameter.data)
        if parameter.is_meta:
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            share_attributes(parameter, real)
        else:
            parameter.data = value
            real = parameter
        self._real[id(parameter)] = self._real[id(real)] = real
        self._keep.append(parameter)  # or its id could be another's
        return real

    def _value(self, tensor: Tensor) -> Tensor:
        value = (
            torch.empty_like(tensor, device=self._device) if tensor.is_meta else tensor.to(self._device)
        ).contiguous()
        if value.numel():
            for group in self._groups:  # along the first axis, then from each of these along the next
                dist.broadcast(value, group_src=0, group=group)
        return value


def _shard(
    wrapped: MeshModel,
    unit: nn.Module,
    mesh: DeviceMesh,
    sharded: bool,
    options: Options,
    compute_dtype: torch.dtype | None,
    in_tree: bool,
) -> None:
    taken = {id(p) for inner in wrapped.units for p in inner.parameters()}
    whole = unshardable(unit, taken)
    if compute_dtype is not None:
        own = {p for p in unit.parameters() if id(p) not in taken}
        norms = own & {p for module in unit.modules() if _is_norm(module) for p in module.parameters(recurse=False)}
        rest = own - whole - norms
        if options.low_precision_gather == "all":
            whole |= norms
        elif unit is not wrapped and _computes_as_autocast(unit, rest):
            whole |= norms
            _refuse_outside_of_autocast(wrapped.model, rest, compute_dtype, mesh.device_type)
        else:
            compute_dtype = None
    known = {id(p) for p in wrapped.unsharded}
    wrapped.unsharded += [p for p in unit.parameters() if p in whole and id(p) not in known]
    mixed = MixedPrecisionPolicy()
    if compute_dtype is not None:
        cast = options.low_precision_gather == "all" and unit is not wrapped
        mixed = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if options.cpu_offload else OffloadPolicy()
    ignored = set(wrapped.unsharded)
    if sharded:
        reshard = None if unit is wrapped else options.reshard_after_forward
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=mixed,
            offload_policy=offload,
            ignored_params=ignored,
        )
    else:
        replicate(unit, mesh=mesh, mp_policy=mixed, offload_policy=offload, ignored_params=ignored)
    sum_gradients_of(unit)
    engine: Any = unit
    for comm, use, kind in (
        (_AllGather(), engine.set_custom_all_gather, GATHER),
        (_TreeReduceScatter() if in_tree else _ReduceScatter(), engine.set_custom_reduce_scatter, REDUCE),
    ):
        comm.before = functools.partial(wrapped.note, kind, -1 if unit is wrapped else len(wrapped.units))
        use(comm)
    wrapped.units.append(unit)


def unshardable(unit: nn.Module, sharded: set[int]) -> set[nn.Parameter]:
    """Parameters of `unit`, but for those whose id is in `sharded`, that torch's fully_shard cannot shard exactly.

    These are single numbers, those without elements, complex ones (whose shards train to other values), and trained
    ones of another dtype than most: torch reduces the gradients of a unit in one dtype.
    """
    parameters = [p for p in unit.parameters() if id(p) not in sharded]
    whole = {p for p in parameters if p.dim() == 0 or not p.numel() or p.is_complex()}
    trained = [p for p in parameters if p.requires_grad and p not in whole]
    numel: Counter[torch.dtype] = Counter()
    for parameter in trained:
        numel[parameter.dtype] += parameter.numel()
    return whole | {p for p in trained if p.dtype != numel.most_common(1)[0][0]}


class _Announced:
    """Says before it begins which unit is gathered or reduced."""

    before: Callable[[int], None]

    def allocate(self, size: Any, **options: Any) -> Any:
        self.before(size[0])
        return super().allocate(size, **options)  # type: ignore[misc]  # of the class that it is put before


class _AllGather(_Announced, DefaultAllGather): ...


class _ReduceScatter(_Announced, DefaultReduceScatter): ...


class _TreeReduceScatter(_ReduceScatter):
    """Reduces with the sums of `strategies/sync/tree.py`."""

    def __call__(  # type: ignore[override]  # torch waits for what it returns only where it is asynchronous
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(reduce_scatter(input_tensor.view(group.size(), -1), group))


def sum_gradients_of(unit: Any) -> None:
    """Let torch sum the gradients of a sharded or replicated module over ranks, which it averages by default."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


_CAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Layers whose weights autocast converts before anything is computed with them."""
_OF_WEIGHTS = frozenset(("weight", "bias", "parameters", "named_parameters", "_parameters", "state_dict"))
_OF_LAYERS = frozenset(("weight", "bias"))
"""The same in functions that others call, where `parameters` may be those of a signature."""
_FOREIGN = frozenset(("torch", "lockstep", "builtins", "functools", "numpy"))
"""Packages whose functions compute with no weight that they were not given."""
_OUTSIDE_OF_STEPS = ("init", "reset_", "configure_", "on_", "setup", "teardown")
"""How methods begin, but for underscores, that see no block as it was gathered."""


def _computes_as_autocast(unit: nn.Module, parameters: set[nn.Parameter]) -> bool:
    """Whether a 16-bit copy of `parameters` is all that a step under autocast reads of them: they are float32 weights
    of layers that autocast casts, and no code of the user's that may see the copy computes with weights."""
    return (
        all(parameter.dtype == torch.float32 for parameter in parameters)
        and parameters <= _only_cast(unit)
        and not _computes_with_weights(unit)
    )


def _only_cast(unit: nn.Module) -> set[nn.Parameter]:
    """The parameters that only such layers have; no block shares its own with others."""
    found: tuple[set[nn.Parameter], set[nn.Parameter]] = set(), set()
    for module in unit.modules():
        kind: Any = next((kind for kind in _CAST if isinstance(module, kind)), None)
        forward = vars(module).get("forward", type(module).forward)
        is_cast = kind is not None and forward is kind.forward and module._parameters.keys() <= {"weight", "bias"}
        found[is_cast].update(module.parameters(recurse=False))
    return found[True] - found[False]


def _computes_with_weights(unit: nn.Module) -> bool:
    """Whether code of the user's classes, or of forward hooks, names what holds weights, and so may compute with them
    by hand."""
    return any(_reads_weights(module) for module in unit.modules() if not _is_norm(module))


def _reads_weights(module: nn.Module) -> bool:
    named = [item for cls in users_classes(module) for item in vars(cls).items()]
    called = [value for key, value in named if not key.strip("_").startswith(_OUTSIDE_OF_STEPS)]
    called += [hook for kind in FORWARD for _, hook in users_hooks(module, kind)]
    seen: set[FunctionType] = set()
    words = _OF_WEIGHTS
    while called:
        functions = {function for thing in called for function in _functions_of(thing)} - seen
        if any(not words.isdisjoint(_names(code)) for function in functions for code in codes_of(function)):
            return True
        seen |= functions
        helpers = (helper for function in functions for helper in named_by(function))
        called, words = [helper for helper in helpers if isinstance(helper, FunctionType)], _OF_LAYERS
    return False


def _functions_of(thing: Any) -> Iterator[FunctionType]:
    """The functions of the user's that run where `thing` is called."""
    if isinstance(thing, functools.partial):
        for part in (thing.func, *thing.args, *thing.keywords.values()):
            yield from _functions_of(part)
    elif callable(thing) and not isinstance(thing, nn.Module | type):
        function = inspect.unwrap(getattr(thing, "__func__", thing))
        if isinstance(function, FunctionType):
            yield from () if _is_foreign(function) else (function,)
        elif not _is_foreign(type(thing)):  # an object that can be called
            yield from (f for cls in type(thing).__mro__ for f in vars(cls).values() if isinstance(f, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (held for held in code.co_consts if isinstance(held, str))


def _is_foreign(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FOREIGN


def _refuse_outside_of_autocast(model: nn.Module, low: set[nn.Parameter], dtype: torch.dtype, device: str) -> None:
    """Let the layers that have the parameters `low`, gathered in `dtype`, raise RuntimeError where autocast would leave
    these in float32."""

    def check(name: str, module: nn.Module, args: Any) -> None:
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype:
            raise RuntimeError(
                f"{name} is called outside of the run's autocast, where one process computes with weights in float32, "
                f"but its block was gathered in {dtype}; call it within torch.autocast({device!r}, {dtype}), or give "
                "the strategy low_precision_gather=False"
            )

    for name, module in model.named_modules():
        if not low.isdisjoint(module.parameters(recurse=False)):
            module.register_forward_pre_hook(functools.partial(check, name))


def _is_norm(module: nn.Module) -> bool:
    """Normalization computes in full precision, beside running statistics that are kept in it; its parameters are
    few."""
    return "norm" in type(module).__name__.lower()
