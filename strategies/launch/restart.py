"""Start ranks again after one of them died: when that helps, and when it would only fail once more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lockstep.strategies.launch.failure import RankFailure, place_of

T = TypeVar("T")
_log = logging.getLogger("lockstep")


def keep_going(attempt: Callable[[int], T], max_restarts: int, *, name: Callable[[int], str]) -> T:
    """Return what `attempt(n)` returns, the first n, counted from 0, that does not fail; the process that launches
    calls it.

    Raises what an attempt raised: at once for a stop that was asked for (SIGTERM, SIGINT, SIGUSR1) and for what went
    wrong before the first step or after the last, unless a rank or its connections died; after a failure that came
    twice at the same step; after
    `max_restarts` restarts. A note on the exception says why. `name(n)` says what restart n begins from.
    """
    before: object = None
    for restart in range(max_restarts + 1):
        try:
            return attempt(restart)
        except Exception as error:
            place = place_of(error)
            if place is None or place.stopping:
                raise
            if place.step is None and not isinstance(error, RankFailure | ConnectionError):
                raise
            at = f"at step {place.step}" if place.step is not None else f"in {place.phase or 'start'}"
            kind = (type(error), getattr(error, "signal", None), getattr(error, "exitcode", None), at)
            if kind == before:
                _add_note(
                    error,
                    f"the run was not restarted: the same failure happened twice {at}, so it would happen again "
                    f"(restart {restart} of {max_restarts})",
                )
                raise
            if restart == max_restarts:
                if restart:
                    _add_note(error, f"the run was not restarted: all of max_restarts={max_restarts} were used")
                raise
            before = kind
            what = (
                str(error).partition(";")[0]
                if isinstance(error, RankFailure)
                else f"{type(error).__name__} {at}: {error}".splitlines()[0]
            )
            _log.warning("%s: restart %d of %d from %s", what, restart + 1, max_restarts, name(restart + 1))
    raise AssertionError("unreachable")


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        _log.error(note)
