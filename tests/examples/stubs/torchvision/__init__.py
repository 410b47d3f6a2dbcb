"""Stands in for torchvision, of which timm's models need no more than names.

The package index has torchvision for torch with CUDA only, which cannot be imported beside torch's CPU wheel.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _AnyName(type):
    """A class that has every attribute: its name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _AnyName(name, (), {})
        setattr(self, name, found)
        return found


for _name in (
    "ops",
    "ops.misc",
    "transforms",
    "transforms.functional",
    "datasets",
    "models",
    "models.feature_extraction",
):
    _module = _Module(f"{__name__}.{_name}")
    _module.__path__ = []
    sys.modules[_module.__name__] = _module
    _parent, _, _leaf = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
