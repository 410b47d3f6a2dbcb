"""Draw docs/images/methods.svg: how much of the speed of fast links each method keeps on slow ones, by formula.

    python -m docs.make_methods_figure
    python -m docs.make_methods_figure --measured rows.csv       # points as well: method, bandwidth in Mbit/s, share

A step that computes for T seconds and then sends b bytes a rank over a link of w bits a second, one after the other,
keeps the share T / (T + 8 b / w) of its speed. T is that of the issue's test: on two ranks the gradients of `ddp` take
six times as long over 100 Mbit/s. Methods that overlap the two keep more.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable
from pathlib import Path

FIGURE = Path(__file__).parent / "images" / "methods.svg"
BYTES = {
    "ddp": 4.0,
    "compress=int8": 1 + 4 / 256,
    "compress=topk=0.01": 0.08,
    "local updates, period 50": 4 / 50,
    "local updates, period 500": 4 / 500,
}
"""Bytes that each of two ranks sends a step, for each parameter of float32."""
COMPUTE = BYTES["ddp"] * 8 / 100e6 / 6
"""Seconds that a step computes, for each parameter."""
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377")
LEAST, MOST = 1.0, 1e5
WIDTH, HEIGHT, MARGIN = 680, 340, 52


def share(sent: float, mbit_per_s: float) -> float:
    """Of the speed without communication."""
    return COMPUTE / (COMPUTE + 8 * sent / (mbit_per_s * 1e6))


def at(mbit_per_s: float, value: float) -> tuple[float, float]:
    across = math.log(mbit_per_s / LEAST) / math.log(MOST / LEAST)
    return MARGIN + (WIDTH - 2 * MARGIN) * across, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * value


def drawn(measured: Iterable[tuple[str, float, float]]) -> str:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    parts.append(f'<text x="{MARGIN}" y="20" font-size="13">share of the steps/s of fast links, by bandwidth</text>')
    for value in (0, 0.25, 0.5, 0.75, 1):
        (x, y), (end, _) = at(LEAST, value), at(MOST, value)
        parts.append(f'<path d="M{x:.1f},{y:.1f} L{end:.1f},{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" font-size="11" text-anchor="end">{value:.0%}</text>')
    for power, label in enumerate(("1 Mbit/s", "10", "100", "1 Gbit/s", "10", "100")):
        x, y = at(10.0**power, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" font-size="11" text-anchor="middle">{label}</text>')
    for i, (name, sent) in enumerate(BYTES.items()):
        steps = [LEAST * (MOST / LEAST) ** (k / 120) for k in range(121)]
        points = " ".join("{:.1f},{:.1f}".format(*at(speed, share(sent, speed))) for speed in steps)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLORS[i]}" stroke-width="2"/>')
        parts.append(
            f'<text x="{WIDTH - 210}" y="{HEIGHT - 150 + 16 * i}" font-size="12" fill="{COLORS[i]}">{name}</text>'
        )
    for name, speed, value in measured:
        x, y = at(speed, value)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLORS[list(BYTES).index(name)]}"/>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the figure of docs/methods/index.md.")
    parser.add_argument("--measured", type=Path, help="CSV file: method, bandwidth in Mbit/s, share")
    arguments = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    if arguments.measured:
        with open(arguments.measured, newline="") as file:
            rows = [(name, float(speed), float(value)) for name, speed, value in csv.reader(file)]
    FIGURE.write_text(drawn(rows))


if __name__ == "__main__":
    main()
