"""The random numbers that a user's dataset and sampler draw: the same on any number of ranks and workers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from lockstep.strategies.data.permutation import mix


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
    """Notes in a worker, for its rank to see, that the user's code has drawn random numbers."""

    def __init__(self) -> None:
        self._noted = torch.zeros(1, dtype=torch.bool).share_memory_()

    def note(self) -> None:
        self._noted.fill_(True)

    def __bool__(self) -> bool:
        return bool(self._noted)


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
