"""What ranks take over from the program that starts them, and what it gets back."""

import gc
import os
import random
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lockstep.strategies.launch import environment, forkserver, process_group
from lockstep.strategies.launch.launcher import launch
from lockstep.strategies.launch.phase import set_phase
from tests.strategies.launch.programs import Program, another_server, gone, join, own_rank

pytestmark = pytest.mark.ranks


def all_ranks(value: float) -> list[float]:
    out = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor([value], dtype=torch.float64))
    return [float(item) for item in out]


def whereabouts(x: int) -> dict[str, Any]:
    world = join()
    facts = {
        "world": (
            world.rank,
            world.local_rank,
            world.world_size,
            world.local_world_size,
            world.num_nodes,
            world.launcher,
        ),
        "ranks": all_ranks(float(own_rank())),
        "pids": all_ranks(os.getpid()),
        "threads": torch.get_num_threads(),
        "environ": {
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
        },
        "server": os.getppid(),
        "x": x,
    }
    process_group.destroy_process_group()
    assert not dist.is_initialized()
    process_group.destroy_process_group()
    return facts


def test_ranks_know_their_world_and_the_result_of_rank_0_comes_back(private_tmp: Path) -> None:
    facts = launch(whereabouts, (5,), 3)
    assert facts["world"] == (0, 0, 3, 3, 1, "lockstep")
    assert facts["ranks"] == [0.0, 1.0, 2.0]
    assert facts["environ"] == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
    }
    assert facts["x"] == 5
    assert gone([int(pid) for pid in facts["pids"]])
    assert list(private_tmp.iterdir()) == []
    assert environment.detect() is None


def test_a_second_launch_uses_the_same_server() -> None:
    server = launch(os.getppid, (), 2)
    start = time.monotonic()
    assert launch(os.getppid, (), 2) == server
    assert time.monotonic() - start < 5


@pytest.mark.long
def test_threads_follow_the_cores_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch(torch.get_num_threads, (), 1) == 1  # tests run with OMP_NUM_THREADS=1
    monkeypatch.delenv("OMP_NUM_THREADS")
    with another_server(monkeypatch):
        assert launch(torch.get_num_threads, (), 1) == len(os.sched_getaffinity(0))


def train(module: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return module


def test_weights_come_back() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    trained = launch(train, (module,), 2)
    assert trained[0].weight is trained[1].weight
    assert not torch.equal(trained[0].weight, module[0].weight)
    assert torch.equal(trained[0].weight, train(module)[0].weight)


def memory(data: torch.Tensor, array: np.ndarray) -> tuple[float, int, int]:
    total = float(data.sum()) + float(array.sum())
    status = dict(re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text()))
    return total, int(status["RssAnon"]) // 1024, int(status["RssShmem"]) // 1024


def test_a_large_dataset_is_not_copied_for_each_rank() -> None:
    _, without_data, _ = launch(memory, (torch.ones(1), np.ones(1)), 2)
    total, private_mib, shared_mib = launch(memory, (torch.ones(50_000_000), np.ones(10_000_000)), 2)
    assert total == 60_000_000
    assert shared_mib >= 265  # 200 MB and 80 MB
    assert private_mib < without_data + 20


def test_lambdas_and_closures() -> None:
    factor = 3
    assert launch(lambda x: x * factor, (torch.ones(2),), 2).tolist() == [3.0, 3.0]


def draws() -> tuple[Any, ...]:
    filtered = [entry[0] for entry in warnings.filters if entry[2] is EncodingWarning]
    return (
        random.random(),
        float(np.random.rand()),
        torch.rand(1).item(),
        torch.get_default_dtype(),
        filtered,
        sys.argv,
        os.getcwd(),
    )


def test_ranks_continue_the_program_that_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--flag"])
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("always", EncodingWarning)
        there = launch(draws, (), 2)
        assert there == draws()
    assert there[3:6] == (torch.float64, ["always"], ["program", "--flag"])


def precision() -> str:
    return torch.get_float32_matmul_precision()


def test_numeric_flags_travel() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        assert launch(precision, (), 1) == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def collector() -> tuple[bool, tuple[int, int, int], bool]:
    return gc.isenabled(), gc.get_threshold(), sys.modules["torch"] in gc.get_objects()


def test_ranks_collect_garbage_as_the_program_does_but_skip_modules() -> None:
    before = gc.get_threshold()
    assert launch(collector, (), 1) == (True, before, False)
    gc.set_threshold(900, 11, 12)
    gc.disable()
    try:
        assert launch(collector, (), 1) == (False, (900, 11, 12), False)
    finally:
        gc.set_threshold(*before)
        gc.enable()


def finalizers(path: Path) -> tuple[int, int]:
    weakref.finalize(finalizers, path.touch)
    every = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    return sum(finalizer.atexit for finalizer in every), len(every)


def test_a_rank_runs_its_own_finalizers_and_not_those_of_libraries(tmp_path: Path) -> None:
    at_end, every = launch(finalizers, (tmp_path / "ended",), 1)
    assert 0 < at_end < every / 2, "its own, and those of what only the rank has imported"
    assert (tmp_path / "ended").exists()


def test_unpicklable_work_is_refused_before_anything_starts(private_tmp: Path) -> None:
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object .*: create it on the rank"):
        launch(print, (threading.Lock(),), 2)
    assert list(private_tmp.iterdir()) == []


@pytest.mark.long
def test_a_program_that_ends_without_ranks_does_not_wait_for_the_imports_of_its_server(
    program: Callable[[str], Program],
) -> None:
    script = program("""
        import atexit, threading
        from contextlib import suppress
        from lockstep.strategies.launch import forkserver
        from lockstep.strategies.launch.launcher import launch
        atexit.register(lambda: print(server.process.returncode))  # before what the launch registers, so run after it
        with suppress(TypeError):
            launch(print, (threading.Lock(),), 2)
        server = forkserver._idle
    """)
    assert script.finish() == (0, f"{-signal.SIGKILL}\n", "")


@pytest.mark.parametrize("num_ranks", [0, 201])
def test_number_of_ranks_is_checked(num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"must be from 1 to 200, .*, but devices={num_ranks}"):
        launch(print, (), num_ranks)


def test_launch_in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(launch(own_rank, (), 2)))
    thread.start()
    thread.join(60)
    assert results == [0]


def test_set_phase_is_cheap_enough_for_every_step() -> None:
    start = time.perf_counter()
    for step in range(10_000):
        set_phase(step, "training_step")
    assert time.perf_counter() - start < 1.0


def test_a_server_is_kept_where_torch_sets_the_folder_of_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    first = forkserver.take(2)
    forkserver.give_back(first)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    second = forkserver.take(2)
    forkserver.give_back(second)
    assert second is first
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")  # which torch reads when it is imported
    third = forkserver.take(2)
    third.close()
    assert third is not first


def test_the_import_path_may_hold_other_entries_than_strings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # no string
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # another server
    assert launch(own_rank, (), 1) == 0
