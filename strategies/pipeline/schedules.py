"""The schedules of torch.distributed.pipelining: what each asks for, and when each rank works and waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _Action

# torch.distributed.pipelining takes a second to import, so it is imported where a schedule is built.

DURATIONS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Time of a forward, of a backward, and of its halves for inputs and for weights, in units of a forward."""


@dataclass(frozen=True)
class Schedule:
    """One schedule, and how many stages each rank has under it."""

    name: str
    engine: str
    """Its class in torch.distributed.pipelining."""
    stages_per_rank: int = 1
    v_shaped: bool = False
    """Whether stages go from rank 0 to the last and back; otherwise they go round."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed apart, the latter in what would be the bubble."""
    fallback: str = ""
    """What runs where the number of parts does not fit."""

    def rank_of(self, num_ranks: int) -> list[int]:
        """The rank of each stage."""
        return [self._rank(stage, num_ranks) for stage in range(num_ranks * self.stages_per_rank)]

    def fits(self, num_ranks: int, num_parts: int) -> bool:
        """Whether the schedule takes this number of parts of a micro-batch."""
        if self.name == "1f1b":
            return num_parts >= num_ranks
        if self.name == "dualpipev":
            return num_parts >= 2 * num_ranks
        return (
            self.name not in ("interleaved_1f1b", "interleaved_zero_bubble")
            or num_parts % max(1, num_parts // num_ranks) == 0
        )

    def check(self, num_ranks: int, num_parts: int) -> None:
        """Raise ValueError where it does not take that number of parts."""
        if not self.fits(num_ranks, num_parts):
            near = next(n for n in range(num_parts, num_parts + 2 * num_ranks + 1) if self.fits(num_ranks, n))
            raise ValueError(
                f"schedule={self.name!r} on {num_ranks} ranks does not take num_micro_batches={num_parts}; the next "
                f"number that it takes is {near}"
            )

    def fitting(self, num_ranks: int, num_parts: int) -> Schedule:
        """This schedule, or the one on the same stages that takes this number of parts."""
        return (
            self
            if self.fits(num_ranks, num_parts)
            else replace(SCHEDULES[self.fallback], stages_per_rank=self.stages_per_rank)
        )

    def build(self, stages: Sequence[PipelineStage], num_parts: int, loss: Callable[[Any, Any], Any]) -> Any:
        """Torch's schedule over the stages of this rank, for losses that are weighted already."""
        from torch.distributed import pipelining

        return getattr(pipelining, self.engine)(
            stages[0] if self.stages_per_rank == 1 else stages, num_parts, loss_fn=loss, scale_grads=False
        )

    def timeline(
        self, num_ranks: int, num_parts: int, costs: Sequence[float] | None = None
    ) -> list[list[tuple[float, float, str, int, int]]]:
        """For each rank (start, end, kind, stage, part) of what it does, from torch's own table of actions and
        `DURATIONS`.

        `costs` are the stages' shares of the work, equal by default. Sending takes no time.
        """
        mean = 1.0 if costs is None else sum(costs) / len(costs)
        queues = self._orders(num_ranks, num_parts)
        last = num_ranks * self.stages_per_rank - 1
        done: dict[tuple[str, int, int], float] = {}
        lines: list[list[tuple[float, float, str, int, int]]] = [[] for _ in queues]
        while any(queues):
            moved = False
            for queue, line in zip(queues, lines, strict=True):
                while queue:
                    kind, stage, part = queue[0]
                    needs = _needs(kind, stage, part, last)
                    if not all(need in done for need in needs):
                        break
                    start = max([line[-1][1] if line else 0.0, *(done[need] for need in needs)])
                    end = start + DURATIONS[kind] * (1.0 if costs is None else costs[stage] / mean)
                    line.append((start, end, kind, stage, part))
                    done["B" if kind == "I" else kind, stage, part] = end
                    queue.pop(0)
                    moved = True
            if not moved:
                raise RuntimeError(f"schedule {self.name} waits for itself on {num_ranks} ranks with {num_parts} parts")
        return lines

    def bubble(self, num_ranks: int, num_parts: int, costs: Sequence[float] | None = None) -> float:
        """The share of all ranks' time in which they wait, with `DURATIONS` and `costs` as in `timeline`."""
        lines = self.timeline(num_ranks, num_parts, costs)
        total = max(line[-1][1] for line in lines) * num_ranks
        return 1 - sum(end - start for line in lines for start, end, *_ in line) / total

    def formula(self, num_ranks: int, num_parts: int) -> str:
        """The bubble as a formula, where there is one."""
        p, m, v = num_ranks, num_parts, self.stages_per_rank
        if self.name in ("gpipe", "1f1b"):
            return f"(P - 1) / (M + P - 1) = {(p - 1) / (m + p - 1):.1%}"
        if self.name in ("interleaved_1f1b", "looped_bfs") and m % p == 0:
            return f"(P - 1) / (V M + P - 1) = {(p - 1) / (v * m + p - 1):.1%}"
        return ""

    def picture(self, num_ranks: int, num_parts: int) -> str:
        """A row a rank, a column a unit of time: F3 is the forward of part 3, B its backward, I and W the halves of a
        backward."""
        lines = self.timeline(num_ranks, num_parts)
        width = 1 + len(str(num_parts - 1)) + (self.stages_per_rank > 1)
        length = int(max(line[-1][1] for line in lines))
        rows = []
        for rank, line in enumerate(lines):
            cells = ["·" * width] * length
            for start, end, kind, stage, part in line:
                mark = f"{kind.lower() if stage >= num_ranks else kind}{part}"
                for at in range(int(start), int(end)):
                    cells[at] = (
                        mark.ljust(width) if at == int(start) else (mark[0] + "~" * (len(mark) - 1)).ljust(width)
                    )
            rows.append(f"rank {rank:<3}{' '.join(cells)}")
        return "\n".join(rows)

    def _orders(self, num_ranks: int, num_parts: int) -> list[list[tuple[str, int, int]]]:
        """What each rank computes, in order, as (kind, stage, part)."""
        if self.name == "1f1b":  # torch's own table begins with part 1 on the last rank
            orders = []
            for rank in range(num_ranks):
                ahead = min(num_parts, num_ranks - rank)
                order = [("F", rank, part) for part in range(ahead)]
                for part in range(num_parts):
                    order.append(("B", rank, part))
                    order += [("F", rank, part + ahead)] if part + ahead < num_parts else []
                orders.append(order)
            return orders
        from torch.distributed import pipelining
        from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

        table = get_schedule_ops(getattr(pipelining, self.engine), num_ranks, num_parts, self.stages_per_rank)
        return [[step for action in actions if action is not None for step in _steps(action)] for actions in table]

    def _rank(self, stage: int, num_ranks: int) -> int:
        turn, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.v_shaped and turn % 2 else place


SCHEDULES = {
    found.name: found
    for found in (
        Schedule("gpipe", "ScheduleGPipe"),
        Schedule("1f1b", "Schedule1F1B", fallback="gpipe"),
        Schedule("looped_bfs", "ScheduleLoopedBFS", stages_per_rank=2),
        Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", stages_per_rank=2, fallback="looped_bfs"),
        Schedule(
            "interleaved_zero_bubble",
            "ScheduleInterleavedZeroBubble",
            stages_per_rank=2,
            splits_backward=True,
            fallback="looped_bfs",
        ),
        Schedule("zbv", "ScheduleZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
        Schedule(
            "dualpipev", "ScheduleDualPipeV", stages_per_rank=2, v_shaped=True, splits_backward=True, fallback="zbv"
        ),
    )
}


def schedule(name: str, stages_per_rank: int | None = None) -> Schedule:
    """Find a schedule. Raises ValueError for an unknown name, or a number of stages that it does not take."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, but schedule={name!r}")
    found = SCHEDULES[name]
    if stages_per_rank is None or stages_per_rank == found.stages_per_rank:
        return found
    if found.stages_per_rank == 1 or found.v_shaped:
        raise ValueError(
            f"schedule={name!r} has {found.stages_per_rank} stages a rank, but stages_per_rank={stages_per_rank}; "
            "leave it out"
        )
    if isinstance(stages_per_rank, bool) or not isinstance(stages_per_rank, int) or stages_per_rank < 2:
        raise ValueError(
            f"stages_per_rank of schedule={name!r} must be a whole number of at least 2, but "
            f"stages_per_rank={stages_per_rank!r}"
        )
    return replace(found, stages_per_rank=stages_per_rank)


def check_options(schedule: Schedule, num_micro_batches: int | None, recomputes: bool) -> None:
    """Raise ValueError for a wrong number of microbatches, and for activation checkpointing (`recomputes`) under
    a schedule that would recompute twice."""
    if schedule.splits_backward and recomputes:
        raise ValueError(
            f"schedule={schedule.name!r} runs backward to inputs and to each weight apart, and "
            "activation_checkpointing would recompute a block for each; use 'gpipe', '1f1b', 'interleaved_1f1b' or "
            "'looped_bfs'"
        )
    if num_micro_batches is not None and (
        isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1
    ):
        raise ValueError(
            f"num_micro_batches must be a whole number of at least 1, but num_micro_batches={num_micro_batches!r}"
        )


# ---- helpers -------------------------------------------------------------------------------------------


def _steps(action: _Action) -> list[tuple[str, int, int]]:
    """What an action computes, in order; two that overlap come one after the other."""
    if action.sub_actions:
        return [step for part in action.sub_actions for step in _steps(part)]
    kind = str(action.computation_type.value)
    return [(kind, action.stage_index, int(action.microbatch_index or 0))] if kind in DURATIONS else []


def _needs(kind: str, stage: int, part: int, last: int) -> list[tuple[str, int, int]]:
    """What must be done before."""
    if kind == "F":
        return [("F", stage - 1, part)] if stage else []
    if kind == "W":
        return [("B", stage, part)]
    return [("F", stage, part)] + ([("B", stage + 1, part)] if stage < last else [])
