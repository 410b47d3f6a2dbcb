"""Settings of the site that `make docs` builds from the Markdown in this folder.

The pages stay plain Markdown, as a code host shows them. Here Sphinx learns what it needs besides: the navigation
from the lists of links in index.md, pages for linked files outside docs/, and lists in docstrings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename

import lockstep

if TYPE_CHECKING:
    from docutils.nodes import document
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FROM_ROOT = {"contributing": "CONTRIBUTING.md", "changelog": "CHANGELOG.md"}
"""Pages whose text is a file at the root of the repository."""
FENCE = re.compile(r"^(```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
ITEM = re.compile(r"( *)(`[\w.]+`(?:, `[\w.]+`)*(?: and `[\w.]+`)*: .*)")

project = "Lockstep"
author = "The Lockstep authors"
version = release = lockstep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"Lockstep {release}"
html_show_sourcelink = False
html_show_copyright = False
exclude_patterns = ["**/__pycache__"]
default_role = "code"  # docstrings mark code with single backticks
maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "source": None}

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # an override without a docstring is not listed again
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Let links to files outside docs/ lead to pages of the site, and add the navigation to lists of pages."""
    path = ROOT / FROM_ROOT[page] if page in FROM_ROOT else Path(app.env.doc2path(page))
    folder = (DOCS / page).parent

    def link(found: re.Match[str]) -> str:
        file = (path.parent / found[1]).resolve()
        if "://" in found[1] or not file.exists():
            return found[0]  # Sphinx warns of those that lead nowhere
        name = str(file.relative_to(ROOT))
        own = {root: DOCS / f"{page}.md" for page, root in FROM_ROOT.items()} | {"README.md": DOCS / "index.md"}
        file = own.get(name, file)
        if file.is_relative_to(DOCS) and file.suffix in (".md", ".png", ".svg"):
            return f"]({os.path.relpath(file, folder)}{found[2] or ''})"
        app.env.linked_files.add(name)  # type: ignore[attr-defined]
        return f"](source:{name}{found[2] or ''})"

    parts = FENCE.split(path.read_text() if page in FROM_ROOT else source[0])
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    source[0] = "".join(parts) + ("\n".join(_navigation(path)) if path.stem in ("index", "README") else "")


def _navigation(path: Path) -> Iterator[str]:
    """For the first page a toctree for each of its headings, for that of a folder one: of the pages it links to."""
    seen = {path}
    for part in path.read_text().split("\n## "):
        pages = [(path.parent / found[1]).resolve() for found in LINK.finditer(part)]
        pages = [page for page in pages if page.suffix == ".md" and page.is_relative_to(path.parent)]
        new = [page for page in dict.fromkeys(pages) if page not in seen]
        seen.update(new)
        caption = [f":caption: {part.splitlines()[0]}"] if path.parent == DOCS else []
        if new:
            entries = [str(page.relative_to(path.parent).with_suffix("")) for page in new]
            yield "\n".join(["", "```{toctree}", ":hidden:", *caption, "", *entries, "```", ""])


def _resolve(app: Sphinx, tree: document, page: str) -> None:
    for node in tree.findall():
        uri = getattr(node, "attributes", {}).get("refuri", "")
        if uri.startswith("source:"):
            name, _, anchor = uri.removeprefix("source:").partition("#")
            node["refuri"] = app.builder.get_relative_uri(page, f"source/{name}") + (f"#{anchor}" if anchor else "")


def _linked_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that the docs link to: its text, or the names in a folder."""
    for name in sorted(app.env.linked_files):  # type: ignore[attr-defined]
        path = ROOT / name
        if path.suffix in (".md", ".ipynb"):
            text = path.read_text() if path.suffix == ".md" else _notebook(path)
            yield f"source/{name}", {"title": name, "body": _markdown(path, text)}, "page.html"
            continue
        if path.is_dir():
            text, lexer = (
                "\n".join(sorted(item.name for item in path.iterdir() if item.name[0] not in "._")),
                TextLexer(),
            )
        else:
            text, lexer = path.read_text(), get_lexer_for_filename(name)
        body = f"<h1>{name}</h1>\n{highlight(text, lexer, HtmlFormatter())}"
        yield f"source/{name}", {"title": name, "body": body}, "page.html"


def _notebook(path: Path) -> str:
    """The cells of a notebook, and what they print, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        parts += ["```text\n" + "".join(output["text"]) + "```" for output in cell.get("outputs", [])]
    return "\n\n".join(parts)


def _markdown(path: Path, text: str) -> str:
    """The Markdown of a file outside docs/ as HTML; what it links to in docs/ are pages of the site."""
    folder = Path("source", path.relative_to(ROOT)).parent

    def link(found: re.Match[str]) -> str:
        file = (path.parent / found[1]).resolve()
        if not file.is_relative_to(DOCS):
            return found[0]
        return f"]({os.path.relpath(file.relative_to(DOCS).with_suffix('.html'), folder)}{found[2] or ''})"

    renderer = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=4)
    return str(renderer.render(LINK.sub(link, text)))


def _docstring(app: Sphinx, what: str, name: str, object: object, options: object, lines: list[str]) -> None:
    """Make a list of lines that describe one argument each, as in "`timeout_s`: seconds that ..."."""
    listed: list[str] = []
    indent: str | None = None  # of the list that a line is in
    for line in lines:
        found = ITEM.fullmatch(line)
        if found:
            if indent is None and listed and re.match(f"{found[1]}\\S", listed[-1]):
                listed.append("")
            indent = found[1]
            line = f"{indent}- {found[2]}"
        elif not line.strip():
            indent = None
        elif indent is not None and line.startswith(indent):
            line = f"{indent}  {line.strip()}"
        elif indent is not None:
            listed.append("")
            indent = None
        listed.append(line)
    lines[:] = listed


def _begin(app: Sphinx) -> None:
    if not hasattr(app.env, "linked_files"):
        app.env.linked_files = set()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> None:
    app.add_lexer("mermaid", TextLexer)
    app.connect("builder-inited", _begin)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("doctree-resolved", _resolve)
    app.connect("html-collect-pages", _linked_files)
