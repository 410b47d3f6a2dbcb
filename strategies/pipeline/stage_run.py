"""One pass of a pipeline stage through the user's code, and what torch's schedules call for it."""

from __future__ import annotations

import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.strategies.pipeline.fake_tensors import Blank, Source, is_plain_object
from lockstep.strategies.pipeline.microbatch_state import OfOtherStage

Place = tuple[nn.Module, str, Any]
"""An attribute of a module; in a dict or list, with its key."""
NOTHING: Mapping[Any, Tensor] = {}


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
    attributes: dict[tuple[int, int], list[Place]]
    """What a layer, or a hook of it, sets in attributes, by layer and call."""


@dataclass
class Returned:
    """What a call of a layer came to: its output, and the containers that it was given and has changed, by index."""

    output: Any
    contents: dict[int, Any]

    @classmethod
    def of(cls, output: Any, held: Sequence[Any], changed: Iterable[int], before: Mapping[int, int]) -> Any:
        """`held` are the containers that it was given, `before` the places of what they held, by `id`. The output
        alone, if it has nothing to do with them."""
        places = {id(container): i for i, container in enumerate(held)}

        def is_held(node: Any) -> bool:
            return id(node) in places

        def is_kept(leaf: Any) -> bool:
            return isinstance(leaf, Tensor) and id(leaf) in before

        marked = tree_map_only(is_held, lambda node: _Given(places[id(node)]), output, is_leaf=is_held)
        contents = {i: tree_map_only(is_kept, lambda leaf: _Kept(before[id(leaf)]), held[i]) for i in changed}
        is_plain = not contents and not any(isinstance(leaf, _Given) for leaf in tree_leaves(marked))
        return output if is_plain else cls(marked, contents)

    def give(self, held: Sequence[Any], before: Sequence[Any]) -> Any:
        """Change the containers `held`, which held `before`, as the layer did, and return its output."""
        for i, content in self.contents.items():
            filled(held[i], tree_map_only(_Kept, lambda kept: before[kept.place], content))
        return tree_map_only(_Given, lambda given: held[given.place], self.output)


class _Given:
    """Stands for a container that a layer was given and returns."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class _Kept(_Given):
    """Stands for what a container has held before."""

    __slots__ = ()


def containers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What a layer is given that may hold tensors, and that it may change."""
    return [
        value
        for value in (*args, *kwargs.values())
        if isinstance(value, list | tuple | Mapping | deque | set) or is_dataclass(value) or is_plain_object(value)
    ]


def filled(container: Any, content: Any) -> Any:
    """`container` with what `content` holds: the same object if it can be changed, of the same structure within."""
    if type(container) is not type(content) or isinstance(container, Tensor):
        return content
    if isinstance(container, tuple) and len(container) == len(content) and not hasattr(container, "_fields"):
        return tuple(map(filled, container, content))
    if isinstance(container, list | deque):
        new = [filled(*pair) for pair in zip(container, content, strict=False)] + list(content)[len(container) :]
        container.clear()
        container.extend(new)
    elif type(container) in (dict, OrderedDict, defaultdict):
        _fill(container, content)
    elif is_plain_object(container) and not isinstance(container, tuple | Mapping):
        _fill(vars(container), vars(content))
    else:
        return content
    return container


def _fill(container: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    new = {key: filled(container[key], value) if key in container else value for key, value in content.items()}
    container.clear()
    container.update(new)


class Leave(BaseException):
    """Leaves the user's code where this stage's part of it ends. No `Exception`, so that user code does not catch
    it."""

    def __init__(self, tensors: tuple[Tensor, ...] = ()) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(slots=True)
class Run:
    """One pass of a stage, or of shape inference, through the user's code."""

    stage: int = 0
    received: tuple[Tensor, ...] = ()
    arrive: Callable[[], None] | None = None
    """Waits until `received` is there, where it may be on its way."""
    layout: Layout | None = None
    noise: int | None = None
    """Seed of the random numbers that layers draw."""
    wants: Literal["stage", "inputs", "evaluation", "shapes"] = "stage"
    """"stage", "inputs" (leave as soon as they are known), "evaluation" (all stages of this rank) or "shapes"."""
    entered: bool = False
    inside: bool = False
    started: bool = False
    """Whether a layer of this stage has been called."""
    calls: Counter[int] = field(default_factory=Counter)
    skips: dict[Source, Tensor] | None = None
    """What has arrived for later stages or as skip connections, and what layers of this stage add to it; None before
    `received` is there."""
    hidden: list[tuple[Any, Any, Any, OfOtherStage]] = field(default_factory=list)
    """Stand-ins in attributes that layers of earlier stages set: where, under which key, and the value they replace."""
    links: Links | None = None
    """Called where this stage begins and ends."""

    def arrived(self) -> dict[Source, Tensor]:
        """Wait until `received` is there, and return `skips`."""
        assert self.layout is not None
        if self.skips is None:
            if self.arrive is not None:
                self.arrive()
            self.skips = {}
            if self.stage:
                message = self.layout.messages[self.stage - 1]
                self.skips.update(zip(message.sources, self.received[len(message.leaves) :], strict=True))
        return self.skips

    def output(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What stands for the output of a layer of an earlier stage: tensors without data, but for skip connections."""
        found = self._blank(index)
        if not isinstance(found, Returned):
            return found
        held = containers(args, kwargs)
        return found.give(held, tree_leaves(held))

    def _blank(self, index: int) -> Any:
        assert self.layout is not None and self.links is not None
        self.links.passing(self)
        call = index, self.calls[index]
        for module, name, key in self.layout.attributes.get(call, ()):
            self._hide(module, name, key)
        self.calls[index] += 1
        blank = self.layout.outputs[call]  # new objects a call: those of another micro-batch are others
        if call not in self.layout.skips:
            return blank.tensor() if isinstance(blank, Blank) else tree_map_only(Blank, Blank.tensor, blank)
        leaves, spec = tree_flatten(blank)
        received = self.arrived()
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Blank):
                skip = received.get(Source(*call, i))
                leaves[i] = leaf.tensor() if skip is None else skip.clone()  # which user code may change in place
        return tree_unflatten(leaves, spec)

    def _hide(self, module: nn.Module, name: str, key: Any) -> None:
        """Set an attribute as a layer of an earlier stage has done, to what refuses to be used."""
        holder = vars(module) if key is None else vars(module).get(name)
        stand_in = OfOtherStage(f"{type(module).__name__}.{name}" + ("" if key is None else f"[{key!r}]"))
        if isinstance(holder, list):
            self.hidden.append((holder, None, None, stand_in))
            holder.append(stand_in)
        elif isinstance(holder, dict):
            place = name if key is None else key
            self.hidden.append((holder, place, holder.get(place, NOTHING), stand_in))
            holder[place] = stand_in

    def show(self) -> None:
        """Undo that, at the end."""
        for holder, key, before, stand_in in reversed(self.hidden):
            if isinstance(holder, list):
                holder[:] = [value for value in holder if value is not stand_in]
            elif holder.get(key) is stand_in:
                del holder[key]
                holder.update({} if before is NOTHING else {key: before})

    def keep(self, index: int, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep what a layer of this stage returned, if a later stage needs it."""
        assert self.layout is not None
        call = index, self.calls[index]
        self.calls[index] += 1
        for source in self.layout.skips.get(call, ()):
            expected = self.layout.outputs[call]
            if isinstance(expected, Returned):
                output = Returned.of(output, containers(args, kwargs), expected.contents, {})
            self.arrived()[source] = tree_leaves(output)[source.leaf].clone()

    def beside(self) -> dict[Source, Tensor]:
        """The received parameters of modules around the layers."""
        assert self.layout is not None
        if not any(layer < 0 for layer, _ in self.layout.skips):
            return {}
        return {source: tensor for source, tensor in self.arrived().items() if source.layer < 0}


class Links:
    """Sends between the ranks of a pipeline, where no schedule does it: one batch ahead at most.

    What is to travel beside the tensors overrides `passing`, `starting` and `leaving`, which each run of a stage calls.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self._sent: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        for work, _ in self._sent:
            work.wait()  # type: ignore[union-attr]
        self._sent = [(dist.isend(t, group=self._group, group_dst=rank), t) for t in tensors]

    def receive(self, message: Message, rank: int) -> tuple[Tensor, ...]:
        tensors = tuple(torch.empty_like(t, device=self._device) for t in message.tensors)
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=rank)
        return tensors

    def outside(self) -> None:
        """The pipelined module is called outside of a step, by every rank."""

    def finished(self, rank: int) -> None:
        """It has run, and ended on `rank`."""

    def passing(self, run: Run) -> None:
        """A layer of an earlier stage is called, and computes nothing."""

    def starting(self, run: Run) -> None:
        """The first layer of this stage is called, and what it needs has arrived."""

    def leaving(self, run: Run, tensors: Sequence[Tensor], sent: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first layer of the next stage is called with `tensors`; returns what to send in place of `sent`."""
        return sent


class Stage(nn.Module):
    """What torch's PipelineStage runs: one stage, whose forward is the user's step as far as the stage goes."""

    def __init__(self, index: int, layers: list[nn.Module], own: list[nn.Parameter]) -> None:
        super().__init__()
        self.layers, self.own = nn.ModuleList(layers), nn.ParameterList(own)
        self.index = index
        self.run: Callable[[int, tuple[Tensor, ...]], Any] | None = None
        """What the forward calls; the schedule that runs sets it."""

    def __call__(self, *received: Tensor) -> Any:
        return super().__call__(*received, nothing=None)  # without any argument FSDP fails on CUDA before torch 2.13

    def forward(self, *received: Tensor, nothing: None) -> Any:
        return self.run(self.index, received)  # type: ignore[misc]


UNREACHED = "appears to not have been used in the graph"
"""In torch's error for a gradient that stages before this one would have to compute."""


@contextmanager
def explained(step: str) -> Iterator[None]:
    """While it lasts that error is one that says what to do; `step` is what asks for the gradient."""
    try:
        yield
    except RuntimeError as error:
        if UNREACHED not in str(error):
            raise
        raise RuntimeError(
            f"{step} asks for a gradient by torch.autograd.grad, which in a pipeline ends at the layers of this rank; "
            "use strategy='ddp' or 'fsdp' for penalties on gradients and gradients of inputs"
        ) from error


def received(tensor: Tensor) -> Tensor:
    """What the stage before has sent for a tensor, if it did and the tensor has not changed since; else the tensor."""
    found, version = getattr(tensor, "received", (tensor, 0))
    return found if version == tensor._version else tensor


def refuse_capturing(name: str) -> None:
    """Raise ValueError if transformers collects what layers return, in hooks that only the stages of these layers
    run."""
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    if collector is not None and collector.get():
        raise ValueError(
            f"{name} is asked for {', '.join(collector.get())} (output_hidden_states, output_attentions), which "
            "transformers collects from layers of all stages, but a stage of a pipeline runs only its own; leave them "
            "out, or use strategy='ddp' or 'fsdp'"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that it asks a tensor with a history for its gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield
