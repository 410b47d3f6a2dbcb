"""Sums of floats without rounding, so that they do not depend on the order in which ranks and shares add them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

_SHIFT = 1074
"""Every finite float64 is a whole multiple of 2**-1074."""


class ExactSum:
    """A sum of floats as a whole number of 2**-1074; `float` rounds it once. Immutable."""

    __slots__ = ("_odd", "_units")

    def __init__(self, units: int = 0, odd: float = 0.0) -> None:
        self._units = units
        self._odd = odd  # the sum of what was infinite or NaN

    @classmethod
    def of(cls, numbers: Iterable[float]) -> ExactSum:
        total = cls()
        for number in numbers:
            total += number
        return total

    def __add__(self, other: float | ExactSum) -> ExactSum:
        if isinstance(other, ExactSum):
            return ExactSum(self._units + other._units, self._odd + other._odd)
        if not math.isfinite(other):
            return ExactSum(self._units, self._odd + other)
        numerator, denominator = float(other).as_integer_ratio()  # the denominator is a power of two
        return ExactSum(self._units + (numerator << (_SHIFT + 1 - denominator.bit_length())), self._odd)

    __radd__ = __add__

    def plus_product(self, number: float, weight: float) -> ExactSum:
        """The sum and `number * weight`, which is not rounded either."""
        if not math.isfinite(number):
            return self + number * weight
        (above, below), (times, parts) = float(number).as_integer_ratio(), float(weight).as_integer_ratio()
        shift = _SHIFT + 2 - below.bit_length() - parts.bit_length()
        if shift < 0:
            return self + number * weight
        return ExactSum(self._units + (above * times << shift), self._odd)

    def __truediv__(self, other: ExactSum) -> float:
        """The quotient, rounded once."""
        if self._odd != 0.0 or other._odd != 0.0:
            return float(self) / float(other)
        try:
            return self._units / other._units
        except OverflowError:
            return float(self) / float(other)

    def __float__(self) -> float:
        if self._odd != 0.0:
            return self._odd
        try:
            return self._units / (1 << _SHIFT)
        except OverflowError:
            return math.copysign(math.inf, self._units)

    def __bool__(self) -> bool:
        return bool(self._units or self._odd)

    def floats(self) -> list[float]:
        """Floats whose sum it is, the largest first; few, as each holds 53 bits."""
        if self._odd != 0.0:
            return [self._odd]
        parts, rest = [], self
        while rest:
            parts.append(float(rest))
            if not math.isfinite(parts[-1]):
                return [parts[-1]]
            rest = rest + -parts[-1]
        return parts


def saved_sum(number: Any) -> Any:
    """A sum as JSON data."""
    return number.floats() if isinstance(number, ExactSum) else number


def saved_count(count: Any) -> Any:
    """A count as JSON data: a number, or those whose sum it is, if no float is that."""
    parts = saved_sum(count)
    return parts if isinstance(parts, list) and len(parts) > 1 else float(count)
