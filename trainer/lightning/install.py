"""The modules below `lockstep.lightning`, made from the table in names.py."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

from lockstep.trainer.lightning.names import PATHS, REFUSED, SAME
from lockstep.trainer.lightning_names import nearest


@functools.cache
def places() -> dict[str, dict[str, tuple[str, str]]]:
    """For each path below `lightning` its names, each with our module and our name."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for path, modules in PATHS.items():
        words = [(place.strip(), word.partition("=")) for place, names in modules.items() for word in names.split()]
        found[path] = {name: (f"lockstep.{place}", ours or name) for place, (name, _, ours) in words}
    for path, files in SAME.items():
        found |= {f"{path}.{file}": found[path] for file in files.split()}
    return found


def install(root: str) -> None:
    """Make the modules below `root`; each imports what a name needs at the first use of that name."""
    for path, names in places().items():
        if path:
            module = ModuleType(f"{root}.{path}", f"What code takes from lightning.{path}, mapped onto Lockstep.")
            vars(module).update(
                __path__=[],
                __all__=sorted(name for name in names if not name.startswith("__")),
                __getattr__=functools.partial(find, root, path),
            )
            sys.modules[module.__name__] = module
    for path in filter(None, places()):
        parent, _, name = f"{root}.{path}".rpartition(".")
        if name not in places()[path.rpartition(".")[0]]:
            setattr(sys.modules[parent], name, sys.modules[f"{root}.{path}"])


def find(root: str, path: str, name: str) -> Any:
    """The value of `name` in the module `path`. Raises ImportError for a name of Lightning that is not offered, with
    what to write instead, and AttributeError for others."""
    names = places()[path]
    place = f"{root}.{path}".rstrip(".")
    if name in names:
        module, ours = names[name]
        value = getattr(importlib.import_module(module), ours)
        setattr(sys.modules[place], name, value)
        return value
    if name in REFUSED:
        raise ImportError(f"lockstep.lightning has no {name}; {REFUSED[name]}")
    raise AttributeError(f"module {place!r} has no attribute {name!r}{nearest(name, names)}")
