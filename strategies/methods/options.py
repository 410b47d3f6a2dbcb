"""The options of local updates, and which rank runs which learner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.strategies.optimizers.closures import needs_closure
from lockstep.strategies.sync.compression.compressor import Compressor


@dataclass(frozen=True)
class Rounds:
    """When learners are apart and when they come together. Raises ValueError by name."""

    period: int
    """Steps of a round."""
    start: int = 0
    """Synchronous steps before the first round."""
    fragments: int = 1
    delay: int = 0
    """Steps between sending a fragment and taking it over."""
    mixing: float = 0.0
    """What a learner keeps of its own weights when it takes a fragment over."""

    compress: Compressor | None = None
    """What learners have moved is sent by it."""
    keeps_unsent: bool = False
    """Whether what it does not send of a learner stays in that learner's weights."""

    def __post_init__(self) -> None:
        for name, least in (("period", 1), ("start", 0), ("fragments", 1), ("delay", 0)):
            check_whole(name, getattr(self, name), least)
        if self.fragments > self.period:
            raise ValueError(
                f"fragments={self.fragments} are sent in turn within a round of period={self.period} steps; lower it"
            )
        if self.delay >= self.period:
            raise ValueError(
                f"delay={self.delay} must be less than period={self.period}, so that a fragment is taken over before "
                "it is sent again"
            )
        if self.compress is not None and self.compress.momentum:
            raise ValueError(
                f"compress={self.compress!r} has momentum={self.compress.momentum} in place of an optimizer's, but "
                "what learners have moved has that of their own optimizers; remove it"
            )
        if not isinstance(self.mixing, (int, float)) or not 0 <= self.mixing < 1:
            raise ValueError(f"mixing must be in [0, 1), but mixing={self.mixing!r}")

    def check(self, assignment: Sequence[range]) -> None:
        """Raise ValueError where learners are spread over ranks in a way that these rounds cannot have."""
        learners, numbers = assignment[-1].stop, [len(own) for own in assignment]
        uneven, have = len(set(numbers)) > 1, f"the ranks have {', '.join(map(str, numbers))}"
        if self.start and (uneven or learners & (learners - 1)):
            raise ValueError(
                "synchronous steps (start, or period=1) add the gradients of learners in pairs, so learners must be a "
                f"power of two, equally many on each rank, but {have}"
            )
        if self.compress is not None and uneven:
            raise ValueError(f"compress={self.compress!r} needs equally many learners on each rank, but {have}")


def made_by(make: Callable[[Any], Optimizer], parameters: Sequence[Tensor], name: str) -> Optimizer:
    """The optimizer that user code makes of parameters. Raises TypeError or ValueError if it cannot step them all by
    their gradients."""
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise TypeError(f"{name} must return a torch.optim.Optimizer, but returned {type(made).__name__}")
    if needs_closure(made):
        raise ValueError(
            f"{name} makes a {type(made).__name__}, which needs a closure; use one that steps by gradients"
        )
    stepped = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if stepped != set(map(id, parameters)):
        raise ValueError(
            f"{name} must give the optimizer exactly the {len(parameters)} parameters that it gets, but "
            f"{type(made).__name__} steps {len(stepped)}; the others would stay as they are"
        )
    return made


def check_learners(learners: int | None, per_rank: Sequence[int] | None) -> None:
    """Raise ValueError by name."""
    if learners is not None:
        check_whole("learners", learners, 1)
    if per_rank is not None and (isinstance(per_rank, str) or not isinstance(per_rank, Sequence)):
        raise ValueError(
            "learners_per_rank must be a number of learners for each rank, such as (3, 1) where the first is three "
            f"times as fast, but learners_per_rank={per_rank!r}"
        )
    for number in per_rank or ():
        check_whole("learners_per_rank", number, 1)
    if per_rank is not None and learners is not None and sum(per_rank) != learners:
        raise ValueError(
            f"learners_per_rank={list(per_rank)} must add up to learners={learners}, but gives {sum(per_rank)}"
        )


def assign(learners: int | None, per_rank: Sequence[int] | None, ranks: int) -> list[range]:
    """The learners of each rank, one after the other; by default equally many, the first ranks one more where they do
    not divide. Raises ValueError if a rank has none."""
    if per_rank is None:
        number = ranks if learners is None else learners
        if number < ranks:
            raise ValueError(f"learners={number} leave ranks without one; use at least {ranks}, or fewer devices")
        per_rank = [number // ranks + (rank < number % ranks) for rank in range(ranks)]
    if len(per_rank) != ranks:
        raise ValueError(f"learners_per_rank={list(per_rank)} must have a number for each of {ranks} ranks")
    return [range(start, end) for start, end in itertools.pairwise((0, *itertools.accumulate(per_rank)))]


def check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, but {name}={value!r}")
