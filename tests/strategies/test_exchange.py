"""Numbers from every rank to every rank, through shared memory and by gloo."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from strategies import environment, exchange, processes


def joined(work: Any, num_ranks: int, gloo: bool = False, timeout_s: float = 30.0) -> Any:
    """What `work(exchange, rank)` returns on rank 0."""
    return processes.launch(_on_rank, (work, gloo, timeout_s), num_ranks)


def _on_rank(work: Any, gloo: bool, timeout_s: float) -> Any:
    world = environment.detect()
    assert world is not None
    processes.init_process_group(world, "gloo", 20.0)
    if gloo and world.rank == 0:
        del os.memfd_create  # as on a system without it, or on another machine
    opened = exchange.open_exchange(world.rank, world.world_size, 2, timeout_s)
    assert isinstance(opened, exchange._Gloo if gloo else exchange._Memory)
    result = work(opened, world.rank)
    dist.barrier()
    processes.destroy_process_group()
    return result


@pytest.mark.parametrize("gloo", [False, True])
def test_every_rank_reads_what_all_have_posted(gloo: bool) -> None:
    def work(opened: exchange.Exchange, rank: int) -> list[Any]:
        rows = []
        for turn in range(600):  # more than the ring holds
            opened.post(turn, 10.5 * rank)
            if turn % 200 == rank * 60:
                time.sleep(0.02)  # one comes late, and not always the same
            if turn % 3 != 1:  # some stay unread
                rows.append(opened.read())
        return rows

    rows = joined(work, 3, gloo)
    assert rows == [[(turn, 0.0), (turn, 10.5), (turn, 21.0)] for turn in range(600) if turn % 3 != 1]


def test_a_rank_that_reads_late_finds_what_was_said_then() -> None:
    def work(opened: exchange.Exchange, rank: int) -> list[Any]:
        if rank == 1:
            for turn in range(100):
                opened.post(turn, 1)
            return []
        time.sleep(0.2)
        rows = []
        for turn in range(100):
            opened.post(turn, 0)
            rows.append(opened.read()[1])
        return rows

    assert joined(work, 2) == [(turn, 1) for turn in range(100)]


def test_a_message_that_was_written_over_is_an_error() -> None:
    def work(opened: exchange.Exchange, rank: int) -> None:
        for _ in range(exchange.RING + 1 if rank else 1):
            opened.post(0, 0)
        dist.barrier()
        if rank == 0:
            opened.read()

    with pytest.raises(RuntimeError, match=f"rank 1 is {exchange.RING} messages ahead"):
        joined(work, 2)


def test_who_waits_learns_of_a_rank_that_has_ended(tmp_path: Path) -> None:
    def work(opened: exchange.Exchange, rank: int) -> None:
        if rank == 1:
            os._exit(7)
        opened.post(0, 0)
        try:
            opened.read()
        except RuntimeError as error:
            (tmp_path / "learned").write_text(str(error))
            raise

    with pytest.raises(processes.RankFailure, match="rank 1 exited with code 7"):
        joined(work, 2)
    assert (tmp_path / "learned").read_text() == "rank 1 has ended: see its own error"


def test_waiting_ends_at_the_timeout() -> None:
    def work(opened: exchange.Exchange, rank: int) -> str:
        if rank == 1:
            time.sleep(1.5)
            return ""
        opened.post(0, 0)
        with pytest.raises(RuntimeError, match=r"rank 1 did not come .* within 0.5 s"):
            opened.read()
        return "ended"

    assert joined(work, 2, timeout_s=0.5) == "ended"


def test_a_number_that_means_something_else_on_this_machine_is_no_memory(tmp_path: Path) -> None:
    """As where rank 0 is on another one: its process id and descriptor may be those of any file here."""
    ends = os.pipe()
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("empty", "short", "alike")]
    os.write(files[1], b"abc")
    os.write(files[2], bytes(64))
    for number in (*ends, *files, 10**6, -1):
        assert exchange._open(os.getpid(), number, 77, 64) is None
    assert exchange._open(2**30, 0, 77, 64) is None
    whole = exchange._create(64, 77)
    memory = exchange._open(os.getpid(), whole, 77, 64)
    assert memory is not None and len(memory) == 64
    for number in (*ends, *files, whole):
        os.close(number)
