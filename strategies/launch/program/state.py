"""The settings of a process: environment, import path, random streams, torch's flags, changed modules."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from lockstep.strategies.launch.program.apply import apply
from lockstep.strategies.launch.program.changes import changes
from lockstep.strategies.launch.rng import restore_streams, stream_states


def program_state() -> dict[str, Any]:
    """What a rank takes over from the launcher before it imports anything of the user's."""
    return {
        "environ": dict(os.environ),
        "folder": os.getcwd(),
        "path": [entry for entry in sys.path if isinstance(entry, str)],
        "argv": list(sys.argv),
        "temporary": tempfile.gettempdir(),
        "log_level": logging.getLogger("lockstep").level,
        "start_method": multiprocessing.get_start_method(allow_none=True),
    }


def library_state() -> dict[str, Any]:
    """What a program sets once for its process, and ranks would lack because they do not run it."""
    precision = None
    with suppress(RuntimeError):  # raised where the program has set torch.backends...fp32_precision
        precision = torch.get_float32_matmul_precision()
    return {
        "streams": stream_states(),
        "dtype": torch.get_default_dtype(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "matmul": precision,
        "flags": [getattr(owner, name) for owner, name in _flags()],
        "attention": [is_enabled() for is_enabled, _ in _attention()],
        "warnings": list(warnings.filters),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "recorded_outputs": dict(_recorded_outputs()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "recursion": sys.getrecursionlimit(),
        "changes": changes(),
    }


def _recorded_outputs() -> dict[str, Any]:
    """transformers' table of the layers whose outputs can be recorded (`output_hidden_states`), into which a model is
    entered when it is built, but not when it is unpickled."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_CAN_RECORD_REGISTRY", {})


def _flags() -> list[tuple[Any, str]]:
    backends: Any = torch.backends
    products = ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
    return [
        *((backends.cudnn, name) for name in ("deterministic", "benchmark", "enabled")),
        (backends.mkldnn, "enabled"),
        *((backends.opt_einsum, name) for name in ("enabled", "strategy")),
        *((backends.cuda.matmul, f"allow_{name}") for name in products),
        *((owner, "fp32_precision") for owner in (backends, backends.cuda.matmul, backends.cudnn)),
        *((owner, "fp32_precision") for owner in (backends.cudnn.conv, backends.cudnn.rnn)),
        *((owner, "fp32_precision") for owner in (backends.mkldnn, backends.mkldnn.matmul)),
    ]


def _attention() -> list[tuple[Callable[[], bool], Callable[[bool], None]]]:
    """Which kernels `scaled_dot_product_attention` may choose: what says it, and what sets it."""
    cuda = torch.backends.cuda
    return [
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    ]


def take_over_program(state: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(state["environ"])
    os.chdir(state["folder"])
    sys.path[:] = state["path"]
    sys.argv[:] = state["argv"]
    tempfile.tempdir = state["temporary"]
    logger = logging.getLogger("lockstep")
    if logger.level != state["log_level"]:  # setting it visits all loggers
        logger.setLevel(state["log_level"])
    if state["start_method"] is not None:
        multiprocessing.set_start_method(state["start_method"], force=True)


def take_over_library(state: dict[str, Any]) -> None:
    restore_streams(state["streams"])
    torch.set_default_dtype(state["dtype"])
    torch.use_deterministic_algorithms(state["deterministic"][0], warn_only=state["deterministic"][1])
    if state["matmul"] is not None:
        torch.set_float32_matmul_precision(state["matmul"])
    for (owner, name), value in zip(_flags(), state["flags"], strict=True):
        if getattr(owner, name) != value:
            setattr(owner, name, value)
    for (_, enable), enabled in zip(_attention(), state["attention"], strict=True):
        enable(enabled)
    dict.update(_recorded_outputs(), state["recorded_outputs"])
    torch.multiprocessing.set_sharing_strategy(state["sharing"])
    sys.setrecursionlimit(max(state["recursion"], sys.getrecursionlimit()))
    apply(state["changes"])
    warnings.resetwarnings()  # also forgets what was shown
    warnings.filters.extend(state["warnings"])  # type: ignore[attr-defined]
    # the modules and the work, which stay to the end: the server has turned the collector off for their import
    gc.freeze()
    enabled, thresholds = state["collector"]
    gc.set_threshold(*thresholds)
    if enabled:
        gc.enable()
