"""What the benchmarks share: options, variants that take turns, medians and ratios of the numbers, a table, JSON."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.callbacks import Callback


def make_parser(
    description: str, *, rounds: int | None = None, turns: str = "variant", match: str = ""
) -> argparse.ArgumentParser:
    """A parser with the options of most benchmarks: `--json`, `--rounds` with this default, the turns of each of
    `turns`, and `--match`, which chooses among `match`."""
    parser = argparse.ArgumentParser(description=description)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each {turns}")
    if match:
        parser.add_argument("--match", default="", metavar="TEXT", help=f"only {match} whose name contains it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    return parser


class Clock:
    """Times the steps from number `warmup` to number `warmup + num_steps`, which begins when they are done."""

    def __init__(self, num_steps: int, warmup: int) -> None:
        self.marks = (warmup, warmup + num_steps)
        self.times: list[float] = []
        self.cpu_times: list[float] = []

    def tick(self, step: int) -> None:
        """Call it at the beginning of every step."""
        if step in self.marks:
            self.times.append(time.perf_counter())
            self.cpu_times.append(time.process_time())

    def s_per_step(self) -> float:
        begin, end = self.times
        return (end - begin) / (self.marks[1] - self.marks[0])

    def cpu_s_per_step(self) -> float:
        """Of all threads of the process: other programs on the machine hardly change it."""
        begin, end = self.cpu_times
        return (end - begin) / (self.marks[1] - self.marks[0])


class Ticks(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.clock.tick(batch_idx)


def take_turns(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each variant returned in each round; each round begins with another one."""
    names, values = list(variants), {name: [] for name in variants}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with quiet():
                values[name].append(variants[name]())
    return values


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what the variants print and write away from the table and the working folder."""
    before = Path.cwd()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        os.chdir(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            os.chdir(before)


def summarize(
    values: Mapping[str, Sequence[float]], unit: str, references: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Median, least and most of each variant, and the medians of ratio and difference to its reference of the same
    round."""
    rows: dict[str, dict[str, Any]] = {}
    for name, own in values.items():
        rows[name] = {
            f"median_{unit}": statistics.median(own),
            f"min_{unit}": min(own),
            f"max_{unit}": max(own),
            f"rounds_{unit}": list(own),
        }
        if name in references:
            pairs = list(zip(own, values[references[name]], strict=True))
            rows[name]["ratio"] = statistics.median(value / base for value, base in pairs)
            rows[name][f"over_{unit}"] = statistics.median(value - base for value, base in pairs)
    return rows


STEP_COLUMNS = {
    "us a step": ("median_us", ".1f"),
    "min": ("min_us", ".1f"),
    "max": ("max_us", ".1f"),
    "over": ("over_us", ".1f"),
    "ratio": ("ratio", ".2f"),
    "CPU us": ("cpu_us", ".1f"),
    "CPU over": ("cpu_over_us", ".1f"),
    "CPU ratio": ("cpu_ratio", ".2f"),
}


def summarize_steps(clocks: Mapping[str, Sequence[Clock]], references: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """`summarize` in microseconds a step, and the same of the process's CPU time; for `STEP_COLUMNS`."""
    rows = summarize(
        {name: [clock.s_per_step() * 1e6 for clock in own] for name, own in clocks.items()}, "us", references
    )
    cpu = summarize(
        {name: [clock.cpu_s_per_step() * 1e6 for clock in own] for name, own in clocks.items()}, "us", references
    )
    for name, row in cpu.items():
        rows[name] |= {
            "cpu_us": row["median_us"],
            "cpu_over_us": row.get("over_us"),
            "cpu_ratio": row.get("ratio"),
            "cpu_rounds_us": row["rounds_us"],
        }
    return rows


def table(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], title: str = "") -> str:
    """Rows as text; `columns` are (key of a row, format) by heading. What a row does not have stays empty."""
    width = max(map(len, [*rows, title])) + 2
    widths = {
        heading: max(len(heading), *(len(_cell(row, key, form)) for row in rows.values())) + 2
        for heading, (key, form) in columns.items()
    }
    lines = [f"{title:<{width}}" + "".join(f"{heading:>{widths[heading]}}" for heading in columns)]
    for name, row in rows.items():
        lines.append(
            f"{name:<{width}}"
            + "".join(f"{_cell(row, key, form):>{widths[heading]}}" for heading, (key, form) in columns.items())
        )
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def described(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def report(
    given: argparse.Namespace,
    facts: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str]],
    **more: Any,
) -> None:
    """Print `results` as a `table`, and write them to the file of `given`, with the rounds and steps of `given`."""
    print(table(results, columns))
    work = {name: vars(given)[name] for name in ("rounds", "steps") if name in given}
    write_json(given.json, facts, results, columns=columns, **work, **more)


def write_json(file: Path | None, facts: Mapping[str, Any], results: Any, **more: Any) -> None:
    """With `columns` in `more`, as of `table` (or by part), `benchmarks/_page.py` finds what to show."""
    if file is not None:
        file.write_text(json.dumps({"machine": facts, **more, "results": results}, indent=1) + "\n")


def _cell(row: Mapping[str, Any], key: str, form: str) -> str:
    return "" if row.get(key) is None else format(row[key], form)
