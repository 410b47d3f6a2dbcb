"""What the examples of docs/methods reach, over seeds: the tables and the figure of those pages.

    python -m benchmarks.methods actors --figure docs/images/impala.svg
    python -m benchmarks.methods continual
    python -m benchmarks.methods multitask --seeds 3

Each run is a process of its own, as from the command line. CPU seconds are those of all its processes, as the kernel
counts them.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
RUNS = {
    "actors": ("impala", {"CartPole": []}, ["val/return"]),
    "continual": (
        "continual",
        {"neither": [], "EWC, λ = 1,000": ["module.ewc=1000"], "replay of 50": ["data.replay=50"]},
        ["continual/accuracy", "continual/forgetting"],
    ),
    "multitask": (
        "multitask",
        {"equal": ["module.weighting=equal"], "uncertainty": []},
        ["val/acc", "val/ink", "val/mirror", "cosine/class-ink", "cosine/class-mirror", "cosine/ink-mirror"],
    ),
}
"""By page: the example, the options of each variant, and the metrics to show."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the examples of docs/methods reach.")
    parser.add_argument("page", choices=RUNS)
    parser.add_argument("overrides", nargs="*", help="of the example's config, such as max_epochs=1")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--figure", type=Path, help="SVG file of the first metric by step, a line for each seed")
    arguments = parser.parse_args()
    example, variants, metrics = RUNS[arguments.page]
    print("| | seed |", " | ".join(metrics), "| wall s | CPU s |")
    print("|---" * (len(metrics) + 4) + "|", flush=True)
    lines = []
    for variant, options in variants.items():
        for seed in range(arguments.seeds):
            history, wall_s, cpu_s = measure(example, [*options, *arguments.overrides, f"seed={seed}"])
            last = [f"{history[name][-1][1]:.4g}" for name in metrics]
            print(f"| {variant} | {seed} | {' | '.join(last)} | {wall_s:.0f} | {cpu_s:.0f} |", flush=True)
            lines.append(history[metrics[0]])
    if arguments.figure:
        arguments.figure.write_text(drawn(lines, metrics[0]))


def measure(example: str, options: list[str]) -> tuple[dict[str, list[tuple[int, float]]], float, float]:
    """Each metric of a run by step, its wall time and the CPU time of its processes, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "lockstep",
            "fit",
            f"examples/{example}.yaml",
            "trainer.logger={class: CSVLogger}",
        ]
        command += ["accelerator=cpu", "enable_progress_bar=false", f"default_root_dir={folder}", *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        start, ticks = time.perf_counter(), {}
        place = {"stdout": subprocess.DEVNULL, "cwd": ROOT, "env": environment}
        with subprocess.Popen(command, start_new_session=True, **place) as process:
            while process.poll() is None:
                ticks |= ticks_of(process.pid)
                time.sleep(0.1)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
        wall_s = time.perf_counter() - start
        (file,) = Path(folder).rglob("metrics.csv")
        with open(file, newline="") as rows:
            found = list(csv.DictReader(rows))
    history = {name: [(int(row["step"]), float(row[name])) for row in found if row[name]] for name in found[0]}
    return history, wall_s, sum(ticks.values()) / os.sysconf("SC_CLK_TCK")


def ticks_of(session: int) -> dict[int, int]:
    """CPU time of each process in a session, in clock ticks."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            found[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    return found


def drawn(lines: list[list[tuple[int, float]]], name: str) -> str:
    """An SVG with a line for each run."""
    width, height, margin = 640, 300, 48
    most_x, most_y = (max(point[i] for line in lines for point in line) for i in (0, 1))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')

    def at(x: float, y: float) -> str:
        across, up = (width - 2 * margin) * x / most_x, (height - 2 * margin) * y / most_y
        return f"{margin + across:.1f},{height - margin - up:.1f}"

    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(0, share * most_y).split(",")
        label = f'<text x="{margin - 6}" y="{y}" font-size="11" text-anchor="end">{share * most_y:.4g}</text>'
        parts.append(f'<path d="M{x},{y} L{at(most_x, share * most_y)}" stroke="#ddd"/>{label}')
        x, y = at(share * most_x, 0).split(",")
        parts.append(
            f'<text x="{x}" y="{float(y) + 16}" font-size="11" text-anchor="middle">{share * most_x:.0f}</text>'
        )
    for color, line in zip(["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee"] * len(lines), lines, strict=False):
        points = " ".join(at(*point) for point in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    title = f"{name} by step; at the end {mean(line[-1][1] for line in lines):.4g} in the mean of {len(lines)} runs"
    parts.append(f'<text x="{margin}" y="20" font-size="13">{title}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
