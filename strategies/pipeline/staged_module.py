"""A model cut into stages that still runs the user's own code.

On every rank the pipelined module runs its own `forward`, on the same inputs. What differs are its layers:

- a layer of an earlier stage computes nothing: it returns a tensor that has a shape and no data;
- the first layer of this stage finds such tensors among its arguments, and takes what the stage before has
  sent in their place;
- the first layer of a later stage ends the call: its arguments are what is sent on, with what earlier layers have
  returned and code after them uses.

So positions, masks and all else that follows from the inputs alone is recomputed on every stage, and only
what layers have computed travels. Shape inference on fake tensors finds out, for each shape of the inputs,
what travels where; it is the same on every rank, so nothing is asked and no shape is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.strategies.data.permutation import mix
from lockstep.strategies.launch.rng import seed_streams
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.blocks import is_metric
from lockstep.strategies.pipeline.microbatch_state import StepState
from lockstep.strategies.pipeline.partition import Cut
from lockstep.strategies.pipeline.shape_inference import ShapeInference
from lockstep.strategies.pipeline.shapes.containers import filled
from lockstep.strategies.pipeline.shapes.fake_tensors import Source, is_fake
from lockstep.strategies.pipeline.stage_run import (
    Layout,
    Leave,
    Links,
    Run,
    Stage,
    check_like,
    explained,
    received,
    refuse_recomputing,
    refuse_second_call,
    refuse_uncalled,
    refuse_whole,
)
from lockstep.strategies.pipeline.stage_tensors import StageTensors, Tied


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
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.model = model
        self.name = parts.name or type(parts.net).__name__
        self.layers, self.stage_of, self.rank_of = parts.layers, list(stage_of), list(rank_of)
        self.rank, self.device = rank, device
        self.num_stages = len(rank_of)
        self.here = [stage for stage in range(self.num_stages) if rank_of[stage] == rank]
        self.group, self.links = group, Links(group, device)
        self.splits_backward = False
        """Whether the schedule runs backward for inputs and weights apart: torch then detaches outputs in place, which
        views refuse."""
        self._parts = parts
        self._learned: Layout | None = None
        self._run: Run | None = None
        self.tensors = StageTensors(model, parts, self.stage_of, self.rank_of, rank, device)
        """Which rank holds what."""
        self.tied: Tied
        self.inference = ShapeInference(model, parts, self.stage_of, self.tensors.beside_layers, device)
        inside = {child for layer in self.layers for child in layer.module.modules()} | parts.free()
        self.inference.outside = [child for child in model.modules() if child not in inside and not is_metric(child)]
        self.tensors.replace_absent()
        self._patch()
        self.stages = {stage: self._stage(stage) for stage in self.here}
        """What torch runs, by the index of the stage."""
        self.is_whole = False
        """Whether the whole model is shown on every rank at the moment."""
        self.state: StepState | None = None
        """What steps do to the model beside its layers, if that is watched."""
        self.shards: Any = None
        """If layers are sharded over ranks, a `sharded_stages.Shards`."""

    # ---- parameters ------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that this rank holds."""
        return ((name, p) for name, p in super().named_parameters(*args, **options) if is_here(p))

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
        for module, call in self._compiled.items():
            module._compiled_call_impl = call
        self.tensors.restore(values, self.shards)

    def forget_layouts(self) -> None:
        """Find out again what travels, as other parameters are trained."""
        self.inference.forget()

    def watch_state(self) -> StepState:
        """Follow what steps change beside the layers, from now on."""
        self.state = StepState.of(self.model, self._parts, self.stage_of, self.here, (self.rank_of[-1], self.group))
        return self.state

    # ---- running -----------------------------------------------------------------------------------

    def layout_of(self, step: Callable[[], Any]) -> Layout | None:
        """What travels where when `step()` calls the pipelined module; None where it returned None before."""
        output, left = self._pass(Run(wants="inputs"), step)
        if left is not None:
            return self._learned
        refuse_uncalled(self.name, output)
        return None

    def run_before(self, step: Callable[[], Any]) -> None:
        """Run `step()` until it calls the pipelined module, and leave nothing of it behind."""
        self._pass(Run(wants="numbers"), step)

    def run_stage(
        self,
        stage: int,
        received: tuple[Tensor, ...],
        arrive: Callable[[], None],
        layout: Layout | None,
        noise: int | None,
        step: Callable[[], Any],
        logged: Sequence[Any] | None = None,
    ) -> tuple[Any, tuple[Tensor, ...] | None]:
        """Run `step()` as far as this stage goes; `arrive()` waits until `received` is there. `logged` grows as the
        step logs, if that does not count.

        Returns what it returned on the last stage, and on other stages what is to be sent; None where the step
        returned None before it called the pipelined module.
        """
        run = Run(stage, received, arrive, layout, noise, links=self.links, logged=logged)
        output, left = self._pass(run, step)
        if left is None and not run.entered:
            refuse_uncalled(self.name, output)
        return output, left

    def run_evaluation(self, noise: int | None, step: Callable[[], Any], log_scope: Callable[[int], Any]) -> Any:
        """Run `step()` once over all stages; its value on the rank of the last stage, None on the others. What it logs
        counts there."""
        self.inference.unlogged = functools.partial(log_scope, 0)
        is_last = self.rank_of[-1] == self.rank
        with nullcontext() if is_last else log_scope(0) as logged, explained("the step of an evaluation"):
            return self._pass(Run(wants="evaluation", noise=noise, logged=logged), step)[0]

    def _pass(self, run: Run, step: Callable[[], Any]) -> tuple[Any, tuple[Tensor, ...] | None]:
        """What `step()` returns, and what it was left with. The exception that left it is dropped here: its traceback
        holds the frames of the user's code, and with them the activations of each microbatch."""
        is_last, left, output = run.stage == self.num_stages - 1, None, None
        watch = nullcontext() if self.state is None else self.state.around(run.wants, run.stage, is_last)
        outer, self._run = self._run, run
        try:
            with watch:
                try:
                    output = step()
                except Leave as leaving:
                    left = leaving.tensors
        finally:
            self._run = outer
            run.show()
        return output, left

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
            refuse_recomputing(self.name)
            if self.is_whole and self.shards is not None:
                refuse_whole(self.name)
            with torch.no_grad():
                return self._everywhere(args, kwargs)
        if run.inside:
            return self._parts.net._call_impl(*args, **kwargs)
        if run.entered:
            refuse_second_call(self.name)
        run.entered = True
        layout = self._layout(args, kwargs) if run.wants in ("inputs", "evaluation") else run.layout
        if self.state is not None:
            self.state.calling(run.stage == self.num_stages - 1)
        if run.wants in ("inputs", "numbers"):
            self._learned = layout
            raise Leave
        assert layout is not None
        if run.wants == "evaluation":
            is_last, result = self._through(layout, args, kwargs, run)
            if not is_last:
                raise Leave
            if self.state is not None:
                self.state.called_in_evaluation()
            return result
        if self.inference.key(args, kwargs) != layout.key:
            run.layout = self._layout(args, kwargs).checked(layout, self.name)
        return self._enter(run, args, kwargs)

    def _enter(self, run: Run, args: Any, kwargs: Any) -> Any:
        if run.noise is not None:
            seed_streams(mix(run.noise, run.stage + 1))
        outer, self._run, run.inside = self._run, run, True
        try:
            with self.inference.without_first_stage(run.beside()) if run.stage else nullcontext():
                result = self._parts.net._call_impl(*args, **kwargs)
        finally:
            self._run, run.inside = outer, False
        if run.stage < self.num_stages - 1:
            early = f"{self.name} returned on stage {run.stage} before a layer of stage {run.stage + 1} was called"
            raise RuntimeError(early)
        if any(map(is_fake, tree_leaves(result))):
            result = tree_map_only(is_fake, received, result)
        if any(map(is_fake, tree_leaves(result))):
            raise RuntimeError(
                f"{self.name} returns a value that layers of an earlier stage have computed and that did not travel; "
                "return a tensor, or lists, tuples and dicts of them"
            )
        return result

    def _through(self, layout: Layout, args: Any, kwargs: Any, outer: Run) -> tuple[bool, Any]:
        """The stages of this rank one after the other; (whether the last was among them, its result)."""
        kept: dict[str, Any] = {"hidden": outer.hidden, "noise": outer.noise, "logged": outer.logged}
        carried: tuple[Tensor, ...] = ()
        for stage in self.here:
            if stage and self.rank_of[stage - 1] != self.rank:
                carried = self.links.receive(layout.messages[stage - 1], self.rank_of[stage - 1])
            try:
                run = Run(stage, carried, layout=layout, entered=True, links=self.links, **kept)
                return True, self._enter(run, args, kwargs)
            except Leave as left:
                carried = left.tensors
                if self.rank_of[stage + 1] != self.rank:
                    self.links.send(carried, self.rank_of[stage + 1])
        return False, None

    def _everywhere(self, args: Any, kwargs: Any) -> Any:
        """Outside of a step: every rank calls it alike and gets the result, without gradient."""
        self.links.outside()
        layout = self._layout(args, kwargs)
        with self.gathered():
            is_last, result = self._through(layout, args, kwargs, Run())
        self.links.finished(self.rank_of[-1])
        leaves, spec = tree_flatten(result if is_last else layout.result)
        source = self.rank_of[-1]
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                here = leaf.contiguous() if is_last else torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
                dist.broadcast(here, group=self.group, group_src=source)
                leaves[i] = here
        return tree_unflatten(leaves, spec)

    def _layout(self, args: Any, kwargs: Any) -> Layout:
        outer, self._run = self._run, Run(wants="shapes", inside=True, entered=True)
        try:
            return self.inference.layout(args, kwargs)
        finally:
            self._run = outer

    # ---- the stand-in of a layer ---------------------------------------------------------------------

    def _call_layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        run, stage = self._run, self.stage_of[index]
        if run is None or not run.inside:  # called by itself, or again in the backward of a checkpointed layer
            if stage not in self.here:
                raise RuntimeError(
                    f"{self.layers[index].name} is on another rank of the pipeline, so it cannot be called outside of "
                    f"{self.name}"
                )
            if stage and any(hasattr(leaf, "received") for leaf in tree_leaves((args, kwargs))):
                args, kwargs = self._real_arguments(index, args, kwargs)
            return self._calls[index](*args, **kwargs)
        if run.wants == "shapes":
            return self.inference.layer(index, args, kwargs)
        if stage == run.stage:
            if stage:
                args, kwargs = self._incoming(run, index, args, kwargs)
            with run.in_layer(self.layers[index].name):
                output = self._calls[index](*args, **kwargs)
            layers = self.inference.layers
            if run.layout.skips or layers.by_values:  # type: ignore[union-attr]
                run.keep(index, output, args, kwargs, self.layers[index].name, index in layers.by_values)
                layers.report(index)
            return output
        if stage > run.stage:
            raise Leave(self._outgoing(run, index, args, kwargs))
        if run.knows(index):
            return run.output(index, args, kwargs)
        run.calls[index] += 1
        output, attributes = self.inference.unseen(index, args, kwargs)
        run.hide(attributes)
        return output

    def _incoming(self, run: Run, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not run.started:
            run.started = True
            run.arrived()
            self.links.starting(run)
            leaves = tree_leaves((args, kwargs))
            copies = (
                index in self.inference.edits and torch.is_grad_enabled()
            )  # what is received is a leaf of the graph
            message = run.layout.messages[run.stage - 1]  # type: ignore[union-attr]
            for i, tensor in zip(message.leaves, run.received, strict=False):
                leaves[i].received = (tensor.clone() if copies else tensor), leaves[i]._version
        return self._real_arguments(index, args, kwargs)

    def _real_arguments(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not kwargs and all(type(arg) is Tensor and not hasattr(arg, "received") for arg in args):
            return args, kwargs
        real = tree_map_only(Tensor, functools.partial(self._real, index), (args, kwargs))
        return filled(args, real[0]), filled(dict(kwargs), real[1])  # a layer may change what it is given

    def _real(self, index: int, leaf: Tensor) -> Tensor:
        found = received(leaf)
        if not is_fake(found):
            return found
        raise RuntimeError(
            f"{self.layers[index].name} takes a value that layers of an earlier stage have computed and that did not "
            "travel; return tensors from layers, or lists, tuples and dicts of them, or choose split so that all who "
            "use it are on one stage"
        )

    def _outgoing(self, run: Run, index: int, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        message = run.layout.messages[run.stage]  # type: ignore[union-attr]
        leaves, skips = tree_leaves((args, kwargs)), run.arrived()
        sent = [self._real(index, leaves[i]) for i in message.leaves]
        if run.stage == 0:
            skips |= {Source.beside(i): p for i, p in enumerate(self.tensors.own_parameters())}
        if absent := [self.layers[source.layer].name for source in message.sources if source not in skips]:
            raise RuntimeError(
                f"{', '.join(absent)} was called for some inputs, but not for others of the same shapes, and later "
                "stages of the pipeline use what it returns; call it always, and choose with torch.where"
            )
        sent += [skips[source] for source in message.sources]
        tensors = []
        for i, (tensor, expected) in enumerate(zip(sent, message.tensors, strict=True)):
            check_like(tensor, expected, self.name, self.layers[index].name)
            copied = i >= len(message.leaves) or isinstance(tensor, nn.Parameter)
            copied = copied or (self.splits_backward and tensor._base is not None)
            tensors.append(tensor.clone(memory_format=torch.contiguous_format) if copied else tensor.contiguous())
        return self.links.leaving(run, sent, tuple(tensors))

    # ---- taking the model apart ----------------------------------------------------------------------

    def _stage(self, index: int) -> Stage:
        layers = [layer.module for layer, stage in zip(self.layers, self.stage_of, strict=True) if stage == index]
        return Stage(index, layers, self.tensors.own_parameters() if index == 0 else [])

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
