"""Tensors that have a shape and no data, and what operations on them give, which is asked once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves

from lockstep.strategies.data.batch_slices import made_of
from lockstep.strategies.data.sample_axis import parts_of
from lockstep.strategies.modules.absent import is_here
from lockstep.strategies.modules.parameter_hooks import copy_attributes, copy_module

MAX_KNOWN = 4096
"""Operations whose result is kept: less than a kilobyte each."""


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """As `tree_flatten`, from now on into dataclasses and other objects that hold tensors too, of which torch knows
    none by itself."""
    leaves, spec = tree_flatten(tree, is_leaf)
    found = {type(leaf) for leaf in leaves if _holds_tensors(leaf) and not (is_leaf is not None and is_leaf(leaf))}
    for kind in found:
        register_pytree_node(kind, _flatten_object, functools.partial(_unflatten_object, kind))
        known_objects.add(kind)
    return flatten(tree, is_leaf) if found else (leaves, spec)


known_objects: set[type] = set()
"""Classes of whose objects `flatten` knows that they hold tensors."""


def is_plain_object(value: Any) -> bool:
    """Whether `value` is an object of user code that only holds others, in attributes."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
        and not callable(value)
        and not type(value).__module__.startswith(("torch.", "numpy"))
    )


def _holds_tensors(leaf: Any) -> bool:
    if is_dataclass(leaf):
        return not isinstance(leaf, type | nn.Module)
    if not is_plain_object(leaf):
        return False
    held = tree_leaves(vars(leaf))  # without objects that may hold `leaf` again
    return any(isinstance(t, Tensor) for t in held) and not any(map(is_plain_object, held))


def _flatten_object(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    parts = parts_of(value)
    return [*parts.values()], tuple(parts)


def _unflatten_object(kind: type, values: Iterable[Any], names: Any) -> Any:
    return made_of(kind, dict(zip(names, values, strict=True)))


def is_object(value: Any) -> bool:
    return is_plain_object(value) and not is_dataclass(value)


def content(container: Any) -> tuple[list[int], Any]:
    """What a container holds, to compare: the `id` of each leaf, and how they are arranged."""
    if isinstance(container, set):
        return [*map(id, container)], len(container)
    leaves, spec = flatten(container)
    if len(leaves) == 1 and leaves[0] is container:
        leaves, spec = tree_flatten(dict(vars(container)))
    return [*map(id, leaves)], spec


def held_deep(value: Any) -> Iterator[Any]:
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


class Source(NamedTuple):
    """A tensor that one stage computes and later ones may need: a leaf of what a layer returns in its n-th call."""

    layer: int
    call: int
    leaf: int = 0

    @classmethod
    def beside(cls, index: int) -> Source:
        """A parameter of the modules around the layers, which the first stage holds."""
        return cls(-1, index)

    @classmethod
    def lost(cls, stage: int) -> Source:
        """Of a value that `stage` has computed as no other stage can."""
        return cls(-2, stage)

    @property
    def is_lost(self) -> bool:
        return self.layer == -2


class Origins(TorchDispatchMode):
    """Follows, while it is entered, from which sources the values between layers are computed."""

    def __init__(self, stage_of: Sequence[int], beside: Sequence[Tensor]) -> None:
        super().__init__()
        self._stage_of, self._stage, self._in_layer = stage_of, 0, False
        self._known: dict[int, frozenset[Source]] = {}
        """By storage, which views share."""
        self._alive: list[Tensor] = []  # so that storages are distinct
        self.tensors: dict[Source, Tensor] = {}
        """The fake tensor of each source."""
        for i, parameter in enumerate(beside):
            self._note(parameter, {Source.beside(i)})
            self.tensors[Source.beside(i)] = parameter

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            output = func(*args, **(kwargs or {}))
        except AssertionError as error:  # torch makes no fake tensor of a view of a tensor with a history
            raise ValueError(
                f"{func} between layers of a pipelined module writes what layers have computed into a part of a "
                "tensor, which shape inference cannot follow; collect it in a list and use torch.stack or torch.cat"
            ) from error
        if self._in_layer:
            return output
        found: set[Source] = set()
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                found |= self.of(leaf)
        if torch.Tag.nondeterministic_seeded in func.tags:
            found.add(Source.lost(self._stage))
        for leaf in (*tree_leaves(output), *written(func, args, kwargs or {})) if found else ():
            if isinstance(leaf, Tensor):
                self._note(leaf, found)
        return output

    def of(self, tensor: Tensor) -> frozenset[Source]:
        """The sources of a value."""
        return self._known.get(_storage(tensor), frozenset())

    def stage_of(self, source: Source) -> int:
        """The stage that has a source."""
        return source.call if source.is_lost else 0 if source.layer < 0 else self._stage_of[source.layer]

    @contextmanager
    def of_layer(self, leaves: Sequence[Any], stage: int) -> Iterator[list[Tensor]]:
        """Around the call of a layer of `stage`, whose arguments are `leaves`. Gives a list of those that it has
        changed in place afterwards."""
        self._stage = stage
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_here(leaf)]
        versions = [tensor._version for tensor in given]
        changed: list[Tensor] = []
        self._in_layer = True
        try:
            yield changed
        finally:
            self._in_layer = False
        changed += [tensor for tensor, version in zip(given, versions, strict=True) if tensor._version != version]
        for tensor in changed:
            self._note(tensor, {Source.lost(stage)})

    def note_output(self, layer: int, call: int, output: Any) -> None:
        """What a layer has returned."""
        for i, leaf in enumerate(flatten(output)[0]):
            if is_fake(leaf):
                source = Source(layer, call, i)
                self._note(leaf, {source})
                self.tensors[source] = leaf

    def _note(self, tensor: Tensor, sources: set[Source]) -> None:
        self._known[_storage(tensor)] = self.of(tensor) | sources
        self._alive.append(tensor)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that a call of an operation changes."""
    if not func._schema.is_mutable:
        return []
    given = ((i, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments))
    marks = [a.alias_info for a in func._schema.arguments]
    changed = [value for i, value in given if marks[i] is not None and marks[i].is_write]
    return [t for t in tree_leaves(changed) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or not is_here(tensor) or hasattr(tensor, "device_mesh"):
        return id(tensor)
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError as error:  # of the wrappers of torch.func
        raise ValueError(
            "a step calls the module of a pipeline, or code between its layers, within a transform of torch.func "
            "(vmap, grad, jvp), which does not reach layers on other ranks; call it within one layer, or use "
            "strategy='ddp' or 'fsdp'"
        ) from error


class Mode(FakeTensorMode):
    """The fake mode of one model, with what operations on its tensors have given."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.known: dict[Any, Blank] = {}

    def __deepcopy__(self, memo: Any) -> Mode:
        return self  # see `TrialMode`

    def fake(self, tensor: Tensor) -> Tensor:
        """A tensor of this mode that is like `tensor`, which may be one of another mode: in a run that is planned."""
        return blank(tensor, self) if isinstance(tensor, FakeTensor) else self.from_tensor(tensor)

    def copy_of(self, module: nn.Module, device: torch.device, memo: Mapping[int, Any]) -> nn.Module:
        """A copy of `module` without data, as if on `device`; `memo` as for `deepcopy`."""
        with FakeCopyMode(self):
            fake = copy_module(module, self._copies(module) | {k: v for k, v in memo.items() if v is not module})
        moved: dict[int, Tensor] = {}
        with self:
            for child in fake.modules():
                for holder in (child._parameters, child._buffers):
                    for name, tensor in holder.items():
                        if tensor is not None and tensor.device != device:
                            if id(tensor) not in moved:
                                there = tensor.detach().to(device)
                                if isinstance(tensor, nn.Parameter):
                                    there = nn.Parameter(there, requires_grad=tensor.requires_grad)
                                    copy_attributes(tensor, there)
                                moved[id(tensor)] = there
                            holder[name] = moved[id(tensor)]  # type: ignore[assignment]
        return fake

    def _copies(self, module: nn.Module) -> dict[int, Any]:
        """For `deepcopy`: what to take for the tensors of `module` that are of another mode."""
        held = (t for child in module.modules() for t in (*child._parameters.values(), *child._buffers.values()))
        found: dict[int, Any] = {}
        for tensor in held:
            if isinstance(tensor, FakeTensor):
                copy: Tensor = blank(tensor, self)
                if isinstance(tensor, nn.Parameter):
                    copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                found[id(tensor)] = copy
        return found


def blank(tensor: FakeTensor, mode: FakeTensorMode) -> FakeTensor:
    """A tensor of `mode` that is like the fake tensor of another mode."""
    with unset_fake_temporarily():
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, like, tensor.fake_device)


def is_fake(value: Any) -> bool:
    """Whether `value` is a tensor of a `Mode`, which stands for one that another stage computes; in a run that is
    planned all tensors are fake."""
    return isinstance(value, FakeTensor) and isinstance(value.fake_mode, Mode)


class Blank:
    """What a tensor without data is like, to make more of them: a tenth of the time of a detach, which goes through the
    fake mode."""

    __slots__ = ("_device", "_mode", "like")

    def __init__(self, tensor: FakeTensor) -> None:
        self._mode, self._device = tensor.fake_mode, tensor.fake_device
        with unset_fake_temporarily():  # of a run that is planned
            self.like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    def tensor(self) -> FakeTensor:
        with unset_fake_temporarily():
            return _Known(self._mode, self.like, self._device)


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
