"""The garbage collector rests while torch and the packages are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it no pass of the garbage collector runs.

    An import makes hundreds of thousands of objects that stay; the collector, which goes by their number, would look
    through all of them several times and find next to nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
