"""The strategy of docs/strategies/writing-one.md passes the contract suite; examples/by_hand.py drives any strategy."""

from __future__ import annotations

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.strategies.hooks import SPMDHooks
from tests.conftest import REPO_ROOT
from tests.strategies import contract
from tests.strategies.contract import difference, reference, saved_weights
from tests.strategies.test_contract import HALF, PLANS

pytestmark = pytest.mark.ranks

PAGE = REPO_ROOT / "docs/strategies/writing-one.md"


def test_the_strategy_of_the_page_passes_the_contract(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert len(code.splitlines()) <= 45
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    make = namespace["WideDDP"]
    contract.run_each({key: (make(), plan) for key, plan in PLANS.items()}, 2, tmp_path)
    for key, plan in PLANS.items():
        assert difference(saved_weights(tmp_path / key), reference(plan)[0]) < 1e-11, key
    resumed = replace(HALF, start_from=str(tmp_path / "plain"))
    model, expected = reference(PLANS["plain"])
    contract.run(make(), 2, resumed, tmp_path / "resumed")
    assert difference(saved_weights(tmp_path / "resumed"), reference(HALF, model, expected["optimizer"])[0]) < 1e-11
    found = contract.run(make(), 1, PLANS["clip norm"], tmp_path / "one rank")
    assert found["norms"] == pytest.approx(reference(PLANS["clip norm"])[1]["norms"], rel=1e-11)


def test_the_page_names_every_hook() -> None:
    page = PAGE.read_text()
    hooks = [name for name, value in vars(SPMDHooks).items() if not name.startswith("_") and callable(value)]
    assert not [name for name in hooks if f"`{name}(" not in page]


def test_a_loop_by_hand_gives_the_same_numbers_under_any_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for strategy, devices in (("single", "1"), ("ddp", "2"), ("fsdp", "2")):
        monkeypatch.setattr(sys, "argv", ["by_hand.py", strategy, devices])
        runpy.run_path(str(REPO_ROOT / "examples/by_hand.py"), run_name="__main__")
    printed = re.findall(r"loss (\S+)", capsys.readouterr().out)
    assert len(printed) == 3 and len(set(printed)) == 1, printed
