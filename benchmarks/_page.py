"""Puts what was measured into the tables of benchmarks/results/performance.md, each between the marks of its benchmark.

python -m benchmarks._page build/bench     # the folder of JSON files that `make bench` leaves
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "results" / "performance.md"


def main() -> None:
    text = PAGE.read_text()
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        numbers = json.loads(file.read_text())
        if numbers.get("columns"):
            text = filled(text, file.stem, numbers)
    PAGE.write_text(text)


def filled(text: str, name: str, numbers: Mapping[str, Any]) -> str:
    """`text` with the tables of `numbers` between the marks `<!-- name -->` and `<!-- /name -->`, where it has them."""
    results, columns = numbers["results"], numbers["columns"]
    whole = {"": results} if all(isinstance(column, list) for column in columns.values()) else results
    facts = [f"{key} {value}" for key, value in numbers["machine"].items()]
    lines = [f"{', '.join(facts)}; {numbers['rounds']} rounds:", ""]
    for part, rows in whole.items():
        own = columns[part] if part else columns
        lines += ["| " + " | ".join([part, *own]) + " |", "|---" * (len(own) + 1) + "|"]
        for row, values in rows.items():
            cells = ["" if values.get(key) is None else format(values[key], form) for key, form in own.values()]
            lines.append("| " + " | ".join([row, *cells]) + " |")
        lines.append("")
    return re.sub(f"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", lambda _: "\n".join(lines), text, flags=re.DOTALL)


if __name__ == "__main__":
    main()
