"""A line between two network namespaces on which each packet takes a given time, in user space.

    python -m benchmarks._delay_line PID PID MS

In the namespaces of the two processes it makes a device `cable` each (tun), passes packets from one to the other MS
milliseconds after they came, and prints "ready" when they are there; addresses are for the caller to give. It ends with
its standard input. Needs root on Linux, where the kernel's own `netem` may be missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

from tests.multinode.hosts import INTERFACE

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_LARGEST = 65536


def device(pid: int) -> int:
    """A file whose reads and writes are what is sent and received by `cable` in the network namespace of a process."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to the network of {pid}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return file


def main() -> None:
    one, other = device(int(sys.argv[1])), device(int(sys.argv[2]))
    delay_s = float(sys.argv[3]) / 1000
    print("ready", flush=True)
    to = {one: other, other: one}
    under_way: deque[tuple[float, int, bytes]] = deque()  # in the order of arrival, which is that of leaving
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        arrived, *_ = select.select([one, other, 0], [], [], wait)
        if 0 in arrived:
            return
        for file in arrived:
            under_way.append((time.monotonic() + delay_s, to[file], os.read(file, _LARGEST)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, file, packet = under_way.popleft()
            os.write(file, packet)


if __name__ == "__main__":
    main()
