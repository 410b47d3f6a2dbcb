"""Where DeepSpeed's engine keeps weights, gradients and optimizer state, and how to read and change them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lockstep.strategies.deepspeed.access import Access
from lockstep.strategies.launch import environment
from lockstep.strategies.modules.model_changes import shortened

_LOOKS = 4
"""Assignments after each of which it is searched for who keeps the values before."""


class Partitions:
    """What the engine keeps of `model` on this rank. `trained` are the parameters that the optimizer steps."""

    def __init__(self, engine: Any, model: nn.Module, trained: list[nn.Parameter], access: Access) -> None:
        self._engine, self._model, self._trained, self._access = engine, model, trained, access
        self.stage = int(engine.zero_optimization_stage())
        self._offloads = engine.zero_cpu_offload()
        self._kept = [flat.grad for flat in self.flats()]
        self._changed, self._versions = False, [parameter._version for parameter in trained]
        self._moves = 0
        """How often it was seen that `data` of parameters was assigned."""
        self._assigned: list[tuple[str, StorageWeakRef]] = []
        """Names of parameters, and the memory that user code has assigned to their `data`."""
        self._written: dict[int, tuple[nn.Parameter, Tensor]] = {}
        """What layers had whole under stage 3, and whether it was changed."""
        self._views = [] if self.stage == 3 else [(parameter, parameter.detach()) for parameter in trained]

    def begin_window(self) -> None:
        """Empty what the engine would add gradients to, or take for this window's."""
        if self._assigned:
            self._refuse_kept()
        if self.stage == 3:
            self.adopt_weights()  # the engine frees what no optimizer steps with the backward
            # a parameter without gradient would be stepped by its last one
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()
        elif self._offloads:
            for flat, gradient in zip(self.flats(), self._kept, strict=True):
                flat.grad = gradient  # the optimizer's zero_grad has dropped the buffers that the engine copies into

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Let the weights that the optimizer steps follow what user code has changed in the model's parameters.

        Calls no collective. Where masters are more precise than parameters, only elements that were changed are taken
        over.
        """
        optimizer, rank = self._engine.optimizer, dist.get_rank()
        if self.stage == 3:
            self._refuse_shared(optimizer.persistent_parameters)
            for parameter in optimizer.persistent_parameters:  # the others are not there to be changed
                self._take_changes(parameter)
            return
        self._changed = self._changed or self._versions != [parameter._version for parameter in self._trained]
        moved = [pair for pair in self._views if pair[0].data_ptr() != pair[1].data_ptr()]  # `.data` was assigned
        if moved:
            self._refuse_shared(self._model.parameters())
            own = {view.untyped_storage().data_ptr() for _, view in self._views}
            theirs = [p for p, _ in moved if p.untyped_storage().data_ptr() not in own]
            self._assigned += [(self._name_of(p), StorageWeakRef(p.untyped_storage())) for p in theirs]
            self._refuse_backups(moved)
            values = [parameter.detach().clone() for parameter, _ in moved]  # two may have been swapped
            for (parameter, view), value in zip(moved, values, strict=True):
                parameter.data = view.copy_(value)
        for parts, high in zip(optimizer.parallel_partitioned_bit16_groups, self.flats(), strict=True):
            self._changed = _take_changes(high, parts[rank]) or self._changed

    def _refuse_shared(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise RuntimeError for two of these with elements in common, as after `a.data = b.data`."""
        if environment.in_plan():  # where tensors have no memory
            return
        with self._access.of_engine():
            spans = sorted((p.data_ptr(), p.numel() * p.element_size(), i, p) for i, p in enumerate(parameters))
        for (place, size, _, one), (begin, _, _, other) in itertools.pairwise(spans):
            if place + size > begin:
                raise _shared(self._name_of(one), f"those of {self._name_of(other)}")

    def _refuse_backups(self, moved: list[tuple[nn.Parameter, Tensor]]) -> None:
        """Raise RuntimeError if user code still holds what it has taken of `data` of one of these before it assigned
        to it: the engine's memory, which gets the new values. Searched for after the first assignments, and then after
        those whose number is a power of two, as it takes some tenths of a second."""
        self._moves += 1
        if self._moves > _LOOKS and self._moves & (self._moves - 1):
            return
        optimizer = self._engine.optimizer
        engines = [view for _, view in moved] + [*optimizer.bit16_groups_flat]
        engines += itertools.chain.from_iterable(optimizer.parallel_partitioned_bit16_groups)
        engines += [getattr(getattr(parameter, "_hp_mapping", None), "lp_fragment", None) for parameter, _ in moved]
        own = set(map(id, engines))
        places = {(view.data_ptr(), view.shape): parameter for parameter, view in moved}
        shapes = {shape for _, shape in places}
        for held in gc.get_objects():
            if type(held) is Tensor and held.shape in shapes and held.layout == torch.strided and id(held) not in own:
                parameter = places.get((held.data_ptr(), held.shape))
                if parameter is not None:
                    raise RuntimeError(
                        f"user code keeps what it has taken of `data` of {self._name_of(parameter)} before it assigned "
                        "other values to it, but DeepSpeed holds weights in one tensor, whose elements are those of "
                        "both; keep a clone() of it, or write in place (copy_)"
                    )

    def _refuse_kept(self) -> None:
        """Raise RuntimeError if user code still holds what it has assigned to `data` of a parameter. To be called when
        no hook of the user's runs, whose variables would hold it."""
        for name, memory in self._assigned:
            if not memory.expired() and gc.collect() >= 0 and not memory.expired():
                raise _shared(name, "those of a tensor that user code keeps")
        self._assigned.clear()

    def take_changed(self) -> bool:
        """Whether user code has changed weights on this rank since the last call. On accelerators changes by way of
        `.data` are not seen."""
        changed, self._changed = self._changed, False
        self._versions = [parameter._version for parameter in self._trained]
        return changed

    def held_whole(self) -> list[nn.Parameter]:
        """What user code can change without `whole`."""
        return self._trained if self.stage < 3 else [*self._engine.optimizer.persistent_parameters]

    def _take_changes(self, parameter: nn.Parameter) -> None:
        """The same for one parameter under stage 3, if it is not empty."""
        piece = self._piece(parameter, None)
        with self._access.of_engine():
            if piece is not None and parameter.numel():
                low = parameter.detach().reshape(-1)[piece.offset : piece.offset + piece.source.numel()]
                self._changed = _take_changes(piece.source, low) or self._changed
                if parameter.requires_grad:  # of which the engine gathers another copy, once it has freed it
                    _take_changes(parameter.ds_tensor[: low.numel()], low)  # type: ignore[attr-defined]

    @torch.no_grad()
    def refuse_written(self, module: nn.Module, trains: bool) -> None:
        """Before the engine frees what a layer has used under stage 3: raise RuntimeError for a parameter that user
        code has changed while it was whole; on accelerators at the next `check_written`."""
        if environment.in_plan():  # where ranks that are not there send nothing
            return
        for parameter in module.parameters(recurse=False):
            cut: Any = parameter
            stays = cut.ds_persist and not (parameter.requires_grad and trains)  # `adopt_weights` takes its changes
            if stays or cut.ds_status.name != "AVAILABLE" or cut.ds_tensor.dtype != cut.dtype:
                continue
            part = parameter.detach().reshape(-1)[dist.get_rank() * cut.ds_tensor.numel() :][: cut.ds_tensor.numel()]
            differs = (part != cut.ds_tensor[: part.numel()].to(part.device)) & (part == part)  # NaN is not a change
            written = differs.any() | (parameter.numel() != cut.ds_numel)
            self._written[cut.ds_id] = parameter, written | self._written.get(cut.ds_id, (None, False))[1]
            if written.is_cpu:
                self.check_written()

    def check_written(self) -> None:
        """Raise RuntimeError if a parameter was changed while a layer had it whole."""
        if not self._written:
            return
        parameters, flags = zip(*self._written.values(), strict=True)
        self._written.clear()
        written = torch.stack(flags).tolist()  # waits for the device once
        names = [self._name_of(p) for p, is_written in zip(parameters, written, strict=True) if is_written]
        if names:
            raise RuntimeError(
                f"{shortened(names)} was changed in the forward or backward of its layer, or in a hook of it, but "
                "ZeRO-3 frees what it has gathered for that and drops the change; change it in a hook such as "
                "on_train_batch_start within `with trainer.whole(module):`, or use strategy='deepspeed_stage_2' or "
                "'fsdp'"
            )

    @contextlib.contextmanager
    def unsharded(self, gathers: bool) -> Iterator[None]:
        """Parameters, and with `gathers` the gradients of a window, are whole while it lasts; changes persist. Every
        rank calls it."""
        parameters = list(self._model.parameters())
        self.adopt_weights()
        cut = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
        hides = self._access.hides_gradients
        with self._access.of_engine():
            if cut:
                cut[0].all_gather(param_list=cut)  # type: ignore[attr-defined]
            for parameter in self._trained if gathers else ():
                parameter.grad = self.gradient(parameter)
        self._access.hides_gradients = hides and not gathers
        try:
            yield
            self._refuse_shared(self._model.parameters())
            with self._access.of_engine(), torch.no_grad():
                for parameter in self._trained if gathers else ():
                    if parameter.grad is None:
                        raise RuntimeError(
                            f"the gradient of {self._name_of(parameter)} was dropped, but ZeRO steps all parameters "
                            "together; set it to zeros, or use strategy='ddp'"
                        )
                    self.set_gradient(parameter, parameter.grad)
                for parameter in cut:
                    if parameter.numel() < parameter.ds_numel:  # type: ignore[attr-defined]
                        raise RuntimeError(
                            "a layer was called within `whole`, which ends with that under ZeRO-3; call it outside"
                        )
                    self._take_changes(parameter)
        finally:
            self._access.hides_gradients = hides
            with self._access.of_engine():
                for parameter in self._trained if gathers else ():
                    parameter.grad = None
                if cut:
                    cut[0].partition(param_list=cut, has_been_updated=True)  # type: ignore[attr-defined]
        if cut:
            self.refresh()
        else:
            self.adopt_weights()

    @torch.no_grad()
    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """All of the gradient that the optimizer will get. Every rank calls it."""
        from deepspeed.utils import safe_get_full_grad

        with self._access.of_engine():
            held, parameter.grad = parameter.grad, None
            gradient = safe_get_full_grad(parameter).to(parameter.dtype)
            parameter.grad = held
        return gradient

    @torch.no_grad()
    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Let this be the gradient of a parameter, where it differs from what the optimizer would get."""
        from deepspeed.utils import safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

        with self._access.of_engine():
            held, parameter.grad = parameter.grad, None
            if self.stage < 3:
                safe_set_full_grad(parameter, gradient.to(torch.float32))
            else:  # what sets all of it asks for more elements than there are, where ranks hold different numbers
                mine = safe_get_local_grad(parameter).clone()
                piece = gradient.reshape(-1)[dist.get_rank() * mine.numel() :][: mine.numel()]
                mine[: piece.numel()] = piece
                safe_set_local_grad(parameter, mine)
            parameter.grad = held

    def flats(self) -> list[Tensor]:
        """This rank's pieces of the weights as the optimizer steps them, several parameters in one tensor."""
        optimizer = self._engine.optimizer
        return optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups

    def gradients(self) -> list[Tensor]:
        """This rank's pieces of the global gradient, once a window is through."""
        if self._offloads:
            if self._engine.device.type == "cuda":
                torch.cuda.synchronize()  # the engine copies them to the host beside the backward
            return [flat.grad for flat in self.flats()]  # type: ignore[misc]
        return [gradient for group in self._engine.optimizer.averaged_gradients.values() for gradient in group]

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(getattr(tensor, "ds_shape", tensor.shape))

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor of this rank for the parameter's group; optimizer state is kept under it."""
        if self.stage == 3:
            optimizer = self._engine.optimizer
            return self.flats()[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]
        return self.flats()[group_of(self._engine.optimizer, parameter)]

    def cuts(self, value: Any) -> bool:
        """Whether ranks hold pieces of a parameter, or of what the optimizer steps in its place."""
        return hasattr(value, "ds_id") or hasattr(value, "_hp_mapping")

    def whole(self, tensor: Tensor, state: Tensor | None = None) -> Tensor:
        """All of a parameter or buffer, or of `state` (a tensor like `flat`) of a parameter. Every rank calls it."""
        piece = self._piece(tensor, state)
        if piece is None:
            return tensor.detach()
        shape = self.shape(tensor)
        buffer = torch.zeros(math.prod(shape), dtype=piece.source.dtype, device=self._engine.device)
        buffer[piece.offset : piece.offset + piece.source.numel()] = piece.source.detach().to(buffer.device)
        dist.all_reduce(buffer)
        return buffer.view(shape)

    def fill(self, tensor: Tensor, read: Callable[[int, int], Tensor], state: Tensor | None = None) -> None:
        """Copy into this rank's piece what `read(offset, numel)` gives of the flattened tensor."""
        piece = self._piece(tensor, state)
        if piece is None:
            tensor.copy_(read(0, tensor.numel()).view(tensor.shape))
        elif piece.source.numel():
            piece.source.copy_(read(piece.offset, piece.source.numel()))

    @torch.no_grad()
    def refresh(self) -> None:
        """Let the parameters that the model computes with follow the weights that the optimizer steps. Every rank calls
        it."""
        optimizer = self._engine.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        for low, high in zip(optimizer.fp16_partitioned_groups_flat, self.flats(), strict=True):
            low.copy_(high)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, other in self._model.named_parameters() if other is parameter)

    def _piece(self, tensor: Any, state: Tensor | None) -> _Piece | None:
        """This rank's piece of a tensor, or None where every rank holds all of it."""
        optimizer, rank = self._engine.optimizer, dist.get_rank()
        if self.stage == 3:
            if not hasattr(tensor, "ds_id"):
                return None
            source = tensor.ds_tensor
            if optimizer.get_param_id(tensor) in optimizer.grad_position:
                index, begin, numel = optimizer.grad_position[optimizer.get_param_id(tensor)]
                source = (self.flats()[index] if state is None else state)[begin : begin + numel]
            offset = rank * source.numel()
            return _Piece(source[: max(0, tensor.ds_numel - offset)], offset)
        if not hasattr(tensor, "_hp_mapping"):
            return None
        mapping = tensor._hp_mapping
        if mapping is None:
            return _Piece((self.flats()[0] if state is None else state)[:0], 0)
        at, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        return _Piece(
            (self.flats()[mapping.param_group_index] if state is None else state)[at : at + numel],
            mapping.lp_fragment_address.start,
        )


def _shared(name: str, other: str) -> RuntimeError:
    return RuntimeError(
        f"`data` of {name} was assigned: its elements are {other}, so that on one process a change of one is a change "
        "of both, but DeepSpeed keeps each parameter by itself; assign a clone(), or tie parameters before fit "
        "(head.weight = embedding.weight)"
    )


class _Piece(NamedTuple):
    source: Tensor
    """A flat view of what this rank holds."""
    offset: int
    """Where it begins in the flattened tensor."""


def group_of(optimizer: Any, parameter: nn.Parameter) -> int:
    """The index of the group that DeepSpeed's optimizer of stage 1 or 2 has a parameter in."""
    groups = enumerate(optimizer.bit16_groups)
    return next(index for index, group in groups if any(parameter is other for other in group))


def _take_changes(high: Tensor, low: Tensor) -> bool:
    """Copy `low` into `high`, but for elements of which `low` is the rounded value. Whether any was another one; False
    on accelerators, where the host would wait for that."""
    low, waits = low.to(high.device), not high.is_cpu
    if high.dtype == low.dtype:
        if not waits and torch.equal(high, low):
            return False
        high.copy_(low)
        return not waits
    is_rounded = high.to(low.dtype) == low
    if not waits and bool(is_rounded.all()):
        return False
    torch.where(is_rounded, high, low.to(high.dtype), out=high)
    return not waits
