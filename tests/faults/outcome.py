"""What a finished run has left, to be compared with what an undisturbed one leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lockstep.trainer.checkpoint.store import Checkpoint, newest


def outcome(run: Path, num_steps: int) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[Any], str]:
    """Tensors (weights, optimizer, random streams), progress and metrics, what each rank keeps, and all that was
    logged."""
    path = newest(run / "checkpoints")
    assert path is not None
    checkpoint = Checkpoint.open(path)
    assert checkpoint.global_step == num_steps
    state = {name: checkpoint.state[name] for name in ("progress", "seed", "metrics", "schedulers")}
    ranks = [checkpoint.rank_state(rank) for rank in range(checkpoint.world_size)]
    return {name: checkpoint.read(name) for name in checkpoint.names()}, state, ranks, (run / "metrics.csv").read_text()
