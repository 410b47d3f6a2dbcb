"""One pass of a pipeline stage through the user's code, and what torch's schedules call for it."""

from __future__ import annotations

import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from lockstep.strategies.modules.absent import Refusing
from lockstep.strategies.pipeline.shapes.containers import Returned, containers, shapes
from lockstep.strategies.pipeline.shapes.fake_tensors import Blank, Source
from lockstep.strategies.sync.collectives import broadcast_object

Place = tuple[nn.Module, str, Any]
"""An attribute of a module; in a dict or list, with its key."""
NOTHING: Mapping[Any, Tensor] = {}


SENDS_ALL_GRADIENTS = torch.__version__ < "2.12"  # as versions, not as texts
"""Whether torch sends a gradient of all that a stage has received, and sends tensors that can have one only."""
SPLITS_EXACTLY = torch.__version__ >= "2.13"
"""Whether the gradient of a weight that is used twice is right where that of inputs is computed apart."""


class Message(NamedTuple):
    """What travels from one stage to the next."""

    leaves: tuple[int, ...]
    """Places among the flattened arguments of the call with which the next stage begins."""
    sources: tuple[Source, ...]
    """What else later stages need of this and earlier ones: skip connections."""
    tensors: tuple[Tensor, ...]
    """Shapes, dtypes and requires_grad of both, as tensors on the meta device."""

    @property
    def kinds(self) -> Any:
        return self.leaves, self.sources, [(t.shape, t.dtype, t.requires_grad) for t in self.tensors]

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

    def checked(self, other: Layout, name: str) -> Layout:
        """This layout. Raises RuntimeError if other tensors travel in `other`, for a batch of the same shapes."""
        if [message.kinds for message in self.messages] != [message.kinds for message in other.messages]:
            raise RuntimeError(
                f"shapes of what {name} is called with, and of what its layers send each other, must follow from the "
                "shapes of the batch in a pipeline, but two batches of one shape led to two; pad them alike"
            )
        return self


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
    wants: Literal["stage", "inputs", "numbers", "evaluation", "shapes"] = "stage"
    """"stage", "inputs" (leave as soon as they are known), "numbers" (leave before), "evaluation" (all stages of this
    rank) or "shapes"."""
    entered: bool = False
    inside: bool = False
    started: bool = False
    """Whether a layer of this stage has been called."""
    calls: Counter[int] = field(default_factory=Counter)
    skips: dict[Source, Tensor] | None = None
    """What has arrived for later stages or as skip connections, and what layers of this stage add to it; None before
    `received` is there."""
    hidden: list[tuple[Any, Any, Any, Refusing]] = field(default_factory=list)
    """Stand-ins in attributes that layers of earlier stages set: where, under which key, and the value they replace."""
    links: Links | None = None
    """Called where this stage begins and ends."""
    logged: Sequence[Any] | None = None
    """What the step has logged so far, if that does not count."""

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
        self.hide(self.layout.attributes.get(call, ()))
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

    @contextmanager
    def in_layer(self, name: str) -> Iterator[None]:
        """Around the call of a layer of this stage. Raises RuntimeError if it logs something that does not count."""
        num_logged = len(self.logged or ())
        self.inside = False  # layers within it are called as parts of it
        yield
        self.inside = True
        if self.logged is not None and len(self.logged) > num_logged:
            raise RuntimeError(
                f"{name} logs {self.logged[num_logged][0]!r}, but a pipeline counts what is logged on the rank of the "
                "last stage, and this layer is on another; return the value and log it in training_step"
            )

    def knows(self, index: int) -> bool:
        """Whether shape inference has seen the call of a layer that comes next."""
        assert self.layout is not None
        return (index, self.calls[index]) in self.layout.outputs

    def hide(self, places: Iterable[Place]) -> None:
        """Set attributes as a layer of an earlier stage has done, to what refuses to be used."""
        for place in places:
            self._hide(*place)

    def _hide(self, module: nn.Module, name: str, key: Any) -> None:
        holder = vars(module) if key is None else vars(module).get(name)
        shown = f"{type(module).__name__}.{name}" + ("" if key is None else f"[{key!r}]")
        stand_in = Refusing(
            f"a step reads {shown}, which a layer or a hook of it has set on another stage of the pipeline; return it "
            "from the layer and from the pipelined module, or use strategy='ddp' or 'fsdp'"
        )
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

    def keep(
        self, index: int, output: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str, reads_values: bool
    ) -> None:
        """Keep what a layer of this stage returned, if a later stage needs it. Raises RuntimeError if a layer that
        reads values returned other shapes than shape inference gave."""
        assert self.layout is not None
        call = index, self.calls[index]
        self.calls[index] += 1
        expected = self.layout.outputs.get(call)
        if isinstance(expected, Returned):
            output = Returned.of(output, containers(args, kwargs), expected.contents, {})
        found, inferred = (shapes(output), shapes(expected)) if reads_values and expected is not None else ([], [])
        if found != inferred:
            raise RuntimeError(
                f"shapes of what layers return must follow from those of their inputs in a pipeline, but {name} reads "
                f"values and returns {found} where shape inference gave {inferred}; pad it, or use strategy='ddp'"
            )
        for source in self.layout.skips.get(call, ()):
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

    def shared(self, output: Any, rank: int) -> Any:
        """What the step has returned on the rank of the last stage, on each, for hooks that use it."""
        try:
            found = broadcast_object(output, rank, self._group)
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
            raise TypeError(
                f"hooks of a batch use outputs, but what a step of the pipeline returned cannot be sent to the "
                f"ranks of other stages ({error}); return tensors, numbers, or containers and dataclasses of them"
            ) from error
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), found)

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


def check_like(tensor: Tensor, expected: Tensor, name: str, layer: str) -> None:
    """Raise RuntimeError for a tensor that `layer` is given, and that is not as shape inference expected."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        found, inferred = f"{list(tensor.shape)} {tensor.dtype}", f"{list(expected.shape)} {expected.dtype}"
        raise RuntimeError(
            f"shapes and dtypes within {name} must follow from those of its inputs, "
            f"but {layer} is given {found} where shape inference gave {inferred}"
        )
    if tensor.requires_grad and not expected.requires_grad:
        raise RuntimeError(
            f"what layers compute a gradient for must follow from shapes within {name}, but {layer} is given a tensor "
            "with a gradient where shape inference gave one without; freeze and unfreeze layers in a hook such as "
            "on_train_batch_start, and detach tensors whatever their values are"
        )


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


def refuse_recomputing(name: str) -> None:
    """Raise RuntimeError in the recomputation of a checkpoint: layers on several ranks do not recompute alike."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"training_step calls torch.utils.checkpoint around {name}, whose layers are on several ranks of a "
            "pipeline; call the module itself, and give Pipeline(activation_checkpointing=True)"
        )


def refuse_uncalled(name: str, output: Any) -> None:
    """Raise ValueError for what a step has returned without a call of the pipelined module, but for None."""
    if output is not None:
        raise ValueError(
            f"a pipelined module is called once a step, but the step returned a loss without calling {name}; call it, "
            "or name another module"
        )


def refuse_whole(name: str) -> NoReturn:
    """Raise RuntimeError for a call of the module while its parameters are whole on every rank."""
    raise RuntimeError(
        f"{name} was called within whole(), where its parameters are not sharded as it computes with them; call it "
        "outside of the block"
    )


def refuse_second_call(name: str) -> NoReturn:
    """Raise RuntimeError for a second call of the module in a step."""
    raise RuntimeError(
        f"a pipelined module is called once a step, but the step calls {name} a second time; join the calls into one, "
        "or use another strategy"
    )


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
