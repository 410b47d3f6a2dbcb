"""Settings of every test: one thread a process, a folder of its own, the same random numbers, no launcher's
variables."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its threads: ranks share the machine's few cores

import functools
import gc
import importlib.util
import logging
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from lockstep.strategies.launch import forkserver
from lockstep.strategies.launch.program import changes
from tests import daily, gpu_report, kinds

REPO_ROOT = Path(__file__).resolve().parent.parent
LAUNCHER_PREFIXES = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "TF_CONFIG",
    "LOCKSTEP_FORCE_MESH",
)

torch.set_num_threads(1)

# What test modules import: once for the server of a process, not in each of its ranks. DeepSpeed's import, which takes
# 2 s, may start CUDA, which no fork survives: only where there is none.
FOR_RANKS = ["pytest", "hypothesis", "torchmetrics.classification", "torch.distributed.pipelining"]
FOR_RANKS += ["lockstep.strategies.mesh.sharded", "lockstep.strategies.pipeline.strategy"]
FOR_RANKS += [] if torch.cuda.is_available() else ["deepspeed.runtime.zero.muon.muon_optimizer"]
forkserver.PRELOAD = (
    *forkserver.PRELOAD,
    *(name for name in FOR_RANKS if importlib.util.find_spec(name.split(".")[0])),
)

# The collector rests while test modules and what they test are imported, and never scans them later: 14 % of the time.
gc.disable()

settings.load_profile("ci")  # the same examples every time, and no deadline: the cores are shared
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(REPO_ROOT / ".pytest_cache" / "hypothesis"))


_STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "socket.sendmsg")
"""Audit events of a start: the last is the launcher's request to its fork server."""
_running: pytest.Item | None = None


_all_modules = changes.own_modules


def _modules_of_the_test() -> dict[str, ModuleType]:
    """Of the test modules only the running one and those that it imports from: with all 300 of them, which one process
    has imported, each launch would compare a hundred times what a user's program has."""
    modules = _all_modules()
    if not isinstance(_running, pytest.Function):
        return modules
    used = _used_by(_running.module.__name__)
    return {name: module for name, module in modules.items() if not name.startswith("tests.") or name in used}


@functools.cache
def _used_by(name: str) -> set[str]:
    used, found = set[str](), [name]
    while found:
        used.add(name := found.pop())
        values = list(vars(sys.modules[name]).values())
        names = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in values}
        found += [name for name in names if str(name).startswith("tests.") and name in sys.modules and name not in used]
    return used


changes.own_modules = _modules_of_the_test


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    if event in _STARTS and _running is not None and _running.get_closest_marker("unit"):
        raise RuntimeError(f"{_running.nodeid} starts a process ({event}): mark it `ranks`")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _running
    _running = item
    try:
        return (yield)
    finally:
        _running = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--daily", action="store_true", help="without tests marked `long` and most cases: tests/daily.py")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not config.option.basetemp:
        config.option.basetemp = tempfile.mkdtemp(prefix="ls-")  # with each worker's name in it, still a short path
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Iterator[Any]:
    found = yield
    if isinstance(found, list):
        kinds.check([case for case in found if isinstance(case, pytest.Item)])
    return found


@pytest.hookimpl(wrapper=True)  # before tests are chosen by their markers, and after it
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    # Files with tests that take long begin first, so that none of them is what all workers wait for at the end.
    long = {item.path for item in items if any(map(item.get_closest_marker, ("timeout", "faults", "docs")))}
    files = {path: i for i, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (item.path not in long, files[item.path], _group(item)))
    kinds.mark(items)
    if config.option.timeout is None:
        kinds.limit_time(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
    yield
    if config.option.daily:
        set_aside = daily.set_aside(items)
        config.hook.pytest_deselected(items=[item for item in items if item in set_aside])
        items[:] = [item for item in items if item not in set_aside]


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("grouped")
    if marker is None or not isinstance(item, pytest.Function):
        return ""
    return str(item.callspec.params.get(marker.args[0], "")) if hasattr(item, "callspec") else ""


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if gpu_report.is_asked_for(config):
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
        terminalreporter.section(f"covered on {torch.cuda.device_count()} × {name}, torch {torch.__version__}")
        for line in gpu_report.table(terminalreporter.stats):
            terminalreporter.line(line)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if gpu_report.is_asked_for(session.config) and not torch.cuda.is_available() and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED  # all skipped is not a success


@pytest.fixture(autouse=True)
def isolate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test in `tmp_path`, from a fixed seed, and undo what it changed in torch's global settings."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(LAUNCHER_PREFIXES)]:
        monkeypatch.delenv(name)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    logger = logging.getLogger("lockstep")
    level, handlers_of_logger = logger.level, list(logger.handlers)
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers_of_logger
    torch.set_default_dtype(dtype)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # the setter imports the compiler: a second
        torch.use_deterministic_algorithms(deterministic)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left a process group behind")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    if any(handler is not signal.SIG_DFL for handler in handlers.values()):
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)
        pytest.fail(f"the test left signal handlers behind: {handlers}")


@pytest.fixture
def repo_root() -> Path:
    return REPO_ROOT


@pytest.fixture
def run_ranks() -> Callable[..., Any]:
    """`run_ranks(fn, n, *args)` runs `fn(*args)` on n real gloo ranks and returns what rank 0 returned."""
    from lockstep.strategies.launch.launcher import launch

    def run(fn: Callable[..., Any], num_ranks: int, *args: Any) -> Any:
        return launch(fn, args, num_ranks)

    return run


@pytest.fixture
def one_rank_keeps_its_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy of several ranks runs its own code on one, in this process."""
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
