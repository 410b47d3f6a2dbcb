"""The rows that a logger has handed to a service, in a file of the run's folder."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from lockstep.callbacks._support.files import replacing


class Journal:
    """A file of JSON lines: the id of the service's run, then a row each time that metrics are logged.

    A service's client may lose what it was given last when its process is killed; what is written here is not lost.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> tuple[str | None, list[dict[str, Any]]]:
        """The id, None if there is no file, and the rows up to a line that a kill cut short. Raises OSError."""
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(FileNotFoundError, ValueError), open(self.path, encoding="utf-8") as file:
            for line in file:
                lines.append(json.loads(line))
        return (lines[0]["id"], lines[1:]) if lines else (None, [])

    def write(self, run_id: str, rows: list[dict[str, Any]]) -> None:
        """Replace the file. Raises OSError."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with replacing(self.path) as file:
            file.writelines(json.dumps(line) + "\n" for line in [{"id": run_id}, *rows])

    def append(self, row: dict[str, Any]) -> None:
        """Add a row. Raises OSError."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
