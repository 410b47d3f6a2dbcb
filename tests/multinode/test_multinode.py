"""Two hosts under torchrun are one run: the numbers, the facts and the checkpoint of a single process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lockstep import Trainer
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.conftest import REPO_ROOT
from tests.multinode import fit
from tests.multinode.hosts import Host, two_hosts
from tests.trainer.toy import net, quiet

pytestmark = pytest.mark.faults

TIMEOUT_S = 80
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = str(REPO_ROOT / "tests" / "multinode" / "fit.py")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    machines = two_hosts()
    try:
        pair = machines.__enter__()
    except OSError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")
    try:
        yield pair
    finally:
        machines.__exit__(None, None, None)


@dataclass(frozen=True)
class Expected:
    """The same run without ranks."""

    folder: Path
    metrics: dict[str, float]
    third_epoch: dict[str, torch.Tensor]
    """The weights, had it continued for another epoch."""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    folder, module = tmp_path_factory.mktemp("single"), net()
    run = fit.trainer(folder, strategy="single")
    run.fit(module, datamodule=fit.Data())
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return Expected(folder, metrics, one_more_epoch(folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "strategies", "rendezvous"),
    [
        (1, "ddp,fsdp", "c10d"),
        pytest.param(1, "ddp,fsdp", "static", marks=pytest.mark.slow),
        pytest.param(2, "ddp,fsdp,hybrid", "c10d", marks=pytest.mark.slow),
    ],
)
def test_two_hosts(
    devices: int, strategies: str, rendezvous: str, hosts: tuple[Host, Host], one_process: Expected, tmp_path: Path
) -> None:
    processes, outputs = [], []
    for node, host in enumerate(hosts):
        if rendezvous == "static":
            meet = [f"--node-rank={node}", f"--master-addr={hosts[0].address}", "--master-port=29500"]
        else:  # a host knows itself by its name, and these have the name of the machine
            is_host = "true" if node == 0 else "false"
            meet = [
                f"--rdzv-backend={rendezvous}",
                f"--rdzv-endpoint={hosts[0].address}:29400",
                "--rdzv-id=test",
                f"--rdzv-conf=is_host={is_host}",
            ]
            meet.append(f"--local-addr={host.address}")
        command = [
            *TORCHRUN,
            "--nnodes=2",
            f"--nproc-per-node={devices}",
            *meet,
            SCRIPT,
            strategies,
            "2",
            str(devices),
            str(tmp_path),
        ]
        outputs.append(tmp_path / f"host-{node}.txt")
        processes.append(host.start(command, outputs[-1], environment(), tmp_path))
    wait(processes, outputs)
    for name in strategies.split(","):
        check(tmp_path / name, nodes=2, devices=devices, one_process=one_process)


@pytest.mark.slow  # the two hosts do the same with more to go wrong
@pytest.mark.parametrize(("launcher", "strategies"), [("torchrun", "ddp,fsdp"), ("variables", "ddp")])
def test_two_processes_on_one_host(launcher: str, strategies: str, one_process: Expected, tmp_path: Path) -> None:
    arguments = [SCRIPT, strategies, "1", "2", str(tmp_path)]
    if launcher == "torchrun":
        commands = [([*TORCHRUN, "--standalone", "--nproc-per-node=2", *arguments], environment())]
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        commands = [
            ([sys.executable, *arguments], environment() | meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
    processes, outputs = [], []
    try:
        for i, (command, environ) in enumerate(commands):
            outputs.append(tmp_path / f"output-{i}.txt")
            with outputs[-1].open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, cwd=tmp_path
                    )
                )
        wait(processes, outputs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks then, which SIGKILL would leave behind
                process.wait(20)
    for name in strategies.split(","):
        check(tmp_path / name, nodes=1, devices=2, one_process=one_process)


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_nodes_without_a_launcher(strategy: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"^num_nodes=2 needs a launcher that starts the ranks on every node, such as torchrun --nnodes=2; none "
        r"was found$",
    ):
        Trainer(strategy=strategy, num_nodes=2, devices=1, accelerator="cpu")


def test_hosts_end_with_all_that_runs_on_them(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    process = hosts[1].start(
        ["sh", "-c", "setsid sleep 600 & echo $(hostname); exec sleep 600"],
        tmp_path / "output.txt",
        os.environ,
        tmp_path,
    )
    deadline = time.monotonic() + 10
    while not (tmp_path / "output.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    namespace = os.readlink(f"/proc/{hosts[1].pid}/ns/net")
    assert len(list(inhabitants(namespace))) >= 3
    hosts[1].shut_down()
    assert process.wait(10) != 0
    assert not list(inhabitants(namespace))


def inhabitants(namespace: str) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "ns" / "net") == namespace:
                yield folder.name
        except OSError:  # it has ended, or is somebody else's
            pass


def environment() -> dict[str, str]:
    """Of a rank; which network interface to use, it finds out itself."""
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    return kept | {"PYTHONPATH": str(REPO_ROOT), "OMP_NUM_THREADS": "1"}


def wait(processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]) -> None:
    """Until all have ended well; a failure or the time limit fails the test with what they printed."""
    deadline = time.monotonic() + TIMEOUT_S
    codes = [process.poll() for process in processes]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.05)
        codes = [process.poll() for process in processes]
    assert codes == [0] * len(processes), "\n".join(
        f"---- {path.name}\n{path.read_text(errors='replace')}" for path in outputs
    )


def check(folder: Path, nodes: int, devices: int, one_process: Expected) -> None:
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(nodes * devices)]
    for rank, facts in enumerate(ranks):
        place = [facts[name] for name in ("global_rank", "local_rank", "world_size", "is_global_zero", "global_step")]
        assert place == [rank, rank % devices, nodes * devices, rank == 0, 14]
        assert facts["metrics"] == ranks[0]["metrics"]
        assert facts["validated"] == ranks[0]["validated"]
        nodes_refused, devices_refused = facts["refused"]
        assert nodes_refused.startswith(f"num_nodes={nodes + 1} contradicts torchrun, which runs on {nodes} node")
        assert devices_refused.startswith(
            f"devices={devices + 1} contradicts torchrun, which started {devices} ranks on this node;"
        )
    # toy's accuracy is in float32
    expected = {
        name: pytest.approx(value, rel=1e-6 if name == "val/acc" else 1e-12)
        for name, value in one_process.metrics.items()
    }
    assert ranks[0]["metrics"] == expected
    assert ranks[0]["validated"] == {name: expected[name] for name in ("val/loss", "val/acc")}
    assert sorted(path.name.rsplit("-", 5)[0] for path in folder.glob("prepared-*")) == [
        f"prepared-on-node-{node}" for node in range(nodes)
    ]
    assert len([*(folder / "once").glob("prepared-*")]) == 1, "prepare_data_per_node is False"

    saved, reference = (Checkpoint.open(path / "checkpoints" / "last") for path in (folder, one_process.folder))
    names = reference.names("model/") + reference.names("optimizer/")
    assert saved.names("model/") + saved.names("optimizer/") == names
    for name in names:
        assert torch.allclose(saved.read(name), reference.read(name), rtol=1e-12, atol=1e-12), name
    for name, value in one_more_epoch(folder).items():
        assert torch.allclose(value, one_process.third_epoch[name], rtol=1e-12, atol=1e-12), name


def one_more_epoch(folder: Path) -> dict[str, torch.Tensor]:
    """The weights after one process has continued from the checkpoint in `folder`."""
    module = net()
    quiet(strategy="single", precision="64-true", split_batches=True, max_epochs=3).fit(
        module, datamodule=fit.Data(), ckpt_path=folder / "checkpoints" / "last"
    )
    return module.state_dict()
