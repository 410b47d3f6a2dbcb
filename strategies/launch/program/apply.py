"""On a rank: what a program has changed in modules since it imported them is put into the modules of this process."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from types import ModuleType
from typing import Any

from lockstep.strategies.launch.program.changes import At, are_equal, is_own_class
from lockstep.strategies.launch.program.values import Parts, put_into, put_parts


def apply(changes: dict[str, bytes]) -> None:
    """Let the modules of this process hold what those of the program did: those imported already now, others when they
    are imported."""
    here = [name for name in changes if name in sys.modules]
    pending = {name: changes[name] for name in changes if name not in here}
    if pending:
        sys.meta_path.insert(0, _Importer(pending))
    for name in here:
        _apply_to(sys.modules[name], changes[name])


class _Importer:
    """Applies changes to a module as soon as it has been imported."""

    def __init__(self, pending: dict[str, bytes]) -> None:
        self.pending = pending

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        changes = self.pending.pop(name, None)
        spec = importlib.util.find_spec(name) if changes else None
        if changes is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_apply(module: ModuleType) -> None:
            execute(module)
            _apply_to(module, changes)

        spec.loader.exec_module = execute_and_apply  # type: ignore[method-assign]
        return spec


def _apply_to(module: Any, changes: bytes) -> None:
    try:
        found = pickle.loads(changes)
    except Exception as error:  # whatever the code of a class raises
        raise TypeError(
            f"{At.last} was changed since its file was imported, and ranks import the file again, but what is there "
            f"now cannot be made of its pickle on a rank ({type(error).__name__}: {error}); write it in the file, or "
            "set it in a hook, such as setup()"
        ) from error
    for _, change in found:
        owner = module
        for part in filter(None, change.owner.split(".")):
            owner = getattr(owner, part, None)
        missing = owner is None or change.name not in vars(owner)
        current = None if missing else vars(owner)[change.name]
        if owner is None or (change.added and not missing):
            continue
        if change.file is not None and not are_equal(current, change.file.value):
            continue
        if isinstance(change.value, Parts):
            put_parts(current, change.value, are_equal)
        elif missing or not (are_equal(current, change.value) or put_into(current, change.value, is_own_class)):
            setattr(owner, change.name, change.value)
