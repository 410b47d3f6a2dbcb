"""What steps draw from generators of random numbers that user code keeps: once a micro-batch, as one process does."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.strategies.launch.program.generators import generator_content, generator_of
from lockstep.strategies.launch.rng import watch_draws
from lockstep.strategies.modules.blocks import OF_TORCH
from lockstep.strategies.sync.contents import generator_state

_FIRST, _MOST = 4, 64
"""Micro-batches with draws that run whole too; items of a container that are read."""
_INSTEAD = "draw before the call, which all stages do alike, or in a hook that runs once on every rank"


class Draws:
    """Generators of the modules `outside` of the layers, and of the globals that steps name.

    Each run of a micro-batch begins with the states that the micro-batch found and leaves the same: a draw is one for
    the whole micro-batch. Raises RuntimeError naming a generator of which that cannot hold. The streams of torch, numpy
    and Python, which are seeded for each part, are left as they are.
    """

    def __init__(self, outside: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
        self._outside, self._names = outside, names
        self._deeper: dict[int, tuple[str, Any]] = {}
        """Those that a snapshot has found."""
        self._found: list[tuple[str, Any]] = []
        self._start: list[Any] = []
        self._marks: list[Any] = []
        self._called: list[Any] | None = None
        self._end: list[Any] | None = None
        self._num_drawn = 0

    def begin(self, found: Iterable[tuple[str, Any]] = ()) -> None:
        """A micro-batch begins, or an evaluation step; `found` are those of a snapshot."""
        self._deeper |= {id(generator): (name, generator) for name, generator in found}
        held = {id(generator): (name, generator) for name, generator in self._held()}
        known = {**self._deeper, **held}
        seeded = [torch.default_generator, *torch.cuda.default_generators, random._inst, np.random.mtrand._rand]
        streams = {*map(id, seeded)}
        self._found = [each for key, each in known.items() if key not in streams]
        self._start = [generator_content(generator) for _, generator in self._found]
        self._marks, self._called, self._end = self._now(), None, None

    @contextmanager
    def whole(self, is_whole: bool) -> Iterator[None]:
        """Around a run of the step that leaves nothing behind, if that is on the whole micro-batch."""
        with self.run(is_whole) if is_whole else nullcontext():
            yield

    @contextmanager
    def run(self, is_whole: bool = False) -> Iterator[None]:
        """Around a run of the step, on a part or on the whole micro-batch."""
        self._put_back()
        self._called = None
        yield
        if not self._found:
            return
        now = self._now()
        self.refuse_since(self._called)
        if self._end is not None and (name := self._other(self._end, now)) is not None:
            raise RuntimeError(
                f"training_step draws other numbers from {name} for a part of a micro-batch than for the whole, such "
                "as some for each sample, but a pipeline runs it for each part; draw them from the generators of "
                "torch, numpy or random, which are seeded for each part, or in the dataset"
            )
        if is_whole:
            return
        for i, content in enumerate(self._start):
            if content is None and now[i] != self._marks[i]:
                raise RuntimeError(
                    f"training_step draws from {self._found[i][0]}, a {type(self._found[i][1]).__name__} whose state "
                    "cannot be put back, but a pipeline runs it for each part of a micro-batch; use a random.Random, "
                    "torch.Generator or numpy.random.Generator"
                )
        self._num_drawn += self._end is None and now != self._marks
        self._end = now

    @property
    def asks_whole(self) -> bool:
        """Whether the step, whose parts have drawn, is to run on the whole micro-batch, to draw what they have."""
        has_drawn = self._end is not None and self._end != self._marks
        return has_drawn and (self._num_drawn <= _FIRST or self._num_drawn & (self._num_drawn - 1) == 0)

    def calling(self) -> None:
        """The step calls the pipelined module."""
        self._called = self._now()

    def refuse_since(self, called: list[Any] | None) -> None:
        """Raise RuntimeError naming a generator from which was drawn since the pipelined module was called."""
        if called is not None and (name := self._other(called, self._now())) is not None:
            raise RuntimeError(
                f"a step draws from {name} after it has called the pipelined module, or in one of its layers, where "
                f"not all stages of a pipeline come, so that they would draw other numbers from then on; {_INSTEAD}"
            )

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around the run of an evaluation step."""
        self.begin()
        yield
        self.refuse_since(self._called)

    @contextmanager
    def hook(self, which: str, of_streams: bool = False) -> Iterator[None]:
        """Around a hook that one rank calls alone; `of_streams`: where other ranks' streams would not follow."""
        before, has_drawn = self._now(), watch_draws() if of_streams else bool
        yield
        name = self._other(before, self._now())
        if name is None and has_drawn():
            name = "torch, numpy or random"
        if name is not None:
            raise RuntimeError(
                f"{which} draws from {name}, but in a pipeline only one rank calls it, so that the others would draw "
                "other numbers from then on; draw in on_train_batch_start or on_train_batch_end, which run once on "
                "every rank"
            )

    # ---- helpers ---------------------------------------------------------------------------------------

    def _held(self) -> Iterator[tuple[str, Any]]:
        for module in self._outside:
            for key, value in vars(module).items():
                if key not in OF_TORCH:
                    name = f"{self._names.get(module, '')}.{key}".lstrip(".")
                    for shown, item in _items(name, value):
                        if generator_state(item) is not None:
                            yield shown, item

    def _now(self) -> list[Any]:
        return [generator_state(generator) for _, generator in self._found]

    def _other(self, before: list[Any], now: list[Any]) -> str | None:
        pairs = zip(self._found, before, now, strict=True)
        return next((name for (name, _), was, found in pairs if was != found), None)

    def _put_back(self) -> None:
        for (_, generator), content in zip(self._found, self._start, strict=True):
            if content is not None:
                generator_of(content, generator)


def _items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value, or the items of a container."""
    if isinstance(value, dict) and len(value) <= _MOST:
        yield from ((f"{name}[{key!r}]", item) for key, item in dict.items(value))
    elif isinstance(value, list | tuple) and len(value) <= _MOST:
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
    else:
        yield name, value
