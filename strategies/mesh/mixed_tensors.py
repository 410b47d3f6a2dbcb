"""What torch's DTensors give to user code: numbers of the whole tensor, or an error that says what to do."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.data.batch_slices import tensors_of
from lockstep.strategies.modules.sharded_errors import INSTEAD


def install() -> None:
    """Let torch's DTensors give global numbers. Changes torch once a process."""
    from torch.distributed.tensor import DTensor  # takes a second

    dispatcher: Any = DTensor._op_dispatcher
    if getattr(dispatcher, "_lockstep", False):
        return
    dispatcher._lockstep = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    for op in _operators(_DRAWS):
        dispatcher._custom_op_handlers[op] = _draw
    for op in _operators(name for loss in _LOSSES for name in (loss, f"{loss}_backward")):
        dispatcher._custom_op_handlers[op] = _mean
    for op in _operators(_OF_WHOLE):
        dispatcher._custom_op_handlers[op] = _refuse_part
    for op in _operators(name for name in dir(torch) if name.startswith("_foreach_")):
        dispatcher._custom_op_handlers[op] = _each
    DTensor.numpy = _refuse_numpy  # type: ignore[method-assign, assignment]
    _watch_copies(dispatcher)

    @torch.no_grad()
    def assign(self: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor):  # torch would keep the shard and lose the value
            raise RuntimeError(
                f"a tensor was assigned to `data` of a parameter of shape {list(self.shape)} of which this rank holds "
                "a shard; "
                f"{INSTEAD}"
            )
        if value.shape != self.shape or value.dtype != self.dtype or value.device_mesh != self.device_mesh:
            raise RuntimeError(
                f"a tensor of shape {list(value.shape)} and {value.dtype} was assigned to `data` of a sharded "
                f"parameter of shape {list(self.shape)} and {self.dtype}, or it is sharded over other ranks; assign "
                "one like it, or change the parameter before fit"
            )
        new, source = value.redistribute(placements=self.placements)._local_tensor, value._local_tensor
        if new.is_set_to(self._local_tensor):
            return
        shard, call = assigns.get(id(self), (None, None))
        if shard is self and call is not None:
            call(new)
        elif {"fsdp", "ddp"} & {*(self.device_mesh.mesh_dim_names or ())}:
            self._local_tensor.copy_(new)
        else:  # torch would lose it; what the backward uses of the values before is left as it was
            self._local_tensor.data = new
            increment_version(self._local_tensor)
        note_assigned(self._local_tensor, source)

    DTensor.data = property(_take, assign)  # type: ignore[assignment]
    nn.Parameter.data = property(_take, _give)  # type: ignore[assignment]


def _give(parameter: nn.Parameter, value: Tensor) -> None:
    from torch.distributed.tensor import DTensor  # imported by now

    if isinstance(value, DTensor):  # of which torch would take no values, and end the process later
        raise RuntimeError(
            f"a tensor of shape {list(value.shape)}, of which this rank holds a shard, was assigned to `data` of a "
            f"parameter of shape {list(parameter.shape)} that is whole here; {INSTEAD}"
        )
    _DATA.__set__(parameter, value)


def _take(tensor: Tensor) -> Any:
    if not tensor.is_cpu:
        data_taken.add(id(tensor))
    return _DATA.__get__(tensor)


assigns: dict[int, tuple[Tensor, Callable[[Tensor], None]]] = {}
"""By the id of the shard of a parameter the shard, and what is to be called with this rank's part of what is assigned
to its `data`. A weak reference would forbid casts."""
_DATA: Any = Tensor.data
data_taken: set[int] = set()
"""Ids of parameters on accelerators of which user code has taken `data`, to which writes leave no trace."""
_in_steps = 0


@contextmanager
def step() -> Iterator[None]:
    """While it lasts user code has values of this rank's own samples at hand."""
    global _in_steps
    _in_steps += 1
    try:
        yield
    finally:
        _in_steps -= 1


def _number(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """`.item()`, `float()` and the like: of the whole, where torch would give this rank's part. Every rank of the mesh
    calls it.

    Raises RuntimeError in a step for a sum over ranks with samples of their own: torch takes a plain number that was
    added to it, such as the loss, for the same on all of them.
    """
    tensor = args[0]
    if _in_steps:
        names = tensor.device_mesh.mesh_dim_names or ()
        sums = {name for name, place in zip(names, tensor.placements, strict=False) if place.is_partial("sum")}
        if sums & {"ddp", "fsdp"}:
            raise RuntimeError(
                "a number was taken in a step of a sum over weights that are sharded over ranks, to which values of "
                f"this rank's own samples may be added; {INSTEAD}"
            )
    with torch.no_grad():
        return op(tensor.full_tensor())


_aten = torch.ops.aten
_DRAWS = (
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout normal "
    "normal_ poisson rand_like randint_like randn_like random random_ rrelu_with_noise rrelu_with_noise_ uniform "
    "uniform_ _standard_gamma"
).split()


def _draw(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Random numbers for a DTensor: those of a model's own layers in a step, but none for weights, nor in hooks, where
    each rank would draw its part by itself."""
    _check_write(op, args, kwargs)
    tensor = next(arg for arg in args if hasattr(arg, "device_mesh"))
    names = tensor.device_mesh.mesh_dim_names or ()
    if isinstance(tensor, nn.Parameter) or {"fsdp", "ddp"} & {*names} or not _in_steps:
        raise RuntimeError(
            f"random numbers were drawn ({str(op).removesuffix('.default')}) for a tensor of shape "
            f"{list(tensor.shape)} of which this rank holds a shard, and would not be those of one process; {INSTEAD}"
        )
    return _by_torch(op, args, kwargs, _draw)


_LOSSES = (
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits"
).split()
_OF_WHOLE = "eye index_add_ index_copy_ index_reduce_".split()
"""What torch does on each shard as if that were the whole tensor."""


def _mean(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A loss of DTensors, or its gradient: of a mean torch would take the mean of the ranks' means, which is another
    number if they hold shards of several sizes."""
    names = [argument.name for argument in op._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    if values.get("reduction", 1) != 1 or op._overloadname != "default":
        return _by_torch(op, args, kwargs, _mean)
    values["reduction"] = 0
    numel = math.prod(torch.broadcast_shapes(values["self"].shape, values["target"].shape))
    if names[0] == "grad_output":
        values["grad_output"] = values["grad_output"] / numel
        return _by_torch(op, (), values, _mean)
    return _by_torch(op, (), values, _mean).sum() / numel


def _refuse_part(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor = next(arg for arg in (*args, *kwargs.values()) if hasattr(arg, "placements"))
    if all(place.is_replicate() for place in tensor.placements):
        return _by_torch(op, args, kwargs, _refuse_part)
    raise RuntimeError(
        f"{op._schema.name.removeprefix('aten::')}() was called for a tensor of shape {list(tensor.shape)} of which "
        f"this rank holds a shard; {INSTEAD}"
    )


def _each(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A function of lists of tensors, such as all parameters, where some are DTensors and others whole: torch does not
    mix them, so each kind by itself. Nor does it count that it writes to DTensors, as it does for other tensors."""
    _check_write(op, args, kwargs)
    if op._schema.name.endswith("_"):
        increment_version(args[0])
    sharded = [hasattr(tensor, "_local_tensor") for tensor in args[0]] if isinstance(args[0], list | tuple) else []
    if all(sharded) or not any(sharded):
        return _by_torch(op, args, kwargs, _each)

    def of_kind(value: Any, kind: bool) -> Any:
        if isinstance(value, list | tuple) and len(value) == len(sharded):
            return [item for item, one in zip(value, sharded, strict=True) if one is kind]
        return value.full_tensor() if not kind and hasattr(value, "full_tensor") else value

    results = {}
    for kind in (True, False):
        mine = [of_kind(value, kind) for value in args]
        found = _by_torch(op, mine, {name: of_kind(value, kind) for name, value in kwargs.items()}, _each)
        results[kind] = iter(found or ())
    return [next(results[kind]) for kind in sharded] if op._schema.returns else None


def _by_torch(op: Any, args: Sequence[Any], kwargs: Any, handler: Callable[..., Any]) -> Any:
    """What torch does with a DTensor where `handler` is to be called for it."""
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _watch_copies(dispatcher: Any) -> None:
    """From the first view on that torch makes of a copy, as other ranks hold some of it, check each operation that
    writes; remember all such copies."""
    redistribute, handlers = dispatcher.redistribute_local_args, dispatcher._custom_op_handlers
    watches_writes = False

    def watched(op_info: Any, schema: Any, *args: Any) -> None:
        nonlocal watches_writes
        if schema.op.is_view and not watches_writes:
            watches_writes = True
            handlers.update({op: write for op in _writes() if op not in handlers})
        before = op_info.local_args
        redistribute(op_info, schema, *args)
        if schema.op.is_view:
            for shard, copy in zip(before, op_info.local_args, strict=False):
                if isinstance(shard, Tensor) and copy is not shard:
                    note_copy(shard, copy)

    def write(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        _check_write(op, args, kwargs)
        return _by_torch(op, args, kwargs, write)

    dispatcher.redistribute_local_args = watched


_copies: list[tuple[StorageWeakRef, StorageWeakRef]] = []
"""Shards, and copies of what they are part of, that user code may still hold."""
_assigned: list[tuple[StorageWeakRef, StorageWeakRef]] = []
"""Shards, and what user code has assigned to `data` of their parameters, which has been copied into them."""


def note_copy(shard: Tensor, copy: Any) -> None:
    _note(_copies, shard, copy)


def note_assigned(shard: Tensor, value: Any) -> None:
    """The shard has got a copy of this rank's part of `value`, unless it has its memory now."""
    _note(_assigned, shard, value)
    of_shard, of_value = _assigned[-1]
    if of_shard == of_value:
        _assigned.pop()
    _assigned.extend((of_shard, other) for other, copy in _copies if copy == of_value)  # a view that is a copy


def _note(pairs: list[tuple[StorageWeakRef, StorageWeakRef]], shard: Tensor, copy: Any) -> None:
    if len(pairs) >= 1024 and len(pairs).bit_count() == 1:  # at each power of two
        pairs[:] = [pair for pair in pairs if not pair[1].expired()]
    memory = (tensor.untyped_storage() for tensor in (shard, getattr(copy, "elem", copy)))
    of_shard, of_copy = map(StorageWeakRef, memory)
    pairs.append((of_shard, of_copy))


def refuse_kept_copies(model: nn.Module, strategy: str) -> None:
    """Raise RuntimeError if somebody holds a view of a parameter that is a copy, or what `refuse_assigned` refuses,
    before a step changes the parameter.

    To be called when no hook of the user's runs, whose variables would hold them.
    """
    refuse_assigned(model, strategy)
    if _copies and (name := _kept(_copies, model)):
        raise RuntimeError(
            f"user code keeps a view of {name} (a slice of it, or a detach() or state_dict() within whole()), "
            f"which is a copy, as {strategy} shards the parameter over ranks, and would not follow it; keep a "
            "clone() of the values, or take the view again where you need it"
        )


def refuse_assigned(model: nn.Module, strategy: str, *, at_end: bool = False) -> None:
    """Raise RuntimeError if somebody, as another parameter, holds what was copied into a parameter as its `data`. At
    the end of a run only another parameter: no step is to come that would part what user code holds from it."""
    if at_end:
        storages = {StorageWeakRef(getattr(p, "_local_tensor", p).untyped_storage()).cdata for p in model.parameters()}
        _assigned[:] = [pair for pair in _assigned if pair[1].cdata in storages]
    if _assigned and (name := _kept(_assigned, model)):
        raise RuntimeError(
            f"what was assigned to `data` of {name} is kept by another parameter or by user code, so that on one "
            f"process a change of one is a change of both, but {strategy} shards the parameter over ranks and has "
            "copied it; assign a clone(), or tie parameters before fit (head.weight = embedding.weight)"
        )


def _kept(pairs: list[tuple[StorageWeakRef, StorageWeakRef]], model: nn.Module) -> str | None:
    """The first parameter of whose copies one is still held. Empties `pairs`."""
    if all(copy.expired() for _, copy in pairs):
        pairs.clear()
        return None
    shards = {
        StorageWeakRef(parameter._local_tensor.untyped_storage()).cdata: name
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "_local_tensor")
    }
    pairs[:] = [(shard, copy) for shard, copy in pairs if shard.cdata in shards and not copy.expired()]
    if pairs:
        gc.collect()  # torch.save, for one, leaves tensors to it
    alive = {shard.cdata for shard, copy in pairs if not copy.expired()}
    pairs.clear()
    return next((name for cdata, name in shards.items() if cdata in alive), None)


def refuse_kept(model: nn.Module) -> None:
    """Once the units are freed, raise RuntimeError for a tensor in an attribute of a layer of the user's that a step
    has made of the memory of a whole parameter: to read it would end the process."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if type(value) is Tensor and value.numel() and has_no_memory(value):
                raise RuntimeError(
                    f"{name + '.' if name else ''}{key} was given a view (.data, .detach() or a part) of a parameter, "
                    "which FSDP had gathered for the step and has freed since; keep a copy (.clone()), or take it from "
                    "the module where it is used"
                )


def refuse_returned(output: Any) -> None:
    """Raise RuntimeError for a tensor in what a step has returned that is of the memory of a whole parameter, once that
    is freed: to read it would end the process."""
    if any(tensor.numel() and has_no_memory(getattr(tensor, "_local_tensor", tensor)) for tensor in tensors_of(output)):
        raise RuntimeError(
            "a step returned a weight, or a view of one (.data, .detach() or a part), which FSDP had gathered for the "
            "step and has freed since; return a copy (.clone())"
        )


def has_no_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor.untyped_storage().nbytes()


def _writes() -> Iterator[Any]:
    """The operators of torch that write to a tensor they are given."""
    names = {*dir(Tensor), *dir(torch), *dir(nn.functional), *(f"{name}_" for name in dir(nn.functional))}
    for prefix, module in (("linalg", torch.linalg), ("special", torch.special), ("fft", torch.fft)):
        names |= {f"{prefix}_{name}" for name in dir(module)}
    yield from (op for op in _operators(names) if op._schema.is_mutable)


def _operators(names: Iterable[str]) -> Iterator[Any]:
    packets: list[Any] = [getattr(_aten, name, None) for name in names]
    for packet in packets:
        yield from (
            (getattr(packet, overload) for overload in packet.overloads()) if hasattr(packet, "overloads") else ()
        )


def _check_write(op: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """Raise RuntimeError if `op` is to write to a part of a sharded tensor that is a copy of what other ranks hold."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        written = args[i] if i < len(args) else kwargs.get(argument.name)
        for part in written if isinstance(written, list | tuple) else (written,):
            whole = None if part is None else part._base
            if whole is not None and hasattr(whole, "_local_tensor") and not _shares(part, whole):
                name = op._schema.name.removeprefix("aten::")
                raise RuntimeError(
                    f"{'an assignment or ' if name in ('copy_', 'fill_') else ''}{name}() was to change a part, of "
                    f"shape {list(part.shape)}, of a tensor of shape {list(whole.shape)} that is sharded over ranks, "
                    f"and would change a copy of it; {INSTEAD}"
                )


def _shares(part: Any, whole: Any) -> bool:
    """Whether writing to a part of a DTensor writes to this rank's shard of it."""
    mine, all_mine = (StorageWeakRef(tensor._local_tensor.untyped_storage()) for tensor in (part, whole))
    return mine.cdata == all_mine.cdata


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
