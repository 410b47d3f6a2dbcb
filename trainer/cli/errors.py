"""ConfigError and the resolved config that knows where each key was set."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

Key = tuple[str, ...]
P = ParamSpec("P")
T = TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be run; the message is one line with the key and where it was set."""


@dataclass(frozen=True)
class Resolved:
    """A merged config: plain dicts, lists and scalars, without interpolations."""

    values: dict[str, Any]
    origins: dict[Key, str]
    """Where a key was set: "file.yaml:3" or "command line"."""

    raw: dict[str, Any] = field(default_factory=dict)
    """`values` with their interpolations."""

    def from_environment(self, key: Key) -> str:
        """For a value of `key` that `${oc.env:NAME}` gave: what makes a number of the text, else nothing."""
        node: Any = self.raw
        for name in key:
            if isinstance(node, list) and name.isdigit() and int(name) < len(node):
                node = node[int(name)]
            else:
                node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, str):
            return ""
        if reference := re.fullmatch(r"\$\{(\w+(?:\.\w+)*)\}", node):  # has been resolved, so it ends
            return self.from_environment(tuple(reference[1].split(".")))
        return f"; an environment variable is a string: write ${{oc.decode:{node}}}" if "${oc.env:" in node else ""

    @property
    def text(self) -> str:
        """The config as YAML."""
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(self.values))

    def error(self, key: Key, message: str) -> ConfigError:
        """The error of `key`, with where it was set, or the nearest key in it or around it."""
        inside = (origin for known, origin in self.origins.items() if known[: len(key)] == key)
        around = (self.origins[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.origins)
        origin = self.origins.get(key) or next(inside, None) or next(around, None)
        return error_at(key, origin, message)


def bounded(fn: Callable[P, T]) -> Callable[P, T]:
    """`fn` with a ConfigError in place of the RecursionError of a config that is nested too deeply."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return fn(*args, **kwargs)
        except RecursionError:
            raise ConfigError(
                "the config is nested too deeply; flatten it, or check for an anchor or interpolation that refers to "
                "itself"
            ) from None

    return call


def error_at(key: Key, origin: str | None, message: str) -> ConfigError:
    return ConfigError(f"{'.'.join(key)}{f' ({origin})' if origin else ''}: {message}")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
