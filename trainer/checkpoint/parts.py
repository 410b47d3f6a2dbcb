"""What each rank leaves in the folder of a save for rank 0: which files it wrote, or what failed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.content import refusal
from lockstep.trainer.checkpoint.manifest import CheckpointError, split_name, tiling_fault


def part_file(rank: int) -> str:
    return f"part-{rank:05d}.json"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def listing(folder: Path) -> str:
    """Names and sizes in a folder, "" if it is gone."""
    try:
        return str(sorted((entry.name, entry.stat().st_size) for entry in os.scandir(folder)))
    except OSError:
        return ""


def leave_part(folder: Path, rank: int, part: dict[str, Any]) -> None:
    """Leave `part` for rank 0, whole or not at all. One that cannot be written says by its absence that this rank
    failed."""
    path = folder / part_file(rank)
    with suppress(OSError):
        hidden_path = path.with_name(f".{path.name}")
        hidden_path.write_text(json.dumps(part))
        os.rename(hidden_path, path)


def read_part(folder: Path, rank: int, final: Path) -> dict[str, Any]:
    """What a rank left; raises what failed on it."""
    try:
        with open(folder / part_file(rank)) as file:
            part: dict[str, Any] = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot save the checkpoint {final}: rank {rank} could not leave its part in {folder}; "
            "see its own error, or choose a folder on a file system that all nodes share"
        ) from error
    if "error" in part:
        raise failure_of(part["error"])
    return part


def failure_of(part: dict[str, str]) -> Exception:
    """A failure of another rank, to be raised."""
    return (FloatingPointError if part["kind"] == "FloatingPointError" else CheckpointError)(part["text"])


def merge_tensors(parts: Sequence[dict[str, Any]], final: Path) -> dict[str, Any]:
    """The tensors of all ranks by name, each element of which exactly one rank has saved. Raises CheckpointError."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, entry in part["tensors"].items():
            known = merged.setdefault(name, {**entry, "pieces": []})
            if (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
                raise refusal(
                    final,
                    name,
                    f"ranks differ on it: {known['dtype']} {tuple(known['shape'])} and {entry['dtype']} "
                    f"{tuple(entry['shape'])}",
                    "save the same tensor on all ranks",
                )
            if 0 not in entry["shape"] or not known["pieces"]:
                known["pieces"] += entry["pieces"]
    for name, entry in merged.items():
        fault = tiling_fault(entry["shape"], entry["pieces"])
        if fault:
            raise refusal(final, name, f"over all ranks {fault}", "let each element be saved by exactly one rank")
    return merged


def index_tensors(
    tensors: Mapping[str, TensorShard], rank: int, world_size: int
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """What the manifest must know of a rank's tensors, and the tensors of each file by key."""
    index: dict[str, Any] = {}
    groups: dict[str, dict[str, Tensor]] = {}
    suffix = f"-{rank:05d}-of-{world_size:05d}" if world_size > 1 else ""
    for name, shard in tensors.items():
        group, key = split_name(name)
        file = f"{group}{suffix}.safetensors"
        index[name] = {
            "dtype": str(shard.tensor.dtype).removeprefix("torch."),
            "shape": list(shard.global_shape),
            "pieces": [],
        }
        # An empty piece of a tensor that has elements says nothing; one of an empty tensor stands for it.
        if shard.tensor.numel() or 0 in shard.global_shape:
            piece = {"file": file, "offsets": list(shard.offsets), "shape": list(shard.tensor.shape)}
            index[name]["pieces"].append(piece)
            groups.setdefault(file, {})[key] = shard.tensor
    return index, groups


def plain_names(files: Iterable[str]) -> dict[str, str]:
    """New names of the tensor files whose group one rank wrote alone: plain ones, whatever the world size."""
    writers: dict[str, list[str]] = {}
    for name in files:
        if name.endswith(".safetensors"):
            writers.setdefault(re.split("[-.]", name)[0], []).append(name)
    return {names[0]: f"{group}.safetensors" for group, names in writers.items() if len(names) == 1}
