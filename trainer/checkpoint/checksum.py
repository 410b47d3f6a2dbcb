"""The checksum of files: CRC-32, by the library that computes it fastest here. The numbers of both are the same."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel of it for this machine
    from zlib import crc32

__all__ = ["crc32", "joined"]

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1: the highest power of x is in the lowest bit."""


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two runs of bytes, one after the other, of which the second has so many."""
    power, shift = 1 << 23, _ONE  # x^8, and the product of its powers: x to 8 times the bytes
    while second_bytes:
        if second_bytes & 1:
            shift = _product(shift, power)
        power, second_bytes = _product(power, power), second_bytes >> 1
    return _product(first, shift) ^ second


def _product(one: int, other: int) -> int:
    """Of two polynomials over the integers modulo 2, modulo that of CRC-32."""
    found = 0
    while one:
        if one & _ONE:
            found ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found
