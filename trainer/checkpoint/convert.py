"""Weights in other formats: one safetensors file, and what Lightning and torch have pickled.

Nothing that `fit`, `validate`, `test` or `predict` reads goes through here: an import is a step of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.callbacks._support.files import replacing
from lockstep.strategies import checkpoint_state
from lockstep.strategies.checkpoint_state import TensorShard, is_packed_tensor, pack, plain_config, unpack
from lockstep.trainer.checkpoint import safetensors_file
from lockstep.trainer.checkpoint.manifest import reason
from lockstep.trainer.checkpoint.reader import refuse_inside
from lockstep.trainer.checkpoint.safetensors_file import PAIRS
from lockstep.trainer.checkpoint.store import Checkpoint, CheckpointError, save

LIGHTNING = "2.6.0"
"""The version of Lightning whose layout `export_lightning` writes."""
_NOTE = "lockstep"
"""Key in a safetensors file's metadata: JSON of what the tensors alone do not say."""


@dataclass
class Weights:
    """What a foreign file holds that a checkpoint can."""

    values: dict[str, Any]
    """A state dict: tensors, and extra state of modules."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    hyperparameters_name: str | None = None
    """The argument that they are together, if they are one."""
    unsaved: list[str] = field(default_factory=list)
    """Names of hyperparameters that a checkpoint cannot hold."""
    global_step: int = 0
    current_epoch: int = 0
    skipped: list[str] = field(default_factory=list)
    """Names of what was not taken."""
    source: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    """All that a pickled file holds."""


def export_weights(checkpoint: Checkpoint, target: str | os.PathLike[str]) -> Path:
    """Write the weights of a checkpoint as one safetensors file under the module's own names; return its absolute path.

    Replaces a file at `target` in one rename. Holds the largest tensor in memory, not the model. Raises
    CheckpointError.
    """
    target = Path(os.path.abspath(target))
    names = checkpoint.names("model/")
    if not names:
        raise CheckpointError(f"checkpoint {checkpoint.path} has no weights; export one that fit saved")
    if target.is_dir():
        raise CheckpointError(
            f"cannot export to {target}: it is a folder; give the path of a file, such as "
            f"{target / 'model.safetensors'}"
        )
    refuse_inside(target)
    state = checkpoint.state
    note = {
        "model": {name: value for name, value in checkpoint.meta.get("model", {}).items() if value is not None},
        "complex128": [name.removeprefix("model/") for name in names if checkpoint.dtype(name) in PAIRS],
        "hyperparameters": {
            name: value
            for name, value in state.get("hyperparameters", {}).items()
            if '"$tensor"' not in json.dumps(value)
        },
        "hyperparameters_name": state.get("hyperparameters_name"),
        "hyperparameters_unsaved": state.get("hyperparameters_unsaved", []),
        "progress": _progress(state.get("progress")),
    }
    layout = {name.removeprefix("model/"): (checkpoint.dtype(name), checkpoint.shape(name)) for name in names}
    with _exported(target) as file:
        for data in safetensors_file.content(
            layout, lambda key: checkpoint.read(f"model/{key}"), {_NOTE: json.dumps(note)}
        ):
            file.write(data)
    return target


@contextmanager
def _exported(target: Path) -> Iterator[Any]:
    """The file to write, which replaces one at `target` at the end."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, "wb", durable=True) as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"cannot export to {target}: {reason(error)}; choose another path") from error


def export_lightning(checkpoint: Checkpoint, target: str | os.PathLike[str]) -> Path:
    """Write a checkpoint as one file in Lightning's layout, which `torch.load(…, weights_only=True)` opens.

    Weights, hyperparameters, counters, optimizers as torch saves them, schedulers and callbacks; Lightning loads its
    weights and hyperparameters, but not the position of its loops. Holds all of it in memory. Raises CheckpointError.
    """
    target, state = Path(os.path.abspath(target)), checkpoint.state
    if not checkpoint.names("model/"):
        raise CheckpointError(f"checkpoint {checkpoint.path} has no weights; export one that fit saved")
    refuse_inside(target)

    def plain(packed: Any) -> Any:
        return _plain(unpack(packed, checkpoint.read))

    progress = _progress(state.get("progress"))
    content = {
        "epoch": progress["current_epoch"],
        "global_step": progress["global_step"],
        "pytorch-lightning_version": LIGHTNING,
        "state_dict": {
            key: checkpoint.read(f"model/{key}") if value is None else plain(value)
            for key, value in checkpoint.meta["model"].items()
        },
        **_hyperparameters(checkpoint),
        "optimizer_states": [_torch_state(saved, plain) for saved in checkpoint.meta.get("optimizers", {}).values()],
        "lr_schedulers": [plain(saved) for saved in state.get("schedulers", [])],
        "callbacks": {key: plain(saved) for key, saved in state.get("callbacks", {}).items()},
        **plain(state.get("module", {})),
    }
    with _exported(target) as file:
        torch.save(content, file)
    return target


def _hyperparameters(checkpoint: Checkpoint) -> dict[str, Any]:
    """Those of the module and the DataModule under Lightning's names, and a note of what these do not say: which were
    not saved, which are configs of omegaconf, and the state of the DataModule."""
    state, found, note = checkpoint.state, {}, {}
    for prefix in ("", "datamodule_"):
        given = unpack(state.get(f"{prefix}hyperparameters", {}), checkpoint.read)
        name = state.get(f"{prefix}hyperparameters_name")
        if f"{prefix}hyperparameters" in state or not prefix:
            found[f"{prefix}hyper_parameters"] = _plain(given)
            note[f"{prefix}unsaved"] = state.get(f"{prefix}hyperparameters_unsaved", [])
            note[f"{prefix}configs"] = [*checkpoint_state.configs_in(given)]
        if name is not None:
            found[f"{prefix}hparams_name"] = name
    if state.get("datamodule"):
        note["datamodule"] = _plain(unpack(state["datamodule"], checkpoint.read))
    return {**found, _NOTE: note}


def given_in(loaded: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """The hyperparameters in a file in Lightning's layout, and names of those that were not saved."""
    given = loaded.get(f"{prefix}hyper_parameters")
    values = {key: value for key, value in given.items() if type(key) is str} if isinstance(given, Mapping) else {}
    for path in _noted(loaded, f"{prefix}configs", (str, list)):
        checkpoint_state.put_config(values, path)
    return values, _noted(loaded, f"{prefix}unsaved", str)


def note_in(loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `export_lightning` has written beside what Lightning's layout has."""
    note = loaded.get(_NOTE)
    return note if isinstance(note, Mapping) else {}


def _noted(loaded: Mapping[str, Any], key: str, kinds: Any) -> list[Any]:
    names = note_in(loaded).get(key)
    return [name for name in names if isinstance(name, kinds)] if isinstance(names, list) else []


def _torch_state(saved: dict[str, Any], plain: Callable[[Any], Any]) -> dict[str, Any]:
    """The saved state of an optimizer with numbers for the names of parameters, as `Optimizer.state_dict` has it."""
    groups = [plain(group) for group in saved["param_groups"]]
    names = [name for group in groups for name in group["params"]]
    index = {name: i for i, name in enumerate(names)}
    return {
        "state": {index[name]: plain(entry) for name, entry in saved["state"].items()},
        "param_groups": [{**group, "params": [index[name] for name in group["params"]]} for group in groups],
    }


def _plain(value: Any) -> Any:
    """`value` in types that torch's restricted unpickler takes: paths as strings, arrays of numpy as tensors."""
    value = plain_config(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return str(value) if isinstance(value, PurePath) else value


def import_weights(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, trust_pickle: bool = False
) -> Weights:
    """Make a checkpoint of the weights in `source`; return what was found.

    `source` is a safetensors file, or, with `trust_pickle`, a Lightning checkpoint or a state dict of torch, which is
    first read by torch's restricted unpickler and, where that refuses, run as the program that a pickle is. The
    checkpoint holds weights, hyperparameters and counters: enough for `load_from_checkpoint`, `validate`, `test` and
    `predict`, not to resume. Raises CheckpointError, and replaces nothing that is at `target`.
    """
    source, target = Path(source), Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise CheckpointError(f"cannot import to {target}: it exists; choose another path")
    if not source.is_file():
        raise CheckpointError(
            f"cannot import {source}: it is not a file; pass a safetensors file, a Lightning checkpoint or a torch "
            "state dict"
        )
    try:
        with open(source, "rb") as file:
            head = file.read(9)
    except OSError as error:
        raise CheckpointError(f"cannot import {source}: {reason(error)}; pass a readable file") from error
    if head[8:] == b"{":
        found = _read_safetensors(source)
    elif not trust_pickle:
        raise CheckpointError(
            f"cannot import {source}: it is not a safetensors file and would have to be unpickled, which can run any "
            "code: "
            "pass --trust-pickle if you trust its author"
        )
    else:
        found = read_pickle(source, trusts=True)
    _write(found, source, target)
    return found


def _write(found: Weights, source: Path, target: Path) -> None:
    tensors: dict[str, TensorShard] = {}
    model: dict[str, Any] = {}
    try:
        for name, value in found.values.items():
            packed = pack(value, f"model/{name}", tensors)
            model[name] = None if is_packed_tensor(packed) else packed
        state = {
            "progress": {"global_step": found.global_step, "current_epoch": found.current_epoch},
            "strategy": {"model": model},
            "hyperparameters": pack(found.hyperparameters, "module/hparams", tensors),
            "hyperparameters_name": found.hyperparameters_name,
            "hyperparameters_unsaved": found.unsaved,
            "imported_from": source.name,
        }
    except TypeError as error:
        raise CheckpointError(f"cannot import {source}: {error}; leave it out") from error
    if not model:
        raise CheckpointError(f"cannot import {source}: it has no tensors; pass a file with a state dict")
    save(target, rank=0, world_size=1, tensors=tensors, state=state)


def _read_safetensors(source: Path) -> Weights:
    try:
        with safe_open(source, "pt") as file:
            note = json.loads((file.metadata() or {}).get(_NOTE, "{}"))
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(note, dict):
            raise ValueError(f"its metadata {_NOTE!r} is not a JSON object")
        for name in note.get("complex128", []):
            values[name] = torch.view_as_complex(values[name].contiguous())
        progress = _progress(note.get("progress"))
        extra = note.get("model", {})
        referred = {name.removeprefix("model/") for name in _references(extra)}
        whole = {name: value for name, value in values.items() if name not in referred}
        whole |= {name: unpack(value, lambda key: values[key.removeprefix("model/")]) for name, value in extra.items()}
        hyperparameters = unpack(note.get("hyperparameters", {}), values.__getitem__)
        if not isinstance(hyperparameters, dict) or not all(isinstance(name, str) for name in hyperparameters):
            raise ValueError("its hyperparameters are not a JSON object")
        name, unsaved = note.get("hyperparameters_name"), note.get("hyperparameters_unsaved", [])
        if not isinstance(name, str | None) or not isinstance(unsaved, list):
            raise ValueError("its hyperparameters are not named")
        return Weights(whole, hyperparameters, name, unsaved, progress["global_step"], progress["current_epoch"])
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot import {source}: it is not a valid safetensors file ({error}); download it again"
        ) from error
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot import {source}: what its metadata {_NOTE!r} does not match its tensors ({error}); export it again"
        ) from error


def values_in(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict that a pickled file holds, or is: of each name what a checkpoint can hold."""
    nested = _key_of_weights(loaded)
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in (loaded if nested is None else loaded[nested]).items()
        if isinstance(name, str) and (isinstance(value, Tensor) or _fits(value))
    }


def _key_of_weights(loaded: Mapping[str, Any]) -> str | None:
    keys = ("state_dict", "model_state_dict", "model")
    return next((key for key in keys if isinstance(loaded.get(key), Mapping)), None)


def read_pickle(file: str | os.PathLike[str] | BinaryIO, trusts: bool) -> Weights:
    """What a Lightning checkpoint or a state dict of torch holds; only torch's restricted unpickler reads it unless
    `trusts`."""
    source = Path(os.path.expanduser(file)) if isinstance(file, (str, os.PathLike)) else file
    if not isinstance(source, Path) and not hasattr(source, "read"):
        raise TypeError(f"checkpoint_path must be a path or an open file, but it is {source!r:.60}; pass one of them")
    try:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about files that other programs have pickled
                loaded = torch.load(source, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            if not trusts:
                raise
            if not isinstance(source, Path):
                source.seek(0)
            loaded = torch.load(source, map_location="cpu", weights_only=False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"cannot read {source}: {_reason(error)}; give weights_only=False to load_from_checkpoint, or "
            "--trust-pickle to lockstep checkpoint import, if you trust its author"
        ) from error
    except Exception as error:  # whatever the pickled program does
        raise CheckpointError(
            f"cannot import {source}: torch cannot load it ({type(error).__name__}: {str(error)[:200]}); download it "
            "again"
        ) from error
    if isinstance(loaded, torch.nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"cannot import {source}: it holds {type(loaded).__name__}, not a state dict; save module.state_dict() "
            "instead"
        )
    nested = _key_of_weights(loaded)
    found = Weights(values_in(loaded), source=str(source), content=loaded)
    given = loaded if nested is None else loaded[nested]
    found.skipped += [f"{nested or 'state dict'}: {name}" for name in given if name not in found.values]
    if nested is None:
        return found
    hyperparameters, unsaved = given_in(loaded)
    found.hyperparameters = {name: value for name, value in hyperparameters.items() if _fits(value)}
    lost = [str(name) for name in loaded.get("hyper_parameters") or () if name not in found.hyperparameters]
    found.skipped += [f"hyper_parameters: {name}" for name in lost]
    found.unsaved = [*lost, *unsaved]
    found.hyperparameters_name = name_in(loaded)
    found.global_step = _count(loaded.get("global_step"))
    found.current_epoch = _count(loaded.get("epoch", loaded.get("current_epoch")))
    known = {nested, "hyper_parameters", "global_step", "epoch", "current_epoch", "hparams_name", _NOTE}
    found.skipped += [str(name) for name in loaded if name not in known]
    return found


def name_in(loaded: Mapping[str, Any], prefix: str = "") -> str | None:
    """The argument that all hyperparameters are together, if there is one."""
    name = loaded.get(f"{prefix}hparams_name")
    return name if isinstance(name, str) and name != "kwargs" else None


def _reason(error: pickle.UnpicklingError) -> str:
    """What torch's restricted unpickler refused, without its advice and colors."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    found = re.search(r"WeightsUnpickler error: (.*)", text)
    refused = (found[1] if found else text.splitlines()[0]).split(". ")[0][:150].strip()
    if not refused:  # bytes that torch.save does not write
        return "it is not a file of tensors and plain data from torch.save, and a pickle could run code"
    return f"it holds more than tensors and plain data, which would run code ({refused})"


def _fits(value: Any) -> bool:
    """Whether a checkpoint can hold it."""
    try:
        json.dumps(pack(value, "", {}))
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _references(value: Any) -> set[str]:
    """Names of the tensors that packed JSON data refers to."""
    if isinstance(value, dict):
        return {value["$tensor"]} if "$tensor" in value else set().union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _progress(value: Any) -> dict[str, int]:
    progress = value if isinstance(value, dict) else {}
    return {name: _count(progress.get(name)) for name in ("global_step", "current_epoch")}


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 62 else 0
