"""Which ranks of a pipeline hold which parameters and buffers of the model; others have `Absent` tensors instead."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import Topology
from lockstep.strategies.checkpoint_state import State
from lockstep.strategies.launch.process_group import backend_of
from lockstep.strategies.mesh.mesh import PipelineRanks
from lockstep.strategies.modules.absent import Absent, is_here
from lockstep.strategies.modules.model_changes import renamed
from lockstep.strategies.modules.parameter_hooks import copy_attributes, share_attributes
from lockstep.strategies.pipeline.partition import Cut, holding_stages
from lockstep.strategies.sync.collectives import own_group, sum_gradients

if TYPE_CHECKING:
    from lockstep.strategies.pipeline.staged_module import Staged


class _Lost(NamedTuple):
    """A parameter or buffer that is on another rank."""

    module: nn.Module
    name: str
    value: Tensor | None
    """A buffer that is not part of the state, as it was."""
    absent: Absent


class StageTensors:
    """The parameters and buffers of `model` by stage and rank; see `Staged` for the arguments."""

    def __init__(
        self,
        model: nn.Module,
        parts: Cut,
        stage_of: Sequence[int],
        rank_of: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        self._model, self._device = model, device
        self._stage_of, self._rank_of, self._rank = stage_of, rank_of, rank
        self._layers = parts.layers
        self._owner = self._owners(parts)
        holders = holding_stages(parts, stage_of)
        self._ranks = {
            name: sorted({rank_of[stage] for stage in holders[id(p)]})
            for name, p in model.named_parameters()
            if id(p) in holders
        }
        self.beside_layers = [
            (shell, name) for _, shell in parts.shells for name, p in shell._parameters.items() if p is not None
        ]
        """Parameters of the modules around the layers: module and name. They belong to the first stage."""
        self._lost: list[_Lost] = []
        self._caches: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def is_here(self, name: str) -> bool:
        """Whether this rank answers for the tensor `name` of the model's state."""
        return self.rank_of_name(name) == self._rank

    def rank_of_name(self, name: str) -> int:
        """The rank of the pipeline that answers for the tensor `name` of the model's state."""
        if name not in self._owner:
            raise renamed([name], "Pipeline")
        return self._rank_of[self._owner[name]]

    def ranks_of_name(self, name: str) -> list[int]:
        """The ranks of the pipeline that hold the parameter `name`: several if stages of several ranks share it."""
        return self._ranks.get(name) or [self.rank_of_name(name)]

    def own_parameters(self) -> list[nn.Parameter]:
        """Those of the modules around the layers, which the first stage holds."""
        return [shell._parameters[name] for shell, name in self.beside_layers]  # type: ignore[misc]

    def tied(self) -> dict[tuple[int, ...], dict[str, nn.Parameter]]:
        """The parameters that several ranks hold, by these ranks and name; on other ranks they are `Absent`."""
        found: dict[tuple[int, ...], dict[str, nn.Parameter]] = {}
        for name, parameter in self._model.named_parameters():
            if len(self._ranks.get(name, ())) > 1:
                found.setdefault(tuple(self._ranks[name]), {})[name] = parameter
        return found

    def staged(self) -> list[tuple[str, Tensor, int]]:
        """Name, tensor and rank of each parameter and buffer that is on one stage, in the same order on all ranks.

        Others, outside of the pipelined module or buffers beside layers, are on every rank.
        """
        stage_by_id = {id(lost.absent): lost.absent.absent_stage for lost in self._lost} | self._stages_of_layers()
        stage_by_id.update((id(shell._parameters[name]), 0) for shell, name in self.beside_layers)
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return [(name, t, self._rank_of[stage_by_id[id(t)]]) for name, t in named if id(t) in stage_by_id]

    def keep_own(self, state: State, is_first: bool) -> dict[str, Any]:
        """Drop from a checkpoint's state what other ranks save, and return this rank's JSON part.

        `is_first`: this rank holds the first stage, and saves what all ranks have.
        """
        meta = {name: value for name, value in state.meta["model"].items() if self.is_here(name)}
        dropped = {f"model/{name}" for name in state.meta["model"].keys() - meta}
        for key, saved in state.meta["optimizers"].items():
            others = {name for name in saved["state"] if not self.is_here(name)}
            dropped |= {tensor for name in others for tensor in _under(f"optimizer/{key}/{name}/", state.tensors)}
            saved["state"] = {name: entry for name, entry in saved["state"].items() if name not in others}
        if not is_first:  # of parameter groups
            dropped |= {name for name in state.tensors if name.startswith("optimizer/") and name.count("/") == 2}
        state.tensors = {name: shard for name, shard in state.tensors.items() if name not in dropped}
        return {"model": meta, "optimizers": state.meta["optimizers"]}

    def replace_absent(self) -> None:
        """Give up what only other ranks hold and move the rest to the device."""
        places = [
            (child, name, stage)
            for layer, stage in zip(self._layers, self._stage_of, strict=True)
            if self._rank_of[stage] != self._rank
            for child in layer.module.modules()
            for name in (*child._parameters, *child._buffers)
        ]
        places += [] if self._rank_of[0] == self._rank else [(shell, name, 0) for shell, name in self.beside_layers]
        kept = self._ids_here()
        known = {(id(module), name) for module, name, _ in places}
        places += [  # names for the same parameter elsewhere
            (module, name, -1)
            for module in self._model.modules()
            for name in (*module._parameters, *module._buffers)
            if (id(module), name) not in known
        ]
        paths = {module: path for path, module in self._model.named_modules()}
        made: dict[int, Absent] = {}
        alive: list[Tensor] = []  # until all are listed, so that ids are distinct
        for module, name, stage in places:
            is_parameter = name in module._parameters
            value = module._parameters[name] if is_parameter else module._buffers[name]
            if value is None or id(value) in kept or (stage < 0 and id(value) not in made):
                continue
            alive.append(value)
            if id(value) not in made:
                path = f"{paths[module]}.{name}" if paths[module] else name
                made[id(value)] = Absent(value, path, stage, self._device, is_parameter)
                share_attributes(value, made[id(value)])
            unsaved = value if name in module._non_persistent_buffers_set else None
            self._lost.append(_Lost(module, name, unsaved, made[id(value)]))
        for lost in self._lost:
            _put(lost, None)
        alive.clear()
        self._model.to(self._device)
        for lost in self._lost:
            _put(lost, lost.absent)
        self._caches = {name: (weakref.ref(buffer), buffer._version) for name, buffer in self._own_caches()}

    def changed_caches(self) -> dict[str, Tensor]:
        """By name the buffers of this rank's layers that are not in the state dict and that were written to."""
        return {
            name: buffer
            for name, buffer in self._own_caches()
            if (held := self._caches.get(name)) is None or held[0]() is not buffer or held[1] != buffer._version
        }

    def _own_caches(self) -> Iterator[tuple[str, Tensor]]:
        paths = {module: path for path, module in self._model.named_modules()}
        for layer, stage in zip(self._layers, self._stage_of, strict=True):
            for child in layer.module.modules() if self._rank_of[stage] == self._rank else ():
                for name in child._non_persistent_buffers_set:
                    if (buffer := child._buffers.get(name)) is not None and buffer.layout is torch.strided:
                        yield f"{paths[child]}.{name}", buffer

    def restore(self, values: Mapping[str, Tensor], shards: Any) -> None:
        """Make all parameters plain ones on the CPU with `values`, the whole tensors by name.

        `shards` are a `sharded_stages.Shards` if layers are sharded, else None.
        """
        named = chain(self._model.named_parameters(), self._model.named_buffers())
        names = {
            tensor: name for name, tensor in named if isinstance(tensor, Absent)
        }  # steps may have exchanged layers
        path = {lost.absent: names.get(lost.absent, lost.absent.absent_path) for lost in self._lost}
        for lost in self._lost:
            _put(lost, None)
        if shards is not None:
            shards.scatter()
            shards.undo()
            self._make_plain(values)
        self._model.to("cpu")
        parameters: dict[Absent, nn.Parameter] = {}
        for lost in self._lost:
            if not lost.absent._is_param:
                _put(lost, values.get(path[lost.absent], lost.value))
                continue
            if lost.absent not in parameters:
                whole = nn.Parameter(values[path[lost.absent]], requires_grad=lost.absent.requires_grad)
                copy_attributes(lost.absent, whole)
                parameters[lost.absent] = whole
            _put(lost, parameters[lost.absent])
        self._model.load_state_dict(dict(values), strict=False)

    def _make_plain(self, values: Mapping[str, Tensor]) -> None:
        whole: dict[int, nn.Parameter] = {}
        for name, p in self._model.named_parameters():
            whole[id(p)] = nn.Parameter(values[name], requires_grad=p.requires_grad)
            copy_attributes(p, whole[id(p)])
        for module in self._model.modules():
            module._parameters.update(
                {name: None if p is None else whole[id(p)] for name, p in module._parameters.items()}
            )

    def _owners(self, parts: Cut) -> dict[str, int]:
        """The stage that answers for each name of the model's state: the last one, whose step ends, for those outside
        of the module."""
        stage_by_id = self._stages_of_layers()
        for _, shell in parts.shells:
            stage_by_id.update(
                (id(t), 0) for t in (*shell._parameters.values(), *shell._buffers.values()) if t is not None
            )
        owners = {}
        for name, value in self._model.state_dict(keep_vars=True).items():
            by_name = next(
                (s for layer, s in zip(self._layers, self._stage_of, strict=True) if name.startswith(f"{layer.name}.")),
                len(self._rank_of) - 1,
            )
            owners[name] = stage_by_id.get(id(value), by_name)
        return owners

    def _stages_of_layers(self) -> dict[int, int]:
        """The first stage of each tensor of a layer, by `id`."""
        found: dict[int, int] = {}
        for layer, stage in zip(self._layers, self._stage_of, strict=True):
            for tensor in (*layer.module.parameters(), *layer.module.buffers()):
                found.setdefault(id(tensor), stage)
        return found

    def _ids_here(self) -> set[int]:
        """The `id` of each tensor that this rank uses: those of its stages, and buffers beside layers."""
        inside = {child for layer in self._layers for child in layer.module.modules()}
        mine = [t for m in self._model.modules() if m not in inside for t in m._buffers.values()]
        for layer, stage in zip(self._layers, self._stage_of, strict=True):
            if self._rank_of[stage] == self._rank:
                mine += [*layer.module.parameters(), *layer.module.buffers()]
        if self._rank_of[0] == self._rank:
            mine += [shell._parameters[name] for shell, name in self.beside_layers]
        return {*map(id, mine)}


class Tied:
    """The parameters that stages on several ranks share. Each of these ranks holds a copy, with an optimizer state of
    its own; as the gradients are summed before the step, the copies stay equal bit by bit.

    Every rank constructs it. `ranks` are those of this rank's pipeline.
    """

    def __init__(self, tensors: StageTensors, ranks: PipelineRanks, topology: Topology) -> None:
        backend = backend_of(topology.device)
        self.by_group: list[tuple[dist.ProcessGroup | None, list[nn.Parameter]]] = []
        """Those of this rank."""
        self.copies: list[nn.Parameter] = []
        """Those of which an earlier rank of the pipeline holds a copy too, which counts and saves it."""
        for holders, named in sorted(tensors.tied().items()):
            group = ranks.group
            if len(holders) < ranks.num_stage_ranks:
                size = ranks.data_size
                group = own_group([[holder * size + i for holder in holders] for i in range(size)], backend)
            if ranks.stage_rank in holders:
                self.by_group.append((group, [*named.values()]))
                self.copies += () if ranks.stage_rank == holders[0] else named.values()

    def sum_gradients(self) -> None:
        """Add up what the stages have computed of their gradients. Every rank calls it, once in a window."""
        for group, parameters in self.by_group:
            sum_gradients(parameters, [group])


def _put(lost: _Lost, value: Tensor | None) -> None:
    holder: dict[str, Any] = lost.module._parameters if lost.absent._is_param else lost.module._buffers
    holder[lost.name] = value


def _under(prefix: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def merge_meta(state: State, pieces: Sequence[Mapping[str, Any]]) -> None:
    """Put what `keep_own` returned on each rank of a pipeline into the JSON part of `state`."""
    state.meta["model"] = {name: value for piece in pieces for name, value in piece["model"].items()}
    for key, saved in state.meta["optimizers"].items():
        saved["state"] = {name: entry for piece in pieces for name, entry in piece["optimizers"][key]["state"].items()}


@contextmanager
def whole(wrapped: Staged, group: dist.ProcessGroup | None, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """While it lasts modules and optimizers of every rank hold plain tensors in the place of what is absent or sharded.

    What the rank that holds a parameter has changed in its value, gradient or `requires_grad` holds afterwards.
    Costs a broadcast of each tensor and gradient, and the memory of the whole model.
    """
    if wrapped.is_whole:
        yield
        return
    from lockstep.strategies.mesh.whole_model import take_hooks

    model = wrapped.model
    staged = wrapped.tensors.staged()
    have = torch.tensor([is_here(t) and t.grad is not None for _, t, _ in staged], dtype=torch.int8).to(wrapped.device)
    dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    """By `id` of what it stands for: that, and the whole tensor."""
    for (_, tensor, source), has_gradient in zip(staged, have.tolist(), strict=True):
        value = _everywhere(tensor.detach(), tensor, source, group)
        gradient = (
            _everywhere(tensor.grad if is_here(tensor) else None, tensor, source, group) if has_gradient else None
        )
        if is_here(tensor) and not hasattr(tensor, "full_tensor"):
            continue
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            value.grad = gradient
        share_attributes(tensor, value)
        made[id(tensor)] = tensor, value
    _exchange(model, optimizers, {key: value for key, (_, value) in made.items()})
    hooks = [] if wrapped.shards is None else take_hooks(model)
    wrapped.is_whole = True
    try:
        yield
    finally:
        wrapped.is_whole = False
        for held, theirs in hooks:
            held.update(theirs)
        _exchange(model, optimizers, {id(value): tensor for tensor, value in made.values()})
        with torch.no_grad():
            for tensor, value in made.values():
                _give_back(tensor, value)


def _everywhere(mine: Tensor | None, like: Tensor, source: int, group: dist.ProcessGroup | None) -> Tensor:
    """A tensor of the rank `source` of the group, whole."""
    if not is_here(like):
        found = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        assert mine is not None
        found = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        found = found.contiguous()
    dist.broadcast(found, group=group, group_src=source)
    return found


def _exchange(model: nn.Module, optimizers: Iterable[Optimizer], others: dict[int, Tensor]) -> None:
    """Put other tensors in the place of those with these ids."""
    for module in model.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if id(tensor) in others:
                    holder[name] = others[id(tensor)]  # type: ignore[assignment]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [others.get(id(p), p) for p in group["params"]]


def _give_back(tensor: Tensor, value: Tensor) -> None:
    """Let what was made of a whole tensor hold for the one that it stood for."""
    if tensor.requires_grad != value.requires_grad:
        tensor.requires_grad_(value.requires_grad)
    if not is_here(tensor):
        return
    tensor.copy_(shard_like(value.detach(), tensor))
    tensor.grad = None if value.grad is None else shard_like(value.grad, tensor)


def shard_like(whole: Tensor, sharded: Tensor) -> Tensor:
    """A tensor that is whole and equal on all ranks, sharded as `sharded` is; nothing is sent."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(sharded, DTensor)
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
