"""In which order a module's forward calls its submodules, as its source shows it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn


def call_order(module: nn.Module, names: list[str]) -> list[str]:
    """`names` of layers below `module`, in the order in which its forward calls them or the submodules that hold them.

    They come back as they are if the source does not show one place for each.
    """
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        (function,) = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return names
    if not isinstance(function, ast.FunctionDef) or not function.args.args:
        return names
    uses = [use for line in function.body for use in _uses(line, function.args.args[0].arg)]
    places: dict[str, list[int]] = {}
    for name in names:
        way = name.split(".")
        prefixes = {".".join(way[:n]) for n in range(1, len(way) + 1)}
        places[name] = [place for place, use in enumerate(uses) if use in prefixes]
    if any(len(found) != 1 for found in places.values()):
        return names
    return sorted(names, key=lambda name: places[name])


def _uses(node: ast.AST, own: str) -> Iterator[str]:
    """What of `own` a statement calls, or hands on, in the order of evaluation: "norm" for `self.norm(x)`."""
    if isinstance(node, ast.Attribute):
        path = _path(node, own)
        if path:
            yield path
        else:
            yield from _uses(node.value, own)
        return
    fields = dict(ast.iter_fields(node))
    for condition in ("test", "ifs"):  # asks whether a submodule is there
        fields.pop(condition, None)
    if isinstance(node, ast.Call):  # its arguments are computed first
        fields["func"] = fields.pop("func")
    elif isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
        fields = {"generators": fields.pop("generators"), **fields}
    for value in fields.values():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _uses(child, own)


def _path(node: ast.Attribute, own: str) -> str:
    names: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    return ".".join(reversed(names)) if isinstance(value, ast.Name) and value.id == own else ""
