"""The site that `make docs` builds: without a warning, with search, from local files, every link leads somewhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import lockstep.callbacks
import lockstep.strategies
from tests.conftest import REPO_ROOT

pytestmark = [pytest.mark.docs, pytest.mark.timeout(300)]


class Page(HTMLParser):
    """The anchors of a page, where it links to, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") == "stylesheet":
            self.loads.append(given["href"])
        if tag in ("script", "img") and "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as by `make docs`, in a folder of its own."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason="pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # the garbage collector, which finds nothing in a tree of pages, takes two fifths of the time
    sphinx = "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
    built = subprocess.run(
        [*(sys.executable, "-c", sphinx, "--fail-on-warning", "--keep-going", "--quiet"),
         *("-d", str(folder / "doctrees"), str(REPO_ROOT / "docs"), str(folder / "html"))],
        cwd=REPO_ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder / "html"


def broken(site: Path) -> Iterator[str]:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if "://" in link or target.startswith("mailto:"):
                continue
            goal = (path.parent / target).resolve() if target else path
            if not goal.exists() or (anchor and goal in pages and anchor not in pages[goal].anchors):
                yield f"{path.relative_to(site)} links to {link}"
        for name in page.loads:
            if "://" in name or not (path.parent / name.partition("?")[0]).exists():
                yield f"{path.relative_to(site)} loads {name}"


@pytest.mark.long
def test_the_site_is_complete(site: Path) -> None:
    assert not list(broken(site))
    assert (site / "searchindex.js").stat().st_size > 100_000 and (site / "search.html").exists()
    for page in (REPO_ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(REPO_ROOT / "docs").with_suffix(".html")).exists()
    reference = {page.stem: Page(page.read_text()).anchors for page in (site / "reference").glob("*.html")}
    anchors = set().union(*reference.values())
    for package in (lockstep, lockstep.callbacks, lockstep.strategies):
        for name in set(package.__all__) - {"__version__"}:
            known = {f"{package.__name__}.{name}", f"lockstep.{name}"}
            assert known & anchors, f"docs/reference shows no {package.__name__}.{name}"
