"""SCAFFOLD's control variates: where the gradient of each client points, and that of all."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.strategies.methods.federated.copy import RefusedOnClient
from lockstep.strategies.methods.federated.server import LIMIT, ExactSums


class ClientStates:
    """A vector for each client, on disk: in a file without a name, which the kernel deletes with the process.

    Memory is a few dozen bytes a client that has one. What is put holds from `commit` on.
    """

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `close`, or with this object
        weakref.finalize(self, self._file.close)
        self._rows: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._free: list[int] = []
        self._used = 0
        self._size = 0

    def clients(self) -> list[int]:
        return sorted(self._rows)

    def put(self, client: int, value: Tensor) -> None:
        """Note `value` `[n]`, of the same length and dtype each time."""
        data = value.detach().cpu().contiguous().view(torch.uint8).numpy().data
        self._size = data.nbytes
        row = self._free.pop() if self._free else self._used
        self._used = max(self._used, row + 1)
        offset = row * self._size
        while data.nbytes:  # one call writes at most 2 GiB, and less on a disk that is nearly full
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written
        self._pending[client] = row

    def commit(self, holds: bool = True) -> None:
        """Let what was put since the last time hold, or forget it."""
        if not holds:
            self._free += self._pending.values()
        else:
            self._free += [self._rows[client] for client in self._pending if client in self._rows]
            self._rows |= self._pending
        self._pending = {}

    def get(self, client: int, dtype: torch.dtype) -> Tensor | None:
        """What holds of a client, on the CPU; None if nothing was put."""
        return self.mapped(client, dtype).clone() if client in self._rows else None

    def mapped(self, client: int, dtype: torch.dtype) -> Tensor:
        """The same without memory of its own: valid until the next `put`."""
        offset = self._rows[client] * self._size
        raw = np.memmap(self._file, np.uint8, "c", offset, (self._size,))
        return torch.from_numpy(raw).view(dtype)

    def clear(self) -> None:
        self._rows, self._pending, self._free, self._used = {}, {}, [], 0

    def close(self) -> None:
        self.clear()
        self._file.close()


class Control:
    """The server's control variate c and those of the clients, c_k, which are on disk.

    A local step adds c - c_k to the gradient. Afterwards c_k is the mean of the client's own gradients in the round:
    option II of Karimireddy et al., 2020, which for plain SGD is the same. c moves by the changes of c_k, each with the
    client's part of all samples.
    """

    def __init__(self, states: ClientStates) -> None:
        self.states = states
        self.server: dict[str, Tensor] = {}
        """c by the name of the parameter."""
        self._named: list[tuple[str, nn.Parameter]] = []
        self._old = self._sum = torch.zeros(0)
        self._steps = 0
        self._sums: ExactSums | None = None
        self._total: Tensor | None = None

    def begin(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """A round begins, in which these parameters are trained."""
        if self.server and list(self.server) != [name for name, _ in named]:
            raise RefusedOnClient(
                "server='scaffold' keeps a control variate for the parameters that were trained when it began, and now "
                "others are; freeze or unfreeze before training, or use server='fedavg'"
            )
        self._named, self._total = [*named], None
        self.states.commit(False)  # of a round that was skipped
        dtype = torch.float32  # the widest, for all
        for _, parameter in named:
            dtype = torch.promote_types(dtype, parameter.dtype)
        for name, parameter in named:
            self.server.setdefault(name, torch.zeros_like(parameter.detach(), dtype=dtype))
        size = sum(parameter.numel() for _, parameter in named)
        self._sums = ExactSums(size, named[0][1].device if named else torch.device("cpu"))

    def begin_client(self, client: int) -> None:
        like = torch.cat([self.server[name].reshape(-1) for name, _ in self._named])
        old = self.states.get(client, like.dtype)
        self._old = torch.zeros_like(like) if old is None else old.to(like.device)
        self._sum, self._steps = torch.zeros_like(like), 0

    def correct(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """What to add to each gradient of a local step; notes the gradients as they are."""
        self._steps += 1
        start = 0
        for name, parameter in self._named:
            end = start + parameter.numel()
            if parameter.grad is not None:
                self._sum[start:end] += parameter.grad.reshape(-1)
            yield parameter, self.server[name] - self._old[start:end].view_as(parameter)
            start = end

    def add(self, client: int, weight: float) -> None:
        """A client has trained: its c_k is another one once the server steps."""
        if not self._steps:
            return
        new = self._sum / self._steps
        moved = (new.double() - self._old.double()) * weight
        if not bool((moved.abs() < LIMIT).all()):  # its weights are finite, so that is an overflow on the way
            raise RefusedOnClient(f"the gradients of a client are too large for SCAFFOLD ({float(moved.abs().max())})")
        assert self._sums is not None
        self._sums.add(0, moved)
        self.states.put(client, new)

    def reduce(self) -> None:
        """Sum over ranks what clients have added. Every rank calls it."""
        assert self._sums is not None
        self._total, self._sums = self._sums.reduce(), None

    def commit(self, weight: float) -> None:
        """The server steps: `weight` is that of all samples of the population."""
        if self._total is None:
            return
        start = 0
        for name, parameter in self._named:
            end = start + parameter.numel()
            self.server[name] += (self._total[start:end] / weight).view_as(parameter).to(self.server[name])
            start = end
        self.states.commit()
        self._total = None

    @property
    def num_bytes(self) -> int:
        """Of c, or of one c_k."""
        return sum(value.numel() * value.element_size() for value in self.server.values())

    def mapped(self, client: int) -> Tensor:
        """The c_k of a client that has one, valid until clients train again."""
        return self.states.mapped(client, next(iter(self.server.values())).dtype)

    def load(self, server: dict[str, Tensor], clients: Iterator[tuple[int, Tensor]]) -> None:
        """Take over what was saved."""
        self.server = server
        self.states.clear()
        for client, value in clients:
            self.states.put(client, value)
        self.states.commit()

    def close(self) -> None:
        self.states.close()
