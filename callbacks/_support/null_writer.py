"""What stands for a logger's writer on ranks that do not write."""

from __future__ import annotations

from typing import Any


class NullWriter:
    """Every method exists and does nothing; what is set under a key is forgotten."""

    def __setitem__(self, name: Any, value: Any) -> None: ...
    def __getitem__(self, name: Any) -> NullWriter:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
