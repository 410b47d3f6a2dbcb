"""Random streams: seeding them, and taking their state with a checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any, cast

import numpy as np
import torch


def seed_everything(seed: int | None = None, workers: bool = True) -> int:
    """Seed torch, numpy and random in this process; return the seed.

    None takes the environment's LOCKSTEP_SEED, else 0. `workers` is accepted for Lightning's sake: loader
    workers are always seeded, by rank and worker.
    """
    if seed is None:
        seed = int(os.environ.get("LOCKSTEP_SEED", 0))
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2**63), but seed={seed}")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return seed


def derive(seed: int, *stream: str | int) -> int:
    """A seed below 2**63 for a named stream of `seed`."""
    text = "/".join(map(str, (seed, *stream)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process as tensors and JSON data."""
    kind, keys, position, has_gauss, cached = cast("tuple[str, np.ndarray, int, int, float]", np.random.get_state(legacy=True))
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Take back what `rng_state` returned."""
    torch.set_rng_state(state["torch"].to(torch.uint8))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].to(torch.uint8))
