"""The module that DeepSpeed's engine wraps, and where the engine keeps what it has cut."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import warnings
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.strategies.base import NO_HOOKS, Loss, StepHooks, split_loss
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.deepspeed.access import Access
from lockstep.strategies.modules.model_changes import own_backward
from lockstep.strategies.modules.side_effect_free import side_effect_free
from lockstep.strategies.modules.step_state import numbers, refuse_changed_numbers
from lockstep.strategies.sync.call_order import END_FORWARD, GATHER, REDUCE, CallOrder


class ZeroStep(nn.Module):
    """What the engine wraps: a module whose forward is a step of the user's module. Knows where the engine keeps what
    it cuts.

    The step and its output pass by the engine's hooks, which would take batches and outputs apart; only the loss goes
    through them.
    """

    engine: Any = None

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.groups: list[list[str]] = []
        """Names of the parameters in each group of the optimizer."""
        self.call: Callable[[], Any] = _nothing
        self.forwarded: Callable[[], Any] = _nothing
        self.last: Callable[[], Any] | None = None
        """A step on the last micro-batch that gave a loss."""
        self.output: Any = None
        self.step_hooks = NO_HOOKS
        self.ran = False
        """Whether the running step has called a submodule."""
        self.counts = True
        """Whether the running step is one that one process would run too."""
        self.arrived: list[int] = []
        """Indices of the parameters in the order in which this window's backwards gave them a gradient."""
        self.in_backward: set[int] = set()
        """Those of the running backward."""
        self.used: set[int] = set()
        """Those of steps that one process would run too."""
        self.called: list[int] = []
        """Indices of submodules in the order in which this window's steps called them, under stage 3."""
        self.call_order: CallOrder | None = None
        """Compares what ranks gather and reduce on the way, from when it is set."""
        self.access = Access()
        self.has_gradients = False
        """Whether the engine holds the final gradient of a window."""

    def attach(
        self,
        optimizer: Optimizer,
        config: dict[str, Any],
        trained: list[nn.Parameter],
        device: torch.device,
        local_rank: int,
    ) -> None:
        """Build the engine. Every rank calls it."""
        self.local_rank = local_rank
        self.before = [(owner, set(vars(owner))) for owner in (*self.model.modules(), *self.model.parameters())]
        self.linear = F.linear  # replaced by ZeRO-3
        self.trained, self.num_modules = trained, len([*self.model.modules()])
        self.hooks: list[Any] = [  # before the engine's own
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note_gradient, i))
            for i, parameter in enumerate(trained)
        ]
        gathers: list[bool] = []  # who read parameters before the running gather or release began

        def begin(*_: Any) -> None:
            gathers.append(self.access.is_users)
            self.access.is_users = False

        def end(*_: Any) -> None:
            self.access.is_users = gathers.pop()

        cuts = config["zero_optimization"]["stage"] == 3
        modules = list(self.model.modules()) if cuts else []
        for i, module in enumerate(modules):  # around the engine's own hooks, which are registered in between
            self.hooks.append(module.register_forward_pre_hook(functools.partial(self._announce, i)))
            self.hooks += [module.register_forward_pre_hook(begin), module.register_forward_hook(begin)]
        accelerator = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
        with _environment(LOCAL_RANK=str(local_rank), **accelerator), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed

            # An operator for inference, which would be compiled here (45 s, and not without g++). Asking which
            # operators could be compiled tries the compiler, so the answer is put in its place.
            vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
            with contextlib.redirect_stdout(io.StringIO()):
                engine, *_ = deepspeed.initialize(
                    model=self, optimizer=optimizer, config=config, dist_init_required=False
                )
        self.__dict__["engine"] = engine  # no child: the engine holds this module
        self.stage = int(engine.zero_optimization_stage())
        self.offloads = engine.zero_cpu_offload()
        self.kept = [flat.grad for flat in self.flats()]
        for module in modules:
            cut = any(not parameter.ds_persist for parameter in module.parameters(recurse=False))  # type: ignore[attr-defined]
            call = functools.partial(self._note_call, modules.index(module) if cut else None)
            self.hooks += [module.register_forward_pre_hook(end), module.register_forward_hook(end)]
            self.hooks += [module.register_forward_pre_hook(call)]
        if self.stage < 3:
            self.views = [(parameter, parameter.detach()) for parameter in trained]
            name = "reduce_gradients" if self.stage == 1 else "overlapping_partition_gradients_reduce_epilogue"
            setattr(engine.optimizer, name, functools.partial(self._reduce_all, getattr(engine.optimizer, name)))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or hasattr(parameter, "ds_id"):
                self.access.guard(name, parameter)
        if engine.optimizer.optimizer is not optimizer:
            raise ValueError(
                f"DeepSpeed replaces {type(optimizer).__name__} by an optimizer of its own, which schedulers do not "
                "reach; use another optimizer"
            )

    def release(self, keep: bool) -> None:
        """Take the engine off; with `keep` the model holds its weights, whole. Every rank calls it."""
        whole = []
        with self.access.of_engine():
            self.adopt_weights()
            for parameter in self.model.parameters():
                value = self.whole(parameter) if self.stage == 3 else parameter.detach()
                whole += [(parameter, value.to(parameter.dtype, copy=True))] if keep else []
        self.detach()
        for parameter, value in whole:
            parameter.data = value

    def detach(self) -> None:
        """Remove the engine and what it has put on the model. Calls no collective; where parameters were cut, they stay
        so."""
        if self.engine is None:
            return
        for hook in self.hooks:
            hook.remove()
        self.views = []
        for parameter in self.model.parameters():
            self.access.release(parameter)
        self.engine.destroy()
        del self.__dict__["engine"]
        F.linear = self.linear
        for owner, names in self.before:
            for name in set(vars(owner)) - names:
                del vars(owner)[name]
            if isinstance(owner, nn.Module):
                vars(owner)["_parameters"] = dict(owner._parameters)

    # ---- a window --------------------------------------------------------------------------------

    def begin_window(self, hooks: StepHooks) -> None:
        self.step_hooks = hooks
        self.arrived, self.called, self.used = [], [], set()
        self.access.hides_gradients = self.has_gradients = False
        optimizer = self.engine.optimizer
        if self.stage == 3:
            # a parameter without gradient would be stepped by its last one
            optimizer.grad_partitions_flat_buffer.zero_()
        elif self.offloads:
            for flat, gradient in zip(self.flats(), self.kept, strict=True):
                flat.grad = (
                    gradient  # the optimizer's own zero_grad has dropped the buffers that the engine copies into
                )

    def each(self, prepare: Callable[[Window], Iterable[MicroBatch]] | None, window: Window) -> Iterator[MicroBatch]:
        """The micro-batches, telling the engine which one ends the window: it must not count them itself."""
        last = len(window.micro_batches) - 1
        for i, micro_batch in enumerate(window.micro_batches if prepare is None else prepare(window)):
            self.engine.set_gradient_accumulation_boundary(i == last)
            yield micro_batch

    def step(self, step_fn: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> Any:
        """What the step returns, through the engine. Where it returns None, gradients of zero."""
        self.call, self.counts = functools.partial(step_fn, batch, batch_idx), True
        return self._run_step()

    def _run_step(self) -> Any:
        self.in_backward = set()
        value = self._through_engine(self._loss)
        self._end_forward()
        return _with_loss(self._taken(), value)

    def weightless_step(self, step_fn: Callable[[Any, int], Any], batch: Any, batch_idx: int) -> Loss:
        """Padding: the other ranks exchange parameters and gradients in this micro-batch, in the order in which they
        are used."""
        self.call, self.counts = functools.partial(step_fn, batch, batch_idx), False
        before = numbers(self.model)
        with no_trace(self.model, self.step_hooks):
            output = self._run_step()
            refuse_changed_numbers(self.model, before)
        value: Any = split_loss(output, 0)[0]
        return Loss(value * 0, 0)

    def evaluate(self, call: Callable[[], Any]) -> Any:
        self.call = call
        self._through_engine(self._output)
        self._end_forward()
        return self._taken()

    def forward(self) -> Tensor | None:
        self.access.is_users = True
        try:
            return self.forwarded()
        finally:
            self.access.is_users = False

    def _through_engine(self, forwarded: Callable[[], Any]) -> Any:
        self.forwarded = forwarded
        with (
            self.access.of_engine(),
            _environment(LOCAL_RANK=str(self.local_rank)),
        ):  # where ZeRO-3 looks for it, and not every launcher sets it
            return self.engine()

    def _taken(self) -> Any:
        """The output of the step, which must not be kept alive here."""
        output, self.output, self.call = self.output, None, _nothing
        return output

    def _output(self) -> None:
        self.output = self.call()

    def _loss(self) -> Any:
        self.ran = False
        self.output = self.call()
        if self.output is not None:
            self.last = self.call if self.stage > 1 else None
            return split_loss(self.output, 0)[0]
        self.counts = False
        if self.stage == 1:
            return torch.stack([parameter.sum() * 0 for parameter in self.trained]).sum()
        if self.last is None or (self.ran and self.stage == 3):
            when = "for a rank's first micro-batch" if self.last is None else "after it had run the model"
            raise RuntimeError(
                f"training_step returned None {when}, but under ZeRO-{self.stage} a rank must do what the others do, "
                "as they exchange tensors on the way; "
                "return Loss(total * 0, 0) for no weight"
            )
        with no_trace(self.model, self.step_hooks):  # do again what the other ranks do now
            value: Any = split_loss(self.last(), 0)[0]
        return value * 0

    def name_of(self, index: int) -> str:
        """Of a submodule, or behind these of a trained parameter, as `call_order` counts them."""
        modules = [name for name, _ in self.model.named_modules()]
        return modules[index] if index < len(modules) else self.names([index - len(modules)])[0]

    def _announce(self, index: int, module: nn.Module, *_: Any) -> None:
        own: list[Any] = list(module.parameters(recurse=False))
        if self.call_order is not None and any(p.ds_status.name != "AVAILABLE" for p in own):
            self.call_order.note(GATHER, index)

    def _end_forward(self) -> None:
        if self.call_order is not None:
            self.call_order.note(END_FORWARD)

    def _note_call(self, index: int | None, *_: Any) -> None:
        self.ran = True
        if index is not None:
            self.called.append(index)

    def _note_gradient(self, index: int, parameter: nn.Parameter) -> None:
        if self.access.is_users:
            raise own_backward(self.names([index]))
        if self.call_order is not None:
            self.call_order.note(REDUCE, self.num_modules + index)
        self.arrived.append(index)
        self.in_backward.add(index)
        if self.counts:
            self.used.add(index)

    def _reduce_all(self, reduce: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """In place of what ends the engine's backward under stages 1 and 2: ranks exchange a gradient for each
        parameter.

        One that this rank's samples did not use gets zeros here, as another rank may have used it.
        """
        optimizer = self.engine.optimizer
        for i, parameter in enumerate(self.trained):
            if i in self.in_backward or (
                self.stage == 1 and optimizer.get_gradient_for_reduction(parameter) is not None
            ):
                continue
            parameter.grad = torch.zeros_like(parameter)
            optimizer.process_gradients(parameter, optimizer._get_param_group_idx(parameter))
        return reduce(*args, **options)

    def order(self) -> int:
        """A number below 2**32 of what this rank exchanged in the window, in its order; equal on ranks that did the
        same."""
        if self.stage == 1 and not self.engine.optimizer.overlap_comm:
            return 0  # whole gradients, reduced in the order of the parameters
        return zlib.crc32(array("q", [*self.arrived, -1, *self.called]).tobytes())

    def unused(self) -> list[int]:
        """The parameters for which no step of this rank gave a gradient."""
        return [i for i in range(len(self.trained)) if i not in self.used] if len(self.used) < len(self.trained) else []

    def names(self, indices: Iterable[int]) -> list[str]:
        """The names of trained parameters."""
        known = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [known[id(self.trained[i])] for i in indices]

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Let the weights that the optimizer steps follow what user code has changed in the model's parameters.

        Calls no collective. Where masters are more precise than parameters, only elements that were changed are taken
        over.
        """
        optimizer, rank = self.engine.optimizer, dist.get_rank()
        if self.stage == 3:
            for parameter in optimizer.persistent_parameters:  # the others are not there to be changed
                self._take_changes(parameter)
            return
        for parameter, view in self.views:
            if parameter.data_ptr() != view.data_ptr():  # `.data` was assigned
                view.copy_(parameter)
                parameter.data = view
        for parts, high in zip(optimizer.parallel_partitioned_bit16_groups, self.flats(), strict=True):
            _take_changes(high, parts[rank])

    def _take_changes(self, parameter: nn.Parameter) -> None:
        """The same for one parameter under stage 3, if it is not empty."""
        piece = self._piece(parameter, None)
        with self.access.of_engine():
            if piece is not None and parameter.numel():
                low = parameter.detach().reshape(-1)[piece.offset : piece.offset + piece.source.numel()]
                _take_changes(piece.source, low)

    def forget_gradients(self) -> None:
        """A window that counts nothing is not stepped: the next one must not add to it."""
        with self.access.of_engine():
            self.engine.optimizer.zero_grad()
        self.access.hides_gradients = self.has_gradients = False
        if self.stage < 3:
            self.engine.optimizer.micro_step_id = -1

    # ---- what user code sees ---------------------------------------------------------------------

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Parameters, and gradients where there are, whole while it lasts; what was changed then holds. Every rank
        calls it."""
        parameters = list(self.model.parameters())
        self.adopt_weights()
        cut = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
        hides, gathers = self.access.hides_gradients, self.has_gradients
        with self.access.of_engine():
            if cut:
                cut[0].all_gather(param_list=cut)  # type: ignore[attr-defined]
            for parameter in self.trained if gathers else ():
                parameter.grad = self.gradient(parameter)
        self.access.hides_gradients = hides and not gathers
        try:
            yield
            with self.access.of_engine(), torch.no_grad():
                for parameter in self.trained if gathers else ():
                    if parameter.grad is None:
                        raise RuntimeError(
                            f"the gradient of {self.names([self.trained.index(parameter)])[0]} was dropped, but ZeRO "
                            "steps all "
                            "parameters together; set it to zeros, or use strategy='ddp'"
                        )
                    self.set_gradient(parameter, parameter.grad)
                for parameter in cut:
                    if parameter.numel() < parameter.ds_numel:  # type: ignore[attr-defined]
                        raise RuntimeError(
                            "a layer was called within `whole`, which ends with that under ZeRO-3; call it outside"
                        )
                    self._take_changes(parameter)
        finally:
            self.access.hides_gradients = hides
            with self.access.of_engine():
                for parameter in self.trained if gathers else ():
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

        with self.access.of_engine():
            held, parameter.grad = parameter.grad, None
            gradient = safe_get_full_grad(parameter).to(parameter.dtype)
            parameter.grad = held
        return gradient

    @torch.no_grad()
    def set_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Let this be the gradient of a parameter, where it differs from what the optimizer would get."""
        from deepspeed.utils import safe_get_local_grad, safe_set_full_grad, safe_set_local_grad

        with self.access.of_engine():
            held, parameter.grad = parameter.grad, None
            if self.stage < 3:
                safe_set_full_grad(parameter, gradient.to(torch.float32))
            else:  # what sets all of it asks for more elements than there are, where ranks hold different numbers
                mine = safe_get_local_grad(parameter).clone()
                piece = gradient.reshape(-1)[dist.get_rank() * mine.numel() :][: mine.numel()]
                mine[: piece.numel()] = piece
                safe_set_local_grad(parameter, mine)
            parameter.grad = held

    # ---- where things are ------------------------------------------------------------------------

    def flats(self) -> list[Tensor]:
        """This rank's pieces of the weights as the optimizer steps them, several parameters in one tensor."""
        optimizer = self.engine.optimizer
        return optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups

    def gradients(self) -> list[Tensor]:
        """This rank's pieces of the global gradient, once a window is through."""
        if self.offloads:
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()  # the engine copies them to the host beside the backward
            return [flat.grad for flat in self.flats()]  # type: ignore[misc]
        return [gradient for group in self.engine.optimizer.averaged_gradients.values() for gradient in group]

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that the optimizer steps, by canonical name, in the optimizer's order."""
        parameters = dict(self.model.named_parameters())
        return ((name, parameters[name]) for group in self.groups for name in group if parameters[name].requires_grad)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(getattr(tensor, "ds_shape", tensor.shape))

    def flat(self, parameter: nn.Parameter) -> Tensor:
        """The flat tensor of this rank for the parameter's group; optimizer state is kept under it."""
        if self.stage == 3:
            optimizer = self.engine.optimizer
            return self.flats()[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]
        return self.flats()[self.engine.optimizer._get_param_group_idx(parameter)]

    def cuts(self, value: Any) -> bool:
        """Whether ranks hold pieces of a parameter, or of what the optimizer steps in its place."""
        return hasattr(value, "ds_id") or hasattr(value, "_hp_mapping")

    def whole(self, tensor: Tensor, state: Tensor | None = None) -> Tensor:
        """All of a parameter or buffer, or of `state` (a tensor like `flat`) of a parameter. Every rank calls it."""
        piece = self._piece(tensor, state)
        if piece is None:
            return tensor.detach()
        shape = self.shape(tensor)
        buffer = torch.zeros(math.prod(shape), dtype=piece.source.dtype, device=self.engine.device)
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

    def refresh(self) -> None:
        """Let the parameters that the model computes with follow the weights that the optimizer steps. Every rank calls
        it."""
        optimizer = self.engine.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        for low, high in zip(optimizer.fp16_partitioned_groups_flat, self.flats(), strict=True):
            low.copy_(high)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _piece(self, tensor: Any, state: Tensor | None) -> _Piece | None:
        """This rank's piece of a tensor, or None where every rank holds all of it."""
        optimizer, rank = self.engine.optimizer, dist.get_rank()
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
            return _Piece(self.flats()[0][:0], 0)
        at, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
        return _Piece(
            (self.flats()[mapping.param_group_index] if state is None else state)[at : at + numel],
            mapping.lp_fragment_address.start,
        )


class _Piece(NamedTuple):
    source: Tensor
    """A flat view of what this rank holds."""
    offset: int
    """Where it begins in the flattened tensor."""


def _take_changes(high: Tensor, low: Tensor) -> None:
    """Copy `low` into `high`, but for elements of which `low` is the rounded value."""
    if high.dtype == low.dtype:
        high.copy_(low)
        return
    low = low.to(high.device)
    torch.where(high.to(low.dtype) == low, high, low.to(high.dtype), out=high)


@contextlib.contextmanager
def no_trace(model: nn.Module, hooks: StepHooks) -> Iterator[None]:
    """Run a step whose logged values, counters and random numbers do not count."""
    with side_effect_free(model), hooks.log_scope(0):
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while, where they are not set."""
    missing = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def _nothing() -> None: ...


def _with_loss(output: Any, value: Any) -> Any:
    """What a step returned, with the loss that went through the engine's hooks in its place."""
    if output is None:
        return Loss(value, 0)
    if isinstance(output, Loss):
        return Loss(value, output.count)
    return {**output, "loss": _with_loss(output["loss"], value)} if isinstance(output, Mapping) else value
