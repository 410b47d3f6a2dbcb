"""A model cut into stages that still runs the user's own code.

On every rank the pipelined module runs its own `forward`, on the same inputs. What differs are its layers:

- a layer of an earlier stage computes nothing: it returns a tensor that has a shape and no data;
- the first layer of this stage finds such tensors among its arguments, and takes what the stage before has
  sent in their place;
- the first layer of a later stage ends the call: its arguments are what is sent on.

So positions, masks and all else that follows from the inputs alone is recomputed on every stage, and only
what layers have computed travels. A rehearsal on tensors without data finds out, for each shape of the inputs,
what travels where; it is the same on every rank, so nothing is asked and no shape is sent.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
)
from torch.utils._pytree import tree_any, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.data.permutation import mix
from lockstep.strategies.launch.rng import kept_streams, seed_streams
from lockstep.strategies.modules.absent import Absent, is_here
from lockstep.strategies.pipeline.microbatch_state import StepState
from lockstep.strategies.pipeline.partition import Cut
from lockstep.strategies.pipeline.shape_inference import Blank, Mode

MAX_LAYOUTS = 512
"""Shapes of inputs whose rehearsal is kept: some kilobytes each."""


class Message(NamedTuple):
    """What travels from one stage to the next."""

    leaves: tuple[int, ...]
    """Places among the flattened arguments of the call with which the next stage begins."""
    tensors: tuple[Tensor, ...]
    """Shapes, dtypes and requires_grad, as tensors on the meta device."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class Layout(NamedTuple):
    """What a rehearsal found out."""

    key: Any
    """What the inputs look like."""
    messages: list[Message]
    """From stage i to stage i + 1."""
    outputs: dict[tuple[int, int], Any]
    """What a layer returns in its n-th call, without data."""
    result: Any
    """What the module returns, without data."""


class Leave(BaseException):
    """Leaves the user's code where this stage's part of it ends. No `Exception`, so that user code does not catch
    it."""

    def __init__(self, tensors: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(slots=True)
class _Run:
    """One pass of a stage (or of a rehearsal) through the user's code."""

    stage: int = 0
    received: tuple[Tensor, ...] = ()
    arrive: Callable[[], None] | None = None
    """Waits until `received` is there, where it may be on its way."""
    layout: Layout | None = None
    noise: int | None = None
    """Seed of the random numbers that layers draw."""
    wants: str = "stage"
    """"stage", "inputs" (leave as soon as they are known), "evaluation" (all stages of this rank) or "rehearsal"."""
    entered: bool = False
    inside: bool = False
    started: bool = False
    calls: Counter[int] = field(default_factory=Counter)
    messages: list[Message] = field(default_factory=list)
    outputs: dict[tuple[int, int], Any] = field(default_factory=dict)


class _Lost(NamedTuple):
    """A parameter or buffer that is on another rank."""

    module: nn.Module
    name: str
    value: Tensor | None
    """A buffer that is not part of the state, as it was."""
    absent: Absent


class Staged(nn.Module):
    """The user's model, of which this rank holds some stages: what `Pipeline.setup_module` returns.

    `stage_of` is the stage of each layer, `rank_of` the rank (in the pipeline's group) of each stage. In the place of
    what other ranks hold the model has `Absent` tensors; this module's own `parameters()` are those of this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Cut,
        stage_of: Sequence[int],
        rank_of: Sequence[int],
        rank: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.model = model
        self.name = parts.name or type(parts.net).__name__
        self.layers, self.stage_of, self.rank_of, self.rank, self.device = (
            parts.layers,
            list(stage_of),
            list(rank_of),
            rank,
            device,
        )
        self.num_stages = len(rank_of)
        self.here = [stage for stage in range(self.num_stages) if rank_of[stage] == rank]
        self.group: dist.ProcessGroup | None = None
        self.splits_backward = False
        """Whether the schedule walks back to inputs and weights apart: torch then detaches outputs in place, which
        views refuse."""
        self._parts = parts
        self._learned: Layout | None = None
        self._modes = Mode()
        self._run: _Run | None = None
        self._layouts: dict[Any, Layout] = {}
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._owner = self._owners(parts)
        own = [(shell, name, p) for _, shell in parts.shells for name, p in shell._parameters.items() if p is not None]
        self._own = [(shell, name) for shell, name, _ in own]
        self._shadows = [self._shadow(layer.module) for layer in self.layers]
        with self._modes:
            self._own_shadows = [
                self._modes.from_tensor(p.detach()).to(device).requires_grad_(p.requires_grad) for _, _, p in own
            ]
        self._edits_input = [
            any(getattr(child, "inplace", False) for child in layer.module.modules()) for layer in self.layers
        ]
        self._lost: list[_Lost] = []
        self._replace_absent()
        self._patch()
        self.stages = {stage: self._stage(stage) for stage in self.here}
        """What torch runs, by the index of the stage."""
        self.is_whole = False
        """Whether the whole model is shown on every rank at the moment."""
        self.state: StepState | None = None
        """What steps do to the model beside its layers, where that is watched."""
        self.shards: Any = None
        """Where layers are sharded over ranks: a `pipeline_shard.Shards`."""

    # ---- parameters and names ----------------------------------------------------------------------

    def is_here(self, name: str) -> bool:
        """Whether this rank answers for the tensor `name` of the model's state."""
        return self.rank_of[self._owner[name]] == self.rank

    def staged(self) -> list[tuple[str, Tensor, int]]:
        """Name, tensor and rank of each parameter and buffer that is on one stage, in the same order on all ranks.

        Others, outside of the pipelined module or buffers beside layers, are on every rank.
        """
        stage_by_id = {id(lost.absent): lost.absent.stage for lost in self._lost}
        stage_by_id.update((id(shell._parameters[name]), 0) for shell, name in self._own)
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            stage_by_id.update((id(t), stage) for t in (*layer.module.parameters(), *layer.module.buffers()))
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return [(name, t, self.rank_of[stage_by_id[id(t)]]) for name, t in named if id(t) in stage_by_id]

    def rank_of_name(self, name: str) -> int:
        """The rank of the pipeline that answers for the tensor `name` of the model's state."""
        return self.rank_of[self._owner[name]]

    @property
    def state_names(self) -> set[str]:
        """All names of the model's state, on whatever rank they lie."""
        return set(self._owner)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank holds."""
        return ((name, p) for name, p in super().named_parameters(*args, **options) if is_here(p))

    def _make_plain(self, values: Mapping[str, Tensor]) -> None:
        whole = {
            id(p): nn.Parameter(values[name], requires_grad=p.requires_grad)
            for name, p in self.model.named_parameters()
        }
        for module in self.model.modules():
            module._parameters.update(
                {name: None if p is None else whole[id(p)] for name, p in module._parameters.items()}
            )

    @property
    def statistics(self) -> list[Tensor]:
        """What BatchNorm layers of this rank have measured."""
        layers = [layer.module for layer, stage in zip(self.layers, self.stage_of, strict=True) if stage in self.here]
        norms = [
            child for layer in layers for child in layer.modules() if isinstance(child, nn.modules.batchnorm._BatchNorm)
        ]
        return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Undo the placement: plain modules on the CPU with plain parameters; `values` are the whole tensors by
        name."""
        self._unpatch()
        for lost in self._lost:
            self._put(lost, None)
        if self.shards is not None:
            self.shards.scatter()
            self.shards.undo()
            self._make_plain(values)
        self.model.to("cpu")
        parameters: dict[Absent, nn.Parameter] = {}
        for lost in self._lost:
            if not lost.absent._is_param:
                self._put(lost, values.get(lost.absent.path, lost.value))
                continue
            if lost.absent not in parameters:
                whole = nn.Parameter(values[lost.absent.path], requires_grad=lost.absent.requires_grad)
                parameters[lost.absent] = whole
            self._put(lost, parameters[lost.absent])
        self.model.load_state_dict(dict(values), strict=False)

    # ---- running -----------------------------------------------------------------------------------

    def layout_of(self, step: Callable[[], Any]) -> Layout | None:
        """What travels where when `step()` calls the pipelined module; None where it returned None before."""
        try:
            self._refuse_uncalled(self._pass(_Run(wants="inputs"), step))
        except Leave:
            return self._learned
        return None

    def run_stage(
        self,
        stage: int,
        received: tuple[Tensor, ...],
        arrive: Callable[[], None],
        layout: Layout,
        noise: int,
        step: Callable[[], Any],
    ) -> tuple[Any, tuple[Tensor, ...] | None]:
        """Run `step()` as far as this stage goes; `arrive()` waits until `received` is there.

        Returns what it returned on the last stage, and on other stages what is to be sent; None where the step
        returned None before it called the pipelined module.
        """
        run = _Run(stage=stage, received=received, arrive=arrive, layout=layout, noise=noise)
        try:
            output = self._pass(run, step)
        except Leave as left:
            return None, left.tensors
        if not run.entered:
            self._refuse_uncalled(output)
        return output, None

    def run_evaluation(self, noise: int, step: Callable[[], Any]) -> Any:
        """Run `step()` once over all stages; its value on the rank of the last stage, None on the others."""
        try:
            return self._pass(_Run(wants="evaluation", noise=noise), step)
        except Leave:
            return None

    def _refuse_uncalled(self, output: Any) -> None:
        if output is not None:
            raise ValueError(
                f"a pipelined module is called once a step, but the step returned a loss without calling {self.name}; "
                "call it, or name another module"
            )

    def _pass(self, run: _Run, step: Callable[[], Any]) -> Any:
        watch, left, output = self._watch(run), None, None
        outer, self._run = self._run, run
        try:
            with watch:
                try:
                    output = step()
                except Leave as leaving:
                    left = leaving
        finally:
            self._run = outer
        if left is not None:
            raise left
        return output

    def _watch(self, run: _Run) -> AbstractContextManager[None]:
        """What a run of the step may do to the model beside its layers."""
        if self.state is None:
            return nullcontext()
        if run.wants == "stage":
            return self.state.run(run.stage == self.num_stages - 1)
        return self.state.rehearsal() if run.wants == "inputs" else self.state.evaluation()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """While it lasts the parameters of this rank's layers are whole."""
        if self.shards is None:
            yield
            return
        self.shards.gather()
        try:
            yield
        finally:
            self.shards.scatter()

    # ---- the stand-in of the pipelined module --------------------------------------------------------

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None:
            if self.is_whole and self.shards is not None:
                raise RuntimeError(
                    f"{self.name} was called within whole(), where its parameters are not sharded as it computes with "
                    "them; "
                    "call it outside of the block"
                )
            with torch.no_grad():
                return self._everywhere(args, kwargs)
        if run.inside:
            return self._parts.net._call_impl(*args, **kwargs)
        if run.entered:
            raise RuntimeError(
                f"a pipelined module is called once a step, but the step calls {self.name} a second time; join the "
                "calls into one, or use another strategy"
            )
        run.entered = True
        if self.state is not None and run.stage == self.num_stages - 1:
            self.state.calling()
        if run.wants == "inputs":
            self._learned = self._rehearsed(args, kwargs)
            raise Leave
        if run.wants == "evaluation":
            layout = self._rehearsed(args, kwargs)
            is_last, result = self._through(layout, args, kwargs, run.noise)
            if not is_last:
                raise Leave
            return result
        if _looks(self._parts.net, args, kwargs) != run.layout.key:  # type: ignore[union-attr]
            raise RuntimeError(
                f"shapes of what {self.name} is called with must follow from the shapes of the batch in a pipeline, "
                "but two batches of one shape led to two; pad them alike"
            )
        return self._enter(run, args, kwargs)

    def _enter(self, run: _Run, args: Any, kwargs: Any) -> Any:
        if run.noise is not None:
            seed_streams(mix(run.noise, run.stage + 1))
        outer, self._run, run.inside = self._run, run, True
        try:
            with self._without_own_parameters() if run.stage else nullcontext():
                result = self._parts.net._call_impl(*args, **kwargs)
        finally:
            self._run, run.inside = outer, False
        if run.stage < self.num_stages - 1:
            raise RuntimeError(
                f"{self.name} returned on stage {run.stage} before a layer of stage {run.stage + 1} was called"
            )
        if tree_any(lambda leaf: isinstance(leaf, FakeTensor), result):
            raise RuntimeError(
                f"{self.name} returns a value that layers of an earlier stage have computed; only what the next layer "
                "is called with travels between stages"
            )
        return result

    def _through(self, layout: Layout, args: Any, kwargs: Any, noise: int | None) -> tuple[bool, Any]:
        """The stages of this rank one after the other, receiving and sending; (whether the last was among them, its
        result)."""
        carried: tuple[Tensor, ...] = ()
        for stage in self.here:
            if stage and self.rank_of[stage - 1] != self.rank:
                carried = self._receive(layout.messages[stage - 1], self.rank_of[stage - 1])
            try:
                return True, self._enter(
                    _Run(stage=stage, received=carried, layout=layout, noise=noise, entered=True), args, kwargs
                )
            except Leave as left:
                carried = left.tensors
                if self.rank_of[stage + 1] != self.rank:
                    self._send(carried, self.rank_of[stage + 1])
        return False, None

    def _everywhere(self, args: Any, kwargs: Any) -> Any:
        """Outside of a step: every rank calls it alike and gets the result, without gradient."""
        layout = self._rehearsed(args, kwargs)
        with self.gathered():
            is_last, result = self._through(layout, args, kwargs, None)
        leaves, spec = tree_flatten(result if is_last else layout.result)
        source = self.rank_of[-1]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[i] = (
                    leaf.contiguous() if is_last else torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                )
                dist.broadcast(leaves[i], group=self.group, group_src=source)
        return tree_unflatten(leaves, spec)

    def _send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        for work, _ in self._sent:  # so that this rank is one batch ahead at most
            work.wait()  # type: ignore[union-attr]
        self._sent = [(dist.isend(t, group=self.group, group_dst=rank), t) for t in tensors]

    def _receive(self, message: Message, rank: int) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty_like(t, device=self.device) for t in message.tensors)
        for tensor in tensors:
            dist.recv(tensor, group=self.group, group_src=rank)
        return tensors

    # ---- the stand-in of a layer ---------------------------------------------------------------------

    def _call_layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        run, stage = self._run, self.stage_of[index]
        if run is None or not run.inside:  # called by itself, or again in the backward of a checkpointed layer
            if stage not in self.here:
                raise RuntimeError(
                    f"{self.layers[index].name} lies on another rank of the pipeline, so it cannot be called outside "
                    f"of {self.name}"
                )
            if stage and tree_any(lambda leaf: hasattr(leaf, "received"), (args, kwargs)):
                args, kwargs = self._real_arguments(index, args, kwargs)
            return self._calls[index](*args, **kwargs)
        if run.wants == "rehearsal":
            return self._rehearse_layer(run, index, args, kwargs)
        if stage == run.stage:
            if stage:
                args, kwargs = self._incoming(run, index, args, kwargs)
            return self._calls[index](*args, **kwargs)
        if stage > run.stage:
            raise Leave(self._outgoing(run, index, args, kwargs))
        call = run.calls[index]
        run.calls[index] += 1
        # A new object a call: it is told apart from that of another micro-batch.
        blank = run.layout.outputs[index, call]  # type: ignore[union-attr]
        return blank.tensor() if isinstance(blank, Blank) else tree_map_only(Blank, Blank.tensor, blank)

    def _incoming(self, run: _Run, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not run.started:
            run.started = True
            if run.arrive is not None:
                run.arrive()
            leaves = tree_leaves((args, kwargs))
            copies = self._edits_input[index] and torch.is_grad_enabled()  # what is received is a leaf of the graph
            for i, tensor in zip(run.layout.messages[run.stage - 1].leaves, run.received, strict=True):  # type: ignore[union-attr]
                leaves[i].received = tensor.clone() if copies else tensor
        return self._real_arguments(index, args, kwargs)

    def _real_arguments(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not kwargs and all(type(arg) is Tensor for arg in args):
            return args, kwargs
        return tree_map_only(FakeTensor, functools.partial(self._real, index), (args, kwargs))

    def _real(self, index: int, leaf: Tensor) -> Tensor:
        """What was received for a tensor without data."""
        found = getattr(leaf, "received", None)
        if found is None:
            raise RuntimeError(
                f"{self.layers[index].name} takes a value that layers of an earlier stage have computed and that is "
                "not handed from layer to layer; "
                "compute it once before the first layer and pass it to each, or choose split so that all who use it "
                "lie on one stage"
            )
        return found

    def _outgoing(self, run: _Run, index: int, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        message = run.layout.messages[run.stage]  # type: ignore[union-attr]
        leaves = tree_leaves((args, kwargs))
        tensors = []
        for i, expected in zip(message.leaves, message.tensors, strict=True):
            tensor = self._real(index, leaves[i]) if isinstance(leaves[i], FakeTensor) else leaves[i]
            if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
                found, rehearsed = f"{list(tensor.shape)} {tensor.dtype}", f"{list(expected.shape)} {expected.dtype}"
                raise RuntimeError(
                    f"shapes and dtypes within {self.name} must follow from those of its inputs, "
                    f"but {self.layers[index].name} is given {found} where the rehearsal gave {rehearsed}"
                )
            copied = isinstance(tensor, nn.Parameter) or (self.splits_backward and tensor._base is not None)
            tensors.append(tensor.clone(memory_format=torch.contiguous_format) if copied else tensor.contiguous())
        return tuple(tensors)

    def forget_layouts(self) -> None:
        """Find out again what travels, as other parameters are trained."""
        for layer, shadow in zip(self.layers, self._shadows, strict=True):
            for mine, theirs in zip(layer.module.parameters(), shadow.parameters(), strict=True):
                theirs.requires_grad_(mine.requires_grad)
        for (shell, name), own in zip(self._own, self._own_shadows, strict=True):
            own.requires_grad_(shell._parameters[name].requires_grad)  # type: ignore[union-attr]
        self._layouts.clear()

    def watch_state(self) -> None:
        """Follow what steps change beside the layers, from now on."""
        here = [layer for layer, stage in zip(self.layers, self.stage_of, strict=True) if stage in self.here]
        self.state = StepState(self.model, self.layers, here)

    # ---- rehearsal -----------------------------------------------------------------------------------

    def _rehearsed(self, args: Any, kwargs: Any) -> Layout:
        key = _looks(self._parts.net, args, kwargs)
        layout = self._layouts.get(key)
        if layout is None:
            run = _Run(wants="rehearsal", inside=True, entered=True)
            outer, self._run = self._run, run
            try:
                with torch.enable_grad(), kept_streams(), self._without_own_parameters():
                    result = self._parts.net.forward(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise ValueError(
                    f"what {self.name} does between its layers must follow from shapes in a pipeline, but it looks at "
                    "values that "
                    f"layers have computed ({error.func}); decide within one layer, or use strategy='ddp' or 'fsdp'"
                ) from error
            finally:
                self._run = outer
            if run.stage < self.num_stages - 1:
                missing = self.layers[self.stage_of.index(run.stage + 1)].name
                raise ValueError(
                    f"{self.name} called no layer of stage {run.stage + 1}, which begins with {missing}; "
                    "define layers in the order in which they are called, or give split"
                )
            result = tree_map_only(FakeTensor, torch.Tensor.detach, result)
            layout = self._layouts[key] = Layout(key, run.messages, run.outputs, result)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.pop(next(iter(self._layouts)))
        return layout

    def _rehearse_layer(self, run: _Run, index: int, args: Any, kwargs: Any) -> Any:
        name, stage = self.layers[index].name, self.stage_of[index]
        if stage < run.stage:
            raise ValueError(
                f"{name} is called after layers of stage {run.stage}, but lies on stage {stage}: stages follow the "
                "order in which layers are defined; "
                "define it where it is used, or choose split so that both lie on one stage"
            )
        if stage > run.stage + 1:
            raise ValueError(
                f"{self.name} calls {name} of stage {stage} before any layer of stage {run.stage + 1}; define layers "
                "in the order in which they are called"
            )
        if stage > run.stage:
            leaves = tree_leaves((args, kwargs))
            places = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, FakeTensor)}
            if not places:
                raise ValueError(
                    f"{name} begins stage {stage} but takes nothing that the layers before it have computed; give split"
                )
            chosen = tuple(sorted(places.values()))
            tensors = tuple(
                torch.empty(
                    leaves[i].shape, dtype=leaves[i].dtype, device="meta", requires_grad=leaves[i].requires_grad
                )
                for i in chosen
            )
            run.messages.append(Message(chosen, tensors))
            run.stage = stage
        with self._modes:
            output = self._shadows[index](*args, **kwargs)
        call = run.calls[index]
        run.calls[index] += 1
        run.outputs[index, call] = tree_map_only(FakeTensor, Blank, output)
        return output

    @contextmanager
    def _without_own_parameters(self) -> Iterator[None]:
        """Parameters beside layers belong to the first stage: for the others they are values that it has computed."""
        before = [shell.__dict__.get(name) for shell, name in self._own]
        for (shell, name), shadow in zip(self._own, self._own_shadows, strict=True):
            shell.__dict__[name] = shadow  # found before what `_parameters` holds
        try:
            yield
        finally:
            for (shell, name), value in zip(self._own, before, strict=True):
                if value is None:
                    del shell.__dict__[name]
                else:
                    shell.__dict__[name] = value

    # ---- taking the model apart ----------------------------------------------------------------------

    def _shadow(self, module: nn.Module) -> nn.Module:
        """A copy without data, as if on the device."""
        with FakeCopyMode(self._modes):
            shadow = copy.deepcopy(module)
        moved: dict[int, Tensor] = {}
        with self._modes:
            for child in shadow.modules():
                for holder in (child._parameters, child._buffers):
                    for name, tensor in holder.items():
                        if tensor is not None and tensor.device != self.device:
                            if id(tensor) not in moved:
                                there = tensor.detach().to(self.device)
                                moved[id(tensor)] = (
                                    nn.Parameter(there, requires_grad=tensor.requires_grad)
                                    if isinstance(tensor, nn.Parameter)
                                    else there
                                )
                            holder[name] = moved[id(tensor)]  # type: ignore[assignment]
        return shadow

    def _stage(self, index: int) -> Stage:
        layers = [layer.module for layer, stage in zip(self.layers, self.stage_of, strict=True) if stage == index]
        own = [shell._parameters[name] for shell, name in self._own] if index == 0 else []
        return Stage(index, layers, [p for p in own if p is not None])

    def _owners(self, parts: Cut) -> dict[str, int]:
        """The stage that answers for each name of the model's state; what lies outside of the module is the last one's,
        whose step ends."""
        stage_by_id: dict[int, int] = {}
        for _, shell in parts.shells:
            stage_by_id.update(
                (id(t), 0) for t in (*shell._parameters.values(), *shell._buffers.values()) if t is not None
            )
        for layer, stage in zip(self.layers, self.stage_of, strict=True):
            stage_by_id.update((id(t), stage) for t in (*layer.module.parameters(), *layer.module.buffers()))
        owners = {}
        for name, value in self.model.state_dict(keep_vars=True).items():
            by_name = next(
                (s for layer, s in zip(self.layers, self.stage_of, strict=True) if name.startswith(f"{layer.name}.")),
                self.num_stages - 1,
            )
            owners[name] = stage_by_id.get(id(value), by_name)
        return owners

    def _replace_absent(self) -> None:
        """Give up what other ranks hold and move the rest to the device."""
        places = [
            (child, name, stage)
            for layer, stage in zip(self.layers, self.stage_of, strict=True)
            if stage not in self.here
            for child in layer.module.modules()
            for name in (*child._parameters, *child._buffers)
        ]
        places += [] if 0 in self.here else [(shell, name, 0) for shell, name in self._own]
        known = {(id(module), name) for module, name, _ in places}
        places += [  # names for the same parameter elsewhere
            (module, name, -1)
            for module in self.model.modules()
            for name in (*module._parameters, *module._buffers)
            if (id(module), name) not in known
        ]
        paths = {module: path for path, module in self.model.named_modules()}
        made: dict[int, Absent] = {}
        alive: list[Tensor] = []  # until all are listed, so that ids are told apart
        for module, name, stage in places:
            is_parameter = name in module._parameters
            value = module._parameters[name] if is_parameter else module._buffers[name]
            if value is None or (stage < 0 and id(value) not in made):
                continue
            alive.append(value)
            if id(value) not in made:
                path = f"{paths[module]}.{name}" if paths[module] else name
                made[id(value)] = Absent(value, path, stage, self.device, is_parameter)
            kept = value if name in module._non_persistent_buffers_set else None
            self._lost.append(_Lost(module, name, kept, made[id(value)]))
        for lost in self._lost:
            self._put(lost, None)
        alive.clear()
        self.model.to(self.device)
        for lost in self._lost:
            self._put(lost, lost.absent)

    @staticmethod
    def _put(lost: _Lost, value: Tensor | None) -> None:
        (lost.module._parameters if lost.absent._is_param else lost.module._buffers)[lost.name] = value  # type: ignore[assignment]

    def _patch(self) -> None:
        """Put the stand-ins in the place of the calls, on the objects: names, types, attributes and copies stay the
        user's.

        Hooks of a module run where it runs for real.
        """
        modules = [self._parts.net, *(layer.module for layer in self.layers)]
        self._compiled = {module: module._compiled_call_impl for module in modules}
        self._calls = [layer.module._compiled_call_impl or layer.module._call_impl for layer in self.layers]
        self._parts.net._compiled_call_impl = self._call
        for index, layer in enumerate(self.layers):
            layer.module._compiled_call_impl = functools.partial(self._call_layer, index)

    def _unpatch(self) -> None:
        for module, call in self._compiled.items():
            module._compiled_call_impl = call


class Stage(nn.Module):
    """What torch's PipelineStage runs: one stage, whose forward is the user's step as far as the stage goes."""

    def __init__(self, index: int, layers: list[nn.Module], own: list[nn.Parameter]) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), nn.ParameterList(own)
        self.index = index
        self.run: Callable[[int, tuple[Tensor, ...]], Any] | None = None
        """What the forward calls; the schedule that runs sets it."""

    def forward(self, *received: Tensor) -> Any:
        return self.run(self.index, received)  # type: ignore[misc]


def _looks(net: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a rehearsal depends on, to compare and to look up."""
    leaves, spec = tree_flatten((args, kwargs))
    kinds = tuple(
        (leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (bool, int, float, str, type(None)))
        else signature(leaf)
        for leaf in leaves
    )
    return str(spec), kinds, net.training, torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
