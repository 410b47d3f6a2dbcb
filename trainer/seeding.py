"""Random streams: seeding them, and taking their state with a checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lockstep.strategies.launch.rng import restore_streams, stream_states

if TYPE_CHECKING:
    from lockstep.trainer.arguments import TrainerArguments


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed torch (every device), numpy and random in this process; return the seed.

    None takes the environment's LOCKSTEP_SEED, else 0; no other variable is read, and none is set. `workers`
    and `verbose` are accepted for Lightning's sake: loader workers are always seeded, by rank and worker, and
    nothing is printed.
    """
    if seed is None:
        given = os.environ.get("LOCKSTEP_SEED", "0")
        if not given.isdecimal():
            raise ValueError(f"LOCKSTEP_SEED must be a whole number of at least 0, but LOCKSTEP_SEED={given!r}")
        seed = int(given)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), but seed={seed}")
    torch.manual_seed(seed)
    if torch.cuda.is_initialized():  # torch gives all GPUs one stream, which slices of a batch on several would share
        for i, generator in enumerate(torch.cuda.default_generators):
            if i != torch.cuda.current_device():
                generator.manual_seed(derive(seed, "device", i))
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return seed


def deterministic(warn_only: bool = False) -> Callable[[], None]:
    """Let torch take deterministic algorithms only, and raise or warn where there is none; returns what sets
    everything back."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False  # it would take the algorithm that was the fastest in this process
    torch.use_deterministic_algorithms(True, warn_only=warn_only)

    def undo() -> None:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    return undo


def torch_settings(arguments: TrainerArguments) -> Iterator[Callable[[], None]]:
    """Set what `deterministic`, `detect_anomaly` and `benchmark` ask for; yields what sets each back."""
    if arguments.deterministic:
        yield deterministic(warn_only=arguments.deterministic == "warn")
    if arguments.detect_anomaly:
        anomalies = torch.autograd.set_detect_anomaly(True)
        yield partial(anomalies.__exit__)
    if arguments.benchmark is not None:
        yield partial(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = arguments.benchmark


def derive(seed: int, *stream: str | int) -> int:
    """A seed below 2**63 for a named stream of `seed`."""
    text = "/".join(map(str, (seed, *stream)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def named_stream(
    streams: dict[str, torch.Generator], name: str, device: str | torch.device, seed: int, *place: str | int
) -> torch.Generator:
    """The generator `name` among `streams`; made, as a function of seed, name and place (such as the data rank), where
    it is first asked for."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        raise ValueError(
            f"the name of a random stream must be of letters, digits, '_', '.' and '-', but it is {name!r}"
        )
    kind = torch.device(device).type
    key = name if kind == "cpu" else f"{name}@{kind}"
    if key not in streams:
        streams[key] = torch.Generator(device).manual_seed(derive(seed, "stream", key, *place))
    return streams[key]


def has(device: str) -> bool:
    """Whether a generator for `device` can be made here; a stream of another is named after it, and nobody asks for
    it."""
    return torch.device(device).type != "cuda" or torch.cuda.is_available()


def rng_state(streams: Mapping[str, torch.Generator] | None = None) -> dict[str, Any]:
    """The state of every generator of this process, and of named `streams`, as tensors and JSON data."""
    states = stream_states()
    kind, keys, position, has_gauss, cached = states["numpy"]
    state = {
        "torch": states["torch"],
        "python": states["python"],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "streams": {key: [generator.device.type, generator.get_state()] for key, generator in (streams or {}).items()},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    return state


def _set_cuda_state(state: dict[str, Any]) -> None:
    """All devices of the process as they were; of the device in use alone where the process sees others than it did."""
    saved = [value.to(torch.uint8) for value in state["cuda"]]
    if len(saved) == torch.cuda.device_count() and state["cuda_device"] == torch.cuda.current_device():
        torch.cuda.set_rng_state_all(saved)
    else:
        torch.cuda.set_rng_state(saved[state["cuda_device"]])


def continue_streams(state: Mapping[str, Any]) -> None:
    """Let user code of this process draw next what it would have drawn where `rng_state` returned `state`."""
    set_rng_state({**state})
    if "cuda" not in state:  # as torch seeds the generators of GPUs once CUDA starts
        torch.cuda.manual_seed_all(torch.initial_seed())


def set_rng_state(state: dict[str, Any], streams: dict[str, torch.Generator] | None = None) -> None:
    """Take back what `rng_state` returned; of `streams` exactly those that it holds remain."""
    version, internal, gauss = state["python"]
    kind, keys, *others = state["numpy"]
    restore_streams(
        {
            "torch": state["torch"].to(torch.uint8),
            "python": (version, tuple(internal), gauss),
            "numpy": (kind, keys.numpy().astype(np.uint32), *others),
        }
    )
    if "cuda" in state and torch.cuda.is_available():
        _set_cuda_state(state)
    if streams is not None:
        for key in streams.keys() - state["streams"].keys():
            del streams[key]
        for key, (device, value) in state["streams"].items():
            if not has(device):
                continue
            if key not in streams:
                streams[key] = torch.Generator(device)
            streams[key].set_state(value.to(torch.uint8))
