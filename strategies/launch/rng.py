"""The random streams that user code draws from: torch's, Python's and numpy's."""

from __future__ import annotations

import inspect
import pickle
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from lockstep.strategies.launch import environment

_DRAWING = re.compile(r"rand|normal_?$|uniform|bernoulli|multinomial|dropout|exponential|poisson|gauss|shuffle|choice")
"""In names of functions that draw."""
_LOOKS = 16
"""Steps in which it is seen whether code draws; later ones of an optimizer that has not cost nothing."""


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
    """Set the generators to what `stream_states` returned of them; CUDA's only if CUDA has started in this process."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def _moved(states: Mapping[str, Any]) -> set[str]:
    """The generators that have moved since `stream_states` returned `states`."""
    now = stream_states()
    same = {name for name in now.keys() & states.keys() & {"torch", "cuda"} if torch.equal(now[name], states[name])}
    if now["python"] == states["python"]:
        same.add("python")
    one, other = now["numpy"], states["numpy"]
    if repr(one[2:]) == repr(other[2:]) and np.array_equal(one[1], other[1]):
        same.add("numpy")
    return {*now, *states} - same


def has_drawn(states: Mapping[str, Any]) -> bool:
    """Whether any generator has moved since `stream_states` returned `states`."""
    return bool(_moved(states))


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
    """Let every rank draw what rank 0 draws; at the end the others' streams are what they were, but those that were
    equal to rank 0's before, as where ranks share samples, are so afterwards. Every rank calls it."""
    own = stream_states()
    take_first_streams(broadcast, is_first)
    apart = _moved(own)
    try:
        yield
    finally:
        restore_streams({name: state for name, state in own.items() if name in apart})


def take_first_streams(broadcast: Callable[[Any], Any], is_first: bool) -> None:
    """Let every rank continue with the streams of rank 0. Every rank calls it."""
    data = torch.frombuffer(bytearray(pickle.dumps(stream_states())), dtype=torch.uint8)
    shared = torch.empty(int(broadcast(data.numel())), dtype=torch.uint8)
    shared = broadcast(data if is_first else shared)
    if not is_first and not environment.in_plan():  # where the others do what this one does
        restore_streams(pickle.loads(shared.numpy().tobytes()))


def _may_draw(functions: list[FunctionType]) -> bool:
    """Whether functions, or those of their files that these call, name what draws random numbers, which they may do in
    later steps only."""
    from lockstep.strategies.launch.program.functions import codes_of

    for function in functions:  # grows
        names = {name for code in codes_of(function) for name in code.co_names}
        if any(map(_DRAWING.search, names)):
            return True
        held = [function.__globals__.get(name) for name in names]
        called = [inspect.unwrap(value) for value in held if isinstance(value, FunctionType)]
        functions += [value for value in called if value.__globals__ is function.__globals__ and value not in functions]
    return False


def _methods_of(kind: type) -> list[FunctionType]:
    members = [value for each in kind.__mro__[:-1] if each is not Optimizer for value in vars(each).values()]
    return [inspect.unwrap(value) for value in members if isinstance(value, FunctionType)]


def _functions_of(hook: Any) -> list[FunctionType]:
    while isinstance(hook, partial):
        hook = hook.func
    if not isinstance(hook, FunctionType | MethodType):
        hook = type(hook).__call__
    function = inspect.unwrap(getattr(hook, "__func__", hook))
    return [function] if isinstance(function, FunctionType) else []


class SharedDraws:
    """Lets user code draw on every rank what it draws on rank 0, as on one process, between `begin` and `end`.

    The streams of ranks differ, for noise of the model, so that each replica or shard would get noise of its own.
    """

    def __init__(self, broadcast: Callable[[Any], Any], is_first: bool, draws: bool) -> None:
        self._broadcast, self._is_first = broadcast, is_first
        self._steps, self._draws = 0, draws
        self._open: tuple[AbstractContextManager[None], dict[str, Any]] | None = None

    @property
    def is_over(self) -> bool:
        """Whether draws are no longer shared: the code drew nothing in its first steps, and names nothing random."""
        return self._steps >= _LOOKS and not self._draws

    def begin(self) -> None:
        self.leave()
        shared = shared_streams(self._broadcast, self._is_first)
        shared.__enter__()
        self._open = shared, {} if self._draws else stream_states()

    def end(self) -> None:
        if self._open is None:
            return
        (shared, states), self._open = self._open, None
        self._draws = self._draws or has_drawn(states)
        shared.__exit__(None, None, None)
        self._steps += 1
        if self._steps == _LOOKS:  # code may draw on some ranks only
            self._draws = bool(self._broadcast(self._draws))

    def leave(self) -> None:
        """After code that has raised."""
        if self._open is not None:
            (shared, _), self._open = self._open, None
            shared.__exit__(None, None, None)


class OptimizerDraws(SharedDraws):
    """Shares what an optimizer draws in its steps."""

    def __init__(self, optimizer: Optimizer, broadcast: Callable[[Any], Any], is_first: bool) -> None:
        super().__init__(broadcast, is_first, _may_draw(_methods_of(type(optimizer))))
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        self.leave()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leave()
        if len(args) < 2 and kwargs.get("closure") is None:  # which runs the model, on each rank with its own noise
            self.begin()

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end()
        if self.is_over:
            self.close()


class HookDraws:
    """Shares what hooks on parameters draw, which each rank calls on whole gradients. `draw_alike`: ranks do anyway."""

    refused = ""
    """Why what hooks draw now is not what one process draws; empty if it is."""

    def __init__(self, broadcast: Callable[[Any], Any], is_first: bool, draw_alike: bool) -> None:
        self._broadcast, self._is_first, self._draw_alike = broadcast, is_first, draw_alike
        self._hooks: list[Any] = []
        self._shared = SharedDraws(broadcast, is_first, False)

    @contextmanager
    def around(self, hooks: list[Any]) -> Iterator[None]:
        """Around the call of `hooks`. Raises RuntimeError for draws that are not those of one process."""
        if not self.refused and self._draw_alike:
            yield
        elif self.refused or self._of(hooks).is_over:
            has_drawn = watch_draws()
            yield
            if has_drawn():
                raise drawn_in_hook(self.refused or f"for the first time after {_LOOKS} steps")
        else:
            self._shared.begin()
            try:
                yield
                self._shared.end()
            finally:
                self._shared.leave()

    def _of(self, hooks: list[Any]) -> SharedDraws:
        if [*map(id, hooks)] != [*map(id, self._hooks)]:
            functions = [function for hook in hooks for function in _functions_of(hook)]
            self._hooks, self._shared = hooks, SharedDraws(self._broadcast, self._is_first, _may_draw(functions))
        return self._shared


def drawn_in_hook(why: str) -> RuntimeError:
    return RuntimeError(
        f"a hook on a parameter draws random numbers {why}, which are not those of one process; draw from a generator "
        "of your own that is seeded alike on all ranks (torch.Generator().manual_seed(step), random.Random(step)), or "
        "change the gradient in on_before_optimizer_step within `with self.trainer.whole(self): ...`"
    )
