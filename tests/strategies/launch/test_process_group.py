"""Ranks meet on this machine alone, under this launcher or another one."""

import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.strategies.launch import environment, process_group
from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.sync.collectives import own_group
from tests.strategies.launch.programs import LOOPBACKS, join

pytestmark = pytest.mark.ranks


def listening() -> list[str]:
    """Local addresses, as hexadecimal, on which this process accepts TCP connections."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
        except OSError:
            pass
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def meet(init_method: str | None) -> tuple[set[str], float]:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(replace(world, init_method=init_method or world.init_method), timeout_s=60)
    other = dist.new_group([0, 1], backend="gloo")
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    addresses = listening()
    where = [None] * 2
    dist.all_gather_object(where, addresses)
    process_group.destroy_process_group()
    return {address for part in where if part for address in part}, total.item()


def lone_calls(seconds: float) -> list[str]:
    """What becomes of collectives that rank 0 alone calls, in groups of every kind that strategies make."""
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world, timeout_s=seconds)
    groups = [
        process_group.new_group(),
        own_group([[0, 1]], "gloo"),
        process_group.plain_group(),
        process_group.new_mesh("cpu", {"ddp": 1, "fsdp": 2}).get_group("fsdp"),
    ]
    found = []
    for group in groups if world.rank == 0 else ():
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        found.append("in time" if time.monotonic() - began < 2 * seconds + 2 else "late")
    process_group.destroy_process_group()
    return found


@pytest.mark.long
def test_groups_of_parts_of_a_run_wait_as_long_as_the_default_group() -> None:
    assert launch(lone_calls, (2.0,), 2) == ["in time"] * 4


def test_a_group_is_joined_once_the_last_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL leaves a group when the other ranks of the node do, and torch holds one default group at a time."""
    leave, others_leave = dist.destroy_process_group, threading.Event()

    def leave_late() -> None:
        others_leave.wait(60)
        leave()

    process_group.init_process_group(None, "gloo")
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", leave_late)
        process_group.destroy_process_group(timeout_s=0.01)
        assert dist.is_initialized()
        threading.Timer(0.3, others_leave.set).start()
        process_group.init_process_group(None, "gloo")
    assert dist.is_initialized()
    process_group.destroy_process_group()
    assert not dist.is_initialized()


def test_a_group_is_joined_while_the_last_one_ends_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = dist.destroy_process_group

    def stay() -> None:
        leave()
        time.sleep(5)

    process_group.init_process_group(None, "gloo")
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", stay)
        process_group.destroy_process_group(timeout_s=0.1)
        process_group.init_process_group(None, "gloo")
    assert dist.is_initialized() and time.monotonic() - began < 4
    process_group.destroy_process_group()


def host_of_nccl() -> str | None:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(world, timeout_s=60)
    hosts: list[str | None] = [None] * 2
    dist.all_gather_object(hosts, os.environ.get("NCCL_HOSTID"))
    process_group.destroy_process_group()
    return str(hosts)


@pytest.mark.long
@pytest.mark.parametrize(("shares", "hosts"), [("1", "['rank 0', 'rank 1']"), ("0", "[None, None]")])
def test_ranks_that_share_a_gpu_are_hosts_of_their_own(
    shares: str, hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To NCCL, which refuses two ranks of one host on one GPU."""
    monkeypatch.setenv("LOCKSTEP_SHARE_GPU", shares)
    assert launch(host_of_nccl, (), 2) == hosts


@pytest.mark.long
@pytest.mark.parametrize("method", [None, "tcp://127.0.0.1", "tcp://localhost", "env://", "file://"])
def test_nothing_listens_beyond_loopback(method: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if method == "file://":
        method += str(tmp_path / "store")
    elif method == "env://":
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
    elif method:
        method += f":{port}"
    addresses, total = launch(meet, (method,), 2)
    assert total == 2
    assert addresses, "gloo listens somewhere"
    assert addresses <= LOOPBACKS


def interface() -> str | None:
    join()
    dist.barrier()  # a rank that has joined must not end while the other still connects
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_the_users_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(interface, (), 2) == "lo"
    others = [
        name
        for name in os.listdir("/sys/class/net")
        if name != "lo" and Path(f"/sys/class/net/{name}/operstate").read_text().strip() == "up"
    ]
    if not others:
        pytest.skip("this machine has a loopback interface only")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", others[0])
    assert launch(interface, (), 2) == others[0]


def wait_for_nobody() -> None:
    world = environment.detect()
    assert world is not None
    if world.rank == 0:
        process_group.init_process_group(world, timeout_s=1.0)
    time.sleep(100)


def test_the_rendezvous_times_out() -> None:
    with pytest.raises((RuntimeError, dist.DistError)):
        launch(wait_for_nobody, (), 2)


WORKER = """
    import os, signal, sys
    import torch, torch.distributed as dist
    from lockstep.strategies.launch import environment, process_group
    world = environment.detect()
    process_group.init_process_group(world, timeout_s=60)
    total = torch.ones(1)
    dist.all_reduce(total)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    os.write(1, f"{world.launcher} {world.rank} of {world.world_size} sum {total.item()} {interface}\\n".encode())
    process_group.destroy_process_group()
"""


def run_under(launcher: list[str], tmp_path: Path, repo_root: Path, **environ: str) -> str:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    run = subprocess.run(
        [*launcher, str(script)],
        env={**os.environ, "PYTHONPATH": str(repo_root), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout


@pytest.mark.long
def test_torchrun_and_its_restart(tmp_path: Path, repo_root: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    out = run_under(torchrun, tmp_path, repo_root)
    assert sorted(out.splitlines()) == ["torchrun 0 of 2 sum 2.0 lo", "torchrun 1 of 2 sum 2.0 lo"]


MPIRUN = shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")
def test_mpirun(tmp_path: Path, repo_root: Path) -> None:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    out = run_under([MPIRUN or "", "--oversubscribe", "-n", "2", sys.executable], tmp_path, repo_root, **root)
    assert sorted(out.splitlines()) == ["mpi 0 of 2 sum 2.0 lo", "mpi 1 of 2 sum 2.0 lo"]


def test_the_ranks_of_mpirun_meet_at_a_file_of_this_user_only(private_tmp: Path) -> None:
    assert launch(meet_as_mpi, (), 2) == 2
    (folder,) = private_tmp.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(RuntimeError, match="must be a folder that only this user may enter"):
        launch(meet_as_mpi, (), 2)


def meet_as_mpi() -> float:
    world = environment.detect()
    assert world is not None
    process_group.init_process_group(replace(world, init_method=None, launcher="mpi"), timeout_s=30)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


MESHES = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from lockstep.strategies.launch import process_group

for outer in ("pipeline", "ddp"):
    process_group.init_process_group(None, backend="gloo")
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=(outer, "fsdp"))["fsdp"]
    doubled = distribute_tensor(torch.ones(4), mesh, [Shard(0)]) * 2
    assert doubled.device_mesh is mesh, outer
    process_group.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.ranks
def test_a_second_run_in_a_process_gets_no_mesh_of_the_first() -> None:
    ended = subprocess.run([sys.executable, "-c", MESHES], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
