"""Numbers of the Trainer that user code may set, kept in checkpoints for a run that continues, and attributes that it
adds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import TYPE_CHECKING, Any

from lockstep.trainer.kept.values import MOST_ITEMS, NOTHING, Mark, attributes, is_same, mark_of

if TYPE_CHECKING:
    from lockstep.trainer.run.state import RunState

NAMES = ("accumulate_grad_batches", "max_epochs", "max_steps")

Values = dict[str, int | None]


class Numbers:
    """`accumulate_grad_batches`, `max_epochs` and `max_steps` of a fit: as the code has given them until
    `configure_optimizers` has been called, as hooks of the start have left them, and as hooks have set them since."""

    def __init__(self, run: RunState) -> None:
        """Called once `configure_optimizers` has been."""
        self._run = run
        self._configured = now(run)
        self._begun: Values | None = None
        """As hooks of the start have left them; before that, as they had in the run that is resumed."""
        self._resumed: Values = {}
        """What the run that is resumed had made of those that the code gives as it did then, while hooks of the start
        are still called."""

    def state_dict(self) -> dict[str, Values]:
        then = self._will_be()
        return {"configured": self._configured, "begun": then if self._begun is None else self._begun, "now": then}

    def load_state_dict(self, state: Mapping[str, Values]) -> None:
        """Take up what the run that is resumed had made of those that the code gives as it did then."""
        self._begun = dict(state["begun"])
        self._resumed = {
            name: value
            for name, value in state["now"].items()
            if name in NAMES and self._configured.get(name) == state["configured"].get(name)
        }
        vars(self._run).update(self._resumed)

    def note_begun(self) -> list[str]:
        """Called once hooks of the start have been. What they have left as when the run was new is again what the run
        that is resumed had made of it. Returns the names of what they have set to something else."""
        left, will_be, resumed = now(self._run), self._will_be(), self._resumed
        vars(self._run).update(will_be)
        self._begun, self._resumed = left, {}
        return [name for name, value in resumed.items() if will_be.get(name) != value]

    def _will_be(self) -> Values:
        left, begun = now(self._run), self._begun or {}
        return left | {name: value for name, value in self._resumed.items() if left.get(name) == begun.get(name)}


def now(run: RunState) -> Values:
    """The numbers of now that are whole or None."""
    values = {name: getattr(run, name) for name in NAMES}
    return {n: v if v is None else int(v) for n, v in values.items() if v is None or isinstance(v, Integral)}


@contextmanager
def as_seen(run: RunState, seen: Mapping[str, int | None]) -> Iterator[None]:
    """While it lasts the numbers are as in `seen`, a `now` of the run that is resumed."""
    before = {name: getattr(run, name) for name in NAMES}
    vars(run).update({name: value for name, value in seen.items() if name in NAMES})
    try:
        yield
    finally:
        vars(run).update(before)


def saved(state: Mapping[str, Any]) -> Mapping[str, Values]:
    """What the `state` of a checkpoint has of them, for `Numbers.load_state_dict`."""
    if "numbers" in state or "accumulation" not in state:
        return state.get("numbers", {"configured": {}, "begun": {}, "now": {}})
    older, name = state["accumulation"], "accumulate_grad_batches"
    return {key: {name: older[of]} for key, of in (("configured", "at_start"), ("begun", "at_start"), ("now", "now"))}


def not_in_parts(run: RunState, step: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """`step`, which a strategy calls for each part of a batch: raises RuntimeError if it changes what user code keeps
    on the Trainer."""

    def checked(batch: Any, batch_idx: int) -> Any:
        before = _marks(run)
        output = step(batch, batch_idx)
        now = _marks(run)
        for name in before.keys() | now.keys():
            if not is_same(before.get(name, NOTHING), now.get(name, NOTHING)):
                raise RuntimeError(
                    f"training_step changed trainer.{name}, but strategy {run.strategy.name!r} calls it for parts of a "
                    "batch; keep it in an attribute of the module, or change it in on_train_batch_end"
                )
        return output

    return checked


def _marks(run: RunState) -> dict[str, Mark]:
    return {name: mark_of(value, MOST_ITEMS) for name, value in attributes(run.trainer).items()}
