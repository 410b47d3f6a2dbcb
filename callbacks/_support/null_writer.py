"""What stands for a logger's writer on ranks that do not write."""

from __future__ import annotations

from typing import Any


class NullWriter:
    """Every method exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
