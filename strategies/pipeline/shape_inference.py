"""What travels between stages, found by running the model on fake tensors, which have a shape but no data."""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.modules.parameter_hooks import copy_attributes, copy_module
from lockstep.strategies.pipeline.fake_tensors import (
    Blank,
    Mode,
    Origins,
    Returned,
    Source,
    containers,
    flatten,
    is_fake,
    is_plain_object,
    known_objects,
)
from lockstep.strategies.pipeline.partition import Cut

NOTHING: Mapping[Any, Tensor] = {}
MAX_LAYOUTS = 512
"""Shapes of inputs whose layout is kept: some kilobytes each."""


class Message(NamedTuple):
    """What travels from one stage to the next."""

    leaves: tuple[int, ...]
    """Places among the flattened arguments of the call with which the next stage begins."""
    sources: tuple[Source, ...]
    """What else later stages need of this and earlier ones: skip connections."""
    tensors: tuple[Tensor, ...]
    """Shapes, dtypes and requires_grad of both, as tensors on the meta device."""

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


class Layout(NamedTuple):
    """What shape inference found out."""

    key: Any
    """What the inputs look like."""
    messages: list[Message]
    """From stage i to stage i + 1."""
    outputs: dict[tuple[int, int], Any]
    """What a layer returns in its n-th call, as fake tensors."""
    result: Any
    """What the module returns, as fake tensors."""
    skips: dict[tuple[int, int], list[Source]]
    """The sources that travel, by layer and call."""


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
        self._fake_layers = [self._fake(layer.module) for layer in parts.layers]
        own: list[Any] = [shell._parameters[name] for shell, name in beside_layers]
        with self._mode:
            self._fake_beside = [self._mode.fake(p.detach()).to(device).requires_grad_(p.requires_grad) for p in own]
        self._pass: _Pass | None = None
        self.kept_streams: Callable[[], AbstractContextManager[None]] = kept_streams
        """Gives random streams back what a run on fake tensors has drawn."""
        self.known: dict[Any, Layout] = {}
        """The layouts by what the inputs look like."""

    def forget(self) -> None:
        """Find layouts again, as other parameters are trained."""
        for layer, fake in zip(self._layers, self._fake_layers, strict=True):
            for mine, theirs in zip(layer.module.parameters(), fake.parameters(), strict=True):
                theirs.requires_grad_(mine.requires_grad)
        for (shell, name), own in zip(self._beside_layers, self._fake_beside, strict=True):
            own.requires_grad_(shell._parameters[name].requires_grad)  # type: ignore[union-attr]
        self.known.clear()

    def key(self, args: Any, kwargs: Any) -> Any:
        """What a layout depends on, to compare and to look up."""
        leaves, spec = flatten((args, kwargs), _is_object)
        kinds = tuple(
            (leaf.shape, leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            if isinstance(leaf, (bool, int, float, str, type(None)))
            else signature(leaf)
            for leaf in leaves
        )
        autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
        return str(spec), kinds, self._net.training, *autocast

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
        for layer, fake in zip(self._layers, self._fake_layers, strict=True):
            for mine, theirs in zip(layer.module.modules(), fake.modules(), strict=True):
                theirs.training = mine.training  # BatchNorm takes a batch of one in evaluation only
        outer, running = self._pass, _Pass(Origins(self._stage_of, self._fake_beside))
        self._pass = running
        state = [(vars(module), dict(vars(module)), dict(module._buffers)) for module in self._free]
        try:
            with torch.enable_grad(), self.kept_streams(), self.without_first_stage(), _quiet(), running.origins:
                result = self._net.forward(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"what {self._name} does between its layers must follow from shapes in a pipeline, but it reads values "
                f"that layers have computed ({error.func}); decide within one layer, or use strategy='ddp' or 'fsdp'"
            ) from error
        finally:
            self._pass = outer
            for attributes, before, buffers in state:  # a cache of a module without parameters may have become fake
                attributes.clear()
                attributes.update(before)
                attributes["_buffers"].clear()
                attributes["_buffers"].update(buffers)
        if running.stage < self._stage_of[-1] and not running.error:
            missing = self._layers[self._stage_of.index(running.stage + 1)].name
            running.error = f"{self._name} called no layer of stage {running.stage + 1}, which begins with {missing}"
        if running.error:
            raise ValueError(f"{running.error}; {self._advice(running.order)}")
        self._need(running, self._name, flatten(result)[0])
        for leaf in flatten((args, kwargs), _is_object)[0]:
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
        return Layout(key, messages, running.outputs, result, skips)

    def layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """What stands for the call of a layer while `layout` runs the model."""
        running = self._pass
        assert running is not None
        name, stage, leaves = self._layers[index].name, self._stage_of[index], flatten((args, kwargs))[0]
        running.order.append(index)
        _refuse_capturing(self._name)
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
        before = [_content(container) for container in held]
        held_before = flatten(held)[0]
        places = {id(leaf): i for i, leaf in reversed(list(enumerate(held_before)))}
        with running.origins.of_layer(leaves, running.stage), self._mode:
            output = self._fake_layers[index](*args, **kwargs)
        changed = [i for i, container in enumerate(held) if _content(container) != before[i]]
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
        return returned.give(held, held_before) if isinstance(returned, Returned) else returned

    def _refuse_opaque(self, name: str, values: Any) -> None:
        """Raise ValueError if a layer returns or changes an object whose tensors cannot be sent."""
        for leaf in flatten(values)[0]:
            if is_plain_object(leaf) and any(map(is_fake, _held_deep(leaf))):
                raise ValueError(
                    f"{name} returns or changes a {type(leaf).__name__}, whose tensors a pipeline cannot send, as it "
                    "holds objects that hold others; use tensors, or lists, tuples, dicts and dataclasses of them"
                )

    def _handed_on(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor that a layer has returned, which may be one that it was given."""
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
                f"it have computed; {self._advice(running.order)}"
            )
        like = [*(leaves[i] for i in chosen), *(origins.tensors[source] for source in sources)]
        tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta", requires_grad=t.requires_grad) for t in like]
        return Message(tuple(chosen), tuple(sources), tuple(tensors))

    def _advice(self, order: list[int]) -> str:
        """What to do where layers are called in another order than they are defined."""
        last = {index: place for place, index in enumerate(order)}
        first = {index: len(order) - 1 - place for place, index in enumerate(reversed(order))}
        good = [
            self._layers[k].name
            for k in sorted(first)
            if any(i < k for i in last) and max(last[i] for i in last if i < k) < min(first[i] for i in first if i >= k)
        ]
        if len(good) < self._stage_of[-1]:
            return (
                f"no split into {self._stage_of[-1] + 1} stages works: define layers in the order in which they are "
                "called, use fewer stages, or use strategy='ddp' or 'fsdp'"
            )
        return (
            "define layers in the order in which they are called, or give split: stages can begin with "
            f"{', '.join(good)}"
        )

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

    def _fake(self, module: nn.Module) -> nn.Module:
        """A copy without data, as if on the device."""
        with FakeCopyMode(self._mode):
            fake = copy_module(module, self._mode.copies(module))
        moved: dict[int, Tensor] = {}
        with self._mode:
            for child in fake.modules():
                for holder in (child._parameters, child._buffers):
                    for name, tensor in holder.items():
                        if tensor is not None and tensor.device != self._device:
                            if id(tensor) not in moved:
                                there = tensor.detach().to(self._device)
                                if isinstance(tensor, nn.Parameter):
                                    there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                                    copy_attributes(tensor, there)
                                moved[id(tensor)] = there
                            holder[name] = moved[id(tensor)]  # type: ignore[assignment]
        return fake


def _is_object(value: Any) -> bool:
    return is_plain_object(value) and not is_dataclass(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that it asks a tensor with a history for its gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def _content(container: Any) -> tuple[list[int], Any]:
    """What a container holds, to compare: the `id` of each leaf, and how they are arranged."""
    if isinstance(container, set):
        return [*map(id, container)], len(container)
    leaves, spec = flatten(container)
    if len(leaves) == 1 and leaves[0] is container:
        leaves, spec = tree_flatten(dict(vars(container)))
    return [*map(id, leaves)], spec


def _held_deep(value: Any) -> Iterator[Any]:
    """The tensors in the attributes of an object, and in those of what it holds."""
    known: set[int] = set()
    waiting = [value]
    while waiting and len(known) < 1000:
        found = waiting.pop()
        if id(found) not in known:
            known.add(id(found))
            leaves = tree_leaves(vars(found))
            yield from leaves
            waiting += filter(is_plain_object, leaves)


def _refuse_capturing(name: str) -> None:
    """Raise ValueError if transformers collects what layers return, in hooks that only the stages of these layers
    run."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is not None and collector.get():
        raise ValueError(
            f"{name} is asked for {', '.join(collector.get())} (output_hidden_states, output_attentions), which "
            "transformers collects from layers of all stages, but a stage of a pipeline runs only its own; leave them "
            "out, or use strategy='ddp' or 'fsdp'"
        )
