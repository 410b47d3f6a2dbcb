"""The checksum of files: CRC-32, by the library that computes it fastest here. The numbers of both are the same."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel of it for this machine
    from zlib import crc32

__all__ = ["crc32"]
