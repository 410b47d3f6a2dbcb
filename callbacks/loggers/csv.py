"""Metrics as a table in one CSV file, for a spreadsheet, pandas or a plot without TensorBoard."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.files import replacing
from lockstep.callbacks._support.hparams import write_hparams
from lockstep.callbacks._support.null_writer import NullWriter
from lockstep.callbacks.loggers.run_logger import RunLogger

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class CSVLogger(RunLogger):
    """Writes `metrics.csv` (a row each time that metrics are logged, first column `step`) and `hparams.yaml` into the
    run's folder.

    A metric that appears later adds a column; one named `step` has the column `metric/step`. When `fit` begins in a
    folder that has rows already, those of later steps than the one it begins at are dropped, and so are those that were
    written after the checkpoint that it resumes: a resumed run has each row once. Rows of a `validate` or `test`, or
    that were logged between two fits, stay: `.metrics.csv.outside` has their numbers.

    Args:
        save_dir: folder above all runs; None takes the Trainer's `default_root_dir`.
        name: folder of this experiment below `save_dir`; None takes the module's class name.
        version: folder of this run below `name`, a number N for `version_N`; None takes the next free one.
        flush_every: rows to collect before they are written; at 1 each row is in the file as soon as it is logged. What
            was logged before a checkpoint is in the file before it.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        version: str | int | None = None,
        flush_every: int = 1,
    ) -> None:
        if flush_every < 1:
            raise ValueError(f"flush_every must be at least 1 row, but it is {flush_every}")
        super().__init__(save_dir, name, version)
        self.flush_every = flush_every
        self._last_valid_step: int | None = None  # rows of later steps are to be dropped
        self._num_rows = 0  # logged so far
        self._num_valid_rows: int | None = None  # of fits, in the file, as the checkpoint says that is resumed
        self._rows: list[dict[str, Any]] = []  # not yet in the file
        self._outside: set[int] = set()  # numbers of rows that were logged outside of a fit, of whatever steps
        self._noted: set[int] = set()  # those that the file beside the rows has
        self._mine: set[int] = set()  # those that this object has logged before its first fit
        self._has_fitted = False
        self._again: set[int] = set()  # of these what the run that is resumed had logged too
        self._in_fit = False
        self._columns: list[str] | None = None  # of the file; None: not known, read it

    @property
    def path(self) -> str:
        """The CSV file; it exists once metrics were logged."""
        return os.path.join(self.log_dir or "", "metrics.csv")

    @property
    def experiment(self) -> Any:
        return self if self._is_writer else NullWriter()

    @property
    def state_key(self) -> str:
        return f"CSVLogger[save_dir={self.save_dir}, name={self.name}]"

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self._num_rows, "outside": sorted(self._outside)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rows, self._outside = int(state_dict["rows"]), {*state_dict.get("outside", ())}
        self._num_valid_rows = rows - len(self._outside)
        written = {i for i in self._mine if i < self._num_rows - len(self._rows)}
        if self._outside:  # what this process has logged before the run is there
            self._rows, self._again = [], written - self._outside
        self._num_rows = rows + len(self._rows)
        self._outside |= {*range(rows, self._num_rows)}
        self._mine = written | {*range(rows, self._num_rows)}

    def roll_back(self, state_dict: dict[str, Any]) -> None:
        # The next write drops later steps; what came at this one, as of an epoch's end, does not come again.
        self._last_valid_step, self._columns = self._at(None), None
        valid = [row for row in self._rows if row["step"] <= self._last_valid_step]
        self._num_rows, self._rows = self._num_rows - len(self._rows) + len(valid), valid

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        super().setup(trainer, module, stage)
        self._in_fit = stage == "fit"

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        # The disk is touched only by what the Trainer calls behind its error boundary.
        self._last_valid_step, self._columns, self._has_fitted = trainer.global_step, None, True

    def on_save_checkpoint(self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]) -> None:
        self.save()  # a run that resumes from it does not log those rows again

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._is_writer:
            return
        if not self._in_fit:
            self._outside.add(self._num_rows)
            self._mine |= set() if self._has_fitted else {self._num_rows}
        self._num_rows += 1
        self._rows.append(self._row("step", self._at(step), metrics))
        if self.has_folder and len(self._rows) >= self.flush_every:
            self.save()

    def save(self) -> None:
        """Write the collected rows; without a folder they stay held. Raises OSError; rows that could not be written
        are lost."""
        if not self._is_writer or not self.has_folder:
            return
        if not self._hparams_are_written:
            self._hparams_are_written = True
            write_hparams(self._folder(), self._hparams)
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        new = {key: None for row in rows for key in row}
        if self._columns is None or not new.keys() <= set(self._columns):
            self._rewrite(rows)
        else:
            try:
                with open(self.path, "a", newline="", encoding="utf-8") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            except OSError:
                self._columns = None  # the last line may be torn: the next write reads and repairs the file
                raise
        if self._outside != self._noted:
            with replacing(self._note) as file:
                json.dump(sorted(self._outside), file)
            self._noted = {*self._outside}

    def forget_held(self) -> None:
        self._rows = []

    def finalize(self, status: str) -> None:
        self._in_fit = False
        self.save()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        """Write the valid rows of the file, then `rows`, with the columns of all, as one rename."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        last_valid, whole = self._last_valid_step, list[dict[str | Any, Any]]()
        if last_valid == 0 and self._num_valid_rows is None:
            last_valid = -1  # what is there is of a fit that begins again, which logs its step 0 again too
        if os.path.exists(self.path):
            with open(self.path, newline="", encoding="utf-8") as file:
                whole = list(filter(_is_whole, csv.DictReader(file)))
        first = self._num_rows - len(rows)
        self._noted = self._read_note()
        free = (self._noted or {i for i in self._outside if i < first}) - self._again
        own = [i for i, row in enumerate(whole) if last_valid is None or int(row["step"]) <= last_valid]
        own = [i for i in own if i not in free][: self._num_valid_rows]
        valid = sorted({*own, *(free & {*range(len(whole))})})
        kept: list[Mapping[str, Any]] = [whole[i] for i in valid]
        new = {i - first + len(kept) for i in self._outside if i >= first}
        mine = {n for n, i in enumerate(valid) if i in self._mine and i < first}
        self._mine, self._again = mine | {i - first + len(kept) for i in self._mine if i >= first}, set()
        self._outside = {n for n, i in enumerate(valid) if i in free} | new
        everything = [*kept, *rows]
        columns = list({"step": None} | {key: None for row in everything for key in row})
        with replacing(self.path, durable=True) as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(everything)
        self._columns, self._last_valid_step, self._num_valid_rows = columns, None, None
        self._num_rows = len(everything)

    @property
    def _note(self) -> str:
        return os.path.join(self.log_dir or "", f".{os.path.basename(self.path)}.outside")

    def _read_note(self) -> set[int]:
        with suppress(FileNotFoundError, ValueError), open(self._note, encoding="utf-8") as file:
            return {*json.load(file)}
        return set()


def _is_whole(row: Mapping[str | None, Any]) -> bool:
    """False for a line that a full disk or a kill cut short, or that such a line ran into."""
    return None not in row and None not in row.values() and str(row.get("step", "")).isdigit()
