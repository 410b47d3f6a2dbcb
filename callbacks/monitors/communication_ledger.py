"""What the ranks say to each other in a step: calls and bytes of every collective."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.callbacks._support.collectives import collective
from lockstep.callbacks._support.local_ops import LocalOps, watching
from lockstep.callbacks._support.monitored_metric import check_state, is_number
from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks._support.tables import columns
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer


class CommunicationLedger(Callback):
    """Counts the collectives of `num_steps` optimizer steps, whoever issues them: DDP, FSDP, DTensor, a pipeline, you.

    Prints a table on rank 0 when training ends, and writes `communication.json` into the run's folder: calls and bytes
    a step by collective and dtype, of rank 0 and summed over ranks. Bytes are the size of what a collective works on:
    of the tensor for all-reduce, broadcast, send and recv, of the whole (not of one rank's part) for all-gather and
    reduce-scatter. In a ring of N ranks each rank sends 2 (N - 1) / N of that in an all-reduce, (N - 1) / N in the
    other two.

    A step is all that happens from its first batch to its end; where it logs, the exchange of logged values too, and on
    several nodes the control messages, which on one go through shared memory; not validation. Collectives of other
    threads than the training's are not seen. The measured steps are slower, and run without torch.compile.

    Args:
        first_step: Optimizer steps of this fit before the first one that is counted, at least 2: engines set themselves
        up.
        num_steps: Optimizer steps that are counted.
    """

    def __init__(self, *, first_step: int = 2, num_steps: int = 3) -> None:
        for name, value, least in (("first_step", first_step, 2), ("num_steps", num_steps, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, but {name}={value!r}")
        self.first_step, self.num_steps = first_step, num_steps
        self.report: dict[str, Any] | None = None
        """What was written, once it is."""
        self._steps = 0
        self._found: dict[str, list[int]] = {}  # calls and bytes of this rank
        self._watch: ExitStack | None = None
        self._waits_for: Any = None
        """The run whose step is still to begin."""

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        self._steps, self._found, self.report = 0, {}, None

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.strategy.capabilities.local_steps:  # a round, in which a rank may be given no batch
            self._start()
            self._waits_for = trainer._run

    def on_train_batch_start(self, trainer: Trainer, module: Module, batch: Any, batch_idx: int) -> None:
        self._start()
        self._waits_for = None

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer._run.window_is_open:
            return
        self._stop()
        self._steps += 1
        if self._steps == self.first_step + self.num_steps:
            self._add_up(trainer)

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        self._stop()
        if trainer.is_global_zero:
            late = (
                f"communication: not measured, because training ended before step {self.first_step + self.num_steps}; "
                "lower first_step"
            )
            safe_print(late if self.report is None else self.table())

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        self._stop()

    def state_dict(self) -> dict[str, Any]:
        return {"report": self.report}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_state("CommunicationLedger", state_dict, {"report": _is_report})
        self.report = state_dict["report"]

    def roll_back(self, state_dict: dict[str, Any]) -> None: ...  # what was measured since then holds

    def table(self) -> str:
        """What was counted, as text. Raises RuntimeError before the steps are done."""
        if self.report is None:
            raise RuntimeError(
                f"nothing has been measured before step {self.first_step + self.num_steps}; call table() later"
            )
        ranks = self.report["world_size"]
        title = f"communication in a step, over {self.report['num_steps']} steps on {ranks} rank{'s' * (ranks > 1)}"
        if not self.report["rows"]:
            return f"{title}: none"
        rows = [("", "", "rank 0: calls", "MiB", "all ranks: calls", "MiB")]
        rows += [
            (
                row["collective"],
                row["dtype"],
                f"{row['calls']:.2f}",
                f"{row['bytes'] / 2**20:.4f}",
                f"{row['calls_all_ranks']:.2f}",
                f"{row['bytes_all_ranks'] / 2**20:.4f}",
            )
            for row in self.report["rows"]
        ]
        return "\n".join([title, *columns(rows, right=range(2, 6))])

    def _see(self, op: Any, args: tuple[Any, ...], result: Any) -> None:
        if self._waits_for is not None and not self._waits_for.is_stepping:
            return
        self._waits_for = None
        call = collective(op, args, result)
        if call is None:
            return
        entry = self._found.setdefault(f"{call.kind} {call.dtype}", [0, 0])
        entry[0] += 1
        entry[1] += call.num_bytes

    def _add_up(self, trainer: Trainer) -> None:
        """Every rank calls it; exchanges the ranks' counts, once."""
        text = torch.frombuffer(bytearray(json.dumps(self._found).encode()), dtype=torch.uint8)
        longest = int(trainer.strategy.all_reduce(torch.tensor(text.numel()), "max"))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: text.numel()] = text
        ranks = [json.loads(bytes(row.tolist())) for row in trainer.strategy.all_gather(padded)]
        rows = []
        for name in sorted({name for rank in ranks for name in rank}):
            collective, _, dtype = name.partition(" ")
            calls, size = zip(*(rank.get(name, (0, 0)) for rank in ranks), strict=True)
            counts = {"calls": calls[0], "bytes": size[0], "calls_all_ranks": sum(calls), "bytes_all_ranks": sum(size)}
            rows.append(
                {
                    "collective": collective,
                    "dtype": dtype,
                    **{key: value / self.num_steps for key, value in counts.items()},
                }
            )
        self.report = {
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "world_size": trainer.world_size,
            "rows": rows,
        }
        if trainer.is_global_zero:
            path = Path(trainer.log_dir or trainer.arguments.default_root_dir) / "communication.json"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(self.report, indent=2) + "\n")
            except OSError as error:
                warnings.warn(
                    f"CommunicationLedger cannot write {path}, training continues: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _start(self) -> None:
        if self._watch is None and self.first_step <= self._steps < self.first_step + self.num_steps:
            self._watch = watching(LocalOps(self._see))

    def _stop(self) -> None:
        watch, self._watch, self._waits_for = self._watch, None, None
        if watch is not None:
            watch.close()


_NUMBERS = "calls", "bytes", "calls_all_ranks", "bytes_all_ranks"
_FACTS = "first_step", "num_steps", "world_size"


def _is_report(value: Any) -> bool:
    """Whether `CommunicationLedger.report` may be it."""
    if not isinstance(value, dict):
        return value is None
    rows = value.get("rows")
    return (
        all(is_number(value.get(name)) for name in _FACTS)
        and isinstance(rows, list)
        and all(isinstance(row, dict) and isinstance(row.get("collective"), str) for row in rows)
        and all(isinstance(row.get("dtype"), str) and all(is_number(row.get(n)) for n in _NUMBERS) for row in rows)
    )
