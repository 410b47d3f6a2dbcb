"""What travels between stages, found by running the model on fake tensors, which have a shape but no data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.parameter_hooks import FORWARD, users_hooks
from lockstep.strategies.pipeline.partition import Cut, advice
from lockstep.strategies.pipeline.shapes.containers import Returned, containers, filled
from lockstep.strategies.pipeline.shapes.fake_layers import FakeLayers
from lockstep.strategies.pipeline.shapes.fake_tensors import (
    Blank,
    Mode,
    Origins,
    Source,
    content,
    flatten,
    held_deep,
    is_fake,
    is_object,
    is_plain_object,
    known_objects,
)
from lockstep.strategies.pipeline.stage_run import (
    NOTHING,
    SENDS_ALL_GRADIENTS,
    Layout,
    Message,
    Place,
    quiet,
    refuse_capturing,
)
from lockstep.strategies.pipeline.state.found import attributes_of, containers_of, is_other
from lockstep.strategies.pipeline.state.hook_slots import hidden_fakes

MAX_LAYOUTS = 512
"""Shapes of inputs whose layout is kept: some kilobytes each."""


@dataclass(slots=True)
class _Pass:
    """One run of the model on fake tensors."""

    origins: Origins
    stage: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)
    """The layers in the order of their calls."""
    begins: list[tuple[str, list[Any]]] = field(default_factory=list)
    """Of each stage but the first, the name of the layer that is called first, and its flattened arguments."""
    direct: dict[int, int] = field(default_factory=dict)
    """Versions of the fake tensors with which the running stage begins, by `id`."""
    outputs: dict[tuple[int, int], Any] = field(default_factory=dict)
    needed: dict[int, set[Source]] = field(default_factory=lambda: defaultdict(set))
    """By stage, what it needs of earlier ones beside the arguments of its first call."""
    attributes: dict[tuple[int, int], list[Place]] = field(default_factory=dict)
    error: str = ""
    """Why the layers cannot be on their stages."""


class ShapeInference:
    """Finds the `Layout` for each shape of the inputs of a pipelined module. It is the same on every rank, so ranks
    need not exchange it.

    Constructed while the model still has all its parameters and buffers. `beside_layers` are the parameters of the
    modules around the layers.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Cut,
        stage_of: Sequence[int],
        beside_layers: Sequence[tuple[nn.Module, str]],
        device: torch.device,
    ) -> None:
        self._net, self._name = parts.net, parts.name or type(parts.net).__name__
        self._layers, self._stage_of, self._device = parts.layers, stage_of, device
        self._free = parts.free()
        self._mode = Mode()
        self._beside_layers = beside_layers
        self._parents = [shell for _, shell in parts.shells]
        self.layers = FakeLayers(parts.layers, model, self._mode, device)
        own: list[Any] = [shell._parameters[name] for shell, name in beside_layers]
        with self._mode:
            self._fake_beside = [self._mode.fake(p.detach()).to(device).requires_grad_(p.requires_grad) for p in own]
        self._registered = RemovableHandle.next_id
        self._hooks = [
            [key for kind in FORWARD for key, _ in users_hooks(mine, kind)] for mine, _ in self.layers.pairs()
        ]
        self._num_hooks = 0
        self._num_users = Counter(mine for mine, _ in self.layers.pairs())
        self.edits: set[int] = set()
        """Layers that change what they are given in place."""
        self.outside: list[nn.Module] = []
        """The modules around the layers, in which code between layers and hooks may keep tensors."""
        self._pass: _Pass | None = None
        self.kept_streams: Callable[[], AbstractContextManager[None]] = kept_streams
        """Gives random streams back what a run on fake tensors has drawn."""
        self.unlogged: Callable[[], AbstractContextManager[Any]] = nullcontext
        """A context in which what layers log does not count."""
        self.known: dict[Any, Layout] = {}
        """The layouts by what the inputs look like."""

    def forget(self) -> None:
        """Find layouts again, as other parameters are trained."""
        self.layers.follow_trainability()
        for (shell, name), own in zip(self._beside_layers, self._fake_beside, strict=True):
            own.requires_grad_(shell._parameters[name].requires_grad)  # type: ignore[union-attr]
        self.known.clear()

    def key(self, args: Any, kwargs: Any) -> Any:
        """What a layout depends on, to compare and to look up."""
        leaves, spec = flatten((args, kwargs), is_object)
        given: Any = (bool, int, str, type(None))
        if not self._net.training:  # in training a number may change in each step, as a temperature does
            given = (*given, float)
        kinds = tuple(
            (leaf.shape, leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, given)
            else signature(leaf)
            for leaf in leaves
        )
        autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
        children = [
            id(child) for module in self._parents for child in module._modules.values()
        ]  # a step may exchange some
        return str(spec), kinds, tuple(children), self._net.training, *autocast

    def layout(self, args: Any, kwargs: Any) -> Layout:
        """The layout for these arguments of the module, whose layers must call `layer` meanwhile.

        Raises ValueError if the model depends on values that layers compute, or on another order of its layers.
        """
        key = self.key(args, kwargs)
        if key not in self.known:
            num_known = -1
            while num_known != len(known_objects):  # places of tensors are those with all of them taken apart
                num_known = len(known_objects)
                self.known[key] = self._infer(key, args, kwargs)
            if len(self.known) > MAX_LAYOUTS:
                self.known.pop(next(iter(self.known)))
        return self.known[key]

    def _infer(self, key: Any, args: Any, kwargs: Any) -> Layout:
        self.layers.follow()
        outer, running = self._pass, _Pass(Origins(self._stage_of, self._fake_beside))
        self._pass = running
        kept = {*self._free, *self.outside}
        state = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in kept]
        contents = [(held, held.copy()) for module in self.outside for held in containers_of(module)]
        absent = [layer.module for layer in self._layers if not all(map(is_here, layer.module.parameters()))]
        hide = hidden_fakes([*self._net.modules()], {child for layer in absent for child in layer.modules()})
        try:
            with (
                torch.enable_grad(),
                self.kept_streams(),
                self.unlogged(),
                self.without_first_stage(),
                quiet(),
                running.origins,
            ):
                result = self._net.forward(*args, **kwargs)
                self._need_attributes(running)
        except RuntimeError as error:
            of_values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            if not of_values and "not supported for tensor subclasses" not in str(error):  # of numpy()
                raise
            raise ValueError(
                f"what {self._name} does between its layers must follow from shapes in a pipeline, but it reads values "
                f"that layers have computed ({getattr(error, 'func', error)}); decide within one layer, or use "
                "strategy='ddp' or 'fsdp'"
            ) from error
        finally:
            self._pass = outer
            for attributes, before, buffers in state:  # a cache of a module without parameters may have become fake
                attributes.clear()
                attributes.update(before)
                attributes["_buffers"].clear()
                attributes["_buffers"].update(buffers)
            for held, before in contents:
                filled(held, before)
            hide()
        if running.stage < self._stage_of[-1] and not running.error:
            missing = self._layers[self._stage_of.index(running.stage + 1)].name
            running.error = f"{self._name} called no layer of stage {running.stage + 1}, which begins with {missing}"
        if running.error:
            raise ValueError(f"{running.error}; {self._advice(running)}")
        self._need(running, self._name, flatten(result)[0])
        for leaf in flatten((args, kwargs), is_object)[0]:
            lost = running.origins.of(leaf) if isinstance(leaf, Tensor) else ()
            if any(source.is_lost and source.call < running.stage for source in lost):
                raise ValueError(
                    f"a layer of an earlier stage than the last changes a tensor in place that {self._name} is called "
                    "with, which other stages of a pipeline do not see; let it compute a new one"
                )
        messages = [self._message(running, stage) for stage in range(1, running.stage + 1)]
        skips: dict[tuple[int, int], list[Source]] = {}
        for source in sorted({source for message in messages for source in message.sources}):
            skips.setdefault((source.layer, source.call), []).append(source)
        result = tree_map_only(is_fake, torch.Tensor.detach, result)
        return Layout(key, messages, running.outputs, result, skips, running.attributes)

    def layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """What stands for the call of a layer while `layout` runs the model."""
        running = self._pass
        assert running is not None
        name, stage, leaves = self._layers[index].name, self._stage_of[index], flatten((args, kwargs))[0]
        running.order.append(index)
        refuse_capturing(self._name)
        if not running.error:
            self._need(running, name, leaves)
            if stage < running.stage:
                running.error = (
                    f"{name} is called after layers of stage {running.stage}, but is on stage {stage}: stages follow "
                    "the order in which layers are defined"
                )
            elif stage > running.stage + 1:
                running.error = (
                    f"{self._name} calls {name} of stage {stage} before any layer of stage {running.stage + 1}"
                )
            elif stage > running.stage:
                running.begins.append((name, leaves))
                running.direct = {id(leaf): leaf._version for leaf in leaves if is_fake(leaf)}
                running.stage = stage
                self._need(running, name, leaves)
        held = containers(args, kwargs)
        before = [content(container) for container in held]
        watched = [
            pair for pair in self.layers.pairs(index) if self._num_users[pair[0]] == 1
        ]  # each stage runs what several use
        watched += [(module, module) for module in self.outside]
        attributes = [attributes_of(child) for _, child in watched]
        held_before = flatten(held)[0]
        places = {id(leaf): i for i, leaf in reversed(list(enumerate(held_before)))}
        with running.origins.of_layer(leaves, running.stage) as written:
            output = self.layers(index, args, kwargs)
        if written:
            self.edits.add(index)
        changed = [i for i, container in enumerate(held) if content(container) != before[i]]
        for container in (held[i] for i in changed if isinstance(held[i], set)):
            raise ValueError(
                f"{name} changes the {type(container).__name__} that it is given, which other stages of a pipeline do "
                "not see; use a list or dict, or return what it adds"
            )
        self._refuse_opaque(name, [output, *(held[i] for i in changed)])
        returned = Returned.of(output, held, changed, places)
        if any(isinstance(leaf, Tensor) and not is_fake(leaf) for leaf in flatten(returned)[0]):
            returned = tree_map_only(Tensor, self._handed_on, returned)  # that of this batch
        call = running.calls[index]
        running.calls[index] += 1
        running.origins.note_output(index, call, returned)
        running.outputs[index, call] = tree_map_only(is_fake, Blank, returned)
        running.attributes[index, call] = [
            (module, *place)
            for (module, child), before_call in zip(watched, attributes, strict=True)
            for place, value in attributes_of(child).items()
            if is_other(before_call.get(place), value)
        ]
        return returned.give(held, held_before) if isinstance(returned, Returned) else returned

    def unseen(self, index: int, args: Any, kwargs: Any) -> tuple[Any, list[Place]]:
        """The stand-in for the output of a layer that shape inference has not seen called, and the attributes that the
        call sets."""
        outer, running = self._pass, _Pass(Origins(self._stage_of, ()), self._stage_of[index])
        self._pass = running
        try:
            with torch.enable_grad(), self.kept_streams(), self.unlogged(), quiet():
                return self.layer(index, args, kwargs), running.attributes[index, 0]
        finally:
            self._pass = outer

    def hooks(self) -> int:
        """A number that is another one when forward hooks of layers have been registered; layouts are then found
        again."""
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            found = [[key for kind in FORWARD for key, _ in users_hooks(mine, kind)] for mine, _ in self.layers.pairs()]
            if found != self._hooks:
                self._hooks = found
                self._num_hooks += 1
                self.known.clear()
        return self._num_hooks

    def _need_attributes(self, running: _Pass) -> None:
        """What code between layers has kept in attributes is there for the step, which the last stage ends."""
        of_layers = {place for places in running.attributes.values() for place in places}
        of_layers |= {(shell, name, None) for shell, name in self._beside_layers}
        running.direct = {}  # which stand for arguments of layers only
        for module in self.outside:
            for place, value in attributes_of(module).items():
                if not is_fake(value) or (module, *place) in of_layers:
                    continue
                if not any(source.is_lost for source in running.origins.of(value)):
                    self._need(running, self._name, [value])

    def _refuse_opaque(self, name: str, values: Any) -> None:
        """Raise ValueError if a layer returns or changes an object whose tensors cannot be sent."""
        if any(
            isinstance(leaf, PackedSequence) for leaf in tree_leaves(values, lambda x: isinstance(x, PackedSequence))
        ):
            raise ValueError(
                f"{name} returns a PackedSequence, whose shapes follow from values, so a pipeline cannot send it; let "
                "the layer return pad_packed_sequence(..., total_length=...), and pack it again in the next"
            )
        for leaf in flatten(values)[0]:
            if is_plain_object(leaf) and any(map(is_fake, held_deep(leaf))):
                raise ValueError(
                    f"{name} returns or changes a {type(leaf).__name__}, whose tensors a pipeline cannot send, as it "
                    "holds objects that hold others; use tensors, or lists, tuples, dicts and dataclasses of them"
                )

    def _handed_on(self, tensor: Tensor) -> Tensor:
        """The stand-in for a tensor that a layer returned, which may be one of its arguments."""
        if is_fake(tensor):
            return tensor
        with self._mode:
            return self._mode.fake(tensor.detach()).requires_grad_(tensor.requires_grad)

    def _need(self, running: _Pass, name: str, leaves: Sequence[Any]) -> None:
        """Note what the running stage needs of earlier ones for these arguments of a layer, or results."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or (is_fake(leaf) and running.direct.get(id(leaf)) == leaf._version):
                continue
            for source in running.origins.of(leaf):
                if source.is_lost and source.call < running.stage:
                    raise ValueError(
                        f"{name} takes a value that stage {source.call} has computed with random numbers between "
                        f"layers or changed in place in one, which stage {running.stage} cannot repeat; let a layer "
                        "return it as a new tensor, or choose split so that all who use it are on one stage"
                    )
                if running.origins.stage_of(source) < running.stage:
                    running.needed[running.stage].add(source)

    def _message(self, running: _Pass, stage: int) -> Message:
        """What `stage` receives."""
        origins, (name, leaves) = running.origins, running.begins[stage - 1]
        needed = (source for later, found in running.needed.items() if later >= stage for source in found)
        sources = sorted({source for source in needed if origins.stage_of(source) < stage})
        places = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if is_fake(leaf)}
        chosen = [i for i in sorted(places.values()) if not origins.of(leaves[i]) or origins.of(leaves[i]) - {*sources}]
        if not chosen and not sources:
            raise ValueError(
                f"{name} begins stage {stage} but neither it nor what follows takes anything that the layers before "
                f"it have computed; {self._advice(running)}"
            )
        like = [*(leaves[i] for i in chosen), *(origins.tensors[source] for source in sources)]
        kinds = [t.dtype for t in like if not (t.is_floating_point() or t.is_complex())]
        if kinds and SENDS_ALL_GRADIENTS:
            raise RuntimeError(
                f"{name} begins stage {stage} and it or what follows takes a tensor of {kinds[0]} that layers before "
                f"it hand on, which torch {torch.__version__} cannot send; use torch 2.12 or later, convert it to a "
                "floating dtype where layers hand it on, or choose split so that all who use it are on one stage"
            )
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in like]
        return Message(tuple(chosen), tuple(sources), tuple(tensors))

    def _advice(self, running: _Pass) -> str:
        return advice([layer.name for layer in self._layers], running.order, self._stage_of[-1] + 1)

    @contextmanager
    def without_first_stage(self, received: Mapping[Source, Tensor] = NOTHING) -> Iterator[None]:
        """Parameters beside layers belong to the first stage: while it lasts they are fake, as on the other stages, but
        for those that were `received`."""
        before = [shell.__dict__.get(name) for shell, name in self._beside_layers]
        for i, ((shell, name), fake) in enumerate(zip(self._beside_layers, self._fake_beside, strict=True)):
            shell.__dict__[name] = received.get(Source.beside(i), fake)  # found before what `_parameters` holds
        try:
            yield
        finally:
            for (shell, name), value in zip(self._beside_layers, before, strict=True):
                if value is None:
                    del shell.__dict__[name]
                else:
                    shell.__dict__[name] = value
