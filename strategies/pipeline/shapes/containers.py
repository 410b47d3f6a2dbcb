"""Lists, dicts and other objects that hold tensors, which layers may change."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.strategies.pipeline.shapes.fake_tensors import Blank, flatten, is_plain_object


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


def shapes(output: Any) -> list[Any]:
    """Shapes of the tensors in the output of a layer, or in the stand-in for one."""
    output = output.output if isinstance(output, Returned) else output
    return [
        list((leaf.like if isinstance(leaf, Blank) else leaf).shape)
        for leaf in flatten(output)[0]
        if isinstance(leaf, Blank | Tensor)
    ]
