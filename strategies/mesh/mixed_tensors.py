"""What torch's DTensors give to user code: numbers of the whole tensor, or an error that says what to do."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.mesh.user_code.operators import by_torch, check_write, memory, operators, watch_writes
from lockstep.strategies.modules.sharded_errors import INSTEAD


def install() -> None:
    """Let torch's DTensors give global numbers. Changes torch once a process."""
    from torch.distributed.tensor import DTensor  # takes a second

    dispatcher: Any = DTensor._op_dispatcher
    if getattr(dispatcher, "_lockstep", False):
        return
    dispatcher._lockstep = True
    dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number
    for op in operators(_DRAWS):
        dispatcher._custom_op_handlers[op] = _draw
    for op in operators(name for loss in _LOSSES for name in (loss, f"{loss}_backward")):
        dispatcher._custom_op_handlers[op] = _mean
    for op in operators(_OF_WHOLE):
        dispatcher._custom_op_handlers[op] = _refuse_part
    for op in operators(name for name in dir(torch) if name.startswith("_foreach_")):
        dispatcher._custom_op_handlers[op] = _each
    DTensor.numpy = _refuse_numpy  # type: ignore[method-assign, assignment]
    _watch_copies(dispatcher)

    @torch.no_grad()
    def assign(self: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor):  # torch would keep the shard and lose the value
            raise RuntimeError(
                f"a tensor was assigned to `data` of a parameter of shape {list(self.shape)} of which this rank holds "
                f"a shard; {INSTEAD}"
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
        if any(shard == memory(self._local_tensor) and not copied.expired() for shard, copied in _parted):
            raise RuntimeError(
                f"a second tensor was assigned to `data` of a parameter of shape {list(self.shape)}, and the first is "
                "kept by another parameter or by user code, so that on one process a change of one was a change of "
                "both, but this parameter is sharded in another way and has copied it; assign a clone()"
            )
        has_whole_copies = bool({"fsdp", "ddp"} & {*(self.device_mesh.mesh_dim_names or ())})
        shard, call = assigns.get(id(self), (None, None))
        if shard is self and call is not None:
            call(new)
        elif has_whole_copies:
            self._local_tensor.copy_(new)
        else:  # torch would lose it; what the backward uses of the values before is left as it was
            self._local_tensor.data = new
            increment_version(self._local_tensor)
        if has_whole_copies or memory(self._local_tensor) != memory(source):
            note_assigned(self._local_tensor, source)
        if memory(new) != memory(source):
            _parted.append((memory(self._local_tensor), memory(source)))

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


_DRAWS = (
    "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout normal "
    "normal_ poisson rand_like randint_like randn_like random random_ rrelu_with_noise rrelu_with_noise_ uniform "
    "uniform_ _standard_gamma"
).split()


def _draw(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Random numbers for a DTensor: those of a model's own layers in a step, but none for weights, nor in hooks, where
    each rank would draw its part by itself."""
    check_write(op, args, kwargs)
    tensor = next(arg for arg in args if hasattr(arg, "device_mesh"))
    names = tensor.device_mesh.mesh_dim_names or ()
    if isinstance(tensor, nn.Parameter) or {"fsdp", "ddp"} & {*names} or not _in_steps:
        raise RuntimeError(
            f"random numbers were drawn ({str(op).removesuffix('.default')}) for a tensor of shape "
            f"{list(tensor.shape)} of which this rank holds a shard, and would not be those of one process; {INSTEAD}"
        )
    return by_torch(op, args, kwargs, _draw)


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
        return by_torch(op, args, kwargs, _mean)
    values["reduction"] = 0
    numel = math.prod(torch.broadcast_shapes(values["self"].shape, values["target"].shape))
    if names[0] == "grad_output":
        values["grad_output"] = values["grad_output"] / numel
        return by_torch(op, (), values, _mean)
    return by_torch(op, (), values, _mean).sum() / numel


def _refuse_part(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    tensor = next(arg for arg in (*args, *kwargs.values()) if hasattr(arg, "placements"))
    if all(place.is_replicate() for place in tensor.placements):
        return by_torch(op, args, kwargs, _refuse_part)
    raise RuntimeError(
        f"{op._schema.name.removeprefix('aten::')}() was called for a tensor of shape {list(tensor.shape)} of which "
        f"this rank holds a shard; {INSTEAD}"
    )


def _each(op: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """A function of lists of tensors, such as all parameters, some of which are DTensors. Where what it computes with
    is not sharded alike, one tensor after the other, as on one process: torch mixes no kinds, and would take copies of
    all before it writes to the first. Nor does it count that it writes to DTensors, as it does for other tensors."""
    check_write(op, args, kwargs)
    first = args[0] if isinstance(args[0], list | tuple) else ()
    lists = [value for value in args if isinstance(value, list | tuple) and len(value) == len(first)]
    if len(first) > 1 and not (all(map(_alike, *lists)) and len(set(map(_is_sharded, first))) == 1):

        def one(value: Any, i: int) -> Any:
            if isinstance(value, list | tuple) and len(value) == len(first):
                return [value[i]]
            return value.full_tensor() if _is_sharded(value) and not _is_sharded(first[i]) else value

        each = [
            _each(op, tuple(one(value, i) for value in args), {name: one(value, i) for name, value in kwargs.items()})
            for i in range(len(first))
        ]
        return [found for result in each for found in result] if op._schema.returns else None
    if op._schema.name == "aten::_foreach_copy_":  # of which torch knows nothing
        for into, values in zip(*args[:2], strict=True):
            into.copy_(values)
        return None
    if op._schema.name.endswith("_"):
        increment_version(args[0])
    return by_torch(op, args, kwargs, _each)


def _alike(*tensors: Any) -> bool:
    """Whether those of one place in lists have the same sharding, or none."""
    return len({getattr(tensor, "placements", None) for tensor in tensors if isinstance(tensor, Tensor)}) < 2


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "_local_tensor")


def _watch_copies(dispatcher: Any) -> None:
    """From the first view on that torch makes of a copy, as other ranks hold some of it, check each operation that
    writes; remember all such copies."""
    redistribute = dispatcher.redistribute_local_args

    def watched(op_info: Any, schema: Any, *args: Any) -> None:
        if schema.op.is_view:
            watch_writes()
        before = op_info.local_args
        redistribute(op_info, schema, *args)
        if schema.op.is_view:
            for shard, copy in zip(before, op_info.local_args, strict=False):
                if isinstance(shard, Tensor) and copy is not shard:
                    note_copy(shard, copy)

    dispatcher.redistribute_local_args = watched


_copies: list[tuple[StorageWeakRef, StorageWeakRef]] = []
"""Shards, and copies of what they are part of, that user code may still hold."""
_assigned: list[tuple[StorageWeakRef, StorageWeakRef]] = []
"""Shards, and what user code has assigned to `data` of their parameters, which has been copied into them."""
_parted: list[tuple[StorageWeakRef, StorageWeakRef]] = []
"""Those of them that other parameters cannot share, as they are sharded in another way."""


def note_copy(shard: Tensor, copy: Any) -> None:
    _note(_copies, shard, copy)


def note_assigned(shard: Tensor, value: Any) -> None:
    """The shard has got this rank's part of `value`: a copy, or its memory."""
    _note(_assigned, shard, value)
    of_value = _assigned[-1][1]
    also = [other for other, copy in _copies if copy == of_value]  # a view that is a copy
    _assigned.extend((memory(shard), other) for other in also + [other for copy, other in _parted if copy == of_value])


def _note(pairs: list[tuple[StorageWeakRef, StorageWeakRef]], shard: Tensor, copy: Any) -> None:
    if len(pairs) >= 1024 and len(pairs).bit_count() == 1:  # at each power of two
        pairs[:] = [pair for pair in pairs if not pair[1].expired()]
    pairs.append((memory(shard), memory(getattr(copy, "elem", copy))))


def refuse_kept_copies(model: nn.Module, strategy: str) -> None:
    """Raise RuntimeError if somebody holds a view of a parameter that is a copy, or what `refuse_assigned` refuses,
    before a step changes the parameter.

    To be called when no hook of the user's runs, whose variables would hold them.
    """
    refuse_assigned(model, strategy)
    _parted.clear()
    if _copies and (name := _kept(_copies, model)):
        raise RuntimeError(
            f"user code keeps a view of {name} (a slice of it, or a detach() or state_dict() within whole()), which is "
            f"a copy, as {strategy} shards the parameter over ranks, and would not follow it; keep a clone() of the "
            "values, or take the view again where you need it"
        )


def refuse_assigned(model: nn.Module, strategy: str, others: Iterable[Tensor] | None = None) -> None:
    """Raise RuntimeError if somebody holds what was copied into a parameter as its `data`: as `others`, if they are
    given, such as the parameters, where user code may hold it as well."""
    found = _assigned
    if others is not None and found:
        storages = {memory(getattr(p, "_local_tensor", p)).cdata for p in others}
        found = [pair for pair in found if pair[1].cdata in storages]
    if found and (name := _kept(found, model)):
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
    shards, spans = dict[int, str](), dict[int, list[tuple[int, int]]]()
    for name, parameter in model.named_parameters():
        if (own := getattr(parameter, "_local_tensor", None)) is not None:
            shards.setdefault(memory(own).cdata, name)
            spans.setdefault(memory(own).cdata, []).append(_span(own))
    shared = {memory for memory, held in spans.items() if _overlap(held)}
    alive = ((shard, copy) for shard, copy in pairs if shard.cdata in shards and not copy.expired())
    pairs[:] = [(shard, copy) for shard, copy in alive if shard.cdata != copy.cdata or shard.cdata in shared]
    if pairs:
        gc.collect()  # torch.save, for one, leaves tensors to it
    kept = {shard.cdata for shard, copy in pairs if not copy.expired()}
    pairs.clear()
    return next((name for memory, name in shards.items() if memory in kept), None)


def _span(tensor: Tensor) -> tuple[int, int]:
    """Where in its memory it begins and ends, in bytes."""
    begin, size = int(tensor.storage_offset()), tensor.itemsize
    last = begin + sum((number - 1) * stride for number, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (last + 1) * size if tensor.numel() else begin * size


def _overlap(spans: list[tuple[int, int]]) -> bool:
    """Whether two have something in common; views of one tensor, such as its rows, need not."""
    held = sorted(span for span in spans if span[0] < span[1])
    return any(begin < end for (_, end), (begin, _) in pairwise(held))


def _refuse_numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"numpy() was called on a tensor of shape {list(self.shape)} of which this rank holds a shard; {INSTEAD}"
    )
