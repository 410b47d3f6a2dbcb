"""How ranks that run find each other: a store to meet at, the process group, and leaving it."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from lockstep.strategies.launch.environment import World, shares_gpu, started_by_lockstep

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_REJOIN = timedelta(seconds=60)


def init_process_group(
    world: World | None,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    device: torch.device | None = None,
    members: Sequence[int] | None = None,
) -> None:
    """Join the ranks of `world` in the default process group; every rank calls it. None is a group of this process
    alone.

    `backend` None is gloo, and NCCL beside it where CUDA is available. `timeout_s` bounds meeting and collectives.
    `device`, if it is a GPU, is the only one that this rank's NCCL communicators use: they are made here, and not
    guessed later. On one node all sockets are on the loopback interface unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME
    says otherwise, and rank 0 hosts a TCP store, where one is needed, there. On several nodes gloo uses the interface
    that leads to rank 0's host unless GLOO_SOCKET_IFNAME names another. Ranks may leave and join again, with `members`
    only these of the world, which get new numbers. Raises RuntimeError where this process has a default group, and what
    torch raises where the ranks do not meet.
    """
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if world is None or world.num_nodes == 1:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        # Gloo would take the address of this host's name, which many systems (Debian's) define as a loopback address.
        interface = _interface_to(_host_and_port(world)[0])
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    if world is not None and shares_gpu():  # NCCL refuses two ranks of one host on one GPU
        os.environ["NCCL_HOSTID"] = f"rank {world.rank}"
    timeout = timedelta(seconds=timeout_s)
    if world is not None and world.launcher == "plan":
        backend, device = "fake", None
    store = dist.HashStore() if world is None else _store(world, timeout)
    if members:  # one that has died since would be waited for until the timeout
        assert world is not None
        store.set(f"member{world.rank}", "")
        store.wait([f"member{rank}" for rank in members], min(timeout, _REJOIN))
    if _kept and started_by_lockstep():  # it has left a group; one that ends does not pay for the import
        _forget_meshes()
    _wait_until_left(timeout_s)
    if dist.is_initialized():
        raise RuntimeError(
            "this process is in a torch.distributed group already, that of a run that has not returned or one that "
            "your code has made, and a run on ranks makes its own; begin it once the other run has returned, or call "
            "torch.distributed.destroy_process_group() before"
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=0 if world is None else members.index(world.rank) if members else world.rank,
        world_size=1 if world is None else len(members) if members else world.world_size,
        timeout=timeout,
        device_id=device if device is not None and device.type == "cuda" else None,
    )
    _drop_kept()
    _kept.append(dist.group.WORLD)
    _limit[:] = [timeout]


_limit: list[timedelta] = []
"""How long the collectives of the default group wait; empty where it was not made here."""
_leaving: list[threading.Thread] = []
"""What may still be in the default group of the last run."""


def backend_of(device: torch.device) -> str:
    """What the groups of a run need, for tensors on the ranks' devices, of which `device` is one, and on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """A new group of `ranks`, None for all, whose collectives wait as long as those of the default group; torch's own
    default is another. Every rank calls it."""
    return dist.new_group(
        None if ranks is None else list(ranks), backend=backend, timeout=_limit[0] if _limit else None
    )


def new_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """A mesh of all ranks with axes of these sizes, whose collectives wait as long as those of the default group. Every
    rank calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for group in mesh.get_all_groups() if _limit and dist.get_backend() != "fake" else ():
        group.set_timeout(_limit[0])
    return mesh


def plain_group() -> dist.ProcessGroup:
    """A new group of all ranks; every rank calls it.

    It lacks the wrapper that TORCH_DISTRIBUTED_DEBUG=DETAIL puts around groups: torch 2.13's DDP crashes in its
    constructor where it meets one, and what is called in it waits for all ranks at once.
    """
    level = dist.get_debug_level()
    if level == dist.DebugLevel.DETAIL:
        dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        group = new_group()
        _kept.append(group)
        return group
    finally:
        dist.set_debug_level(level)


_kept: list[dist.ProcessGroup | None] = []
"""The groups of this time, until the next or the end of the program: they must not end together with a DDP that was
dropped after them.

Its C++ part would wait for gloo's thread with the GIL held, for which that thread waits to drop the tensors of its last
call.
"""


def _drop_kept() -> None:
    """Let them go, in a thread, as gloo waits for what is in flight."""
    groups = _kept[:]
    _kept.clear()
    thread = threading.Thread(target=groups.clear, name="drop process groups", daemon=True)
    with suppress(RuntimeError):  # from Python 3.12 on no thread starts where a program ends
        thread.start()
        thread.join(2.0)


atexit.register(_drop_kept)


def destroy_process_group(timeout_s: float = 2.0) -> None:
    """Leave the default process group, if there is one, and return within `timeout_s` seconds.

    Gloo waits for what is in flight, up to the timeout of the collective, even when its peer is gone; that wait
    continues in a thread that nobody waits for.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    _limit.clear()

    def destroy() -> None:
        with suppress(Exception):  # of a group that has failed already
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, name="destroy_process_group", daemon=True)
    thread.start()
    thread.join(timeout_s)
    _leaving.append(thread)
    if shares_gpu():
        os.environ.pop("NCCL_HOSTID", None)
    if not started_by_lockstep():  # its program may have groups of its own next
        _forget_meshes()


def _wait_until_left(timeout_s: float) -> None:
    """Torch has one default group, and NCCL leaves the last run's when the other ranks of the node do."""
    end = time.monotonic() + timeout_s
    while dist.is_initialized() and any(thread.is_alive() for thread in _leaving) and time.monotonic() < end:
        time.sleep(0.01)
    for thread in _leaving:  # it may be about to clear torch's tables of groups, or wait for what gloo has in flight
        thread.join(1.0)
    _leaving.clear()


def _forget_meshes() -> None:
    """DTensor keeps the meshes of results it has seen, and takes one of another group that looks the same."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


_stores: dict[tuple[World, str, str], tuple[dist.Store, Iterator[int]]] = {}


def _store(world: World, timeout: timedelta) -> dist.Store:
    """Where the ranks meet this time.

    The store itself stays for the life of the process, for a rank may join again while rank 0, which may host it, has
    not left yet; each time has its own names in it, where the addresses of the last time would lead nowhere.
    """
    key = world, os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if key not in _stores:
        _stores[key] = _open_store(world, timeout), itertools.count()
    store, times = _stores[key]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"join{next(times)}", store)


def _open_store(world: World, timeout: timedelta) -> dist.Store:
    if world.launcher == "plan":
        return dist.HashStore()
    if world.init_method is None:
        return dist.FileStore(_mpi_file(), world.world_size)
    url = urlsplit(world.init_method)
    if url.scheme == "file":
        return dist.FileStore(url.path, world.world_size)
    host, port = _host_and_port(world)
    if url.scheme == "env" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _of_this_start(
            dist.TCPStore(host, port, world.world_size, is_master=False, timeout=timeout), world, timeout
        )
    if world.num_nodes > 1:
        return dist.TCPStore(host, port, world.world_size, is_master=world.rank == 0, timeout=timeout)
    if world.rank != 0:
        return dist.TCPStore("127.0.0.1", port, world.world_size, is_master=False, timeout=timeout)
    # TCPStore would listen on every interface; a socket that listens already keeps it to the loopback.
    with socket.create_server(("127.0.0.1", port)) as listener:
        return dist.TCPStore(
            "127.0.0.1", port, world.world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )


def _of_this_start(store: dist.Store, world: World, timeout: timedelta) -> dist.Store:
    """The part of the store of torchrun's agents that belongs to this start of the ranks; every rank calls it.

    The store stays over restarts, and gloo would find the addresses of ranks that died in it. Nothing that the agents
    tell is new with every start and equal on all nodes, so rank 0 calls the roll: it gives a name, each rank answers
    under it with a name of its own, and the list of these tells them that they were counted. Who finds a list without
    itself has met an earlier start, and looks again.
    """
    roll, mine = (
        f"lockstep/roll-of-{world.world_size}",
        secrets.token_hex(8),
    )  # not from `random`, which training draws from
    if world.rank == 0:
        store.set(roll, mine)
        store.set(
            f"lockstep/{mine}/all",
            ",".join(store.get(f"lockstep/{mine}/{rank}").decode() for rank in range(1, world.world_size)),
        )
        return dist.PrefixStore(f"lockstep/{mine}", store)
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        name = store.get(roll).decode()
        store.set(f"lockstep/{name}/{world.rank}", mine)
        for _ in range(10):
            if store.check([f"lockstep/{name}/all"]):
                if mine in store.get(f"lockstep/{name}/all").decode().split(","):
                    return dist.PrefixStore(f"lockstep/{name}", store)
                break
            time.sleep(0.01)
        time.sleep(0.01)
    raise RuntimeError(
        f"rank {world.rank} got no response from rank 0 within {timeout.total_seconds():g} s: check why rank 0 has not "
        "started"
    )


def _host_and_port(world: World) -> tuple[str, int]:
    """Rank 0's host and the port of the store, as `environment.detect` has checked them; ("", 0) where ranks meet at a
    file."""
    url = urlsplit(world.init_method or "")
    if url.scheme == "env":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return url.hostname or "", url.port or 0


def _interface_to(host: str) -> str | None:
    """The network interface that leads from this node to `host`; None if that cannot be found out."""
    for target in (
        host,
        "192.0.2.1",
    ):  # the second is nobody's: on rank 0's own node its name may mean loopback, so look where others are reached
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex() if not address.startswith("127.") else ():
                with suppress(OSError):  # an interface without an address
                    if _address_of(name, probe) == address:
                        return name
    return None


_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def own_address() -> str:
    """The address at which other nodes reach this one: that of gloo's interface, else that of the host's name."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if name:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return _address_of(name, probe)
    return socket.gethostbyname(socket.gethostname())


def _address_of(interface: str, probe: socket.socket) -> str:
    """Raises OSError where it has none."""
    request = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(request[20:24])


def _mpi_file() -> str:
    """A path that the ranks of one mpirun on this node agree on, and no other mpirun does.

    Open MPI tells every rank the address of its own server, new with every run; elsewhere the parent process is
    mpirun's.
    """
    run = [
        value
        for name, value in sorted(os.environ.items())
        if name.startswith(("PMIX_NAMESPACE", "PMIX_SERVER_URI", "OMPI_MCA_orte_local_daemon_uri"))
    ]
    if not run:
        with suppress(OSError):  # /proc is Linux's
            run = [Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]]  # when it started
        run.append(str(os.getppid()))
    folder = Path(tempfile.gettempdir(), f"lockstep-mpi-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise RuntimeError(
            f"Ranks of mpirun meet in {folder}, which must be a folder that only this user may enter: remove it, or "
            "set MASTER_ADDR"
        )
    return str(folder / hashlib.sha256(json.dumps(run).encode()).hexdigest()[:32])
