"""Functions of `lightning.pytorch.utilities` for words, memory and tied parameters, and what the environment sets."""

from __future__ import annotations

import ast
import gc
import os
import pickle
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.strategies.modules.blocks import several_names
from lockstep.trainer.lightning.utilities import rank_zero_warn
from lockstep.trainer.tuner import is_out_of_memory

_TRUTH = dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True) | dict.fromkeys(
    ("n", "no", "f", "false", "off", "0"), False
)


def is_picklable(obj: Any) -> bool:
    """Whether `pickle` takes an object."""
    try:
        pickle.dumps(obj)
    except Exception:  # an object's own methods may raise anything
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, Any]) -> None:
    """Remove what `pickle` does not take, each with a warning."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(f"{name!r} cannot be pickled, and is removed; name it in save_hyperparameters(ignore=…)")
        del hparams[name]


def str_to_bool_or_str(val: str) -> str | bool:
    """True for "yes", "on", "1" and the like, False for their opposites; other words as they are."""
    return _TRUTH.get(val.lower(), val)


def str_to_bool(val: str) -> bool:
    """As `str_to_bool_or_str`. Raises ValueError for other words."""
    if val.lower() not in _TRUTH:
        raise ValueError(f"val must be one of {', '.join(_TRUTH)}, got {val!r}")
    return _TRUTH[val.lower()]


def str_to_bool_or_int(val: str) -> bool | int | str:
    """As `str_to_bool_or_str`, with other numbers as int."""
    found = str_to_bool_or_str(val)
    return int(found) if isinstance(found, str) and found.lstrip("+-").isdigit() else found


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """The same with its tensors detached, on the CPU if `to_cpu`."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().cpu() if to_cpu else tensor.detach(), in_dict)


def is_oom_error(exception: BaseException) -> bool:
    """Whether memory of a device or of the host ran out."""
    return is_out_of_memory(exception)


def garbage_collection_cuda() -> None:
    """Free what Python and torch's allocator hold and nothing uses."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    return [[*names] for names in several_names(module)]


def set_shared_parameters(module: nn.Module, shared_params: Iterable[Sequence[str]]) -> nn.Module:
    """Tie parameters: those of each list become the first one of it."""
    for first, *others in shared_params:
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(module.get_submodule(owner), name, module.get_parameter(first))
    return module


def from_environment() -> dict[str, Any]:
    """The arguments that `PL_TRAINER_…` gives."""
    found: dict[str, Any] = {}
    for name, text in os.environ.items():
        if name.startswith("PL_TRAINER_"):
            value: Any = text
            with suppress(ValueError, SyntaxError):
                value = ast.literal_eval(text)
            found[name.removeprefix("PL_TRAINER_").lower()] = value
    return found
