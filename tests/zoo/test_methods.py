"""Methods change the numbers of a run, and say which: in their limit case they are those of one process, and otherwise
the same bits on any number of ranks; what cannot be is refused by name."""

from __future__ import annotations

import pytest
import torch

from tests.zoo.table import DOCUMENTED, distance, expected_results, is_refusal, outcome, results, train_all

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("method", ["compress all", "local SGD of each step", "parameter server without staleness"])
def test_the_limit_case_is_one_process_or_refused(method: str) -> None:
    expected = expected_results("single")
    found = {
        name: outcome(name, result, expected[name], "64-true")
        for name, result in results(method, 2, list(expected)).items()
    }
    assert [name for name, kind in found.items() if kind == "error"] == []
    assert [name for name, kind in found.items() if kind == "documented"] == [*DOCUMENTED]
    assert sum(kind == "equal" for kind in found.values()) > len(found) / 2


@pytest.mark.parametrize("method", ["ddp in 2 shares", "compress in 2 shares", "2 learners"])
def test_one_rank_and_two_have_the_same_bits(method: str) -> None:
    names = list(expected_results("single"))
    alone, spread = train_all(names, method, 1, "64-true"), results(method, 2, names)
    equal = []
    for name in names:
        one, two = alone[name], spread[name]
        if one.error or two.error:
            assert all(is_refusal(error) for error in (one.error, two.error) if error), (name, one.error, two.error)
            continue
        assert [key for key, value in one.values.items() if not torch.equal(value, two.values[key])] == [], name
        equal.append(name)
    assert len(equal) > len(names) / 2


def test_learners_that_are_sharded_have_the_numbers_of_those_that_are_not() -> None:
    names = list(expected_results("single"))
    alone, sharded = train_all(names, "2 learners", 1, "64-true"), results("2 islands", 4, names)
    equal = []
    for name in names:
        one, other = alone[name], sharded[name]
        if one.error or other.error:
            assert all(is_refusal(error) for error in (one.error, other.error) if error), (name, one.error, other.error)
        elif name not in DOCUMENTED:
            found = {key: distance(other.values[key], value) for key, value in one.values.items()}
            assert max(found.values()) < 1e-12, (name, found)
            equal.append(name)
    assert len(equal) > len(names) / 2
