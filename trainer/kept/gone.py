"""Attributes that user code deletes in a run: they are gone afterwards too, and in a run that continues it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from lockstep.trainer.kept.fields import dict_of, drop, fields


class Gone:
    """The attributes that owners had as a run began, to find those that they have no longer."""

    def __init__(self) -> None:
        self._had: dict[str, tuple[Any, set[str]]] = {}
        """The owners, with the names of their attributes."""

    def note(self, owners: Mapping[str, tuple[Any, Iterable[str]]]) -> None:
        """Add the attributes that owners have now."""
        for path, (owner, names) in owners.items():
            known, before = self._had.get(path, (None, set[str]()))
            self._had[path] = owner, {*names} | (before if known is owner else set())

    def names(self, owners: Mapping[str, Any]) -> list[list[str]]:
        """Owner and name of each attribute that is gone, of owners that are still there."""
        still = [(path, owner, had) for path, (owner, had) in self._had.items() if owners.get(path) is owner]
        return [[path, name] for path, owner, had in still for name in sorted(had - _names(owner))]


def _names(owner: Any) -> set[str]:
    """The attributes of an owner, and of a module what has taken the place of one as a layer or tensor of it."""
    own = dict_of(owner)
    return {*fields(owner), *(name for held in ("_modules", "_parameters", "_buffers") for name in own.get(held, ()))}


def take_away(owners: Mapping[str, Any], gone: Iterable[Collection[str]]) -> None:
    """Delete from owners what `Gone.names` has found."""
    for path, name in gone:
        if path in owners and name in fields(owners[path]):
            drop(owners[path], name)
