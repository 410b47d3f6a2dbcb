"""Methods whose learners train by themselves for a round: the shortest round with all that happens in a long one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lockstep.strategies.base import Strategy
from lockstep.strategies.data.sharded_loader import MicroBatch, Window
from lockstep.strategies.methods.federated.control import ClientStates
from lockstep.strategies.methods.federated.loader import Round
from lockstep.strategies.methods.federated.strategy import Federated
from lockstep.strategies.methods.local_updates import LocalUpdates
from lockstep.strategies.methods.options import assign
from lockstep.strategies.methods.parameter_server.strategy import ParameterServer
from lockstep.strategies.methods.rounds import LearnerRounds
from lockstep.strategies.planning.trial_mode import TrialMode
from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.sparse import TopK


def shorten_round(strategy: Strategy, mode: TrialMode) -> int:
    """Make a round of `strategy`, which a trial has for itself, short: its fragments are sent in turn, with a step
    between them that sends nothing, as many on their way at once as in a long round; and its compressor sends what it
    does after its first steps. Returns the steps of the round; 1 for a strategy without rounds."""
    compression = getattr(strategy, "_compression", None)
    if compression is not None:
        compression.compressor = _settled(compression.compressor)
    if isinstance(strategy, Federated):
        strategy.client_states = _NoStates
    if not has_rounds(strategy):
        return 1
    assert isinstance(strategy, LearnerRounds)
    rounds = strategy.rounds
    steps = 2 * rounds.fragments
    settled = None if rounds.compress is None else _settled(rounds.compress)
    on_their_way = -(-rounds.delay * rounds.fragments // rounds.period)
    delay = max(0, 2 * on_their_way - 1)
    strategy.rounds = replace(rounds, period=steps, start=0, delay=delay, compress=settled)
    strategy.sender = lambda: _AtOnce(mode)
    return steps


class _NoStates(ClientStates):
    """Of clients that all train for the first time: what they keep is on disk, and a plan has no values to write."""

    def put(self, client: int, value: Tensor) -> None: ...


class _AtOnce(Executor):
    """In place of a thread beside the steps: does at once what it is given, and holds the memory that this takes at
    most until the result is asked for, as it may take as long."""

    def __init__(self, mode: TrialMode) -> None:
        self._mode = mode

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._mode.held_beside() as done:
            result = fn(*args, **kwargs)
        return _Asked(result, done, fn)


class _Asked(Future[Any]):
    """Is done. `work` and what it holds stay as long."""

    def __init__(self, result: Any, done: Callable[[], None], work: Any) -> None:
        super().__init__()
        self._done, self._work = done, work
        self.set_result(result)

    def result(self, timeout: float | None = None) -> Any:
        self._work = None
        self._done()
        return super().result(timeout)


def _settled(compressor: Compressor) -> Compressor:
    """`compressor` after its synchronous start and its warm-up."""
    settled = copy.copy(compressor)
    settled.start = 0
    if isinstance(settled, TopK):
        settled.warmup = 0
    return settled


@dataclass
class Tried:
    """What of a window is tried, as often as it is asked for."""

    window: Window
    batches: list[list[Any]]
    """Of each local step, with fake tensors."""
    times: float = 1.0
    """How often a rank does it in a step."""

    def filled(self) -> Window:
        window, parts = self.window, self.batches
        if not isinstance(window, Round):
            return replace(window, micro_batches=_with(window.micro_batches, parts[0]))
        (one,) = window.participants
        steps = [_with(step, batches) for step, batches in zip(one.steps, parts, strict=True)]
        return replace(window, micro_batches=steps[-1][-1:], participants=[replace(one, steps=steps)])

    @property
    def first(self) -> Any:
        return next(batch for batch in self.batches[0] if batch is not None)


_ROUNDS = 100
"""In which a client of rank 0 is looked for."""

_LOCAL_STEPS = 2
"""Of a client that are tried: clients run one after the other, from the same weights and in the same memory."""


def first_with_batches(firsts: Iterable[Window]) -> Window:
    """Of the first windows of epochs the first in which this rank has batches: in a federated round it may have no
    client."""
    for window in itertools.islice(firsts, _ROUNDS):
        if not isinstance(window, Round) or any(participant.steps for participant in window.participants):
            return window
    raise ValueError(f"rank 0 has no client in the first {_ROUNDS} rounds, and nothing to plan; give fewer ranks")


def tried(window: Window, fake: Callable[[Any], Any]) -> Tried:
    """What stands for all that this rank does in `window`: of the clients of a federated round the one with the most
    samples, for its first steps."""
    if not isinstance(window, Round):
        return Tried(window, [[fake(micro_batch.batch) for micro_batch in window.micro_batches]])
    own = [participant for participant in window.participants if participant.steps]
    one = max(own, key=lambda participant: participant.num_samples)
    shown = replace(one, steps=one.steps[:_LOCAL_STEPS])
    times = sum(len(participant.micro_batches) for participant in own) / len(shown.micro_batches)
    batches = [[fake(micro_batch.batch) for micro_batch in step] for step in shown.steps]
    return Tried(replace(window, participants=[shown]), batches, times)


def _with(micro_batches: Sequence[MicroBatch], batches: Sequence[Any]) -> list[MicroBatch]:
    return [
        MicroBatch(batch, given.num_samples, share=given.share)
        for given, batch in zip(micro_batches, batches, strict=True)
    ]


def has_rounds(strategy: Strategy) -> bool:
    """Whether learners train by themselves between exchanges."""
    return isinstance(strategy, LearnerRounds) and not strategy.capabilities.synchronous


def round_steps(strategy: Strategy) -> int:
    """Steps between exchanges, as the strategy was given them."""
    return strategy.rounds.period if isinstance(strategy, LearnerRounds) and has_rounds(strategy) else 1


def round_overlap(strategy: Strategy) -> float:
    """The share of a round's steps beside which learners send what they have moved, or servers answer workers."""
    if isinstance(strategy, ParameterServer):
        return float(strategy.staleness > 0)
    if not isinstance(strategy, LearnerRounds) or not has_rounds(strategy):
        return 0.0
    return min(1.0, strategy.rounds.delay * strategy.rounds.fragments / strategy.rounds.period)


def notes_of(strategy: Strategy) -> tuple[str, ...]:
    """What the plan of a method does not hold."""
    compressor: Compressor | None = getattr(strategy, "compressor", None)
    first = 0 if compressor is None else compressor.start + getattr(compressor, "warmup", 0)
    if first:
        return (
            f"the first {first} steps send more than compress={compressor!r} does later, and are not in the figures",
        )
    if isinstance(strategy, Federated):
        return (
            "a step is a round of clients: memory and communication are the same in each, its work is that of the "
            "micro-batches that clients of the first round have on rank 0",
        )
    if isinstance(strategy, ParameterServer):
        return (
            "workers are taken to be equally fast, and a server to hold one gradient of each rank at once; what other "
            "workers send and get in a step is in the phase round",
        )
    if not isinstance(strategy, LearnerRounds) or not has_rounds(strategy):
        return ()
    found = [
        f"learners exchange weights once in {strategy.rounds.period} steps: calls and bytes in the phase round are of "
        "all these steps together, their time is a step's share"
    ]
    if strategy.rounds.delay:
        found.append(
            "the most memory that sending a fragment takes is in the figures until it is taken over, as over a "
            "slow link"
        )
    if strategy.rounds.start:
        found.append(f"the first {strategy.rounds.start} steps are synchronous, as with ddp, and not in the figures")
    return tuple(found)


def learners_by_rank(strategy: Strategy, num_ranks: int) -> list[int]:
    """How many learners each rank runs; empty for a strategy without learners."""
    if not isinstance(strategy, LocalUpdates):
        return []
    return [len(own) for own in assign(strategy.learners, strategy.learners_per_rank, num_ranks)]
