"""Modules built on the meta device, which has shapes and no values."""

from __future__ import annotations

from torch import nn


def materialize(model: nn.Module) -> nn.Module:
    """Give what is on the meta device the values that its layers' `reset_parameters` draws, in the order of the layers.

    Those of a model that was built in memory, where building it drew nothing else. Returns `model`. Raises
    ValueError for a layer that has no `reset_parameters`.
    """
    for name, module in model.named_modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if not any(tensor.is_meta for _, tensor in own):
            continue
        if not callable(getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"{name or type(model).__name__}.{own[0][0]} is on the meta device and {type(module).__name__} has no "
                "reset_parameters to give it values; "
                "build the layer in configure_model, or define reset_parameters"
            )
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()
    return model
