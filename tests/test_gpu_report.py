"""`make test-gpu` says what it covered, and fails if it covered nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu_report import strategies_of, table


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("tests/strategies/test_one_gpu.py::test_the_contract[fsdp]", ["fsdp"]),
        ("tests/strategies/test_one_gpu.py::test_the_contract[ddp=1,fsdp=1,tensor=1]", ["ddp", "fsdp", "tensor"]),
        ("tests/strategies/test_one_gpu.py::test_ddp_binds_its_group_to_the_device", ["ddp"]),
        ("tests/strategies/deepspeed/test_strategy.py::test_on_a_gpu[2]", ["deepspeed"]),
        ("tests/trainer/run/test_guards.py::test_on_a_gpu[True]", ["the rest"]),
    ],
)
def test_a_test_counts_for_the_strategies_that_it_names(test: str, names: list[str]) -> None:
    assert strategies_of(test) == names


def test_the_table_counts_outcomes_and_names_reasons() -> None:
    report = SimpleNamespace(nodeid="a.py::test[fsdp]", when="call", longrepr=("a.py", 3, "Skipped: needs 2 GPUs"))
    setup = SimpleNamespace(nodeid="a.py::test[fsdp]", when="setup", longrepr=None)
    rows = {row.split()[0]: row for row in table({"passed": [report, setup, report], "skipped": [report]})[1:]}
    assert rows["fsdp"].split(maxsplit=4)[1:] == ["2", "0", "1", "1: needs 2 GPUs"]
    assert rows["ddp"].split()[1:] == ["0", "0", "0"]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_was_covered(repo_root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "tests/strategies/test_copies.py", "-q"]
    run = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, timeout=60)
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "covered on 0 × no CUDA device" in run.stdout and "4: no CUDA device here" in run.stdout
