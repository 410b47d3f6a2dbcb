"""Which names are of what each process has for itself."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.strategies.launch.program.source import differs_by_process, is_of_process


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", 0), ("LOCAL_RANK", 1), ("world_size", 2), ("rank0", True), ("worldSize", 4), ("my_pid", 77)],
)
def test_what_is_of_a_process(name: str, value: Any) -> None:
    assert is_of_process(name, value) and differs_by_process(f"x = {name}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("RAPID", "x"), ("lipid", 1), ("ranking_weight", 0.5), ("world_model_lr", 0.1), ("lora_rank", 8), ("frank", 0)],
)
def test_what_is_a_setting(name: str, value: Any) -> None:
    assert not is_of_process(name, value)


def test_calls_that_ask_for_the_process_differ() -> None:
    assert differs_by_process("os.getpid()") and not differs_by_process("rapid(y)")
