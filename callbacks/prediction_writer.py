"""PredictionWriter: predictions on disk in the order of the dataset, for more than fits into memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

_LAYOUT = "@layout"
"""Names the file of what a rank has written, which no key of an output can."""
_FLOATS_OF_NUMPY = (torch.float64, torch.float32, torch.float16)


class PredictionWriter(Callback):
    """Write what `predict_step` returns to `.npy` files, a row for each sample, in the order of the dataset.

    `predict_step` returns a tensor, or a dict of tensors, whose first dimension is the samples of the batch. Each
    batch is appended to a file of its rank as soon as it is computed; at the end rank 0 merges the ranks' files a
    batch at a time, so no rank ever holds more than one batch. With `trainer.predict(…, return_predictions=False)`
    memory stays flat. The files are the same on any number of ranks, and nodes must share `output_dir`:

        <output_dir>/<key>.npy                      # "predictions.npy" for a tensor
        <output_dir>/dataloader_<i>/<key>.npy       # with several loaders

    `numpy.load(path, mmap_mode="r")` reads one without loading it. bfloat16 and float8 are written as float32. A file
    of the same name from an earlier run is replaced once the new one is complete. A run that fails removes what its
    ranks had written; what a killed one leaves (hidden files) is removed by the next.

    Raises TypeError for outputs of another kind and ValueError for keys, shapes or dtypes that differ between batches
    or ranks, by name; then no file of an earlier run is replaced.

    Args:
        output_dir: Folder to write to; None takes `predictions` in the run's folder.
    """

    def __init__(self, output_dir: str | Path | None = None) -> None:
        self.output_dir = output_dir
        self._files: dict[tuple[int, str], BinaryIO] = {}
        self._columns: dict[tuple[int, str], tuple[str, list[int]]] = {}
        # Batch, part of it (data rank, or share of `virtual_ranks`) and rows, in the order of the file.
        self._rows: dict[int, list[tuple[int, int, int]]] = {}
        self._folder = Path()
        self._rank = 0
        self._is_open = False  # parts may be on the disk

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        root = Path(trainer.log_dir or trainer.arguments.default_root_dir)
        self._folder = Path(self.output_dir).expanduser() if self.output_dir is not None else root / "predictions"
        topology = trainer.strategy.topology
        self._rank = topology.data_rank
        self._close()
        self._columns, self._rows, self._is_open = {}, {}, True
        self._folder.mkdir(parents=True, exist_ok=True)
        if topology.is_reporting_rank:  # no other one writes this rank's files
            _remove_parts(self._folder, lambda rank: rank == str(self._rank))
        if trainer.is_global_zero:  # of an earlier run, perhaps on more ranks
            _remove_parts(self._folder, lambda rank: rank == "all" or int(rank) >= topology.data_size)

    def on_predict_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.strategy.topology.is_reporting_rank:
            return
        outputs = {"predictions": outputs} if isinstance(outputs, Tensor) else outputs
        if not isinstance(outputs, dict) or not all(isinstance(value, Tensor) for value in outputs.values()):
            raise TypeError(
                "PredictionWriter writes a tensor or a dict of tensors, but predict_step returned "
                f"{_described(outputs)}; return tensors, or write in on_predict_batch_end of a callback of your own"
            )
        rows = {name: value.shape[0] if value.dim() else None for name, value in outputs.items()}
        if len(set(rows.values())) != 1 or None in rows.values():
            raise ValueError(
                "the tensors that predict_step returns must have the samples of the batch as first dimension, but they "
                f"have the shapes { {name: list(value.shape) for name, value in outputs.items()} }"
            )
        before = {name for index, name in self._columns if index == dataloader_idx}
        if dataloader_idx in self._rows and before != outputs.keys():
            raise ValueError(
                f"predict_step returned {sorted(outputs)} for batch {batch_idx}, but {sorted(before)} for those "
                "before; return the same keys for every batch"
            )
        for name, value in outputs.items():
            self._append(dataloader_idx, name, value)
        shares = trainer._run.shares
        part = self._rank if shares is None else shares.current
        self._rows.setdefault(dataloader_idx, []).append((batch_idx, part, next(iter(rows.values())) or 0))

    def on_predict_end(self, trainer: Trainer, module: Module) -> None:
        self._close()
        if trainer.strategy.topology.is_reporting_rank:
            columns = [[index, name, *column] for (index, name), column in self._columns.items()]
            self._part(0, _LAYOUT).write_text(json.dumps({"columns": columns, "rows": self._rows}))
        trainer.strategy.barrier()
        layouts = _layouts(self._folder, trainer.strategy.topology.data_size) if trainer.is_global_zero else []
        problem = trainer.strategy.broadcast(_difference(layouts))
        if problem is not None:
            raise ValueError(problem)
        if trainer.is_global_zero:
            _merge(self._folder, layouts)
        self._is_open = False

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        if self._is_open:
            self._close()
            _remove_parts(self._folder, lambda rank: True)
            if self.output_dir is None:
                with suppress(OSError):  # it holds what an earlier run has written
                    self._folder.rmdir()

    def _append(self, loader: int, name: str, value: Tensor) -> None:
        if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
            raise ValueError(f"predict_step returned the key {name!r}, which cannot be a file name; use letters")
        value = value.detach().cpu().resolve_conj().resolve_neg()
        known = not value.is_floating_point() or value.dtype in _FLOATS_OF_NUMPY
        array = (value if known else value.float()).contiguous().numpy()
        column = array.dtype.str, list(array.shape[1:])
        if self._columns.setdefault((loader, name), column) != column:
            raise ValueError(
                f"predict_step returned {name} with rows of {column}, but of {self._columns[loader, name]} before; "
                "pad them to one shape"
            )
        if (loader, name) not in self._files:
            self._files[loader, name] = self._part(loader, name).open("wb")
        self._files[loader, name].write(array.tobytes())

    def _part(self, loader: int, name: str) -> Path:
        return self._folder / f".{loader}.{name}.rank-{self._rank}"

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_files": {}, "_columns": {}, "_rows": {}}


def _layouts(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """By rank the columns and rows that it has written."""
    return [json.loads((folder / f".0.{_LAYOUT}.rank-{rank}").read_text()) for rank in range(ranks)]


def _difference(layouts: list[dict[str, Any]]) -> str | None:
    """What of the columns is not the same on all ranks that have rows of a loader; None if all is."""
    first: dict[int, tuple[int, dict[str, Any]]] = {}
    for rank, layout in enumerate(layouts):
        for loader in sorted({column[0] for column in layout["columns"]}):
            mine = {name: (kind, shape) for index, name, kind, shape in layout["columns"] if index == loader}
            other, theirs = first.setdefault(loader, (rank, mine))
            if mine.keys() != theirs.keys():
                return (
                    f"predict_step returned {sorted(theirs)} on rank {other}, but {sorted(mine)} on rank {rank}; "
                    "return the same keys for every batch"
                )
            for name, column in mine.items():
                if column != theirs[name]:
                    return (
                        f"predict_step returned {name} with rows of {theirs[name]} on rank {other}, but of {column} on "
                        f"rank {rank}, which has other samples of the same batches; pad them to one shape of one dtype"
                    )
    return None


def _merge(folder: Path, layouts: list[dict[str, Any]]) -> None:
    """Make one file of each column of what the ranks wrote: the parts of batch 0 in order, then those of batch 1."""
    ranks = len(layouts)
    columns = {(index, name): (kind, shape) for layout in layouts for index, name, kind, shape in layout["columns"]}
    several = len({index for index, _ in columns}) > 1
    for (index, name), (kind, shape) in columns.items():
        rows = [layout["rows"].get(str(index), []) for layout in layouts]
        parts = [folder / f".{index}.{name}.rank-{rank}" for rank in range(ranks)]
        files = [part.open("rb") if part.exists() else None for part in parts]
        whole, width = folder / f".{index}.{name}.rank-all", np.dtype(kind).itemsize * math.prod(shape)
        with whole.open("wb") as merged:
            # A rank has no rows of a batch that it has no sample of.
            order = [(batch, part, rank, count) for rank in range(ranks) for batch, part, count in rows[rank]]
            order.sort()
            header = {"descr": kind, "fortran_order": False, "shape": (sum(count for *_, count in order), *shape)}
            np.lib.format.write_array_header_1_0(merged, header)
            for *_, rank, count in order:
                file = files[rank]
                if file is not None:
                    merged.write(file.read(count * width))
        for part, opened in zip(parts, files, strict=True):
            if opened is not None:
                opened.close()
                part.unlink()
        target = folder / f"dataloader_{index}" if several else folder
        target.mkdir(exist_ok=True)
        whole.replace(target / f"{name}.npy")
    _remove_parts(folder, lambda rank: True)


def _remove_parts(folder: Path, of_rank: Callable[[str], bool]) -> None:
    """Remove the ranks' files, "all" being the one that is merged."""
    for path in folder.glob(".*.rank-*"):
        found = re.fullmatch(r"\.\d+\..+\.rank-(\d+|all)", path.name)
        if found and of_rank(found[1]):
            path.unlink(missing_ok=True)


def _described(outputs: Any) -> str:
    if isinstance(outputs, dict):
        return "a dict with " + ", ".join(f"{name}: {type(value).__name__}" for name, value in outputs.items())
    return type(outputs).__name__
