"""Checks of what a callback is given."""

from __future__ import annotations

import math
from typing import Any


def check_number(
    owner: str, name: str, value: Any, least: float = -math.inf, *, whole: bool = False, optional: bool = False
) -> None:
    """Raise ValueError unless `value` is a number of at least `least`, no NaN, and whole if asked; None if
    `optional`."""
    if value is None and optional:
        return
    if hasattr(value, "__index__" if whole else "__float__") and not isinstance(value, bool) and value >= least:
        return
    kind = "a whole number" if whole else "a number"
    bound = "" if least == -math.inf else f" of at least {least:g}"
    raise ValueError(f"{name} of {owner} must be {kind}{bound}{', or None' if optional else ''}, got {value!r}")
