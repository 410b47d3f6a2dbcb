"""Who this process is among the ranks, and where they meet, read from what the launcher left in the environment.

Launchers in the order in which they are asked: Lockstep's own (`strategies/launch/launcher.py`), torchrun (or
RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR set by hand), Slurm's srun, MPI's mpirun (Open MPI, and what
sets PMI_RANK: MPICH, Intel MPI), TF_CONFIG. Two variables overrule the detection:

    LOCKSTEP_LAUNCHER     torchrun, slurm, mpi or tf_config: ask only this one; none: there is no launcher
    LOCKSTEP_INIT_METHOD  where ranks meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://host:port or file:///path
                          (a path that all ranks see and that does not exist yet)

Two more are for tests. With LOCKSTEP_FORCE_MESH=1 a strategy of several ranks that runs on one keeps its own process
group, mesh and engine, of one rank, where it would otherwise do what `single` does. With LOCKSTEP_SHARE_GPU=1 all ranks
of a node compute on its first GPU, and NCCL takes each for a host of its own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class World:
    """The ranks of a run as one of them sees it."""

    rank: int
    """Index of this process among all, 0 on the first node."""
    local_rank: int
    """Index of this process on its node."""
    world_size: int
    """Number of processes on all nodes."""
    local_world_size: int
    """Number of processes on this node."""
    node_rank: int
    """Index of this node."""
    num_nodes: int
    launcher: str
    """lockstep, torchrun, slurm, mpi or tf_config."""
    init_method: str | None
    """env://, tcp://host:port or file:///path; None for mpirun on one node, whose ranks meet at a file."""


_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def detect(environ: Mapping[str, str] = os.environ) -> World | None:
    """Return this process's place among the ranks that a launcher has started, or None where none has.

    A Slurm step or TF_CONFIG of one task counts as no launcher (the cluster gave a machine, not ranks); torchrun and
    mpirun with one process are a world of one. torchrun inside Slurm or MPI is torchrun. Raises ValueError for
    variables that are half set, not numbers, out of range, or that disagree between launchers. Reads only `environ`.
    """
    chosen = environ.get("LOCKSTEP_LAUNCHER", "")
    if chosen == "none":
        return None
    if chosen == "lockstep":
        return _lockstep(environ)
    if chosen and chosen not in _READERS:
        raise ValueError(
            f"LOCKSTEP_LAUNCHER must be one of {', '.join(_READERS)} or none, got {chosen!r}: correct it or unset it"
        )
    if chosen or "TORCHELASTIC_RUN_ID" in environ:
        name = chosen or "torchrun"
        world = _READERS[name](environ)
        if world is None and chosen:
            raise ValueError(f"LOCKSTEP_LAUNCHER={chosen} needs ranks that {chosen} started: unset it")
        return world
    worlds = [world for reader in _READERS.values() if (world := reader(environ)) is not None]
    if not worlds:
        return None
    first = worlds[0]
    for other in worlds[1:]:
        if (other.rank, other.world_size) != (first.rank, first.world_size):
            raise ValueError(
                f"Two launchers disagree: {first.launcher} says rank {first.rank} of {first.world_size}, "
                f"{other.launcher} says rank {other.rank} of {other.world_size}; set LOCKSTEP_LAUNCHER to the one that "
                f"started the ranks ({first.launcher} or {other.launcher})"
            )
    return first


def num_ranks(otherwise: int) -> int:
    """How many ranks a launcher has started; `otherwise` if none has."""
    world = detect()
    return otherwise if world is None else world.world_size


def in_plan() -> bool:
    """Whether this process tries a step on tensors without data, in which other ranks do what this one does."""
    return os.environ.get("LOCKSTEP_LAUNCHER") == "plan"


def started_by_lockstep() -> bool:
    """Whether Lockstep's own launcher started this process, which then ends with the run unless it is rank 0."""
    world = detect()
    return world is not None and world.launcher == "lockstep"


def outlives_run(rank: int) -> bool:
    """Whether the process of this rank continues after the run, with what the run has made of the model."""
    return rank == 0 or not started_by_lockstep()


def forces_mesh() -> bool:
    """Whether LOCKSTEP_FORCE_MESH asks for a mesh of one rank. Raises ValueError for another value."""
    return _flag("LOCKSTEP_FORCE_MESH", os.environ)


def shares_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether LOCKSTEP_SHARE_GPU lets all ranks of a node compute on one GPU. Raises ValueError for another value."""
    return _flag("LOCKSTEP_SHARE_GPU", environ)


@contextmanager
def variables(given: Mapping[str, str | None]) -> Iterator[dict[str, str | None]]:
    """Set environment variables for a while, or with None unset them; gives what they were, of those that change."""
    before = {name: os.environ.get(name) for name in given if os.environ.get(name) != given[name]}
    _set({name: given[name] for name in before})
    try:
        yield before
    finally:
        _set(before)


def _set(given: Mapping[str, str | None]) -> None:
    for name, value in given.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _flag(name: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, but it is {value!r}: correct it or unset it")
    return value == "1"


# ---- one reader a launcher: its world, or None where its variables are absent --------------------------


def _lockstep(environ: Mapping[str, str]) -> World:
    rank, world_size = _rank_of(environ, "RANK", "WORLD_SIZE")
    return World(rank, rank, world_size, world_size, 0, 1, "lockstep", _init_method(environ, "LOCKSTEP_INIT_METHOD"))


def _torchrun(environ: Mapping[str, str]) -> World | None:
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")):
        return None
    rank, world_size = _rank_of(environ, "RANK", "WORLD_SIZE")
    init_method = _init_method(environ, "env://")
    here = world_size == 1 or environ.get("MASTER_ADDR") in _LOOPBACK
    if not here:
        for name, meaning in (
            ("LOCAL_RANK", "index of the process on its node"),
            ("LOCAL_WORLD_SIZE", "number of processes on the node"),
        ):
            if name not in environ:
                raise ValueError(
                    f"RANK={rank} and WORLD_SIZE={world_size} are set but {name} is not: set it to the {meaning}, or "
                    "start with torchrun"
                )
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", low=1, high=world_size, default=world_size)
    local_rank = _integer(environ, "LOCAL_RANK", low=0, high=min(local_world_size - 1, rank), default=rank)
    num_nodes = _integer(environ, "GROUP_WORLD_SIZE", low=1, default=-(-world_size // local_world_size))
    node_rank = _integer(
        environ, "GROUP_RANK", low=0, high=num_nodes - 1, default=(rank - local_rank) // local_world_size
    )
    return World(rank, local_rank, world_size, local_world_size, node_rank, num_nodes, "torchrun", init_method)


def _slurm(environ: Mapping[str, str]) -> World | None:
    # The shell of salloc has no SLURM_PROCID. A batch script, and the shell of `srun --pty bash`, are task 0 of a step
    # of one; SLURM_NTASKS may tell there what the job was granted, not what runs, so the step's own count comes first.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if "SLURM_PROCID" not in environ or (size not in environ and environ["SLURM_PROCID"] == "0"):
        return None
    rank, world_size = _rank_of(environ, "SLURM_PROCID", size)
    if world_size == 1:
        return None
    hosts_name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    from lockstep.strategies.launch.slurm import expand_hosts  # needed under Slurm alone

    hosts = expand_hosts(environ[hosts_name]) if environ.get(hosts_name) else []
    num_nodes = _integer(environ, "SLURM_STEP_NUM_NODES", low=1, high=world_size, default=len(hosts) or 1)
    node_rank = _integer(environ, "SLURM_NODEID", low=0, high=num_nodes - 1, default=0 if num_nodes == 1 else None)
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local_world_size = (
        tasks[node_rank] if len(tasks) == num_nodes and sum(tasks) == world_size else -(-world_size // num_nodes)
    )
    local_rank = _integer(
        environ, "SLURM_LOCALID", low=0, high=local_world_size - 1, default=rank if num_nodes == 1 else None
    )
    # Two steps of one job may run side by side, so both numbers choose the port, below the ephemeral ports.
    step = environ.get("SLURM_STEP_ID", "0")
    job = _integer(environ, "SLURM_JOB_ID", low=0, default=0)
    port = environ.get("MASTER_PORT") or str(10000 + (job + 101 * int(step if step.isdigit() else 0)) % 20000)
    if num_nodes > 1 and not hosts and "MASTER_ADDR" not in environ:
        raise ValueError(
            f"SLURM_NODEID={node_rank} of {num_nodes} nodes is set but SLURM_JOB_NODELIST is not: set it, or "
            "MASTER_ADDR to the host of rank 0"
        )
    host = environ.get("MASTER_ADDR") or (hosts[0] if hosts else "127.0.0.1")
    return World(
        rank,
        local_rank,
        world_size,
        local_world_size,
        node_rank,
        num_nodes,
        "slurm",
        _init_method(environ, f"tcp://{host}:{port}"),
    )


def _tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` is [2, 2, 2, 1]; [] for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _mpi(environ: Mapping[str, str]) -> World | None:
    for names in _MPI_NAMES:
        if any(name in environ for name in names[:2]):
            break
    else:
        return None
    rank_name, size_name, local_rank_name, local_size_name = names
    rank, world_size = _rank_of(environ, rank_name, size_name)
    local_world_size = _integer(environ, local_size_name, low=1, high=world_size, default=world_size)
    local_rank = _integer(
        environ,
        local_rank_name,
        low=0,
        high=local_world_size - 1,
        default=rank if local_world_size == world_size else None,
    )
    # mpirun tells no node index: right where it fills node after node (`--map-by slot`, the default).
    num_nodes, node_rank = -(-world_size // local_world_size), (rank - local_rank) // local_world_size
    address = environ.get("MASTER_ADDR")
    if address:
        init_method = f"tcp://{address}:{_integer(environ, 'MASTER_PORT', low=1, high=65535, default=29500)}"
    elif num_nodes == 1 or "LOCKSTEP_INIT_METHOD" in environ:
        init_method = None
    else:
        raise ValueError(
            f"{size_name}={world_size} on {num_nodes} nodes needs MASTER_ADDR, the host of rank 0, which is not set: "
            "mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500 ..."
        )
    return World(
        rank, local_rank, world_size, local_world_size, node_rank, num_nodes, "mpi", _init_method(environ, init_method)
    )


_MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _tf_config(environ: Mapping[str, str]) -> World | None:
    text = environ.get("TF_CONFIG")
    if not text:
        return None
    example = (
        'TF_CONFIG looks like {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
        '"index": 0}}'
    )
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        # The chief is rank 0; "master" is its older name.
        tasks = [
            (kind, index, host)
            for kind in ("chief", "master", "worker")
            for index, host in enumerate(cluster.get(kind, []))
        ]
        kind, index = task.get("type", "worker"), int(task.get("index", 0))
        addresses = [urlsplit(f"//{host}") for _, _, host in tasks]
        hosts, port = [address.hostname for address in addresses], addresses[0].port if addresses else None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{example}, but it is {text!r} ({error}): correct it or unset it") from error
    if len(tasks) <= 1:
        return None
    rank = next((rank for rank, found in enumerate(tasks) if found[:2] == (kind, index)), None)
    if rank is None:
        raise ValueError(
            f"TF_CONFIG names task {kind} {index}, but ranks are {[f'{kind} {index}' for kind, index, _ in tasks]}: "
            "start training on these only"
        )
    nodes = list(dict.fromkeys(hosts))
    if port is None:
        raise ValueError(f"TF_CONFIG gives ranks as host:port, but the first is {tasks[0][2]!r}: add its port")
    local_rank, local_world_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    init_method = _init_method(environ, f"tcp://{hosts[0]}:{port}")
    return World(
        rank, local_rank, len(tasks), local_world_size, nodes.index(hosts[rank]), len(nodes), "tf_config", init_method
    )


_READERS: dict[str, Callable[[Mapping[str, str]], World | None]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "mpi": _mpi,
    "tf_config": _tf_config,
}


# ---- checked reading -----------------------------------------------------------------------------------


def _integer(
    environ: Mapping[str, str], name: str, *, low: int, high: int | None = None, default: int | None = None
) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(
                f"{name} is not set although the launcher's other variables are: set it, or start again with the "
                "launcher"
            )
        return default
    if not re.fullmatch(r"-?\d+", text) or int(text) < low or (high is not None and int(text) > high):
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise ValueError(
            f"{name} must be an integer {bounds}, but it is {text!r}: correct it, or unset the launcher's variables"
        )
    return int(text)


def _rank_of(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in environ:
            found = (
                f"{other}={environ[other]} is set but {name} is not"
                if other in environ
                else f"{name} and {other} are not set although a launcher is"
            )
            raise ValueError(f"{found}: set both, or unset both to run without a launcher")
    world_size = _integer(environ, size_name, low=1)
    if re.fullmatch(r"\d+", environ[rank_name]) and int(environ[rank_name]) >= world_size:
        raise ValueError(
            f"{rank_name} must be below {size_name}, but {rank_name}={environ[rank_name]} and "
            f"{size_name}={world_size}: correct one of them"
        )
    return _integer(environ, rank_name, low=0, high=world_size - 1), world_size


def _init_method(environ: Mapping[str, str], default: str | None) -> str | None:
    """The explicit rendezvous, else the launcher's; checked, and MASTER_ADDR and MASTER_PORT with env://."""
    method = environ.get("LOCKSTEP_INIT_METHOD") or default
    if method is None:
        return None
    try:
        url = urlsplit(method)
        right = {
            "env": method == "env://",
            "tcp": bool(url.hostname and url.port),
            "file": url.path.startswith("/") and not url.netloc,
        }.get(url.scheme, False)
    except ValueError:  # a port that is not a number, or above 65535
        right = False
    if not right:
        name = (
            "LOCKSTEP_INIT_METHOD"
            if environ.get("LOCKSTEP_INIT_METHOD")
            else "The rendezvous (MASTER_ADDR, MASTER_PORT)"
        )
        raise ValueError(f"{name} must be env://, tcp://host:port or file:///path, but it is {method!r}: correct it")
    if method == "env://":
        if not environ.get("MASTER_ADDR"):
            raise ValueError(
                "MASTER_ADDR is not set although a launcher's variables are: set it to the host of rank 0, or "
                "LOCKSTEP_INIT_METHOD=tcp://host:port"
            )
        _integer(environ, "MASTER_PORT", low=0, high=65535, default=None)
    return method
