"""While a run is on, no process of it can be reached from another machine."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.strategies.launch.programs import LOOPBACKS
from tests.trainer.toy import Net, loader, net, quiet

pytestmark = pytest.mark.faults


def family(root: int) -> list[int]:
    """A process and all its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def listeners(pids: list[int]) -> dict[int, set[str]]:
    """Local addresses, as hexadecimal, on which each of these processes accepts TCP connections or takes datagrams."""
    tables: dict[str, str] = {}
    for table, states in (("tcp", {"0A"}), ("tcp6", {"0A"}), ("udp", {"07"}), ("udp6", {"07"})):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in states:
                tables[fields[9]] = fields[1].split(":")[0]
    found: dict[int, set[str]] = {}
    for pid in pids:
        try:
            links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        found[pid] = {
            tables[inode] for link in links for inode in re.findall(r"socket:\[(\d+)\]", link) if inode in tables
        }
    return found


class Looks(Net):
    launcher: int
    before: set[int]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            pids = [pid for pid in family(self.launcher) if pid not in self.before]
            seen = listeners(pids)
            Path(f"seen{self.global_rank}").write_text(f"{len(seen)} {' '.join(sorted(set().union(*seen.values())))}")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "pipeline", "tensor"])
def test_nothing_listens_beyond_loopback(strategy: str) -> None:
    devices = 1 if strategy == "single" else 2
    model = net()
    model.__class__ = Looks
    model.launcher, model.before = os.getpid(), {os.getpid()}
    quiet(strategy=strategy, devices=devices, max_restarts=1).fit(model, loader(64, num_workers=1))
    count, *addresses = Path("seen1" if strategy == "pipeline" else "seen0").read_text().split()
    assert int(count) >= 1 + devices, "the server and the ranks at least were checked"
    assert set(addresses) <= LOOPBACKS
    assert addresses or devices == 1, "gloo listens somewhere"
