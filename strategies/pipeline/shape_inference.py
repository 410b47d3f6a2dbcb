"""What travels between stages, found by running the model on fake tensors, which have a shape but no data."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from lockstep.strategies.data.batch_slices import signature
from lockstep.strategies.launch.rng import kept_streams
from lockstep.strategies.pipeline.partition import Cut

MAX_KNOWN = 4096
"""Operations whose result is kept: less than a kilobyte each."""
MAX_LAYOUTS = 512
"""Shapes of inputs whose layout is kept: some kilobytes each."""


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
    """What shape inference found out."""

    key: Any
    """What the inputs look like."""
    messages: list[Message]
    """From stage i to stage i + 1."""
    outputs: dict[tuple[int, int], Any]
    """What a layer returns in its n-th call, as fake tensors."""
    result: Any
    """What the module returns, as fake tensors."""


@dataclass(slots=True)
class _Pass:
    """One run of the model on fake tensors."""

    stage: int = 0
    calls: Counter[int] = field(default_factory=Counter)
    messages: list[Message] = field(default_factory=list)
    outputs: dict[tuple[int, int], Any] = field(default_factory=dict)


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
        self._mode = Mode()
        self._beside_layers = beside_layers
        self._fake_layers = [self._fake(layer.module) for layer in parts.layers]
        own: list[Any] = [shell._parameters[name] for shell, name in beside_layers]
        with self._mode:
            self._fake_beside = [
                self._mode.from_tensor(p.detach()).to(device).requires_grad_(p.requires_grad) for p in own
            ]
        self._pass: _Pass | None = None
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
        leaves, spec = tree_flatten((args, kwargs))
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
            self.known[key] = self._infer(key, args, kwargs)
            if len(self.known) > MAX_LAYOUTS:
                self.known.pop(next(iter(self.known)))
        return self.known[key]

    def _infer(self, key: Any, args: Any, kwargs: Any) -> Layout:
        outer, running = self._pass, _Pass()
        self._pass = running
        try:
            with torch.enable_grad(), kept_streams(), self.without_first_stage():
                result = self._net.forward(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"what {self._name} does between its layers must follow from shapes in a pipeline, but it reads values "
                f"that layers have computed ({error.func}); decide within one layer, or use strategy='ddp' or 'fsdp'"
            ) from error
        finally:
            self._pass = outer
        if running.stage < self._stage_of[-1]:
            missing = self._layers[self._stage_of.index(running.stage + 1)].name
            raise ValueError(
                f"{self._name} called no layer of stage {running.stage + 1}, which begins with {missing}; "
                "define layers in the order in which they are called, or give split"
            )
        return Layout(key, running.messages, running.outputs, tree_map_only(FakeTensor, torch.Tensor.detach, result))

    def layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """What stands for the call of a layer while `layout` runs the model."""
        running = self._pass
        assert running is not None
        name, stage = self._layers[index].name, self._stage_of[index]
        if stage < running.stage:
            raise ValueError(
                f"{name} is called after layers of stage {running.stage}, but is on stage {stage}: stages follow the "
                "order in which layers are defined; define it where it is used, or choose split so that both are on "
                "one stage"
            )
        if stage > running.stage + 1:
            raise ValueError(
                f"{self._name} calls {name} of stage {stage} before any layer of stage {running.stage + 1}; define "
                "layers in the order in which they are called"
            )
        if stage > running.stage:
            running.messages.append(_message(name, stage, tree_leaves((args, kwargs))))
            running.stage = stage
        with self._mode:
            output = self._fake_layers[index](*args, **kwargs)
        call = running.calls[index]
        running.calls[index] += 1
        running.outputs[index, call] = tree_map_only(FakeTensor, Blank, output)
        return output

    @contextmanager
    def without_first_stage(self) -> Iterator[None]:
        """Parameters beside layers belong to the first stage: while it lasts they are fake, as on the other stages."""
        before = [shell.__dict__.get(name) for shell, name in self._beside_layers]
        for (shell, name), fake in zip(self._beside_layers, self._fake_beside, strict=True):
            shell.__dict__[name] = fake  # found before what `_parameters` holds
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
            fake = copy.deepcopy(module)
        moved: dict[int, Tensor] = {}
        with self._mode:
            for child in fake.modules():
                for holder in (child._parameters, child._buffers):
                    for name, tensor in holder.items():
                        if tensor is not None and tensor.device != self._device:
                            if id(tensor) not in moved:
                                there = tensor.detach().to(self._device)
                                moved[id(tensor)] = (
                                    nn.Parameter(there, requires_grad=tensor.requires_grad)
                                    if isinstance(tensor, nn.Parameter)
                                    else there
                                )
                            holder[name] = moved[id(tensor)]  # type: ignore[assignment]
        return fake


def _message(name: str, stage: int, leaves: Sequence[Any]) -> Message:
    """What a stage must receive for the flattened arguments of its first layer."""
    places = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, FakeTensor)}
    if not places:
        raise ValueError(
            f"{name} begins stage {stage} but takes nothing that the layers before it have computed; give split"
        )
    chosen = tuple(sorted(places.values()))
    return Message(
        chosen,
        tuple(
            torch.empty(leaves[i].shape, dtype=leaves[i].dtype, device="meta", requires_grad=leaves[i].requires_grad)
            for i in chosen
        ),
    )


# ---- fake tensors ----


class Mode(FakeTensorMode):
    """The fake mode of one model, with what operations on its tensors have given."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, Blank] = {}


class Blank:
    """What a tensor without data is like, to make more of them: a tenth of the time of a detach, which goes through the
    fake mode."""

    __slots__ = ("_device", "_like", "_mode")

    def __init__(self, tensor: FakeTensor) -> None:
        self._mode, self._device = tensor.fake_mode, tensor.fake_device
        self._like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    def tensor(self) -> FakeTensor:
        return _Known(self._mode, self._like, self._device)


class _Known(FakeTensor):
    """Looks up what an operation gives that was asked before, which takes the fake mode many times as long to find
    out."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        question = _question(func, args, kwargs)
        mode = None if question is None else _mode_of(args)
        if mode is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        answer = mode.known.get(question)
        if answer is None:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if not isinstance(result, FakeTensor) or result.constant is not None:
                return result
            if len(mode.known) >= MAX_KNOWN:
                mode.known.clear()
            answer = mode.known[question] = Blank(result)
        return answer.tensor()


_makes_new: dict[Any, bool] = {}


def _question(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """All that the result of an operation depends on where its tensors have no data; None where it is not such a
    one."""
    if func not in _makes_new:
        arguments, returns = func._schema.arguments, func._schema.returns
        _makes_new[func] = (
            len(returns) == 1
            and str(returns[0].type) == "Tensor"
            and not any(value.alias_info for value in (*arguments, *returns))
        )
    if not _makes_new[func]:
        return None
    parts = [_part(value) for value in (*args, *kwargs.values())]
    return None if None in parts else (func, *kwargs, *parts)


_TENSORS = (Tensor, nn.Parameter, FakeTensor, _Known)
_PLAIN = (bool, int, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def _part(value: Any) -> Any:
    kind = type(value)
    if kind in _TENSORS:
        if value.layout is not torch.strided or getattr(value, "constant", None) is not None:
            return None
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.fake_device if isinstance(value, FakeTensor) else value.device,
        )
    if kind in _PLAIN:
        return kind, value
    if kind in (list, tuple):
        parts = [_part(element) for element in value]
        return None if None in parts else (kind, *parts)
    return None


def _mode_of(values: Sequence[Any]) -> Mode | None:
    for value in values:
        mode = (
            value.fake_mode
            if isinstance(value, FakeTensor)
            else _mode_of(value)
            if isinstance(value, list | tuple)
            else None
        )
        if isinstance(mode, Mode):
            return mode
    return None
