"""Checkpoints written and read by hand, by one rank or several."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import symtable
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor
from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.store import Checkpoint, save

REPOSITORY = Path(__file__).parents[3]


def save_alone(path: Path, tensors: dict[str, Tensor] | None = None, state: Any = None, rank_state: Any = None) -> Path:
    shards = {name: TensorShard.whole(tensor) for name, tensor in (tensors or {}).items()}
    return save(path, rank=0, world_size=1, tensors=shards, state={} if state is None else state, rank_state=rank_state)


def save_step(path: Path, step: int) -> Path:
    return save_alone(path, {"model/weight": torch.full((8,), float(step))}, {"progress": {"global_step": step}})


def on_ranks(world_size: int, path: Path, arguments: Callable[[int], dict[str, Any]]) -> list[Any]:
    """Call `save` on `world_size` threads; return each one's path or exception."""
    barrier = threading.Barrier(world_size, timeout=20)
    slot: list[Any] = [None]
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        def broadcast(value: Any) -> Any:
            if rank == 0:
                slot[0] = json.dumps(value)
            barrier.wait()
            received = json.loads(slot[0])
            barrier.wait()
            return received

        try:
            results[rank] = save(
                path,
                rank=rank,
                world_size=world_size,
                barrier=barrier.wait,
                broadcast=broadcast,
                **{"state": {}, **arguments(rank)},
            )
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def cut(tensor: Tensor, splits: tuple[int, ...]) -> list[TensorShard]:
    """Cut into a grid of `splits` pieces a dimension, as evenly as ceil division does: the last may be empty."""
    pieces = [TensorShard.whole(tensor)]
    for dim, parts in enumerate(splits):
        size = -(-tensor.shape[dim] // parts)
        finer = []
        for piece in pieces:
            for part in range(parts):
                start = min(part * size, tensor.shape[dim])
                stop = min(start + size, tensor.shape[dim])
                offsets = (*piece.offsets[:dim], start, *piece.offsets[dim + 1 :])
                finer.append(TensorShard(piece.tensor.narrow(dim, start, stop - start), tuple(tensor.shape), offsets))
        pieces = finer
    return pieces


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def raw(tensor: Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def contents(path: Path, **options: Any) -> dict[str, Any]:
    loaded = Checkpoint.open(path, **options)
    tensors = {name: (str(loaded.dtype(name)), loaded.shape(name), raw(loaded.read(name))) for name in loaded.names()}
    return {"state": repr(loaded.state), "ranks": [loaded.rank_state(rank) for rank in range(3)], **tensors}


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


def undefined(code: str) -> set[str]:
    """Names that a program uses and does not define, also in lines that only other arguments of it reach."""
    scopes = [symtable.symtable(code, "<string>", "exec")]
    defined = {s.get_name() for s in scopes[0].get_symbols() if s.is_assigned() or s.is_imported()} | set(dir(builtins))
    for scope in scopes:
        scopes += scope.get_children()
    return {s.get_name() for scope in scopes for s in scope.get_symbols() if s.is_global()} - defined


def script(code: str, *arguments: object, prefix: tuple[str, ...] = (), timeout_s: float = 60) -> str:
    assert not undefined(code)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COMMON = """
import os, random, signal, sys, time, warnings
from pathlib import Path
import torch
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint import store as checkpoint, directory
from lockstep.trainer.checkpoint.store import Checkpoint

root = Path(sys.argv[1])

def write(path, step, size=64, **more):
    tensors = {f"{group}/weight": TensorShard.whole(torch.full((size,), float(step)))
        for group in ("model", "optimizer")}
    checkpoint.save(path, rank=0, world_size=1, tensors=tensors, state={"progress": {"global_step": step}},
        rank_state={"step": step}, **more)

def step_of(path):
    loaded = Checkpoint.open(path)
    for name in loaded.names():
        assert (loaded.read(name) == loaded.global_step).all()
    assert loaded.rank_state(0) == {"step": loaded.global_step} and len(loaded.names()) == 2
    return loaded.global_step
"""
