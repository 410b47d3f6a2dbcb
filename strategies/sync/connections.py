"""Connections between some of the ranks, over TCP."""

from __future__ import annotations

import hmac
import json
import socket
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lockstep.strategies.launch.process_group import own_address

HELLO = struct.Struct("<32sq")
_ADDRESS_BYTES = 96
_PATIENCE_S = 10.0
"""How long a connection may take to say who it is."""

Connections = dict[int, socket.socket]


class Ended(ConnectionError):
    """A rank has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Connection closed by rank {rank}: see its own error")
        self.rank = rank


def connect(
    rank: int,
    world_size: int,
    above: Sequence[int],
    below: Sequence[int],
    timeout_s: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Connections, Connections]:
    """Connect this rank with each of `above`, of which it is one of `below`, and with each of `below`.

    Every rank of `group`, by default all, calls it with numbers of that group. Both come back in the order that was
    given.
    """
    address = own_address() if below else ""
    listener = socket.create_server((address, 0), backlog=len(below)) if below else None
    secret = torch.randint(0, 256, (32,), dtype=torch.uint8, generator=_fresh())
    dist.broadcast(secret, group=group, group_src=0)
    port = listener.getsockname()[1] if listener is not None else 0
    text = json.dumps([address, port]).encode().ljust(_ADDRESS_BYTES)
    addresses = [torch.empty(_ADDRESS_BYTES, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(addresses, torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group)
    hello = bytes(secret.tolist())
    ours: Connections = {}
    for other in above:
        host, port = json.loads(bytes(addresses[other].tolist()))
        ours[other] = socket.create_connection((host, port), timeout=timeout_s)
        ours[other].sendall(HELLO.pack(hello, rank))
    theirs: Connections = {}
    if listener is not None:
        with listener:
            listener.settimeout(timeout_s)
            while len(theirs) < len(below):
                connection, _ = listener.accept()
                who = greeted(connection, hello)
                if who in below and who not in theirs:
                    theirs[who] = connection
                else:
                    connection.close()
    for connection in (*ours.values(), *theirs.values()):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, {other: theirs[other] for other in below}


def receive(connection: socket.socket, into: memoryview, rank: int) -> None:
    """Fill `into`, whose items are bytes, with what `rank` sends. Raises Ended."""
    while len(into):
        try:
            number = connection.recv_into(into)
        except OSError:
            number = 0
        if not number:
            raise Ended(rank)
        into = into[number:]


def receive_bytes(connection: socket.socket, size: int, rank: int) -> bytes:
    """The next `size` bytes that `rank` sends. Raises Ended."""
    data = bytearray(size)
    receive(connection, memoryview(data), rank)
    return bytes(data)


def greeted(connection: socket.socket, secret: bytes) -> int:
    """Which rank has connected; -1 for anybody who does not know the secret of this run."""
    connection.settimeout(_PATIENCE_S)
    try:
        theirs, rank = HELLO.unpack(receive_bytes(connection, HELLO.size, -1))
    except Ended:
        return -1
    return rank if hmac.compare_digest(theirs, secret) else -1


def _fresh() -> torch.Generator:
    """Random numbers that training does not draw from."""
    generator = torch.Generator()
    generator.seed()
    return generator
