"""The record of an asynchronous run: which worker computed each batch on which version of the parameters."""

from __future__ import annotations

import itertools
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

_log = logging.getLogger("lockstep")

NAME = "schedule.jsonl"
"""The record's name in a run's folder."""


class Arrival(NamedTuple):
    """A gradient, as it arrived."""

    batch: int
    """Number in the run: batch `i` belongs to clock `i // workers`."""
    worker: int
    """The rank that computed it."""
    read: list[int]
    """Of each server the version of its parameters, in clocks applied, that the gradient was computed on."""
    made: int
    """The version that its clock made."""


class Schedule:
    """A recorded run, to be replayed."""

    def __init__(self, path: str | Path) -> None:
        """Raises ValueError for a file that is not a schedule, FileNotFoundError if there is none."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"replay must be the path of a run's {NAME}, but {str(path)!r} does not exist")
        lines = path.read_text().split("\n")[:-1]  # a kill may leave a part of a line
        try:
            head = json.loads(lines[0])
            self.workers, self.servers, self.staleness = (int(head[k]) for k in ("workers", "servers", "staleness"))
            self.reads: dict[int, list[int]] = {}
            for line in lines[1:]:
                arrival = Arrival(**json.loads(line))
                self.reads[arrival.batch] = arrival.read
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"replay must be the path of a run's {NAME}, but {str(path)!r} cannot be read as one: {error}"
            ) from None

    def of(self, batch: int) -> list[int]:
        """The versions to compute `batch` on. Raises RuntimeError before the beginning of the record and past its
        end."""
        if batch not in self.reads:
            first = min(self.reads, default=0)
            if batch < first:
                raise RuntimeError(
                    f"the schedule that is replayed begins with step {first // self.workers}, where the run resumed "
                    "with other workers or servers, or in another folder; give ckpt_path the checkpoint of that step"
                )
            raise RuntimeError(
                f"the schedule that is replayed has no batch {batch}: it ends after {len(self.reads)} batches; train "
                "as long as the run that was recorded, or without replay"
            )
        return self.reads[batch]


class Record:
    """Writes the schedule of this run; rank 0 has it."""

    def __init__(self, folder: str | Path, head: dict[str, Any], clock: int) -> None:
        """A run that resumes at `clock` keeps what is recorded before it; with other workers or servers, in a file of
        its own, as a schedule is replayed with one number of each. One that begins leaves the file that is there under
        another name, with a number."""
        path = Path(folder) / NAME
        if not clock and path.is_file():  # of a fit before this one, or of a run in the same folder
            number = next(i for i in itertools.count(1) if not path.with_stem(f"{path.stem}-{i}").exists())
            path.rename(path.with_stem(f"{path.stem}-{number}"))
        found = path.read_text().split("\n")[:-1] if clock and path.is_file() else []
        before: list[str] = []
        if found:
            first, *lines = found
            old = json.loads(first)
            before = [line for line in lines if json.loads(line)["batch"] < clock * old["workers"]]
            if any(old[key] != head[key] for key in ("workers", "servers")):
                path.with_name(f"{path.stem}-before-step={clock}{path.suffix}").write_text(
                    "\n".join([first, *before, ""])
                )
                before = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = open(path, "w")  # noqa: SIM115 - until `close`
        self._write("\n".join([json.dumps(head), *before, ""]))
        self.flush()

    def add(self, arrival: Arrival) -> None:
        self._write(json.dumps(arrival._asdict()) + "\n")

    def flush(self) -> None:
        self._write("", flushes=True)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: str, flushes: bool = False) -> None:
        """A full disk costs the record, never the training."""
        if self._file is None:
            return
        try:
            self._file.write(text)
            if flushes:
                self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()
            self._file = None
            _log.warning(f"{NAME} is not complete, so this run cannot be replayed to its end: {error}")
