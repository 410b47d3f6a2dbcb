"""The stages of several pipelines sharded over their ranks: torch's fully_shard on each layer of a stage.

Parameters are gathered once a window, before its first forward, and gradients are exchanged once, after the last
backward: how often a schedule runs in between may differ from rank to rank.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage

from lockstep.strategies.mesh.axes import sum_gradients_of, unshardable
from lockstep.strategies.mesh.structure import Structure, keep_containers
from lockstep.strategies.modules.model_changes import shortened
from lockstep.strategies.modules.parameter_hooks import keeping_attributes, share_attributes
from lockstep.strategies.pipeline.stage_run import Stage
from lockstep.strategies.pipeline.staged_module import Staged
from lockstep.strategies.sync.collectives import local


class Shards:
    """The layers of one rank's stages, sharded over the axes of `mesh` besides "pipeline", whose last dimension shards
    and whose first, of two, replicates."""

    def __init__(self, staged: Staged, mesh: DeviceMesh) -> None:
        mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != "pipeline")]
        self._structure = Structure(staged.model)
        self._layers = [layer for stage in staged.stages.values() for layer in stage.layers]
        self._stages: list[Stage] = list(staged.stages.values())
        own = {p for stage in self._stages for p in stage.own}
        layers: Counter[Tensor] = Counter(p for layer in staged.layers for p in layer.module.parameters())
        shared = {p for layer in self._layers for p in layer.parameters() if layers[p] > 1}
        self.whole: list[Tensor] = [*(own | shared).union(*(unshardable(layer, set()) for layer in self._layers))]
        """Parameters that stay whole on each rank: those beside layers, those that several layers share, and those
        that fully_shard cannot shard."""
        ignored = {p for p in self.whole if isinstance(p, nn.Parameter)}
        for module in (*self._layers, *self._stages):  # the stage last: it is the root of its layers
            with keeping_attributes(module):
                fully_shard(module, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
            sum_gradients_of(module)
        for layer in self._layers:
            keep_containers(layer)
        self.gathered = False
        """Whether parameters are whole at the moment, and gradients those of this rank."""
        self._model = staged.model
        self._shard_of = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        self._held: dict[int, tuple[int, int, Tensor]] = {}
        """Of each parameter that was made whole: where it is, how often it was written to by then, its shard here."""
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        """Shards and the whole parameters that `gather` made of them."""
        self._structure.seal()

    def gather(self) -> None:
        """Make the parameters whole. Every rank that holds the same layers calls it."""
        self.gathered = True
        sharded = [p for layer in self._layers for p in layer.parameters()]
        for stage in self._stages:  # which torch does in the first forward: a rank may have no samples for one
            stage._get_fsdp_state()._lazy_init()  # type: ignore[operator]
        for module in (*self._stages, *self._layers):  # the root first: it makes itself known to the layers
            module.unshard()  # type: ignore[operator]
        self._pairs = [*zip(sharded, (p for layer in self._layers for p in layer.parameters()), strict=True)]
        for shard, whole in self._pairs:
            share_attributes(shard, whole)
        self._held = {id(p): (p.data_ptr(), p._version, local(s)) for s, p in self._pairs}

    def follow_trainability(self) -> None:
        """Freeze and unfreeze shards as hooks have done with the whole parameters since `gather`."""
        for shard, whole in self._pairs if self.gathered else ():
            shard.requires_grad_(whole.requires_grad)

    def scatter(self) -> None:
        """Give up what the others hold."""
        self._refuse_written()
        self.gathered = False
        for module in self._layers:
            module.reshard()  # type: ignore[operator]

    def exchange(self, staged: Staged, group: dist.ProcessGroup) -> None:
        """Sum the gradients of a window over the mesh, and shard them and the parameters again.

        What no rank of `group`, that of all pipelines' same stages, has stays None.
        """
        self._refuse_written()
        trained = self._sharded(staged)
        have = torch.tensor([p.grad is not None for p in trained], dtype=torch.int8).to(staged.device)
        dist.all_reduce(have, dist.ReduceOp.MAX, group=group)
        for parameter in trained:  # torch reduces a shard only if every rank has a gradient
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        trains = [p.requires_grad for p in staged.parameters()]  # which hooks may have changed since `gather`
        self.gathered = False
        for stage in self._stages:
            PipelineStage.perform_reduce_grad(SimpleNamespace(submod=stage), 1)  # type: ignore[arg-type]
        for parameter, on in zip(staged.parameters(), trains, strict=True):
            parameter.requires_grad_(on)
        for parameter, used in zip(self._sharded(staged), have.tolist(), strict=True):  # shards again
            if not used:
                parameter.grad = None

    def _refuse_written(self) -> None:
        """Raise RuntimeError for parameters that were written to while they were whole, which would be lost.

        What bypasses version counters, as `.data` does, shows in the bits of this rank's shard.
        """
        apart, held, unseen = {id(p) for p in self.whole}, self._held, {}
        self._held, written = {}, []
        for name, p in self._model.named_parameters():
            if id(p) in apart or id(p) not in held:
                continue
            place, version, shard = held[id(p)]
            if (p.data_ptr(), p._version) != (place, version):
                written.append(name)
            else:
                unseen[name] = (_bits(self._own(p)) == _bits(shard)).all()
        if unseen:
            alike = torch.stack([*unseen.values()]).tolist()  # on an accelerator the host waits, once a window
            written += [name for name, is_alike in zip(unseen, alike, strict=True) if not is_alike]
        if written:
            raise RuntimeError(
                f"weights were changed within an accumulation window ({shortened(written)}), while ranks hold them "
                "whole to compute with them, and the change would be lost; change them once a step, as in "
                "on_before_zero_grad, or use strategy='pipeline'"
            )

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's shard of a parameter, as fully_shard cuts it."""
        count, rank = self._shard_of
        chunks = whole.detach().chunk(count)
        return chunks[rank] if rank < len(chunks) else whole.detach()[:0]

    def _sharded(self, staged: Staged) -> list[nn.Parameter]:
        apart = {id(p) for p in self.whole}
        return [p for p in staged.parameters() if p.requires_grad and id(p) not in apart]

    def undo(self) -> None:
        """Take the layers' classes and hooks off; parameters are left as they are."""
        self._structure.undo()


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bits as integers, so that NaN equals itself and -0 differs from 0."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[real.element_size()])
