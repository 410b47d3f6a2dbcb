"""The random streams that user code draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import inspect
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from lockstep.strategies.launch import environment

_DRAWING = re.compile(r"rand|normal_?$|uniform|bernoulli|multinomial|dropout|exponential|poisson|gauss|shuffle|choice")
"""In names of functions that draw."""
_LOOKS = 16
"""Steps in which it is seen whether an optimizer draws; later ones of an optimizer that has not cost nothing."""


def seed_streams(seed: int) -> None:
    """Seed every generator that a step may draw from."""
    torch.random.default_generator.manual_seed(seed % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed % 2**63)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def stream_states() -> dict[str, Any]:
    """The state of every generator of this process; of CUDA's only that of the device in use, once CUDA has started."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def restore_streams(states: Mapping[str, Any]) -> None:
    """Set every generator to what `stream_states` returned; CUDA's only if CUDA has started in this process."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def has_drawn(states: Mapping[str, Any]) -> bool:
    """Whether any generator has moved since `stream_states` returned `states`."""
    now = stream_states()
    return (
        now.keys() != states.keys()
        or any(not torch.equal(now[name], states[name]) for name in now.keys() & {"torch", "cuda"})
        or now["python"] != states["python"]
        or repr(now["numpy"][2:]) != repr(states["numpy"][2:])
        or not np.array_equal(now["numpy"][1], states["numpy"][1])
    )


def watch_draws() -> Callable[[], bool]:
    """What tells whether any generator has moved since this call."""
    return partial(has_drawn, stream_states())


@contextmanager
def kept_streams() -> Iterator[None]:
    """Give every generator its state back at the end."""
    states = stream_states()
    try:
        yield
    finally:
        restore_streams(states)


@contextmanager
def shared_streams(broadcast: Callable[[Any], Any], is_first: bool) -> Iterator[None]:
    """Let every rank draw what rank 0 draws; at the end the others' streams are what they were. Every rank calls it."""
    own = stream_states()
    take_first_streams(broadcast, is_first)
    try:
        yield
    finally:
        if not is_first:
            restore_streams(own)


def take_first_streams(broadcast: Callable[[Any], Any], is_first: bool) -> None:
    """Let every rank continue with the streams of rank 0. Every rank calls it."""
    data = torch.frombuffer(bytearray(pickle.dumps(stream_states())), dtype=torch.uint8)
    shared = torch.empty(int(broadcast(data.numel())), dtype=torch.uint8)
    shared = broadcast(data if is_first else shared)
    if not is_first and not environment.in_plan():  # where the others do what this one does
        restore_streams(pickle.loads(shared.numpy().tobytes()))


def _may_draw(kind: type) -> bool:
    """Whether methods of a class, or functions of their files that these call, name what draws random numbers, which
    they may do in later steps only."""
    from lockstep.strategies.launch.program.functions import codes_of

    members = [value for each in kind.__mro__[:-1] if each is not Optimizer for value in vars(each).values()]
    functions = [inspect.unwrap(value) for value in members if isinstance(value, FunctionType)]
    for function in functions:  # grows
        names = {name for code in codes_of(function) for name in code.co_names}
        if any(map(_DRAWING.search, names)):
            return True
        held = [function.__globals__.get(name) for name in names]
        called = [inspect.unwrap(value) for value in held if isinstance(value, FunctionType)]
        functions += [value for value in called if value.__globals__ is function.__globals__ and value not in functions]
    return False


class SharedDraws:
    """Lets an optimizer draw on every rank what it draws on rank 0, as on one process.

    The streams of ranks differ, for noise of the model, so that each replica would get noise of its own.
    """

    def __init__(self, optimizer: Optimizer, broadcast: Callable[[Any], Any], is_first: bool) -> None:
        self._broadcast, self._is_first = broadcast, is_first
        self._steps, self._draws = 0, _may_draw(type(optimizer))
        self._open: tuple[AbstractContextManager[None], dict[str, Any]] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def close(self) -> None:
        self.leave()
        for handle in self._handles:
            handle.remove()

    def leave(self) -> None:
        """After a step that has raised, which calls no hook."""
        if self._open is not None:
            (shared, _), self._open = self._open, None
            shared.__exit__(None, None, None)

    def _begin(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leave()
        if len(args) > 1 or kwargs.get("closure") is not None:  # which runs the model, on each rank with its own noise
            return
        shared = shared_streams(self._broadcast, self._is_first)
        shared.__enter__()
        self._open = shared, {} if self._draws else stream_states()

    def _end(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open is None:
            return
        (shared, states), self._open = self._open, None
        self._draws = self._draws or has_drawn(states)
        shared.__exit__(None, None, None)
        self._steps += 1
        if self._steps == _LOOKS and not self._draws:
            self.close()
