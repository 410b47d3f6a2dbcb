"""Every model and habit of the zoo on a GPU, where a mesh of one rank runs each strategy's own code, and on two ranks:
equal to the run without a strategy, or refused."""

from __future__ import annotations

import pytest

from tests.strategies import gpus
from tests.strategies.test_one_gpu import STRATEGIES
from tests.zoo import table
from tests.zoo.habits import HABITS
from tests.zoo.models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", [MODELS, HABITS], ids=["models", "habits"])
@pytest.mark.parametrize("name", [*STRATEGIES, "dp", "model"])
def test_every_case_is_equal_or_refused(name: str, kind: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    monkeypatch.setitem(table.METHODS, name, (STRATEGIES.get(name, lambda: name), {}))
    precision = table.precision_of(name)
    found = {}
    for case in kind:
        expected, result = (table.train(case, strategy, 1, precision, "gpu") for strategy in ("single", name))
        found[case] = table.outcome(case, result, expected, precision)
        assert found[case] != "error", f"{case}: {result.error}"
    assert "equal" in found.values()


@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
@pytest.mark.parametrize(
    "name", ["ddp", "fsdp", "tensor", "pipeline", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
)
def test_every_case_is_equal_or_refused_on_two_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = table.precision_of(name)
    expected = table.train_all([*table.cases()], "single", 1, precision, None, "gpu")
    with gpus.shared_by(2, monkeypatch):
        found = table.results(name, 2, [*expected], "gpu")
    kinds = {case: table.outcome(case, result, expected[case], precision) for case, result in found.items()}
    assert {case: found[case].error for case, kind in kinds.items() if kind == "error"} == {}
    assert sum(kind == "equal" for kind in kinds.values()) > len(kinds) / 2
