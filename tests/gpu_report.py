"""What a run of the tests marked `gpu` has covered, by strategy: printed at its end, and an error if it was nothing."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

STRATEGIES = ("single", "dp", "ddp", "fsdp", "tensor", "pipeline", "model", "deepspeed")
"""In the order of the table; a test that names several counts for each, one that names none for the rest."""
OUTCOMES = ("passed", "failed", "skipped")


def strategies_of(nodeid: str) -> list[str]:
    """The strategies that a test names in its parameters or, without any there, in its file and name."""
    path, _, parameters = nodeid.partition("[")
    for text in (parameters, path.replace("_", " ")):
        named = [name for name in STRATEGIES if re.search(rf"(?<![a-z]){name}(?![a-z])", text)]
        if named:
            return named
    return ["the rest"]


def table(reports: Mapping[str, Sequence[Any]]) -> list[str]:
    """A line a strategy, and one for each reason of a skip."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in OUTCOMES:
        for report in reports.get(outcome, ()):
            if outcome == "passed" and report.when != "call":
                continue
            for name in strategies_of(report.nodeid):
                counts[name][outcome] += 1
                if outcome == "skipped":
                    reasons[name][str(report.longrepr[-1]).removeprefix("Skipped: ")] += 1
    lines = [f"{'':<10}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)]
    for name in (*STRATEGIES, "the rest"):
        row = f"{name:<10}" + "".join(f"{counts[name][outcome]:>9}" for outcome in OUTCOMES)
        why = "; ".join(f"{number}: {reason}" for reason, number in reasons[name].most_common())
        lines.append(f"{row}   {why}".rstrip())
    return lines


def is_asked_for(config: pytest.Config) -> bool:
    """Whether this is a run of the tests marked `gpu`, and not one that leaves them out."""
    return re.match(r"gpu\b", str(config.option.markexpr)) is not None
