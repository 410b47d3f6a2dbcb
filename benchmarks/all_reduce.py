"""The algorithms of `DDP(all_reduce=…)` beside gloo's own all-reduce, by size and number of ranks.

    python -m benchmarks.all_reduce [--ranks 2,3,4] [--kib 4,256,4096,16384] [--rounds 7] [--json FILE] [--write]

All ranks are on this machine, so a message costs what shared memory and the scheduler cost; "hierarchical" takes two
ranks for a node. Each figure is the time of an algorithm over that of gloo's own all-reduce in the same round, the
median over rounds; below 1 the algorithm is faster. `--write` puts the tables into docs/methods/all-reduce.md. Expect
two minutes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._rounds import described, machine, table, write_json
from lockstep.strategies import DDP, Strategy
from lockstep.strategies.sync.all_reduce import ALGORITHMS, add_up

PAGE = Path(__file__).resolve().parent.parent / "docs" / "methods" / "all-reduce.md"
REPEATS_S = 0.15
"""About how long one measurement takes."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ways to add gradients over ranks.")
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--kib", default="4,256,4096,16384", help="sizes of the tensors in KiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/methods/all-reduce.md")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.kib.split(",")]
    facts, results, columns = machine(), {}, {}
    lines = [
        f"{described(facts)}; {arguments.rounds} rounds; gloo's own all-reduce in milliseconds, the others times it:"
    ]
    for ranks in map(int, arguments.ranks.split(",")):
        strategy = DDP().configure(devices=ranks, accelerator="cpu")
        rows = strategy.launch(measure, strategy, sizes, arguments.rounds)
        part = f"{ranks} ranks"
        results[part] = rows
        columns[part] = {"gloo ms": ("ms", ".2f"), **{name: (name, ".2f") for name in ALGORITHMS}}
        print(table(rows, columns[part], part), end="\n\n", flush=True)
        lines += ["", "| " + " | ".join([part, *columns[part]]) + " |", "|---" * (len(columns[part]) + 1) + "|"]
        for name, row in rows.items():
            cells = [format(row[key], form) for key, form in columns[part].values()]
            lines.append("| " + " | ".join([name, *cells]) + " |")
    write_json(arguments.json, facts, results, columns=columns, rounds=arguments.rounds)
    if arguments.write:
        filled = "\n".join([*lines, ""])
        marks = r"(?<=<!-- all_reduce -->\n).*?(?=<!-- /all_reduce -->)"
        PAGE.write_text(re.sub(marks, lambda _: filled, PAGE.read_text(), flags=re.DOTALL))


def measure(strategy: Strategy, sizes: list[int], rounds: int) -> dict[str, dict[str, Any]]:
    """On every rank: by size the time of gloo's own all-reduce in milliseconds, and the ratios to it."""
    topology = strategy.setup()
    ranks = list(range(topology.world_size))
    nodes = [ranks[i : i + 2] for i in ranks[::2]]
    ways: dict[str, Callable[[torch.Tensor], Any]] = {"gloo": dist.all_reduce}
    for name in ALGORITHMS:
        ways[name] = lambda tensor, name=name: add_up(tensor, name, nodes, None)
    rows = {}
    try:
        for kib in sizes:
            tensor = torch.zeros(kib * 256)
            repeats = _agreed(max(1, int(REPEATS_S / _seconds(ways["gloo"], tensor, 3))))
            times: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(rounds):
                order = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
                for name in order:
                    times[name].append(_seconds(ways[name], tensor, repeats))
            rows[f"{kib} KiB"] = {"ms": statistics.median(times["gloo"]) * 1e3} | {
                name: statistics.median(a / b for a, b in zip(times[name], times["gloo"], strict=True))
                for name in ALGORITHMS
            }
        return rows
    finally:
        strategy.teardown()


def _seconds(way: Callable[[torch.Tensor], Any], tensor: torch.Tensor, repeats: int) -> float:
    way(tensor)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(repeats):
        way(tensor)
    return (time.perf_counter() - begin) / repeats


def _agreed(number: int) -> int:
    found = torch.tensor(number)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


if __name__ == "__main__":
    main()
