"""The random numbers that a user's dataset and sampler draw: the same on any number of ranks and workers; and what they
draw or count by themselves, which is kept, or noticed."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lockstep.strategies.data.permutation import mix
from lockstep.strategies.launch.program.attributes import is_same
from lockstep.strategies.launch.program.held_search import moved, search
from lockstep.strategies.launch.program.held_state import Held, is_number, put_into, put_state, state_of

_log = logging.getLogger("lockstep")

HELD = "held"
"""In the state of a loader: what its dataset and collate function hold."""
_LOOKS = 16
"""Fetches of a worker in which it is seen what user code draws by itself; of later ones in every power of two."""


class Randomness:
    """Within it, torch, random and numpy draw from a state of their own, which stays for the next time."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.MT19937(seed)
        self._gauss: Gauss = (0, 0.0)

    def __enter__(self) -> None:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._outside = torch.default_generator.get_state(), random.getstate(), bits, _gauss()
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        _set_numpy(self._numpy, self._gauss)

    def __exit__(self, *_: object) -> None:
        self._torch, self._python, self._gauss = torch.default_generator.get_state(), random.getstate(), _gauss()
        torch_state, python_state, generator, gauss = self._outside
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        _set_numpy(generator, gauss)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, gauss = self._python
        numpy = self._numpy.state["state"]
        return {
            "torch": self._torch,
            "python": [version, list(numbers), gauss],
            "numpy": [numpy["key"].tolist(), int(numpy["pos"]), *self._gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        version, numbers, gauss = state["python"]
        key, position, *numpy_gauss = state["numpy"]
        self._torch = state["torch"].clone()
        self._python = (version, tuple(numbers), gauss)
        self._numpy.state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
        }
        self._gauss = (numpy_gauss[0], numpy_gauss[1]) if numpy_gauss else (0, 0.0)


Gauss: TypeAlias = "tuple[int, float]"
"""Whether numpy holds the second of two gaussian numbers for the next call, and which."""


def _gauss() -> Gauss:
    state = np.random.get_state(legacy=False)
    return state["has_gauss"], state["gauss"]


def _set_numpy(generator: Any, gauss: Gauss) -> None:
    # setting a complete state would copy it; this discards the cached Gaussian
    np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
    if gauss[0]:
        np.random.set_state(np.random.get_state(legacy=False) | dict(zip(("has_gauss", "gauss"), gauss, strict=True)))


class Draws:
    """Notes in a worker, for its rank to see, that the user's code has drawn random numbers, and from what."""

    def __init__(self) -> None:
        self._noted = torch.zeros(512, dtype=torch.uint8).share_memory_()

    def note(self, name: str = "") -> None:
        text = name.encode()[:500]
        self._noted[1 : 1 + len(text)] = torch.tensor([*text], dtype=torch.uint8)
        self._noted[0] = 1  # last, as the rank then reads the name

    @property
    def name(self) -> str:
        return bytes(self._noted[1:].tolist()).rstrip(b"\0").decode(errors="replace")

    def __bool__(self) -> bool:
        return bool(self._noted[0])


class HeldState:
    """The generators and numbers that `roots` hold, by name, and which of them have changed since now."""

    def __init__(self, roots: Mapping[str, Any], rank: int = 0) -> None:
        self._roots, self._rank = roots, rank
        self._first = search(self._roots).copied()
        self._known: set[tuple[str, str]] = set()
        """Of what the run that is resumed had changed."""
        self._began: Held | None = None

    def __reduce__(self) -> Any:  # a DataLoader worker has the dataset itself
        return HeldState, ({}, self._rank)

    def now(self) -> Callable[[], None]:
        """What lets all be as it is now."""
        return partial(self._put, search(self._roots).copied())

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        put_back = self.now()
        try:
            yield
        finally:
            put_back()

    def begin(self) -> None:
        """Note what is held as the data begins to be read."""
        self._began = search(self._roots).copied()

    def put_back(self) -> None:
        """Let all be as before the data was read last."""
        if self._began is not None:
            self._put(self._began)
            self._began = None

    def _put(self, then: Held) -> None:
        now = search(self._roots)
        for key, place in now.places.items():
            state = None if place.is_of_run else then.states.get(key)
            if state is not None and not is_same(now.states[key], state) and now.may_put(key, state, then):
                put_state(place, state)

    def state_dict(self) -> dict[str, Any]:
        now, first = search(self._roots), self._first
        kept: dict[str, dict[str, Any]] = {}
        lost = []
        for key, state in now.states.items():
            before = first.states.get(key)
            is_unchanged = key not in self._known and before is not None and is_same(state, before)
            if is_unchanged or now.places[key].is_of_run:
                continue
            if now.may_put(key, state, first):
                kept.setdefault(key[0], {})[key[1]] = state
            elif before is not None and is_number(before) and is_number(state):
                lost.append(now.places[key].shown)
        found = ({"kept": kept} if kept else {}) | ({"lost": lost} if lost else {})
        return {HELD: found} if found else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take up the part of `state` that `state_dict` gave; return the rest."""
        held: Mapping[str, Any] = state.get(HELD, {})
        now, lost = search(self._roots) if held else Held(), [*held.get("lost", ())]
        for owner, states in held.get("kept", {}).items():
            for name, each in states.items():
                self._known.add((owner, name))
                own = now.states.get((owner, name), each)
                is_alike = own.get("value", 0) is None or ("generator" in own) is ("generator" in each)
                if (owner, name) in now.places and is_alike:
                    put_state(now.places[owner, name], each)
                elif owner in now.owners and name not in now.owners[owner]:  # made as it is first used
                    now.owners[owner][name] = put_into(None, each)
                else:
                    lost.append(f"{owner}.{name}")
        if lost and self._rank == 0:
            _log.warning(
                "these generators and numbers, which reading data had changed, begin as they are built: "
                f"{', '.join(sorted(lost)[:10])}{', …' * (len(lost) > 10)}; they are not there, or were not saved "
                "because what their object holds beside them is not (a cache, an open file): keep them in an object of "
                "their own, or derive them from the index"
            )
        return {key: value for key, value in state.items() if key != HELD}


class Watched:
    """A fetcher that notices what user code draws from generators of its own, or counts, from fetch to fetch."""

    def __init__(self, fetcher: Any, roots: Mapping[str, Any], draws: Draws | None, refuses: bool) -> None:
        """`draws` notes it where there are workers. With `refuses` every fetch is compared, and OwnDraws raised
        without workers."""
        self.fetcher = fetcher
        self._roots, self._draws, self._refuses = roots, draws, refuses
        self._fetches, self._moved, self._held = 0, Counter[tuple[str, str]](), Held()

    @property
    def dataset(self) -> Any:
        return self.fetcher.dataset

    @property
    def may_filter(self) -> bool:
        return bool(self.fetcher.may_filter)

    def __reduce__(self) -> Any:
        return Watched, (self.fetcher, self._roots, self._draws, self._refuses)

    def __getitem__(self, key: Any) -> Any:
        self._fetches += 1
        new = self._fetches & (self._fetches - 1) == 0
        if not (new or self._refuses or self._fetches <= _LOOKS) or (self._draws is not None and self._draws):
            return self.fetcher[key]
        if new:  # what is held may be made as samples are read
            self._held = search(self._roots)
        before = [(at, held := place.get(), _state_of(held)) for at, place in self._held.places.items()]
        batch = self.fetcher[key]
        for at, held, state in before:
            place = self._held.places[at]
            if state is None or (state is _NUMBER and place.get() is held):
                continue
            was: Any = state_of(held) if state is _NUMBER else state
            if moved(place, held, was, self._held.reseeds):
                self._moved[at] += 1  # what is made once, or set once, is what each copy makes
                if self._moved[at] == 2:
                    self._note(place.shown, is_number(was))
        return batch

    def _note(self, name: str, counts: bool) -> None:
        done = f"{name} is {'changed' if counts else 'drawn from'} as samples are read"
        if self._draws is not None and get_worker_info() is not None:
            self._draws.note(done)
        elif self._refuses:
            raise refused(done)


def _state_of(held: Any) -> Any:
    return _NUMBER if type(held) in (bool, int, float) else state_of(held)


_NUMBER = object()
"""In the place of the state of a number, which is the number: there may be thousands, for each fetch."""


class OwnDraws(ValueError):
    """What user code draws or counts by itself would depend on the number of ranks."""


def refused(done: str) -> OwnDraws:
    return OwnDraws(
        f"{done}, which a rank does for the samples that it reads alone, so that with virtual_ranks, learners, clients "
        f"and workers of a parameter server it would depend on the number of ranks; {_INSTEAD}"
    )


_INSTEAD = (
    "draw from the streams of torch, Python (random) or numpy (numpy.random), which Lockstep seeds by the place of the "
    "sample, or derive it from the index"
)


def warning_of(done: str) -> str:
    """What to warn of where workers have done it."""
    return (
        f"{done}, in copies of DataLoader workers that no checkpoint holds, so that it depends on num_workers and is "
        f"not continued by a resumed run; {_INSTEAD}"
    )


def drawn_from() -> tuple[bytes, Any, bytes, int, Gauss]:
    """The states of torch, random and numpy: equal to those before if nothing was drawn."""
    numpy = np.random.get_state(legacy=False)
    key, position = numpy["state"]["key"].tobytes(), numpy["state"]["pos"]
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), key, position, _gauss()


EPOCHS = 1 << 32
"""Among several loaders, the later rounds of a shorter one in an epoch have its number plus multiples of this, so that
they draw other random numbers."""


def announce(iterated: Any, seed: int, epoch: int) -> None:
    """Tell the epoch to whatever of the user's decides an order, and seed the generators that it draws from."""
    for part in (iterated, getattr(iterated, "batch_sampler", None), getattr(iterated, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch % EPOCHS)
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(mix(seed, epoch))


def seed_all(seed: int) -> None:
    """Seed torch, random and numpy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
