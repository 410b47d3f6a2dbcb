"""Every launcher's variables give the same facts; half of them, or two that disagree, are refused."""

import json
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.strategies.devices import device_index
from lockstep.strategies.launch.environment import World, detect
from lockstep.strategies.launch.slurm import expand_hosts

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TASKS = {"chief": ["h0:2222"], "worker": ["h1:2222", "h1:2223"], "ps": ["h2:2222"]}


def tf_config(kind: str, index: int, cluster: object = TASKS) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_no_launcher() -> None:
    assert detect({}) is None
    assert detect({"MASTER_ADDR": "node0", "MASTER_PORT": "1", "LOCKSTEP_LAUNCHER": ""}) is None


def test_torchrun() -> None:
    assert detect(TORCHRUN) == World(3, 1, 4, 2, 1, 2, "torchrun", "env://")


def test_hand_set_variables_on_one_node_need_no_local_rank() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert detect(environ) == World(1, 1, 2, 2, 0, 1, "torchrun", "env://")
    with pytest.raises(ValueError, match="LOCAL_RANK is not: set it to the index of the process on its node"):
        detect({**environ, "MASTER_ADDR": "node0"})


def test_slurm() -> None:
    world = detect(SLURM)
    assert world == World(3, 1, 4, 2, 1, 2, "slurm", "tcp://gpu07:14711")
    assert world == detect(without(SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"))
    uneven = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert detect(uneven) == World(3, 0, 4, 1, 1, 2, "slurm", "tcp://gpu07:14711")


def test_slurm_steps_of_one_job_meet_at_different_ports() -> None:
    first, second = detect(SLURM), detect({**SLURM, "SLURM_STEP_ID": "1"})
    assert first is not None
    assert second is not None
    assert first.init_method != second.init_method


def test_slurm_master_address_of_the_user() -> None:
    world = detect({**SLURM, "MASTER_ADDR": "ib7", "MASTER_PORT": "1234"})
    assert world is not None
    assert world.init_method == "tcp://ib7:1234"


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n1"},  # the shell of salloc
        {
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
        },  # sbatch without --ntasks
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODEID": "0"},
        {
            "SLURM_JOB_ID": "1",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NUM_TASKS": "1",
        },  # srun --pty bash in salloc -n 4
    ],
)
def test_slurm_where_it_started_one_process(environ: dict[str, str]) -> None:
    assert detect(environ) is None


def test_mpi_on_one_node() -> None:
    assert detect(MPI) == World(1, 1, 2, 2, 0, 1, "mpi", None)
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}) == detect(MPI)


def test_mpi_on_several_nodes_needs_an_address() -> None:
    environ = {**MPI, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    with pytest.raises(ValueError, match="needs MASTER_ADDR, the host of rank 0, which is not set"):
        detect(environ)
    assert detect({**environ, "MASTER_ADDR": "n0", "MASTER_PORT": "1234"}) == World(
        3, 1, 4, 2, 1, 2, "mpi", "tcp://n0:1234"
    )
    shared = detect({**environ, "LOCKSTEP_INIT_METHOD": "file:///nfs/meet"})
    assert shared is not None
    assert shared.init_method == "file:///nfs/meet"


def test_tf_config_has_the_chief_first() -> None:
    assert detect(tf_config("chief", 0)) == World(0, 0, 3, 1, 0, 2, "tf_config", "tcp://h0:2222")
    assert detect(tf_config("worker", 0)) == World(1, 0, 3, 2, 1, 2, "tf_config", "tcp://h0:2222")
    assert detect(tf_config("worker", 1)) == World(2, 1, 3, 2, 1, 2, "tf_config", "tcp://h0:2222")
    assert detect(tf_config("worker", 0, {"worker": ["h1:2222"]})) is None


def test_own_launcher_comes_before_every_other() -> None:
    own = {"LOCKSTEP_LAUNCHER": "lockstep", "LOCKSTEP_INIT_METHOD": "file:///tmp/store", "RANK": "1", "WORLD_SIZE": "2"}
    assert detect({**SLURM, **MPI, **own}) == World(1, 1, 2, 2, 0, 1, "lockstep", "file:///tmp/store")


@pytest.mark.parametrize("method", ["tcp://node0:1234", "tcp://[::1]:1234", "file:///a/path", "env://"])
def test_explicit_rendezvous(method: str) -> None:
    world = detect({**SLURM, "MASTER_ADDR": "m", "MASTER_PORT": "1", "LOCKSTEP_INIT_METHOD": method})
    assert world is not None
    assert world.init_method == method


@pytest.mark.parametrize(
    "method",
    ["tcp://node0", "tcp://:12", "tcp://n:99999", "tcp://n:x", "file://relative", "node0:12", "http://a:1", "env://x"],
)
def test_wrong_rendezvous(method: str) -> None:
    with pytest.raises(
        ValueError,
        match="LOCKSTEP_INIT_METHOD must be env://, tcp://host:port or file:///path, but it is "
        + re.escape(repr(method)),
    ):
        detect({**SLURM, "LOCKSTEP_INIT_METHOD": method})


def test_torchrun_inside_slurm_or_mpi_is_torchrun() -> None:
    assert detect({**SLURM, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", **MPI, **TORCHRUN}) == detect(TORCHRUN)


def test_launchers_that_agree() -> None:
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "gpu07"}
    world = detect({**SLURM, **pmi})
    assert world is not None
    assert world.launcher == "slurm"


def test_launchers_that_disagree_and_the_way_out() -> None:
    both = {**SLURM, **MPI}
    with pytest.raises(ValueError, match="slurm says rank 3 of 4, mpi says rank 1 of 2; set LOCKSTEP_LAUNCHER"):
        detect(both)
    assert detect({**both, "LOCKSTEP_LAUNCHER": "mpi"}) == detect(MPI)
    assert detect({**both, "LOCKSTEP_LAUNCHER": "none"}) is None
    with pytest.raises(ValueError, match="LOCKSTEP_LAUNCHER must be one of .*, got 'srun'"):
        detect({**both, "LOCKSTEP_LAUNCHER": "srun"})
    with pytest.raises(ValueError, match="LOCKSTEP_LAUNCHER=mpi needs ranks that mpi started"):
        detect({**SLURM, "LOCKSTEP_LAUNCHER": "mpi"})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE are not set"),
        ({**TORCHRUN, "RANK": "4"}, "RANK must be below WORLD_SIZE, but RANK=4 and WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK must be an integer from 0 to 3, but it is '-1'"),
        ({**TORCHRUN, "RANK": "one"}, "RANK must be an integer from 0 to 3, but it is 'one'"),
        ({**TORCHRUN, "WORLD_SIZE": "4.0"}, "WORLD_SIZE must be an integer of at least 1, but it is '4.0'"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK must be an integer from 0 to 1, but it is '2'"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE must be an integer from 1 to 4"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT must be an integer from 0 to 65535, but it is '70000'"),
        (
            without(TORCHRUN, "LOCAL_WORLD_SIZE"),
            "LOCAL_WORLD_SIZE is not: set it to the number of processes on the node",
        ),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID=1 is set but SLURM_NTASKS is not"),
        ({**SLURM, "SLURM_PROCID": "4"}, "SLURM_PROCID must be below SLURM_STEP_NUM_TASKS"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
        (without(SLURM, "SLURM_NODEID"), "SLURM_NODEID is not set"),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[07-"}, "node list looks like gpu"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST is not: set it, or MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0 is set but OMPI_COMM_WORLD_SIZE is not"),
        ({**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK must be an integer"),
        ({"TF_CONFIG": "{not json"}, "TF_CONFIG looks like .* but it is '{not json'"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG looks like"),
        (tf_config("worker", 2), "TF_CONFIG names task worker 2, but ranks are"),
        (tf_config("ps", 0), "TF_CONFIG names task ps 0, but ranks are"),
        (tf_config("worker", 0, {"worker": ["h0", "h1"]}), "TF_CONFIG gives ranks as host:port, but the first is 'h0'"),
    ],
)
def test_half_set_or_contradictory_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        detect(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("rack[1-2]n[3,5]x", ["rack1n3x", "rack1n5x", "rack2n3x", "rack2n5x"]),
    ],
)
def test_expand_hosts(hosts: str, names: list[str]) -> None:
    assert expand_hosts(hosts) == names


@pytest.mark.ranks
@given(st.lists(st.integers(0, 999), min_size=1, max_size=8))
def test_expand_hosts_gives_back_what_was_listed(numbers: list[int]) -> None:
    assert expand_hosts(f"n[{','.join(f'{number:03}' for number in numbers)}]") == [
        f"n{number:03}" for number in numbers
    ]


@pytest.mark.parametrize("hosts", ["", "n[1-", "n1]", "n[a-b]", "n[]"])
def test_expand_hosts_refuses(hosts: str) -> None:
    with pytest.raises(ValueError, match="node list"):
        expand_hosts(hosts)


@pytest.mark.ranks
def test_detect_reads_the_environment_of_the_process() -> None:
    code = "from lockstep.strategies.launch.environment import detect; print(detect())"
    environ = {**os.environ, **MPI}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "launcher='mpi'" in printed


def node(rank: int, ranks: int) -> World:
    return World(rank, rank, ranks, ranks, 0, 1, "slurm", None)


@pytest.mark.parametrize(
    ("world", "visible", "environ", "index"),
    [
        (None, 4, {}, 0),
        (node(3, 4), 4, {}, 3),
        (node(1, 2), 8, {}, 1),
        (node(3, 4), 1, {"CUDA_VISIBLE_DEVICES": "3"}, 0),  # one GPU a task
        (node(0, 4), 1, {"CUDA_VISIBLE_DEVICES": "GPU-5e1b"}, 0),
        (node(0, 1), 1, {}, 0),
        (node(3, 4), 1, {"LOCKSTEP_SHARE_GPU": "1"}, 0),
        (node(1, 2), 8, {"LOCKSTEP_SHARE_GPU": "1"}, 0),
        (node(1, 2), 8, {"LOCKSTEP_SHARE_GPU": "0"}, 1),
    ],
)
def test_a_rank_takes_the_device_of_its_place_or_the_only_one_it_sees(
    world: World | None, visible: int, environ: dict[str, str], index: int
) -> None:
    assert device_index(world, visible, environ) == index


@pytest.mark.parametrize(
    ("rank", "ranks", "visible", "environ"),
    [
        (1, 2, 1, {}),
        (0, 2, 1, {}),
        (3, 4, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (0, 4, 2, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (0, 1, 0, {"CUDA_VISIBLE_DEVICES": ""}),
        (1, 2, 0, {"LOCKSTEP_SHARE_GPU": "1"}),
    ],
)
def test_fewer_devices_than_ranks_are_refused(rank: int, ranks: int, visible: int, environ: dict[str, str]) -> None:
    """By every rank, not only by those that find none."""
    with pytest.raises(
        ValueError, match=rf"slurm started {ranks} ranks on this node and rank {rank} sees {visible} \("
    ):
        device_index(node(rank, ranks), visible, environ)
