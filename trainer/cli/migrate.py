"""`lockstep migrate FILE…`: rewrite imports of Lightning, and list what has no counterpart. Needs no torch."""

from __future__ import annotations

import argparse
import ast
import difflib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import page
from lockstep.trainer.lightning.install import places
from lockstep.trainer.lightning.names import ACCEPTED, REFUSED
from lockstep.trainer.lightning_names import ARGUMENTS, HOOKS, METHODS, MODULE, STRATEGIES, TRAINER, UNCALLED

USAGE = "lockstep migrate FILE... [--write]"
EXAMPLES = """
examples:
  lockstep migrate train.py model.py
  lockstep migrate --write train.py

Prints the changes as a unified diff, then a line for each name that has no counterpart, with what to write instead.
Exit codes: 0; 1 if a name has no counterpart; 2 for a wrong command or a file that cannot be read.
"""
_OFFERED = ("hparams_initial", "to_torchscript")
"""Attributes of modules that `lockstep.lightning` has, and `lockstep.Module` has not."""
_ROOTS = {
    "lightning": "lockstep.lightning",
    "pytorch_lightning": "lockstep.lightning.pytorch",
    "lightning_fabric": "lockstep.lightning.fabric",
}
_NEW = "lockstep.lightning"
_MARK = "\ufeff"
"""What some editors write at the head of a file."""


class Finding(NamedTuple):
    """A name that has no counterpart."""

    line: int
    text: str


class Edit(NamedTuple):
    """A piece of a line that is replaced; columns count UTF-8 bytes, as those of ast."""

    line: int
    begin: int
    end: int
    text: str


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises ConfigError for a wrong one."""
    parser = page(USAGE, "Rewrite imports of Lightning.", EXAMPLES)
    parser.add_argument("files", nargs="+", type=Path, help="Python files")
    parser.add_argument("--write", action="store_true", help="write the changes into the files")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises ConfigError for a file that cannot be read."""
    given = parse(words)
    found = 0
    for file in given.files:
        if file.suffix == ".ipynb":
            raise ConfigError(
                f"{file} is a notebook; `jupyter nbconvert --to script {file}` makes a program of it, to migrate"
            )
        try:
            with file.open(encoding="utf-8", newline="") as stream:  # lines end as they did
                source = stream.read()
            new, findings = migrate(source)
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{file} cannot be read as Python: {error}") from None
        print("".join(difflib.unified_diff(_lines(source), _lines(new), f"a/{file}", f"b/{file}")), end="")
        if given.write and new != source:
            with file.open("w", encoding="utf-8", newline="") as stream:
                stream.write(new)
        for finding in findings:
            print(f"{file}:{finding.line}: {finding.text}")
        found += len(findings)
    return 1 if found else 0


def migrate(source: str) -> tuple[str, list[Finding]]:
    """Return the program with its imports of Lightning replaced, and what has no counterpart, by line."""
    lines = _lines(source.removeprefix(_MARK))
    reader = _Reader(ast.parse(source.removeprefix(_MARK)), lines)
    for edit in sorted(reader.edits, reverse=True):
        line = lines[edit.line - 1].encode()
        lines[edit.line - 1] = (line[: edit.begin] + edit.text.encode() + line[edit.end :]).decode()
    return _MARK * source.startswith(_MARK) + "".join(lines), sorted(set(reader.findings))


def _lines(source: str) -> list[str]:
    """The lines as Python counts them: a form feed ends one for `splitlines` only."""
    return list(io.StringIO(source, newline=""))


class _Reader:
    """What a program takes from Lightning."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self._lines = lines
        self.edits: list[Edit] = []
        self.findings: list[Finding] = []
        self._bound: dict[str, str] = {}  # local names, with what they are: "lightning.pytorch.Trainer"
        self._kinds: dict[str, set[str]] = {}  # classes of the program, with what of Lightning they derive from
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._import(alias)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                self._import_from(node)
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                self._attribute(node)
            elif isinstance(node, ast.Call) and self._is_trainer(node.func):
                self._trainer(node)
            elif isinstance(node, ast.ClassDef):
                self._class(node)
        used = [node for node in nodes if isinstance(node, ast.Attribute)] if self.edits else []
        for node in used:
            of_trainer = ast.unparse(node.value) in ("trainer", "self.trainer") or self._is_trainer(node.value)
            if of_trainer and node.attr in TRAINER:
                self._say(node, f"Trainer has no attribute {node.attr!r}; {TRAINER[node.attr]}")
            elif node.attr == "to_tensorrt":
                self._say(node, f"a module has no attribute {node.attr!r}; {MODULE[node.attr]}")

    def _say(self, node: ast.AST, text: str) -> None:
        self.findings.append(Finding(getattr(node, "lineno", 1), text))

    def _import(self, alias: ast.alias) -> None:
        root, _, rest = alias.name.partition(".")
        if root not in _ROOTS:
            return
        new = _ROOTS[root] + (f".{rest}" if rest else "")
        self._check_path(alias, new, alias.name)
        if alias.asname:
            self._bound[alias.asname] = new
            text = f"{new} as {alias.asname}"
        else:
            self._bound[root] = _ROOTS[root]
            text = f"{_ROOTS[root]} as {root}"  # the modules below it are its attributes
        if alias.end_lineno == alias.lineno:
            self.edits.append(Edit(alias.lineno, alias.col_offset, alias.end_col_offset or 0, text))
        else:
            self._say(alias, f"the import is on several lines; write import {text}")

    def _import_from(self, node: ast.ImportFrom) -> None:
        assert node.module is not None
        root, _, rest = node.module.partition(".")
        if root not in _ROOTS:
            return
        new = _ROOTS[root] + (f".{rest}" if rest else "")
        begin = self._lines[node.lineno - 1].encode().find(node.module.encode(), node.col_offset + len("from "))
        if begin >= 0:
            self.edits.append(Edit(node.lineno, begin, begin + len(node.module.encode()), new))
        else:
            self._say(node, f"{node.module} is not on the line of its from; write from {new} import …")
        known = self._check_path(node, new, node.module)
        for alias in node.names:
            self._bound[alias.asname or alias.name] = f"{new}.{alias.name}"
            if known and alias.name != "*":
                self._check_name(alias, f"{new}.{alias.name}")

    def _check_path(self, node: ast.AST, new: str, old: str) -> bool:
        if new.removeprefix(_NEW).lstrip(".") in places():
            return True
        self._say(node, f"{old} has no counterpart; import what you need from lockstep")
        return False

    def _check_name(self, node: ast.AST, full: str) -> None:
        """Say it if a dotted name below `lockstep.lightning` is neither a module nor a name of the table."""
        path, _, name = full.removeprefix(_NEW).lstrip(".").rpartition(".")
        if f"{path}.{name}".lstrip(".") in places() or name.startswith("__"):
            return
        if path in places() and name not in places()[path]:
            self._say(node, f"{name} has no counterpart; {REFUSED.get(name, 'see docs/migrating/lightning.md')}")

    def _name(self, node: ast.AST) -> str:
        """What an expression is, as "lockstep.lightning.…", or nothing."""
        if isinstance(node, ast.Name):
            return self._bound.get(node.id, "")
        if isinstance(node, ast.Attribute):
            value = self._name(node.value)
            return f"{value}.{node.attr}" if value else ""
        return ""

    def _is_trainer(self, node: ast.AST) -> bool:
        return self._name(node).endswith(".Trainer")

    def _attribute(self, node: ast.Attribute) -> None:
        parts: list[ast.Attribute] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner)
            inner = inner.value
        for part in reversed(parts):
            name = self._name(part)
            if name:
                self._check_name(part, name)

    def _trainer(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            name, value = keyword.arg, keyword.value
            if name is None or name not in ARGUMENTS or name in ("barebones", "sync_batchnorm"):
                continue
            constant = value.value if isinstance(value, ast.Constant) else value
            if constant is not None and constant not in ACCEPTED.get(name, ()):
                self._say(keyword, f"Trainer has no argument {name!r}; {ARGUMENTS[name]}")

    def _class(self, node: ast.ClassDef) -> None:
        names = {self._name(base).rpartition(".")[2] for base in node.bases}
        kinds = names & {"LightningModule", "LightningDataModule", "Callback", *UNCALLED}
        kinds = kinds.union(*(self._kinds.get(ast.unparse(base), ()) for base in node.bases))
        self._kinds[node.name] = kinds
        for name in sorted(names & STRATEGIES.keys()):
            self._say(node, f"{name} has no subclasses; derive from lockstep.strategies.{STRATEGIES[name]}")
        if not kinds:
            return
        uncalled = {**HOOKS, **METHODS} if "LightningModule" in kinds else {**HOOKS}
        for kind in kinds & UNCALLED.keys():
            uncalled |= UNCALLED[kind]
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name in uncalled:
                self._say(child, f"{node.name}.{child.name} is not called; {uncalled[child.name]}")
        if "LightningModule" in kinds:
            own = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
            for found in _attributes_of_self(node):
                if found.attr in MODULE and found.attr not in (*own, *_OFFERED):
                    self._say(found, f"a module has no attribute {found.attr!r}; {MODULE[found.attr]}")


def _attributes_of_self(node: ast.AST) -> Iterator[ast.Attribute]:
    set_here = {
        child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)
    }
    for child in ast.walk(node):
        if (
            isinstance(child, ast.Attribute)
            and isinstance(child.value, ast.Name)
            and child.value.id == "self"
            and child.attr not in set_here
        ):
            yield child
