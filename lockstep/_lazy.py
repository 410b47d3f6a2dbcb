"""Names that a package exports and imports at their first use (PEP 562), so that its import costs nothing."""

from __future__ import annotations

import difflib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def exports(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that exports these names; `modules` says which module of it
    defines which. A module that is listed with no names is exported itself.

    The package imports the same names under TYPE_CHECKING and lists them in `__all__`, for type checkers.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in places:
            value = getattr(_imported(f"{package}.{places[name]}"), name)
        elif name in modules:
            value = _imported(f"{package}.{name}")
        else:
            near = [] if name.startswith("_") else difflib.get_close_matches(name, places, 1)
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")
            )
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places, *(name for name in modules if "." not in name)})

    return __getattr__, __dir__


@contextmanager
def without_collector() -> Iterator[None]:
    """For imports: an import makes hundreds of thousands of objects that stay, and the garbage collector, which runs by
    their number, would scan all of them several times."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _imported(module: str) -> Any:
    with without_collector():
        return importlib.import_module(module)
