"""Write the picture of docs/architecture.md: which folder imports which, read from the code's own imports.

    .venv/bin/python -m docs.make_architecture            # write it
    .venv/bin/python -m docs.make_architecture --check    # exit with 1 if the page shows another

`make check` and `tests/test_docs.py` fail if the page does not show what this script writes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("trainer", "callbacks", "strategies")
BEGIN, END = "<!-- imports -->", "<!-- end of imports -->"


def picture() -> str:
    """Return a Mermaid graph: a box for each folder, an arrow for each import between folders.

    A folder whose files are imported by its own sub-folders is drawn as two boxes: the files that the
    sub-folders need, and the files that need the sub-folders. An arrow that others imply is not drawn.
    """
    paths = [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")) if path.stem != "__init__"]
    files = {_module(path): path for path in paths}
    edges = {module: set(_imports(path)) & files.keys() for module, path in files.items()}
    boxes = _boxes(files, edges)
    arrows = {(boxes[a], boxes[b]) for a in files for b in edges[a] if boxes[a] != boxes[b]}
    lines = ["graph TD"]
    for package in PACKAGES:
        lines.append(f"  subgraph {package}_folder [{package}]")
        for box in sorted({box for box in boxes.values() if box.split("/")[0].split(":")[0] == package}):
            folder, _, which = box.partition(":")
            names = sorted(files[module].stem for module, its in boxes.items() if its == box)
            label = f"{folder}/<br>{'<br>'.join(_wrapped(names))}" if which or "/" not in folder else f"{folder}/"
            lines.append(f'    {_identifier(box)}["{label}"]')
        lines.append("  end")
    lines += [f"  {_identifier(a)} --> {_identifier(b)}" for a, b in sorted(_reduced(arrows))]
    return "```mermaid\n" + "\n".join(lines) + "\n```"


def _module(path: Path) -> str:
    return ".".join(("lockstep", *path.relative_to(ROOT).with_suffix("").parts))


def _imports(path: Path) -> Iterator[str]:
    """Names of everything that a file imports, also within functions, but not under `if TYPE_CHECKING`."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
        else:
            nodes += ast.iter_child_nodes(node)


def _boxes(files: dict[str, Path], edges: dict[str, set[str]]) -> dict[str, str]:
    """The box of each module: its folder, with `:needed` for files that sub-folders below it import."""
    folders = {module: str(path.parent.relative_to(ROOT)) for module, path in files.items()}
    boxes = dict(folders)
    for package in PACKAGES:
        own = {module for module, folder in folders.items() if folder == package}
        below = {folders[module] for module in _reach(own, edges)} - {package}
        inner = {module for module, folder in folders.items() if folder in below and folder.startswith(f"{package}/")}
        needed = own & {target for module in inner for target in edges[module]}
        needed |= own & _reach(needed, {module: edges[module] & own for module in own})
        boxes.update(dict.fromkeys(needed, f"{package}:needed"))
    return boxes


def _reduced(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The arrows without those that a path of others implies; arrows of a cycle all stay."""
    targets: dict[str, set[str]] = {}
    for a, b in arrows:
        targets.setdefault(a, set()).add(b)

    reached = {box: _reach({box}, targets) for arrow in arrows for box in arrow}
    return {
        (a, b)
        for a, b in arrows
        if not any(b in reached[c] and a not in reached[c] and c not in reached[b] for c in targets[a] - {b})
    }


def _reach(start: set[str], targets: dict[str, set[str]]) -> set[str]:
    """Everything that a path of at least one arrow leads to from `start`."""
    seen: set[str] = set()
    todo = list(start)
    while todo:
        new = targets.get(todo.pop(), set()) - seen
        seen |= new
        todo += new
    return seen


def _identifier(box: str) -> str:
    return box.replace("/", "_").replace(":", "_")


def _wrapped(names: list[str]) -> Iterator[str]:
    line = ""
    for name in names:
        if line and len(line) + 2 + len(name) > 36:
            yield line + ","
            line = ""
        line = f"{line}, {name}" if line else name
    yield line


if __name__ == "__main__":
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    wanted = f"{before}{BEGIN}\n{picture()}\n{END}{after}"
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif text != wanted:
        sys.exit(f"{PAGE.relative_to(ROOT)} shows other imports than there are; run `python -m docs.make_architecture`")
