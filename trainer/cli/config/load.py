"""Reading a config: YAML files and `key=value` overrides, merged in order."""

from __future__ import annotations

import collections.abc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.strategies.registry import as_class
from lockstep.trainer.cli.config.signatures import trainer_arguments
from lockstep.trainer.cli.errors import ConfigError, Key, Resolved, bounded, error_at, first_line
from lockstep.trainer.lightning_names import ARGUMENTS, nearest

SHORT_FOR_MODULE = ("optimizer", "lr_scheduler")
"""Top-level sections that are arguments of the module."""

SECTIONS = ("module", "data", "trainer", "ckpt_path", "output", "vars", *SHORT_FOR_MODULE)
"""What may be at the top level. `vars` holds the user's own values, which nothing but interpolations reads."""


STRATEGY = ("trainer", "strategy")


@bounded
def resolve(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Resolved:
    """Merge YAML files, then `key=value` overrides, in order. Raises ConfigError; imports no class."""
    values: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    for file in files:
        tree, lines = read(Path(file))
        tree, lines = _canonical(tree, lines, str(file))
        values = merge(values, tree)
        origins |= lines
    for override in overrides:
        key, value = parse_override(override)
        _check_top_level(key[0], "command line")
        value = _with_class(value) if key in (("module",), ("data",)) else value
        key = _prefix(key[0]) + key
        assign(values, key, value, "command line")
        origins = {known: origin for known, origin in origins.items() if known[: len(key)] != key} | {
            key: "command line"
        }
    return Resolved(interpolate(Resolved(values, origins)), origins, values)


def read(file: Path) -> tuple[dict[str, Any], dict[Key, str]]:
    """The file's tree and, for every key, "file:line"."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text)
        if root is not None and root.id != "mapping" and not root.tag.endswith(":null"):
            raise ConfigError(f"{file}: a config is a mapping of sections ({', '.join(SECTIONS)}), not a {root.id}")
        tree = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else {}
        lines = dict(_lines(root, (), str(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read config file '{file}': {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(
            f"{file}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {first_line(error)}") from error
    return _string_keys(tree), lines


def _lines(node: Any, key: Key, file: str) -> collections.abc.Iterator[tuple[Key, str]]:
    if node is None:
        return
    pairs = node.value if node.id == "mapping" else []
    for merged in (child for name, child in pairs if name.tag == "tag:yaml.org,2002:merge"):
        for mapping in reversed(merged.value) if merged.id == "sequence" else [merged]:  # the first one counts
            yield from _lines(mapping, key, file)
    children = [(name.value, name, child) for name, child in pairs]
    children += [(str(i), child, child) for i, child in enumerate(node.value)] if node.id == "sequence" else []
    for name, at, child in children:
        yield (*key, name), f"{file}:{at.start_mark.line + 1}"
        yield from _lines(child, (*key, name), file)


def _string_keys(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {str(name): _string_keys(value) for name, value in tree.items()}
    return [_string_keys(value) for value in tree] if isinstance(tree, list) else tree


def _with_class(given: Any) -> Any:
    """The section `module` or `data`, of which a string is the class."""
    return {"class": given} if isinstance(given, str) else given


def _canonical(tree: dict[str, Any], lines: dict[Key, str], file: str) -> tuple[dict[str, Any], dict[Key, str]]:
    """Move the short spellings of the top level to where they belong."""
    result: dict[str, Any] = {}
    for name in sorted(tree, key=lambda name: bool(_prefix(name))):
        origin, section = lines.get((name,), file), _prefix(name)  # YAML may write a key in other ways, such as 0x1
        _check_top_level(name, origin)
        if not section:
            result[name] = _with_class(tree[name]) if name in ("module", "data") else tree[name]
        elif isinstance(given := result.get(section[0]), dict) and name in given:
            place = (*section, name)
            raise error_at(
                (name,),
                origin,
                f"is short for {section[0]}.{name}, which the same file sets as well ({lines.get(place, file)}); keep "
                "one of them",
            )
        else:
            assign(result, (*section, name), tree[name], origin)
    return result, {_prefix(key[0]) + key: origin for key, origin in lines.items()}


def parse_override(text: str) -> tuple[Key, Any]:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    name, equals, value = text.partition("=")
    name = re.sub(r"\[(\d+)\]", r".\1", name)
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[^.\s]+)*", name):
        raise ConfigError(f"'{text}' (command line): an override is key=value, such as trainer.max_epochs=3")
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except yaml.YAMLError as error:
        raise error_at(
            tuple(name.split(".")),
            "command line",
            f"'{value}' is not valid YAML: {getattr(error, 'problem', None) or error}",
        ) from error
    except GrammarParseError as error:
        raise error_at(
            tuple(name.split(".")),
            "command line",
            f"'{value}' is not a valid interpolation; write ${{vars.name}} or ${{oc.env:NAME}}",
        ) from error
    return tuple(name.split(".")), _string_keys(tree)["value"]


def merge(old: Any, new: Any) -> Any:
    """`new` laid over `old`, key by key; another class replaces all that the former one was given."""
    if not (isinstance(old, dict) and isinstance(new, dict)) or new.get("class", old.get("class")) != old.get("class"):
        return new
    return {**old, **{name: merge(old[name], value) if name in old else value for name, value in new.items()}}


def assign(tree: dict[str, Any], key: Key, value: Any, origin: str) -> None:
    """Set one key in place, as an override does; sections on the way come into being, list elements do not."""
    node: Any = tree
    for depth, name in enumerate(key):
        last = depth == len(key) - 1
        here = key[: depth + 1]
        if isinstance(node, list):
            if not name.isdigit() or int(name) >= len(node):
                raise error_at(here, origin, f"the list has {len(node)} elements; name one by its number, from 0")
            index: Any = int(name)
        elif isinstance(node, dict):
            index = name
            if not last and node.get(index) is None:
                node[index] = {}
        else:
            raise error_at(here, origin, f"{'.'.join(key[:depth])} is {node!r}, which has no keys")
        if here == STRATEGY and not last and isinstance(node[index], str):  # options of a strategy given by its name
            node[index] = as_class(node[index]) or node[index]
        if last:
            node[index] = merge(node.get(index) if isinstance(node, dict) else node[index], value)
        node = node[index]


def interpolate(raw: Resolved) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        values = OmegaConf.create(raw.values)
        return OmegaConf.to_container(values, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        name = re.sub(r"\[(\d+)\]", r".\1", getattr(error, "full_key", None) or "")
        message = (
            "missing: it is '???', give it a value" if isinstance(error, MissingMandatoryValue) else first_line(error)
        )
        raise raw.error(tuple(name.split(".")), message) from error


def _prefix(name: str) -> Key:
    """The section that a top-level `name` is short for, or ()."""
    if name in SHORT_FOR_MODULE:
        return ("module",)
    return ("trainer",) if name in trainer_arguments() and name not in SECTIONS else ()


def _check_top_level(name: str, origin: str) -> None:
    known = [*SECTIONS, *trainer_arguments()]
    if name in ARGUMENTS:
        raise error_at((name,), origin, f"the Trainer has no such argument; {ARGUMENTS[name]}")
    if name not in known:
        near = nearest(name, known)
        raise error_at(
            (name,),
            origin,
            f"no such key{near}{' Sections' if near else '; sections'} are {', '.join(SECTIONS)}, or any argument of "
            "the Trainer",
        )
