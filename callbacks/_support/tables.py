"""Tables as text, for a terminal or a log file."""

from __future__ import annotations

from collections.abc import Container, Sequence


def columns(rows: Sequence[Sequence[str]], *, right: Container[int] = (), gap: str = "  ") -> list[str]:
    """One line a row, with aligned columns; those whose index is in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count(number: int, noun: str) -> str:
    """ "1 step", "1,200 steps"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def human_size(num_bytes: float) -> str:
    """Bytes for people: "1.23 GiB"."""
    for unit, name in ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"
