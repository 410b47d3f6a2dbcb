"""Layers placed over several devices of one process; activations move from layer to layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lockstep.strategies.base import Topology
from lockstep.strategies.data.batch_slices import Replaced, move_in_place, moves_whole
from lockstep.strategies.devices import nth_device
from lockstep.strategies.modules.blocks import Rule, balance, closed_layers
from lockstep.strategies.modules.model_changes import refuse_unready
from lockstep.strategies.spmd import SPMDStrategy


class ModelParallel(SPMDStrategy):
    """The model's layers are on `devices` devices of one process, in order, and a batch passes through them.

    One device works at a time, so this makes room, not speed; `pipeline` keeps all devices busy.

    `device_map`: index of a device for submodules by name, such as `{"net.0": 0, "net.1": 1}`; what is inside a
        named submodule goes with it, and every parameter must be covered. None cuts the model into contiguous
        parts of about equal parameter bytes.
    `activation_checkpointing`: recompute the blocks' activations in the backward; True, or which blocks.

    On CPU the devices are logical: the same code runs, and all tensors stay in the same memory.
    """

    single_process = True
    max_devices = None
    sees_whole_gradients = True

    def __init__(
        self, *, device_map: Mapping[str, int] | None = None, activation_checkpointing: bool | Rule = False
    ) -> None:
        super().__init__(activation_checkpointing=activation_checkpointing)
        self._given = None if device_map is None else dict(device_map)
        self.device_map: dict[str, int] = {}
        """Where each submodule lies, by its name; valid after `setup_module`."""
        self._hooks: list[Any] = []

    def setup(self) -> Topology:
        self.topology = replace(super().setup(), device=nth_device(self._accelerator, 0))
        return self.topology

    def setup_module(self, model: nn.Module) -> nn.Module:
        refuse_unready(model, self.name)
        count = self.num_devices
        self.device_map = balanced(model, count) if self._given is None else self._checked(model, self._given)
        self._check_shared(model)
        return super().setup_module(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        for name, index in self.device_map.items():
            layer = model.get_submodule(name)
            layer.to(nth_device(self._accelerator, index))
            self._hooks += _Mover(nth_device(self._accelerator, index)).hooks_of(layer)
        for name, buffer in list(model.named_buffers()):
            if not any(name == place or name.startswith(place + ".") for place in self.device_map):
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = buffer.to(self.topology.device)
        home = _Mover(self.topology.device)
        for child in model.children():  # what the user's step computes a loss from lies with the batch
            self._hooks.append(child.register_forward_hook(home.outputs))
        return model

    def teardown_module(self, wrapped: nn.Module) -> None:
        self._remove_hooks()
        super().teardown_module(wrapped)
        wrapped.to("cpu")  # whole, where its layers find each other's outputs

    def teardown(self) -> None:
        self._remove_hooks()  # those of a run that failed
        super().teardown()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _check_shared(self, model: nn.Module) -> None:
        """Raise ValueError for a parameter that layers on several devices share."""
        places: dict[int, tuple[str, int]] = {}
        for place, index in self.device_map.items():
            for name, parameter in model.get_submodule(place).named_parameters(prefix=place, remove_duplicate=False):
                other, before = places.setdefault(id(parameter), (name, index))
                if before != index:
                    raise ValueError(
                        f"a parameter has one device, but {name} on device {index} is {other} on device {before}; "
                        "give a device_map with "
                        "both on one device"
                    )

    def _checked(self, model: nn.Module, device_map: dict[str, int]) -> dict[str, int]:
        names = {name for name, _ in model.named_modules()}
        for name, index in device_map.items():
            if name not in names:
                raise ValueError(
                    f"device_map names {name!r}, which is not a submodule; there are "
                    f"{', '.join(sorted(names - {''})[:8])}"
                )
            if not isinstance(index, int) or not 0 <= index < self.num_devices:
                raise ValueError(
                    f"device_map must give an index below devices={self.num_devices}, but {name!r} has {index!r}"
                )
        missing = [
            name
            for name, _ in model.named_parameters()
            if not any(name.startswith(place + ".") for place in device_map)
        ]
        if missing:
            raise ValueError(
                f"device_map must cover every parameter, but {missing[0]!r} is in none of the submodules that it names"
            )
        return device_map


def balanced(model: nn.Module, count: int) -> dict[str, int]:
    """Cut the model's layers, in order, into `count` contiguous parts of about equal parameter bytes.

    Raises ValueError for a model with fewer layers than devices.
    """
    loose = [name for name, _ in model.named_parameters(recurse=False)]
    if loose:
        raise ValueError(f"strategy 'model' places layers, but {loose[0]!r} belongs to none; put it into a submodule")
    layers = closed_layers(model, at_least=count)
    if len(layers) < count:
        raise ValueError(
            f"strategy 'model' cuts between layers, but {type(model).__name__} has {len(layers)} for devices={count}; "
            "lower devices or give a device_map"
        )
    first = balance([sum(p.numel() * p.element_size() for p in layer.module.parameters()) for layer in layers], count)
    return {layer.name: sum(start <= i for start in first) - 1 for i, layer in enumerate(layers)}


class _Mover:
    """Hooks that bring what a layer is given, or what it returns, to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.replaced = device, Replaced(moves_whole)

    def hooks_of(self, layer: nn.Module) -> list[Any]:
        return [
            layer.register_forward_pre_hook(self.inputs, with_kwargs=True, prepend=True),
            layer.register_forward_hook(torch.compiler.disable(self.replaced.end), with_kwargs=True, always_call=True),
        ]

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.replaced.begin(
            (args, kwargs), lambda: (move_in_place(args, self._device), move_in_place(kwargs, self._device))
        )

    def outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        return move_in_place(output, self._device)
