"""Weights that user code changes while FSDP has them whole: the change is brought to the shards before the whole is
freed, after which it cannot be used."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import increment_version

from lockstep.strategies.base import StepHooks
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.mesh.mixed_tensors import data_taken, note_assigned
from lockstep.strategies.mesh.steps import has_no_memory, refuse_returned
from lockstep.strategies.modules.casts import follow_casts
from lockstep.strategies.modules.model_changes import written_gradient
from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES, share_attributes
from lockstep.strategies.sync.contents import checksum, same_values


class UnshardedWrites:
    """Looks for changes of unsharded parameters and writes them to the shards.

    On the CPU values are compared, so that changes by way of `.data` are found; on an accelerator, where the host would
    wait for that, version counters are, unless somebody has taken `.data`.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._found: dict[int, tuple[Any, int]] = {}
        self._seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Of each parameter the whole, the shard, and the part of the whole that the shard holds: views, made once."""
        self._gathered: dict[int, Tensor | int] = {}
        """In manual optimization what shards had when they were gathered: values, or a version on an accelerator."""
        self.lends = True
        """Whether whole parameters may have the gradients of shards: not where a compiler would trace these."""
        self._lent: dict[int, tuple[Any, Any]] = {}
        """Parameters, by their ids, whose whole has the gradient of its shard, and that gradient."""
        self._on_fewer: dict[int, tuple[Any, int]] = {}
        """By the id of a parameter what a share of the ranks keeps of it until the backward, and its version."""
        self.awaited: set[int] = set()
        """Ids of groups of blocks that were freed between their forward and their backward."""

    def lend(self, group: Any) -> None:
        """In a step of manual optimization: give whole parameters the gradients of their shards, which its code may
        read, change, zero or drop (`module.zero_grad()`) before the next backward."""
        for parameter in _gatherable(group) if group.is_unsharded else ():
            whole, gradient = parameter._unsharded_param, parameter.sharded_param.grad
            if gradient is None or whole.grad is not None or not self.lends:
                continue
            if gradient.dtype == whole.dtype and gradient.device == whole.device:
                whole.grad = gradient
                self._lent[id(parameter)] = parameter, gradient

    def take_back(self, group: Any = None) -> None:
        """Before a backward, and before whole parameters of a group are freed: take lent gradients back as the step
        has left them, and drop those that it has dropped."""
        for parameter in [parameter for parameter, _ in self._lent.values()] if group is None else group.fsdp_params:
            gradient = self._lent.pop(id(parameter), (None, None))[1]
            whole, shard = getattr(parameter, "_unsharded_param", None), parameter.sharded_param
            if gradient is None or whole is None:
                continue
            returned = getattr(whole.grad, "_spec", None) == gradient._spec  # itself, or another in its place
            if shard.grad is gradient:
                shard.grad = whole.grad if returned else None
            if returned:
                whole.grad = None

    def take_written(self, group: Any) -> None:
        """In a step of manual optimization, before whole parameters of a group are freed: bring gradients of zeros that
        it has written to the shards, so that an optimizer steps with them. Raises RuntimeError for others."""
        for parameter in _gatherable(group):
            gradient = None if is_freed(parameter._unsharded_param) else parameter._unsharded_param.grad
            if gradient is None or _held(gradient) is not gradient:
                continue
            if gradient.any():
                raise written_gradient(parameter._module_info.param_name, "FSDP")
            if parameter.sharded_param.grad is None:
                parameter.sharded_param.grad = torch.zeros_like(parameter.sharded_param)
            parameter._unsharded_param.grad = None

    def follow(self, group: Any, is_manual: Callable[[], bool], is_root: bool) -> None:
        """From now on, in steps of manual optimization, lend the parameters of this group their gradients while they
        are whole. Those of the root are whole between forwards: raise RuntimeError for a step that uses one once it is
        freed, as torch gives it no value and no gradient, and what is set on it is lost."""
        to_sharded, to_unsharded, post_backward = group._to_sharded, group._to_unsharded, group.post_backward
        to_fewer = group._to_sharded_post_forward

        def free(shard: Callable[[], None]) -> None:
            self.take_back(group)
            if is_manual() and not _in_backward():
                self.take_written(group)
            if group.is_unsharded and _in_backward():
                for parameter in _gatherable(group):  # which hooks of the backward may have changed
                    self._write_back(parameter)
            elif group.is_unsharded and torch.is_grad_enabled() and not is_root:
                self.awaited.add(id(group))
            self._leave_fewer(group)
            shard()
            if is_root:
                self._freed(group, is_manual())

        def keep_on_fewer() -> None:
            free(to_fewer)
            for parameter in group.fsdp_params:
                kept = parameter._sharded_post_forward_param
                share_attributes(parameter.sharded_param, kept)
                self._on_fewer[id(parameter)] = kept, _held(kept)._version

        def gather() -> None:
            if is_root:
                for parameter in _gatherable(group):
                    whole = parameter._unsharded_param
                    if is_freed(whole):
                        whole.__class__ = type(whole).__bases__[0]
            to_unsharded()
            self._gathered_now(group)
            self._leave_fewer(group)
            if is_root:
                self._whole_again(group, is_manual())
            if is_manual() and not _in_backward():  # which would add to them
                self.lend(group)

        def reduce(*args: Any) -> None:  # what a backward has left in whole parameters
            self.take_back(group)
            self.awaited.discard(id(group))
            post_backward(*args)
            if is_manual():
                Variable._execution_engine.queue_callback(functools.partial(self.lend, group))

        group._to_sharded, group._to_unsharded, group.post_backward = (
            functools.partial(free, to_sharded),
            gather,
            reduce,
        )
        group._to_sharded_post_forward = keep_on_fewer

    def _leave_fewer(self, group: Any) -> None:
        """Raise RuntimeError if user code has assigned, frozen or hooked what `reshard_after_forward` of a number of
        ranks keeps of a block until its backward; what it has written in place has been gathered with it."""
        for parameter in [p for p in group.fsdp_params if id(p) in self._on_fewer]:
            kept, version = self._on_fewer.pop(id(parameter))
            flag = kept.requires_grad != parameter.sharded_param.requires_grad
            if flag or _held(kept)._version != version or any(getattr(kept, name) for name in ATTRIBUTES):
                raise RuntimeError(
                    f"{_place(parameter)} was assigned, frozen or got a hook between the forward of its block and the "
                    "backward, where reshard_after_forward of a number of ranks keeps a copy of it; do it before the "
                    "forward or in a hook such as on_before_zero_grad, or give reshard_after_forward=True"
                )
            if kept._version or id(kept) in data_taken:
                self._versions[id(parameter)] = -1

    def _freed(self, group: Any, manual: bool) -> None:
        for parameter in _gatherable(group):
            self._gathered.pop(id(parameter), None)
            whole = parameter._unsharded_param
            if manual and not is_freed(whole):
                whole.__class__ = _freed(type(whole))

    def _whole_again(self, group: Any, manual: bool) -> None:
        for parameter in _gatherable(group):
            if parameter.sharded_param.dtype != parameter.orig_dtype:
                raise _cast(parameter)
            if manual:
                self._note(parameter)

    def _note(self, parameter: Any) -> None:
        shard = _held(parameter.sharded_param).detach()
        self._gathered[id(parameter)] = shard.clone() if shard.is_cpu else shard._version

    def _put_back(self, parameter: Any) -> bool:
        """After `parameter.data = …` let torch gather to where the parameter is now; whether it was assigned.

        That is new memory: as on one process, what the backward uses of the values before is left as it was.
        """
        whole, gathered = _held(parameter._unsharded_param), parameter.all_gather_outputs[0]
        if type(gathered) is not Tensor or whole.data_ptr() == gathered.data_ptr():
            return False
        shape = parameter.sharded_param.shape if whole is parameter._unsharded_param else whole.shape
        if whole.shape != shape or whole.dtype != gathered.dtype:
            raise RuntimeError(
                f"training_step gave a parameter of shape {list(shape)} and {gathered.dtype} "
                f"data of shape {list(whole.shape)} and {whole.dtype}, which sharded parameters cannot take; keep "
                "shape and dtype"
            )
        if has_no_memory(whole):
            raise RuntimeError(
                f"`data` of {_place(parameter)} was given the memory of a parameter of another block, which FSDP has "
                "freed since; assign a clone()"
            )
        note_assigned(_held(parameter.sharded_param), whole)
        parameter.all_gather_outputs[0] = torch.empty_like(gathered)
        view = parameter.all_gather_outputs[0][: whole.numel()].view(whole.shape)
        whole.data = view.copy_(whole.detach())
        return True

    def assign(self, group: Any, parameter: Any, value: Tensor) -> None:
        """Do what `data = value` does to a shard of one process: what was taken of it before keeps its values.

        Raises RuntimeError between the forward of its block and the backward, which would use the new values.
        """
        self._seen.pop(id(parameter), None)  # which would keep the memory that it had
        shard, place = _held(parameter.sharded_param), parameter._module_info
        if id(group) in self.awaited:
            raise RuntimeError(
                f"`data` of {_place(parameter)} was assigned between the forward of its block and the backward, where "
                "one process keeps the old values for the backward, but FSDP gathers the new ones; assign it before "
                "the forward, in a forward hook of the layer, or in a hook such as on_before_zero_grad"
            )
        if getattr(place.module, place.param_name) is not parameter.sharded_param:  # its block is whole
            shard.copy_(value)
            return
        shard.data = value.contiguous()
        parameter.reset_sharded_param()
        shard.data = _held(parameter.sharded_param)  # if torch has padded it
        parameter.sharded_param._local_tensor = shard  # with its version counter
        increment_version(shard)

    def _check_shard(self, parameter: Any, shard: Tensor) -> None:
        """Raise RuntimeError if the shard is another than it was when it was gathered."""
        before = self._gathered.get(id(parameter))
        if before is None:
            return
        if same_values(shard.detach(), before) if isinstance(before, Tensor) else shard._version == before:
            return
        raise RuntimeError(
            "parameters that an optimizer holds were changed within training_step, by another optimizer or by way of "
            "param_groups, while the module had them whole, so the two differ; change them by way of "
            "self.parameters(), and return each optimizer from configure_optimizers and step it by self.optimizers()"
        )

    def _gathered_now(self, group: Any) -> None:
        for parameter in _gatherable(group):
            whole = parameter._unsharded_param
            if whole.is_cpu:
                return
            self._versions[id(parameter)] = whole._version
            data_taken.discard(id(whole))

    def write_back(self, unit: Any) -> None:
        """The unit is about to be freed. Does nothing where it is not whole."""
        for parameter in _unsharded(unit):
            self._write_back(parameter)

    @torch.no_grad()
    def _write_back(self, parameter: Any) -> None:
        whole, shard = _held(parameter.unsharded_param), _held(parameter.sharded_param)
        self._check_shard(parameter, shard)
        if self._put_back(parameter):
            self._write(parameter, whole.detach(), shard.detach())
        elif whole.is_cpu:
            seen = self._seen.get(id(parameter))
            if seen is None or not (whole.is_set_to(seen[0]) and shard.is_set_to(seen[1])):
                seen = whole.detach(), shard.detach(), _part(whole.detach(), parameter)
                self._seen[id(parameter)] = seen
            if shard.dtype != whole.dtype or not torch.equal(seen[1], seen[2]):
                self._write(parameter, whole.detach(), shard.detach())
        elif (
            id(parameter.unsharded_param) in data_taken
            or self._versions.get(id(parameter), whole._version) != whole._version
        ):
            self._versions[id(parameter)] = whole._version
            self._write(parameter, whole.detach(), shard.detach())

    def _write(self, parameter: Any, whole: Tensor, shard: Tensor) -> None:
        """Bring what has changed in `whole` to `shard`."""
        part = _part(whole, parameter).to(shard.device)
        was = shard.to(part.dtype)
        if same_values(part, was):
            return
        shard.copy_(torch.where(part == was, shard, part.to(shard.dtype)))  # others keep what a cast would round
        if id(parameter) in self._gathered:
            self._note(parameter)
        known = self._found.get(id(parameter), (parameter, 0))[1]
        self._found[id(parameter)] = parameter, checksum(whole, known)

    def take(self) -> dict[int, int]:
        """What was changed since the last call: hashes of the new values by the id of the sharded parameter.

        A rank whose own part did not change has none.
        """
        found, self._found = self._found, {}
        return {id(parameter.sharded_param): number for parameter, number in found.values()}


_FREED: dict[type, type] = {}
"""By the class of a parameter that of one of which nothing can be asked."""


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _cast(parameter: Any) -> RuntimeError:
    return RuntimeError(
        f"{_place(parameter)} was cast to {parameter.sharded_param.dtype} during the run, but FSDP "
        f"gathers it as {parameter.orig_dtype}, so the cast would have no effect; leave the model's dtype as it is, "
        "compute under torch.autocast, or cast in configure_model"
    )


def _place(parameter: Any) -> str:
    found = parameter._module_info
    return f"{found.param_name} of a {type(found.module).__name__.removeprefix('FSDP')}"


def followed(hooks: StepHooks, write_back: Callable[[], None]) -> StepHooks:
    """`hooks`, of which `before_backward` may change whole parameters, and those at the end of a batch do not get what
    `refuse_returned` refuses."""

    def prepare(window: Window) -> Iterator[MicroBatch]:
        for micro_batch in window.micro_batches if hooks.prepare is None else hooks.prepare(window):
            yield micro_batch
            refuse_returned(micro_batch.output)

    own, checked = hooks.before_backward, hooks._replace(prepare=prepare)
    if own is None:
        return checked

    def before_backward(loss: Tensor) -> None:
        own(loss)
        write_back()

    return checked._replace(before_backward=before_backward)


def is_freed(whole: Any) -> bool:
    return type(whole) in _FREED.values()


def _freed(cls: type) -> type:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a parameter is used that training_step took from the module while it was whole, but it has been freed "
            "since, by a backward or a step; take it again, as by self.parameters(), after manual_backward and "
            "optimizer.step"
        )

    if cls not in _FREED:
        names = {"__slots__": (), "__torch_function__": classmethod(refuse)}
        _FREED[cls] = types.new_class("Freed", (cls,), exec_body=lambda body: body.update(names))
    return _FREED[cls]


def param_groups(unit: Any) -> Sequence[Any]:
    """What FSDP gathers and frees of a unit as one: at most one group before torch 2.12."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def follow_hook(unit: Any, write_back: Callable[[Any], None]) -> None:
    """Call `write_back` after the forward hooks of a unit, which may change its parameters, and before torch frees
    these."""
    hooks, state = unit._forward_hooks, unit._get_fsdp_state()
    keys = [*hooks]
    first = next(i for i, key in enumerate(keys) if getattr(hooks[key], "__self__", None) is state)
    unit.register_forward_hook(lambda module, args, output: write_back(module))
    for key in keys[first:]:
        hooks.move_to_end(key)


def _unsharded(unit: Any) -> Iterator[Any]:
    for group in param_groups(unit):
        if group.is_unsharded:
            yield from _gatherable(group)


def _gatherable(group: Any) -> Iterator[Any]:
    """Parameters that were whole before."""
    return (parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param"))


def _held(tensor: Any) -> Tensor:
    """What this rank holds of a tensor: the tensor itself that is in a DTensor, where `to_local` makes a view."""
    return getattr(tensor, "_local_tensor", tensor)


def _part(whole: Tensor, parameter: Any) -> Tensor:
    """What this rank's shard holds of `whole`."""
    mesh = parameter.mesh_info
    size, rank = getattr(mesh, "shard_mesh_size", 1), getattr(mesh, "shard_mesh_rank", 0)
    dim = parameter.fsdp_placement.dim
    each = -(-whole.size(dim) // size)  # as torch.chunk cuts, without making views of all shards
    start = min(rank * each, whole.size(dim))
    return whole.narrow(dim, start, min(each, whole.size(dim) - start))


def init_unsharded(parameter: Any) -> None:
    """Let torch make the parameter that stands for a shard while it is gathered, with the shard's attributes."""
    del parameter.init_unsharded_param  # torch makes one, and calls its own method in each step
    parameter.init_unsharded_param()
    share_attributes(parameter.sharded_param, parameter._unsharded_param)
    follow_casts(parameter._unsharded_param)
