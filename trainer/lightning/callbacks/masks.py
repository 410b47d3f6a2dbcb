"""Masks of torch.nn.utils.prune, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lockstep.callbacks._support.parameter_state import ParameterState

Places = Sequence[tuple[nn.Module, str]]
"""Modules and the names of their parameters."""
_Tensors = dict[nn.Parameter, dict[str, Tensor]]


class Masks(ParameterState):
    """Masks and whole weights of pruned parameters, and the weights that they had at the start."""

    def __init__(self, places: Places, originals: Sequence[Tensor]) -> None:
        self._places: dict[nn.Parameter, tuple[nn.Module, str]] = {whole(*place): place for place in places}
        self._originals: dict[Tensor, Tensor] = {
            whole(*place): original for place, original in zip(places, originals, strict=False)
        }
        self._kept: _Tensors = {}  # while the parameters have the places and values that are saved
        self._saved: _Tensors = {}
        super().__init__(self._places)

    def reset(self) -> None:
        self._kept.clear()
        self._saved.clear()

    def keep(self) -> None:
        """Note what pruning that is made permanent would lose."""
        for parameter, place in self._places.items():
            if is_pruned(*place):
                self._kept[parameter] = {"whole": parameter.detach().clone(), "mask": _mask(*place)}

    @contextmanager
    def saving(self) -> Iterator[None]:
        with torch.no_grad():
            pruned = {parameter: place for parameter, place in self._places.items() if is_pruned(*place)}
            self.keep()
            for parameter, (layer, name) in pruned.items():
                for each in (name, *_names(name)):
                    delattr(layer, each)
                layer.register_parameter(name, parameter)
                parameter.mul_(self._kept[parameter]["mask"])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, (layer, name) in pruned.items():
                    kept = self._kept.pop(parameter)
                    delattr(layer, name)
                    key, mask_key = _names(name)
                    layer.register_parameter(key, parameter)
                    layer.register_buffer(mask_key, kept["mask"])
                    parameter.copy_(kept["whole"])
                    compute(layer, name)

    def tensors(self) -> dict[Tensor, dict[str, Tensor]]:
        state: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in self._places:
            found = dict(self._kept.get(parameter, {}))
            if parameter in self._originals:
                found["original"] = self._originals[parameter]
            if found:
                state[parameter] = found
        return state

    @torch.no_grad()
    def take(self, parameter: Tensor, saved: dict[str, Tensor]) -> None:
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._originals and "original" in saved:
            self._originals[parameter].copy_(saved["original"])
        if "mask" in saved:
            self._saved[parameter] = saved

    @torch.no_grad()
    def apply_saved(self) -> None:
        """Prune what was pruned when the checkpoint was saved."""
        for parameter, saved in self._saved.items():
            layer, name = self._places[parameter]
            prune.custom_from_mask(layer, name, saved["mask"].to(parameter.device))
            parameter.copy_(saved["whole"])
            compute(layer, name)
        self._saved.clear()


def _names(name: str) -> tuple[str, str]:
    """Under which a pruned layer has the whole parameter and its mask."""
    return f"{name}_orig", f"{name}_mask"


def _mask(layer: nn.Module, name: str) -> Tensor:
    _, mask = _names(name)
    return layer.get_buffer(mask)


def is_pruned(layer: nn.Module, name: str) -> bool:
    return all(hasattr(layer, each) for each in _names(name))


def whole(layer: nn.Module, name: str) -> Any:
    """The parameter without its mask; None if the layer has none."""
    whole, _ = _names(name)
    return getattr(layer, whole if is_pruned(layer, name) else name, None)


def compute(layer: nn.Module, name: str) -> None:
    """Let a pruned layer have the weight of now, as its next forward computes it."""
    if is_pruned(layer, name):
        setattr(layer, name, _mask(layer, name) * whole(layer, name))


def count_pruned(layer: nn.Module, name: str) -> tuple[int, int]:
    """How many values of a parameter are pruned, and how many it has."""
    zeros = int((_mask(layer, name) == 0).sum()) if is_pruned(layer, name) else 0
    return zeros, whole(layer, name).numel()
