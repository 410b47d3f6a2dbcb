"""What ranks agree on of what each of them has kept."""

from __future__ import annotations

from typing import Any

from lockstep.trainer.kept.owners import shown
from lockstep.trainer.kept.values import is_equal


def alike(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the states of several ranks what those that have it agree on; what they do not is lost."""
    lost = {name for state in states for name in state.get("lost", [])}
    values = _agreed([state.get("values", {}) for state in states], lost)
    begun = _agreed([state.get("begun", {}) for state in states], {*lost})
    on_device = [name for state in states for name in state.get("on_device", [])]
    replaced = [name for state in states for name in state.get("replaced", []) if name not in lost]
    groups = states[0].get("shared", []) if states else []
    groups = [kept for group in groups if len(kept := [each for each in group if shown(*each) not in lost]) > 1]
    found = {"values": values, "lost": sorted(lost), "on_device": on_device, "begun": begun}
    left = [name for state in states for name in state.get("left", []) if name not in lost]
    return found | {"replaced": replaced, "left": left, "shared": groups}


def _agreed(found: list[dict[str, dict[str, Any]]], lost: set[str]) -> dict[str, dict[str, Any]]:
    """What is not `lost`, to which those are added that differ."""
    values: dict[str, dict[str, Any]] = {}
    for path, name, value in ((path, *item) for each in found for path, own in each.items() for item in own.items()):
        if not is_equal(values.setdefault(path, {}).setdefault(name, value), value):
            lost.add(shown(path, name))
    return {path: {name: v for name, v in own.items() if shown(path, name) not in lost} for path, own in values.items()}
