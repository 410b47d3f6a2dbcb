"""A module or DataModule built from the hyperparameters in a checkpoint, with the weights or the state in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from lockstep.strategies.checkpoint_state import Reader, check_names, check_shape, unpack
from lockstep.trainer.checkpoint import convert
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.checkpoint.snapshot import weights_for
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError
from lockstep.trainer.hparams import built
from lockstep.trainer.setup import frozen


def load_module(
    cls: Any,
    path: str | Path | BinaryIO,
    map_location: Any,
    strict: bool | None,
    overrides: dict[str, Any],
    trusts: bool,
) -> Any:
    """`Module.load_from_checkpoint`; with `strict` None the module's `strict_loading` decides, if it has one."""
    module, saved = _built(cls, path, overrides, trusts, "")
    if strict is None:
        strict = getattr(module, "strict_loading", None) in (None, True)
    module.configure_model()
    if not isinstance(saved, Checkpoint):
        module.on_load_checkpoint(saved.content)
        with refused(saved.source):
            values = convert.values_in(saved.content)  # as the hook has left them
            module.load_state_dict(values, strict=strict)
        return module.to(_device_of(map_location))
    weights = weights_for((module.on_load_checkpoint,), saved)
    with refused(saved.path):
        frozen.check_module(weights, module)
        _load(module, weights, strict)
    return module.to(_device_of(map_location))


def _load(module: nn.Module, reader: Reader, strict: bool) -> None:
    """Load by the module's `load_state_dict`, which it may override, with the load hooks of its layers.

    Raises KeyError or ValueError by name. Names that the `state_dict` of a layer leaves away are not missed.
    """
    values = module.state_dict()  # which knows the versions of layers, by which these tell what they are given
    own, tensors = dict(values), set(reader.names("model/"))
    for name in own.keys() - set(reader.meta.get("frozen", ())):
        del values[name]
    for name, value in reader.meta["model"].items():
        values[name] = reader.read(f"model/{name}") if f"model/{name}" in tensors else unpack(value, reader.read)
    is_own = type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module)
    complete = own.keys() == values.keys() and not is_own
    try:
        module.load_state_dict(values, strict=strict and not complete)
    except RuntimeError:  # in torch's words
        if strict:
            check_names(own, reader)
        for name in own.keys() & reader.meta["model"].keys():
            if f"model/{name}" in tensors:
                check_shape(name, own[name].shape, reader)
        raise


def _device_of(map_location: Any) -> Any:
    """The device that `map_location` means; what has been read is on the CPU."""
    if callable(map_location):
        return map_location(torch.UntypedStorage(0), "cpu").device
    return map_location.get("cpu") if isinstance(map_location, Mapping) else map_location


def load_datamodule(cls: Any, path: str | Path | BinaryIO, overrides: dict[str, Any], trusts: bool) -> Any:
    """`DataModule.load_from_checkpoint`."""
    datamodule, saved = _built(cls, path, overrides, trusts, "datamodule_")
    if not isinstance(saved, Checkpoint):
        state = saved.content.get(cls.__qualname__, convert.note_in(saved.content).get("datamodule"))
    else:
        state = unpack(saved.state.get("datamodule"), saved.read)
    if state:
        with refused(saved.path if isinstance(saved, Checkpoint) else saved.source):
            datamodule.load_state_dict(state)
    return datamodule


def _built(
    cls: Any, path: str | Path | BinaryIO, overrides: dict[str, Any], trusts: bool, prefix: str
) -> tuple[Any, Checkpoint | convert.Weights]:
    """An object of the hyperparameters in a checkpoint, and that checkpoint, or the file in Lightning's layout."""
    if not isinstance(path, (str, os.PathLike)) or os.path.isfile(os.path.expanduser(path)):
        found = convert.read_pickle(path, trusts)
        given, lost = convert.given_in(found.content, prefix)
        return built(cls, given, convert.name_in(found.content, prefix), lost, overrides, found.source), found
    checkpoint = Checkpoint.open(os.path.expanduser(path))
    state = checkpoint.state
    hparams = unpack(state.get(f"{prefix}hyperparameters", {}), checkpoint.read)
    name = state.get(f"{prefix}hyperparameters_name")
    unsaved = state.get(f"{prefix}hyperparameters_unsaved", [] if f"{prefix}hyperparameters" in state else None)
    if not isinstance(hparams, dict) or not isinstance(name, str | None) or not isinstance(unsaved, list | None):
        raise CheckpointError(
            f"checkpoint {path} cannot be used: state.json has no valid hyperparameters; load another one"
        )
    return built(cls, hparams, name, unsaved, overrides, path), checkpoint
