"""Numbers from every rank to every rank, through shared memory and over a tree of connections."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.strategies.base import StepVote
from lockstep.strategies.launch import environment, launcher, process_group
from lockstep.strategies.launch.failure import RankFailure
from lockstep.strategies.sync import connections, host_all_gather, host_all_gather_tree
from lockstep.strategies.sync.collectives import own_group
from lockstep.strategies.sync.step_agreement import StepAgreement

pytestmark = pytest.mark.ranks


def joined(work: Any, num_ranks: int, tree: bool = False, timeout_s: float = 30.0) -> Any:
    """What `work(exchange, rank)` returns on rank 0."""
    return launcher.launch(_on_rank, (work, tree, timeout_s), num_ranks)


def _on_rank(work: Any, tree: bool, timeout_s: float) -> Any:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world, "gloo", 20.0)
    if tree and world.rank == 0:
        del os.memfd_create  # as on a system without it, or on another machine
    opened = host_all_gather.open_exchange(world.rank, world.world_size, 2, timeout_s)
    assert isinstance(opened, host_all_gather._Tree if tree else host_all_gather._Memory)
    result = work(opened, world.rank)
    dist.barrier()
    opened.close()
    process_group.destroy_process_group()
    return result


@pytest.mark.parametrize("tree", [False, True])
def test_every_rank_reads_what_all_have_posted(tree: bool) -> None:
    def work(opened: host_all_gather.Exchange, rank: int) -> list[Any]:
        rows = []
        for turn in range(600):  # more than the ring holds
            opened.post(turn, 10.5 * rank)
            if turn % 200 == rank * 60:
                time.sleep(0.02)  # one comes late, and not always the same
            if turn % 3 != 1:  # some stay unread
                rows.append(opened.read())
        return rows

    rows = joined(work, 3, tree)
    assert rows == [[(turn, 0.0), (turn, 10.5), (turn, 21.0)] for turn in range(600) if turn % 3 != 1]


@pytest.mark.parametrize("tree", [False, True])
def test_lowest_highest_and_sum_are_equal_on_all_ranks(tree: bool) -> None:
    def work(opened: host_all_gather.Exchange, rank: int) -> list[Any]:
        found = []
        for turn in range(50):
            opened.post(turn - rank, math.inf if rank == 1 else rank)
            if rank == 2 and turn < 40:
                continue  # nobody waits for who does not read
            if turn == 45:
                assert opened.read() == [(45, 0), (44, math.inf), (43, 2)]
            found.append(opened.reduced())
        return found[-2:]

    expected = [((turn - 2, 0), (turn, math.inf), (3 * turn - 3, math.inf)) for turn in (48, 49)]
    assert joined(work, 3, tree) == expected


def test_a_rank_that_reads_late_finds_what_was_said_then() -> None:
    def work(opened: host_all_gather.Exchange, rank: int) -> list[Any]:
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
    def work(opened: host_all_gather.Exchange, rank: int) -> None:
        for _ in range(host_all_gather.RING + 1 if rank else 1):
            opened.post(0, 0)
        dist.barrier()
        if rank == 0:
            opened.read()

    with pytest.raises(RuntimeError, match=f"rank 1 is {host_all_gather.RING} messages ahead"):
        joined(work, 2)


@pytest.mark.parametrize("tree", [False, True])
def test_who_waits_learns_of_a_rank_that_has_ended(tree: bool, tmp_path: Path) -> None:
    def work(opened: host_all_gather.Exchange, rank: int) -> None:
        if rank == 1:
            os._exit(7)
        opened.post(0, 0)
        try:
            opened.read()
        except RuntimeError as error:
            (tmp_path / "learned").write_text(str(error))
            raise

    with pytest.raises(RankFailure, match="rank 1 exited with code 7"):
        joined(work, 2, tree)
    assert (tmp_path / "learned").read_text() == "rank 1 has ended: see its own error"


def test_waiting_ends_at_the_timeout() -> None:
    def work(opened: host_all_gather.Exchange, rank: int) -> str:
        if rank == 1:
            time.sleep(1.5)
            return ""
        opened.post(0, 0)
        with pytest.raises(RuntimeError, match=r"rank 1 did not come .* within 0.5 s"):
            opened.read()
        return "ended"

    assert joined(work, 2, timeout_s=0.5) == "ended"


def test_a_number_that_means_something_else_on_this_machine_is_not_shared_memory(tmp_path: Path) -> None:
    """As where rank 0 is on another one: its process id and descriptor may be those of any file here."""
    ends = os.pipe()
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("empty", "short", "alike")]
    os.write(files[1], b"abc")
    os.write(files[2], bytes(64))
    for number in (*ends, *files, 10**6, -1):
        assert host_all_gather._open(os.getpid(), number, 77, 64) is None
    assert host_all_gather._open(2**30, 0, 77, 64) is None
    whole = host_all_gather._create(64, 77)
    memory = host_all_gather._open(os.getpid(), whole, 77, 64)
    assert memory is not None and len(memory) == 64
    for number in (*ends, *files, whole):
        os.close(number)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_groups_of_ranks_hear_their_own_and_name_ranks_among_all(tree: bool) -> None:
    def work() -> None:
        world = environment.detect()
        assert world is not None
        process_group.init_process_group(world, "gloo", 20.0)
        if tree:
            del os.memfd_create
        first, place = world.rank // 2 * 2, world.rank % 2
        group = own_group([(0, 1), (2, 3)], "gloo")
        opened = host_all_gather.open_exchange(place, 2, 1, 3.0, group)
        for turn in range(first, 30):  # one group has more to say
            opened.post(world.rank + turn)
            assert opened.read() == [(first + turn,), (first + 1 + turn,)]
        agreement = StepAgreement(place, 2, 3.0, group)
        agreement.send(StepVote(), 4, 1.0, finite=place == 0)
        assert agreement.receive().non_finite == f"the loss of rank {first + 1}"
        if not place:  # the other has nothing more to say
            opened.post(0)
            with pytest.raises(RuntimeError, match="a rank did not come" if tree else f"rank {first + 1} did not come"):
                opened.read()
        dist.barrier()
        process_group.destroy_process_group()

    launcher.launch(work, (), 4)


NUM_DEEP = 11
"""With a fanout of two the last rank has three above it."""


def deep(work: Any) -> None:
    """Run `work(links, rank)` on each rank of a tree that is several levels deep."""

    def on_rank() -> None:
        world = environment.detect()
        assert world is not None
        process_group.init_process_group(world, "gloo", 20.0)
        links = host_all_gather_tree.Links(world.rank, world.world_size, 20.0, fanout=2)
        dist.barrier()
        work(links, world.rank)
        dist.barrier()
        links.close()
        process_group.destroy_process_group()

    launcher.launch(on_rank, (), NUM_DEEP)


def test_a_tree_of_several_levels_sums_and_gathers() -> None:
    def work(links: host_all_gather_tree.Links, rank: int) -> None:
        assert len(links.children) + (links.parent is not None) <= 3
        for turn in range(20):
            total = NUM_DEEP * (NUM_DEEP - 1) / 2
            assert links.reduce((rank, turn)) == (0, turn, NUM_DEEP - 1, turn, total, NUM_DEEP * turn)
            found = links.gather((10.0 * rank,))
            assert sorted(zip(found[::2], found[1::2], strict=True)) == [(i, 10.0 * i) for i in range(NUM_DEEP)]

    deep(work)


def test_every_rank_of_a_tree_learns_which_one_has_ended() -> None:
    def work(links: host_all_gather_tree.Links, rank: int) -> None:
        if rank == 4:
            links.close()
            return
        worker = host_all_gather_tree.Worker(links)
        worker.give(links.reduce, (1.0,))
        with pytest.raises(RuntimeError, match="rank 4 has ended: see its own error"):
            worker.result(10.0)

    deep(work)


def test_who_does_not_know_the_secret_is_not_let_in() -> None:
    """Also if it says nothing at all, or too little."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(connections.HELLO.pack(b"x" * 32, 1))
        assert connections.greeted(ours, b"y" * 32) == -1
        theirs.sendall(connections.HELLO.pack(b"y" * 32, 1))
        assert connections.greeted(ours, b"y" * 32) == 1
        threading.Timer(0.1, theirs.close).start()
        assert connections.greeted(ours, b"y" * 32) == -1


def say(control: StepAgreement, rank: int, **changed: Any) -> Any:
    """One round of control messages; `changed` is what this rank says otherwise."""
    vote = StepVote(stop=changed.get("stop", 0), keys=changed.get("keys", 77))
    control.send(vote, changed.get("samples", 20), 4.0 + rank, changed.get("finite", True), 2.0)
    return control.receive()


@pytest.mark.parametrize("tree", [False, True])
def test_the_odd_rank_is_named(tree: bool) -> None:
    """Over a tree too, on which the numbers of each rank travel only after the ranks have found that they disagree."""

    def work(_: host_all_gather.Exchange, rank: int) -> None:
        control = StepAgreement(rank, 4, 20.0)
        try:
            result = say(control, rank, keys=0 if rank == 2 else 77, stop=15 * (rank == 1))
            assert (result.count, result.stop, result.non_finite, result.loss) == (22.0, 15, None, 8 / 22)
            assert say(control, rank, finite=rank < 2).non_finite == "the loss of rank 2"
            assert control.first_rank(rank >= 1) == 1 and control.first_rank(False) is None
            assert control.is_equal(5) and not control.is_equal(rank)
            assert control.gather(2.5 * rank) == [0.0, 2.5, 5.0, 7.5]
            with pytest.raises(
                RuntimeError, match=r"samples of the global batch .*: rank 3 did not do what the others did"
            ):
                say(control, rank, samples=21 if rank == 3 else 20)
            with pytest.raises(RuntimeError, match=r"logged metric names: rank 1 did not do"):
                say(control, rank, keys=78 if rank == 1 else 77)
            if rank == 2:
                control._calls.note("barrier", (), None)
            with pytest.raises(RuntimeError, match=r"latest collective calls .*: rank 2 did not do"):
                control.check()
        finally:
            control.close()

    joined(work, 4, tree)
