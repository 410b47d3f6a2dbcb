"""What control messages cost over many nodes: a tree of connections beside the gloo all-gather that it replaces.

    python -m benchmarks.control_tree [--ranks 32 64] [--steps 40] [--json FILE]

Each rank is a light process of this machine that does nothing but exchange eleven numbers a step, over loopback, in a
network of its own where the kernel allows that, so that what its interface counts is what the ranks sent: `packets` and
`KiB` a step, of all ranks together, acknowledgements included. `sockets` are the connections that the exchange adds,
`set-up s` how long it takes to make them, `ms` and `CPU ms` what a step takes and what it costs all ranks together. A
few cores run all ranks, so the times say what the ranks' work adds up to, not what they wait for each other on real
nodes; there `hops` counts, the messages of a step that follow one after the other. Expect a minute.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import resource
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._rounds import described, machine, make_parser, report
from lockstep.strategies.sync.host_all_gather_tree import FANOUT, Links

NUMBERS = tuple(float(i) for i in range(11))
"""As many as a control message has."""
WARMUP_STEPS = 5
COLUMNS = {
    "hops": ("hops", "d"),
    "sockets": ("sockets", "d"),
    "set-up s": ("setup_s", ".2f"),
    "packets": ("packets", ".0f"),
    "KiB": ("kib", ".0f"),
    "ms": ("ms", ".2f"),
    "CPU ms": ("cpu_ms", ".2f"),
}
_CLONE_NEWNET, _SIOCSIFFLAGS, _UP = 0x40000000, 0x8914, 0x41
_FORK = multiprocessing.get_context("fork")


def all_gather(rank: int, num_ranks: int) -> Callable[[], None]:
    """A step of the way it was, in a group of its own."""
    group = dist.new_group(backend="gloo")
    everyone = [torch.zeros(len(NUMBERS), dtype=torch.float64) for _ in range(num_ranks)]
    return lambda: dist.all_gather(everyone, torch.tensor(NUMBERS, dtype=torch.float64), group=group)


def tree(rank: int, num_ranks: int) -> Callable[[], None]:
    """A step of the way it is, without the thread that keeps it beside what a rank computes."""
    links = Links(rank, num_ranks, 120.0)
    return lambda: links.reduce(NUMBERS)


WAYS = {"all-gather": all_gather, "tree": tree}


def hops(way: str, num_ranks: int) -> int:
    if way == "all-gather":
        return num_ranks - 1  # gloo's goes round
    levels, reached = 0, 1
    while reached < num_ranks:
        levels, reached = levels + 1, reached + FANOUT ** (levels + 1)
    return 2 * levels


def measure(way: str, num_ranks: int, steps: int) -> dict[str, float]:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = _FORK.SimpleQueue(), None
        host = _FORK.Process(target=_host, args=(way, num_ranks, steps, folder, theirs))
        host.start()
        ours = theirs.get()
        host.join()
    if isinstance(ours, str):
        raise RuntimeError(ours)
    return {"hops": hops(way, num_ranks), **ours}


def _host(way: str, num_ranks: int, steps: int, folder: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    alone = _own_network()
    rows = _FORK.SimpleQueue()
    ranks = [_FORK.Process(target=_rank, args=(rank, way, num_ranks, steps, folder, rows)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    found = [rows.get() for _ in ranks]
    for process in ranks:
        process.join(30)
        process.kill()
    wrong = [row for row in found if isinstance(row, str)]
    if wrong:
        results.put(wrong[0])
        return
    total = {key: sum(row[key] for row in found) for key in found[0]}
    row: dict[str, float] = {
        "sockets": total["sockets"] // 2,
        "setup_s": max(row["setup_s"] for row in found),
        "ms": total["s"] / num_ranks / steps * 1e3,
        "cpu_ms": total["cpu_s"] / steps * 1e3,
    }
    if alone:
        row |= {"packets": total["packets"] / steps, "kib": total["bytes"] / steps / 1024}
    results.put(row)


def _rank(rank: int, way: str, num_ranks: int, steps: int, folder: str, rows: Any) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        before = _sockets()
        dist.barrier()
        begin = time.perf_counter()
        step = WAYS[way](rank, num_ranks)
        row: dict[str, float] = {"setup_s": time.perf_counter() - begin}
        for _ in range(WARMUP_STEPS):
            step()
        row["sockets"] = _sockets() - before
        _meet(folder, "begin", num_ranks)
        packets, size = _counters() if rank == 0 else (0, 0)
        _meet(folder, "counted", num_ranks)
        begin, cpu = time.perf_counter(), _cpu_s()
        for _ in range(steps):
            step()
        row |= {"s": time.perf_counter() - begin, "cpu_s": _cpu_s() - cpu}
        _meet(folder, "end", num_ranks)
        row["packets"], row["bytes"] = (
            (a - b for a, b in zip(_counters(), (packets, size), strict=True)) if rank == 0 else (0, 0)
        )
        _meet(folder, "over", num_ranks)
        rows.put(row)
    except Exception as error:
        rows.put(f"rank {rank}: {error!r}")
    finally:
        os._exit(0)  # what gloo holds need not be put away


def _meet(folder: str, name: str, num_ranks: int) -> None:
    """A barrier that sends nothing."""
    with open(f"{folder}/{name}", "ab") as file:
        file.write(b".")
    while os.path.getsize(f"{folder}/{name}") < num_ranks:
        time.sleep(0.01)


def _own_network() -> bool:
    """Whether this process is alone on its loopback interface from here on."""
    with suppress(OSError), socket.socket() as probe:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            return False
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as inside:
            fcntl.ioctl(inside, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP))
        del probe
        return True
    return False


def _counters() -> tuple[int, int]:
    """Packets and bytes that loopback has sent."""
    fields = next(
        line.split() for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    )
    return int(fields[10]), int(fields[9])


def _sockets() -> int:
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("socket:") for fd in _open_files())


def _open_files() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = make_parser("Measure control messages over many ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    facts = machine()
    rows = {
        f"{way}, {num_ranks} ranks": measure(way, num_ranks, arguments.steps)
        for num_ranks in arguments.ranks
        for way in WAYS
    }
    print(described(facts))
    report(arguments, facts, rows, COLUMNS)


if __name__ == "__main__":
    main()
