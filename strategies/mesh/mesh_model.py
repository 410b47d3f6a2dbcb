"""A model on a mesh while it trains: what is gathered, freed and reduced around the step and around layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lockstep.strategies.mesh import mixed_tensors, steps
from lockstep.strategies.mesh.structure import Structure, keep_containers
from lockstep.strategies.mesh.tensor_plan.plan import Plan
from lockstep.strategies.mesh.unsharded_writes import (
    UnshardedWrites,
    follow_hook,
    init_unsharded,
    is_freed,
    param_groups,
)
from lockstep.strategies.mesh.whole_model import Lender
from lockstep.strategies.modules.casts import follow_casts
from lockstep.strategies.modules.forwards import is_compiled, within_compiled
from lockstep.strategies.modules.model_changes import replaced
from lockstep.strategies.modules.parameter_hooks import copy_attributes
from lockstep.strategies.sync.call_order import END_FORWARD, CallOrder
from lockstep.strategies.sync.collectives import local


class MeshModel(nn.Module):
    """A distributed model as the strategy drives it: what runs in its forward finds every parameter whole.

    That is the user's step, which may call any submodule and use any parameter that no block holds. The
    parameters of a block are whole while the block, or one of its layers, runs.
    """

    def __init__(self, model: nn.Module, reshards: bool | int) -> None:
        super().__init__()
        self.structure = Structure(model)
        self._reshards = reshards
        self.model = model
        self.units: list[Any] = []
        """What is gathered and freed as one: the blocks and this module, which holds the rest. Empty without data
        axes."""
        self.unsharded: list[nn.Parameter] = []
        """Parameters that the units leave whole; their gradients are summed over data ranks by hand."""
        self.watched_hooks: list[tuple[nn.Module, str, Any]] = []
        """Modules that take no hooks, with the attribute and what it held before."""
        self.plan: Plan | None = None
        """What tensor parallelism shards, if there is any."""
        self.depth = 0
        """How many brackets are open."""
        self.manual = False
        """Whether the bracket is of a step that runs backward itself, so that what requires gradients may change within
        it."""
        self._trained: dict[int, bool] = {}
        """What required gradients when it was gathered in such a step."""
        self.synchronizes = True
        """Whether the backward of the next step exchanges gradients; one within the step must not, of what was
        accumulated."""
        self._synchronized = True
        self._kept = self._flushes = False
        self._held_back: list[Any] = []
        """Groups whose gradients are not reduced before all uses of their block have theirs."""
        self._calls: set[Any] = set()
        self.reused: list[Any] = []
        """Blocks that run, or of which a layer runs, more than once in this step."""
        self._in_units: list[tuple[str, Any]] = []
        """What FSDP holds of each parameter, by the parameter's name."""
        self._looks = 16  # at attributes, for memory that was freed
        self.writes = UnshardedWrites()
        self.used: set[int] = set()
        """Parameters with a gradient of this rank, if torch reduces all (`find_unused_parameters`)."""
        self.names: list[str] = []
        """Of the units but the last."""
        self.order: CallOrder | None = None
        """Compares what ranks gather and reduce, from when it is set."""

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        if not self.depth:
            self._calls.clear()
            self.writes.awaited.clear()
        if self.manual:
            self.follow_flags()
        self.depth += 1
        try:
            with mixed_tensors.step():
                output = fn(*args)
        finally:
            self.depth -= 1
            if self.units:
                self.writes.write_back(self)
                if not self.depth:
                    self.synchronize(self.synchronizes)
            if self.plan is not None:
                self.plan.end_forward()
        if self.order is not None and not self.depth:
            self.order.note(END_FORWARD)
        return output

    def watch_used(self) -> None:
        """Remember which parameters this rank has a gradient for, where torch reduces zeros for the others."""
        for unit in self.units:
            for group in param_groups(unit):
                group.post_backward = functools.partial(self._note_used, group, group.post_backward)

    def trains_several_dtypes(self) -> bool:
        """Whether a unit trains parameters of several dtypes, whose gradients torch cannot reduce together."""
        groups = [group for unit in self.units for group in param_groups(unit)]
        parameters = [[fsdp_param.sharded_param for fsdp_param in group.fsdp_params] for group in groups]
        return any(len({p.dtype for p in group if p.requires_grad}) > 1 for group in parameters)

    @property
    def puts_back(self) -> bool:
        """Whether whole parameters, and then shards, are put to where the model had parameters when it was wrapped."""
        return bool(self.units)

    def unsharded_by_name(self) -> Iterator[tuple[str, Tensor]]:
        """The whole parameters that user code finds in a step, as far as they were gathered, by name."""
        for name, parameter in self._held():
            if hasattr(parameter, "_unsharded_param") and not is_freed(parameter._unsharded_param):
                yield name, parameter.unsharded_param

    def memory(self) -> Iterator[Tensor]:
        """Parameters, and what they are gathered to."""
        yield from self.model.parameters()
        for _, parameter in self._held():
            yield from parameter.all_gather_outputs

    def _reset(self, parameter: Any) -> None:
        """Raise RuntimeError if a whole parameter was put in the place of a shard, as by `load_state_dict(…,
        assign=True)`."""
        module, key = parameter._module_info.module, parameter._module_info.param_name
        if not isinstance(getattr(module, key), DTensor):
            names = {found: name for name, found in self.model.named_modules()}
            name = f"{names[module]}.{key}" if names.get(module) else key
            raise replaced([name], "the strategy" if self.order is None else self.order.engine)
        dtype = parameter.sharded_param.dtype
        if getattr(parameter, "orig_dtype", dtype) == dtype:  # else gathering it is refused
            type(parameter).reset_sharded_param(parameter)

    def _held(self) -> list[tuple[str, Any]]:
        if not self._in_units:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            for unit in self.units:
                for group in param_groups(unit):
                    for parameter in group.fsdp_params:
                        whole = getattr(parameter, "_unsharded_param", None)
                        self._in_units.append((names.get(id(whole)) or names[id(parameter.sharded_param)], parameter))
        return self._in_units

    def follow_flags(self) -> None:
        """Let whole and sharded parameters require gradients alike, where user code has changed one of them since they
        were gathered: the whole ones by way of the model, the sharded ones by way of an optimizer."""
        for _, parameter in self._held():
            whole, sharded = getattr(parameter, "_unsharded_param", None), parameter.sharded_param
            if whole is None or is_freed(whole):
                continue
            if self._trained.get(id(parameter), whole.requires_grad) != whole.requires_grad:
                sharded.requires_grad_(whole.requires_grad)
            elif whole.requires_grad != sharded.requires_grad:
                whole.requires_grad_(sharded.requires_grad)
            if id(parameter) in self._trained:
                self._trained[id(parameter)] = sharded.requires_grad

    def _note_used(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        for parameter in group.fsdp_params:
            whole = getattr(parameter, "_unsharded_param", None)
            if (
                parameter.sharded_param.grad is not None
                or parameter.unsharded_accumulated_grad is not None
                or (whole is not None and whole.grad is not None)
            ):
                self.used.add(id(parameter.sharded_param))
        post_backward(*args)

    def note(self, kind: int, index: int, size: int) -> None:
        """A unit is about to be gathered or reduced."""
        if self.order is not None:
            self.order.note(kind, index, size)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(*args)` as a forward of this module, whose arguments do not include `args`: torch would move those to the
        device."""
        return self(functools.partial(fn, *args))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Manual optimization: every parameter that no block holds is whole while the user's step runs."""
        self.depth, self.manual = self.depth + 1, True
        self.gather()
        try:
            yield
            self.follow_flags()
            for unit in self.units:
                for group in param_groups(unit):
                    self.writes.take_back(group)
                    self.writes.take_written(group)
        finally:
            self.depth, self.manual = self.depth - 1, False

    def gather(self) -> None:
        """Make the parameters that no block holds whole."""
        if self.units:
            self.unshard()  # type: ignore[operator]
            if self.manual:
                held = (parameter for _, parameter in self._held() if hasattr(parameter, "_unsharded_param"))
                self._trained = {id(parameter): parameter.unsharded_param.requires_grad for parameter in held}

    def close(self) -> None:
        """Leave in the model what the optimizer holds: this rank's part of every parameter."""
        if self.manual:
            self.follow_flags()
        if self._kept:
            self._keep(False)
        for unit in self.reused:
            unit.set_reshard_after_backward(True, recurse=False)
        self.reused.clear()
        self._calls.clear()
        self._reshard()
        self.writes.awaited.clear()
        if self.units and self._looks:
            self._looks -= 1
            steps.refuse_kept(self.model)

    def write_back(self) -> None:
        """Bring what user code has changed of whole parameters to the shards."""
        for unit in self.units:
            self.writes.write_back(unit)

    def _reshard(self) -> None:
        self.write_back()
        for unit in self.units:
            unit.reshard()

    @contextmanager
    def gradients_apart(self) -> Iterator[None]:
        """Within it whole parameters do not have the gradients of their shards."""
        self.writes.take_back()
        yield
        for unit in self.units if self.manual else ():
            for group in param_groups(unit):
                self.writes.lend(group)

    def begin_own_backward(self) -> None:
        """Before a backward in a step of the user's own: have whole again what a graph of gradients computes with."""
        if self._kept:
            for unit in self.units:
                unit.unshard()
        self.writes.take_back()

    def end_own_backward(self) -> None:
        """After it: let the step find shards, with their gradients, also of what is kept whole for other graphs."""
        if self._kept or self.reused:
            self.follow_flags()
            self._reshard()

    def _called(self, unit: Any, output: Any) -> None:
        """A forward hook of a block: see to what torch expects to be a block's only backward, without a graph of
        itself."""
        if not self.depth or not torch.is_grad_enabled():
            return
        if unit in self._calls:
            self.reuse(unit, output)
        self._calls.add(unit)
        self.watch(output)

    def reuse(self, unit: Any, output: Any) -> None:
        """A block or a layer of it runs more than once in a step: its backward is over when that of all of them is."""
        if unit not in self.reused:
            self.reused.append(unit)
            unit.set_reshard_after_backward(False, recurse=False)
        for x in _with_gradient(output):
            x.register_hook(functools.partial(self._again, unit))

    def _again(self, unit: Any, gradient: Tensor) -> None:
        unit.unshard()  # another backward within the step may have freed it
        for group in param_groups(unit):
            if group.reduce_grads:  # once, with what earlier micro-batches have left
                group.reduce_grads = False
                self._held_back.append(group)
        if not self._flushes:
            self._flushes = True
            Variable._execution_engine.queue_callback(self._flush)

    def _flush(self) -> None:
        """Reduce the gradients that came after torch took the backward of their block to be over."""
        self._flushes = False
        for group in self._held_back:
            group.reduce_grads = True
        self._held_back.clear()
        for unit in self.reused:
            for group in param_groups(unit):
                if any(_has_gradient(parameter) for parameter in group.fsdp_params):
                    group.post_backward()
                    group.finalize_backward()

    def watch(self, output: Any) -> None:
        """Before the backward from `output` asks for a graph of itself, keep every parameter whole until `close`.

        The backward of a backward begins with the layers that torch would gather last.
        """
        for x in _with_gradient(output):
            x.register_hook(self._differentiated)

    def _differentiated(self, gradient: Tensor) -> None:
        if not self._kept and torch.is_grad_enabled():
            self._keep(True)

    def _keep(self, on: bool) -> None:
        self._kept = on
        self.set_reshard_after_backward(not on)  # type: ignore[operator]
        for unit in self.units:
            if unit is not self:
                unit.set_reshard_after_forward(False if on else self._reshards, recurse=False)

    def synchronize(self, on: bool) -> None:
        """Whether the next backward exchanges gradients, or keeps them whole on this rank."""
        if self.units and self._synchronized is not on:
            self._synchronized = on
            self.set_requires_gradient_sync(on)  # type: ignore[operator]
            self.set_is_last_backward(on)  # type: ignore[operator]

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Undo the placement: plain modules with plain parameters, made of `values` (the whole tensors by name)."""
        mixed_tensors.assigns.clear()
        whole: dict[int, nn.Parameter] = {}
        for name, cut in self.model.named_parameters():
            whole[id(cut)] = nn.Parameter(values[name], requires_grad=cut.requires_grad)
            copy_attributes(cut, whole[id(cut)])
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = whole[id(parameter)]
            for name, buffer in module._buffers.items():  # whole on every rank, but a DTensor in a sharded layer
                module._buffers[name] = None if buffer is None else local(buffer)
        for module, kind, held in self.watched_hooks:
            held.clear()
            held.update(getattr(module, kind))  # what was taken off meanwhile stays off
            setattr(module, kind, held)
        self.structure.undo()

    def lend(self, blocks: Mapping[str, nn.Module]) -> None:
        """Make layers usable wherever they are called: outside of a step, or without the block that holds them."""
        owner: dict[int, Any] = {}
        for unit in self.units:  # inner ones before those that hold them
            for parameter in unit.parameters():
                owner.setdefault(id(parameter), unit)
        for parameter in self.unsharded:
            owner.pop(id(parameter), None)
        lenders = {
            id(unit): Lender(self, unit, {key for key, holder in owner.items() if holder is unit})
            for unit in self.units
        }
        self.writes.lends = not any(map(is_compiled, self.model.modules()))
        for unit in self.units:
            if unit is not self:
                keep_containers(unit, self._called)
                follow_hook(unit, self.writes.write_back)
            for group in param_groups(unit):
                for parameter in group.fsdp_params:  # torch calls it once values were loaded or converted
                    parameter.reset_sharded_param = functools.partial(self._reset, parameter)
                    follow_casts(parameter.sharded_param, parameter.reset_sharded_param)
                    parameter.init_unsharded_param = functools.partial(init_unsharded, parameter)
                    assign = functools.partial(self.writes.assign, group, parameter)
                    mixed_tensors.assigns[id(parameter.sharded_param)] = parameter.sharded_param, assign
                self.writes.follow(group, lambda: self.manual, is_root=unit is self)
        traced = within_compiled(self.model)
        inside = {module for block in blocks.values() for module in block.modules()}
        for module in self.model.modules():
            if module in inside:
                found = {
                    id(owner[id(p)])
                    for p in module.parameters(recurse=False)
                    if id(p) in owner and owner[id(p)] is not module
                }
            else:
                found = {id(self)} if any(owner.get(id(p)) is self for p in module.parameters()) else set()
            for unit_id in found:
                lenders[unit_id].watch(module, traced=module in traced)


def _with_gradient(output: Any) -> list[Tensor]:
    leaves = [output] if isinstance(output, Tensor) else tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def _has_gradient(parameter: Any) -> bool:
    if not hasattr(parameter, "_unsharded_param"):
        return False
    return parameter.unsharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None
