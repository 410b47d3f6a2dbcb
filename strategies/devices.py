"""Which devices a run has."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lockstep.strategies.launch import environment


def resolve_accelerator(accelerator: str) -> str:
    """The torch device type for "auto", "cpu", "gpu" or "cuda"; raises ValueError where the machine has none."""
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator not in ("cpu", "gpu", "cuda"):
        near = difflib.get_close_matches(str(accelerator).lower(), ("auto", "cpu", "gpu", "cuda"), 1)
        raise ValueError(
            f"accelerator must be 'auto', 'cpu', 'gpu' or 'cuda', but accelerator={accelerator!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    if accelerator != "cpu" and not torch.cuda.is_available():
        raise ValueError(
            f"accelerator={accelerator!r} needs a CUDA device, and torch sees none; use accelerator='cpu' or 'auto'"
        )
    return "cpu" if accelerator == "cpu" else "cuda"


_RULE = "devices must be 'auto', -1, a whole number of at least 1 or a list such as [0, 1]"


def device_count(devices: int | str | Sequence[int], accelerator: str) -> int | str:
    """`devices` as a number or "auto": -1 is "auto", and a list of devices, such as [0, 1] or "0,1", their number.

    On CPU any list is its length. Raises ValueError for a list of GPUs that are not the first ones that torch sees, as
    local rank i takes GPU i.
    """
    if devices in (-1, "-1"):
        return "auto"
    listed = devices
    if isinstance(devices, str) and "," in devices:
        listed = [int(item) if item.strip().isdigit() else -1 for item in devices.strip(" ,").split(",")]
    if isinstance(listed, (int, str)):
        return listed
    indices: list[Any] = list(listed) if isinstance(listed, Sequence) else []
    if (
        not indices
        or len({*indices}) < len(indices)
        or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in indices)
    ):
        raise ValueError(f"{_RULE}, but devices={devices!r}")
    if sorted(indices) != list(range(len(indices))) and resolve_accelerator(accelerator) == "cuda":
        names = ",".join(map(str, indices))
        raise ValueError(
            f"devices={devices!r} must be the first GPUs, as local rank i takes GPU i; set "
            f"CUDA_VISIBLE_DEVICES={names} and give devices={len(indices)}"
        )
    return len(indices)


def resolve_devices(devices: int | str, accelerator: str, most: int | None = None) -> int:
    """The number of devices on this node; "auto" is every GPU, or the ranks of the launcher, or one CPU process."""
    have = torch.cuda.device_count() if accelerator == "cuda" else (os.cpu_count() or 1)
    if devices == "auto":
        world = environment.detect()
        if most == 1:
            return 1
        return world.local_world_size if world else have if accelerator == "cuda" else 1
    try:
        count = int(devices)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or isinstance(devices, bool):
        raise ValueError(f"{_RULE}, but devices={devices!r}")
    if most is not None and count > most:
        raise ValueError(f"strategy='single' runs on one device, but devices={count}; use strategy='ddp' for {count}")
    if accelerator == "cuda" and have and environment.shares_gpu():
        return count
    world = environment.detect() if accelerator == "cuda" and count > have else None
    if world is not None:
        device_index(world, have)
    elif accelerator == "cuda" and count > have:
        raise ValueError(
            f"devices={count}, but this machine has {have} CUDA devices; lower devices or use accelerator='cpu'"
        )
    return count


def nth_device(kind: str, index: int) -> torch.device:
    """The device of a process that runs several: the CPU, or a GPU to share, is one for all indices, but in a plan the
    CPU is one for each."""
    if kind == "cpu" and not (index and environment.in_plan()):
        return torch.device("cpu")
    return torch.device(kind, 0 if kind == "cuda" and environment.shares_gpu() else index)


def check_launcher(name: str, single_process: bool, devices: int | str, num_devices: int, num_nodes: int) -> None:
    """Raise ValueError if the launcher that started this process, or its absence, contradicts the layout."""
    world = environment.detect()
    if world is None:
        if num_nodes != 1:
            raise ValueError(
                f"num_nodes={num_nodes} needs a launcher that starts the ranks on every node, such as torchrun "
                f"--nnodes={num_nodes}; none was found"
            )
        return
    if single_process and world.world_size > 1:
        raise ValueError(
            f"strategy {name} runs on one process, but {world.launcher} started {world.world_size}; use strategy='ddp' "
            "or start one process"
        )
    if not single_process and devices != "auto" and num_devices != world.local_world_size:
        raise ValueError(
            f"devices={devices} contradicts {world.launcher}, which started {world.local_world_size} ranks on this "
            "node; "
            "give the same number or devices='auto'"
        )
    if num_nodes not in (1, world.num_nodes):
        raise ValueError(
            f"num_nodes={num_nodes} contradicts {world.launcher}, which runs on {world.num_nodes} nodes; give the same "
            "number or leave it out"
        )


def device_index(world: environment.World | None, visible: int, environ: Mapping[str, str] = os.environ) -> int:
    """Which of the `visible` CUDA devices is this rank's: by its place on the node, or the only one that its launcher
    shows it, or with LOCKSTEP_SHARE_GPU the first.

    Raises ValueError if there are fewer than ranks.
    """
    if world is None or (visible and environment.shares_gpu(environ)):
        return 0
    if world.local_rank < visible >= world.local_world_size:
        return world.local_rank
    if visible == 1 and environ.get("CUDA_VISIBLE_DEVICES"):  # as with one GPU a task under Slurm
        return 0
    raise ValueError(
        f"each rank needs a CUDA device of its own, but {world.launcher} started {world.local_world_size} ranks on "
        "this node and "
        f"rank {world.rank} sees {visible} (CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')!r}); start "
        "as many ranks as "
        "devices, or show each rank one device"
    )
