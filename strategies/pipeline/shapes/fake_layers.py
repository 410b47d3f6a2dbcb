"""Copies of layers that have shapes and no data."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_map_only

from lockstep.strategies.modules.blocks import Layer
from lockstep.strategies.modules.parameter_hooks import FORWARD, users_hooks
from lockstep.strategies.pipeline.shapes.containers import containers, filled
from lockstep.strategies.pipeline.shapes.fake_tensors import Mode
from lockstep.strategies.pipeline.shapes.made_up import MadeUp


class FakeLayers:
    """Copies of `layers`, as if on `device`, which give fake tensors of `mode` for what the layers return. `model` is
    not copied where a layer holds it."""

    def __init__(self, layers: Sequence[Layer], model: nn.Module, mode: Mode, device: torch.device) -> None:
        self._mode, self._layers = mode, layers
        self._copies = [mode.copy_of(layer.module, device, {id(model): model}) for layer in layers]
        self.by_values: set[int] = set()
        """Layers that run on tensors with values only, so that the shapes of what they return may follow from these."""
        self._reported: set[int] = set()
        self._made_up: MadeUp | None = None

    def pairs(self, index: int | None = None) -> Iterator[tuple[nn.Module, nn.Module]]:
        """The modules of all layers, or of one, and their copies."""
        for i, (layer, copy) in enumerate(zip(self._layers, self._copies, strict=True)):
            if index is None or i == index:
                mine, theirs = (dict(each.named_modules()) for each in (layer.module, copy))
                if changed := sorted(mine.keys() ^ theirs.keys()):
                    raise RuntimeError(
                        f"the layer {layer.name} of a pipeline has other layers than when the run began "
                        f"({layer.name}.{changed[0]}); add and remove layers in __init__, setup or configure_model"
                    )
                yield from zip(mine.values(), theirs.values(), strict=True)

    def follow_trainability(self) -> None:
        for layer, copy in zip(self._layers, self._copies, strict=True):
            for mine, theirs in zip(layer.module.parameters(), copy.parameters(), strict=True):
                theirs.requires_grad_(mine.requires_grad)

    def follow(self) -> None:
        """Take over what may have changed since they were made: modes, hooks, and what knows the run."""
        for mine, theirs in self.pairs():
            theirs.training = mine.training  # BatchNorm takes a batch of one in evaluation only
            held = vars(theirs)
            held.update((key, value) for key, value in vars(mine).items() if held.get(key, mine) is None)
            for kind in FORWARD:
                hooks = {key: self._tried(hook) for key, hook in users_hooks(mine, kind)}
                setattr(theirs, kind, OrderedDict(hooks))
                setattr(theirs, f"{kind}_with_kwargs", getattr(mine, f"{kind}_with_kwargs"))

    def report(self, index: int) -> None:
        """Warn of a layer that reads values, once, on the rank that has it."""
        if index in self.by_values and index not in self._reported:
            self._reported.add(index)
            warnings.warn(
                f"{self._layers[index].name} reads values of tensors, which in a pipeline are those of a part of the "
                "micro-batch: it gives the numbers of one process if it treats samples one by one",
                stacklevel=2,
            )

    def __call__(self, index: int, args: Any, kwargs: Any) -> Any:
        """What a layer returns for fake tensors. A layer that fails on them, as one that reads their values does, runs
        on values that are made up."""
        held, layer = containers(args, kwargs), self._copies[index]
        before = tree_map_only(Tensor, lambda leaf: leaf, held)
        if index not in self.by_values:
            try:
                with self._mode:
                    return layer(*args, **kwargs)
            except Exception:
                self.by_values.add(index)
                filled(held, before)
        made_up = self._made_up = MadeUp(self._mode)
        try:
            args, kwargs = map(filled, (args, kwargs), tree_map_only(Tensor, made_up.real, (args, kwargs)))
            with made_up.within(layer):
                output = layer(*args, **kwargs)
            filled(held, tree_map_only(Tensor, made_up.fake, held))
            return filled(output, tree_map_only(Tensor, made_up.fake, output))
        finally:
            self._made_up = None

    def _tried(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook may read values, as those that watch a model do."""

        def called(*args: Any, **kwargs: Any) -> Any:
            made_up = self._made_up
            try:
                if made_up is None:
                    return hook(*args, **kwargs)
                args, kwargs = tree_map_only(Tensor, made_up.fake, (args, kwargs))
                with self._mode:
                    return tree_map_only(FakeTensor, made_up.real, hook(*args, **kwargs))
            except (DataDependentOutputException, DynamicOutputShapeException):
                return None

        return called
