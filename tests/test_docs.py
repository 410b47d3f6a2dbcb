"""The README and the guide: every block runs, every command and link leads somewhere.

- Python blocks of a page run in order, as one program. A page that says at its top that they continue from the first
  block of docs/getting-started.md or docs/tutorials/digits.md follows it; others run alone. A ```text block behind a
  Python block is what it prints (`...` matches anything).
- Commands in ```bash blocks: targets of `make` exist, `lockstep ...` has a config that fits, files exist;
  `lockstep config ...` runs, and prints the ```yaml block behind it.
- Other ```yaml blocks are configs: where they name a Module, they fit.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from docs.make_architecture import PAGE, picture
from lockstep.strategies import registry
from lockstep.trainer.cli import config, parser
from lockstep.trainer.cli import main as cli
from lockstep.trainer.cli.commands import parse_compare
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.docs

PAGES = sorted([REPO_ROOT / "README.md", *(REPO_ROOT / "docs").rglob("*.md")])
RESULTS = sorted((REPO_ROOT / "benchmarks" / "results").glob("*.md"))
TEXTS = [*PAGES, *RESULTS, REPO_ROOT / "CONTRIBUTING.md", REPO_ROOT / "CHANGELOG.md"]
GETTING_STARTED = REPO_ROOT / "docs" / "getting-started.md"
TUTORIAL = REPO_ROOT / "docs" / "tutorials" / "digits.md"
CONTINUES = re.compile(r"^Blocks on this page continue from the first one of \[[^]]*\]\((\S+)\)\.$", re.MULTILINE)
SHELLS = ("bash", "sh", "console")

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    language: str
    text: str
    line: int
    """Of its first line in the page."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(found[1], found[2], text[: found.start(2)].count("\n") + 1) for found in FENCE.finditer(text)]


def with_output(page: Path, languages: tuple[str, ...], output: str) -> Iterator[tuple[Block, str | None]]:
    """The page's blocks in `languages`, each with the text of the `output` block behind it."""
    found = blocks(page)
    for block, following in zip(found, [*found[1:], None], strict=True):
        if block.language in languages:
            yield block, following.text if following is not None and following.language == output else None


def name(page: Path) -> str:
    return str(page.relative_to(REPO_ROOT))


def pages_with(*languages: str) -> list[Any]:
    return [
        pytest.param(page, id=name(page))
        for page in PAGES
        if any(block.language in languages for block in blocks(page))
    ]


def run(block: Block, page: Path, namespace: dict[str, Any]) -> None:
    exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run(page: Path, capfd: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {
        "__name__": "__main__"
    }  # as in a user's script: what it defines goes to the ranks by value
    if (link := CONTINUES.search(page.read_text())) is not None:  # else its blocks run alone
        start = (page.parent / link[1]).resolve()
        assert start in (GETTING_STARTED, TUTORIAL)
        run(next(block for block in blocks(start) if block.language == "python"), start, namespace)
    for block, expected in with_output(page, ("python",), "text"):
        capfd.readouterr()
        run(block, page, namespace)
        printed = capfd.readouterr().out
        if expected is not None:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert doctest.OutputChecker().check_output(expected, printed, flags), (
                f"{name(page)}:{block.line} prints:\n{printed}"
            )


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell block, word by word, without variables set before them and what follows a pipe."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        words = [re.sub(r"\$\w+", "1", word) for word in words]  # a variable of the shell
        if words:
            yield words[: next((i for i, word in enumerate(words) if word in ("|", ">", ">>")), None)]


def arguments_of_lockstep(words: list[str]) -> list[str] | None:
    """What follows `lockstep` or `-m lockstep` in a command, whatever starts it; None where it is another command."""
    for i, word in enumerate(words):
        if Path(word).name == "lockstep" and "=" not in word:
            return words[i + 1 :]
        if word == "-m" and words[i + 1 : i + 2] == ["lockstep"]:
            return words[i + 2 :]
    return None


def check_config(files: list[str], overrides: list[str]) -> None:
    config.check(config.resolve(files, overrides))


@pytest.mark.parametrize("page", pages_with(*SHELLS))
def test_commands_lead_somewhere(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPO_ROOT)
    targets = set(re.findall(r"^([a-z-]+):", (REPO_ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for block, expected in with_output(page, SHELLS, "yaml"):
        for words in commands(block.text):
            place = f"{name(page)}:{block.line}: {' '.join(words)}"
            arguments = arguments_of_lockstep(words)
            if words[0] == "make":
                assert set(words[1:]) <= targets, place
            elif arguments is not None and arguments and arguments[0] == "config":
                assert cli.main(arguments) == 0, place
                printed = capsys.readouterr().out
                if expected is not None:
                    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                    assert doctest.OutputChecker().check_output(expected, printed, flags), f"{place}\n{printed}"
            elif arguments is not None and arguments and arguments[0] == "compare":
                given = parse_compare(arguments[1:])
                check_config(given.files, given.overrides)
            elif arguments is not None and arguments and arguments[0] in cli.OWN_WORDS:
                importlib.import_module(f"lockstep.trainer.cli.{arguments[0]}").parse(arguments[1:])
            elif arguments is not None and arguments and not arguments[0].startswith("-"):
                command, files, overrides = parser.parse(arguments)
                assert command in parser.COMMANDS, place
                check_config(files, overrides)
            for before, word in zip(["", *words], words, strict=False):
                if before == "-m":
                    assert importlib.util.find_spec(word), place
                elif word.endswith((".py", ".yaml")) and "/" in word and "=" not in word:
                    assert Path(word).is_file(), place


@pytest.mark.parametrize("page", pages_with("yaml"))
def test_configs_fit(page: Path, tmp_path: Path) -> None:
    outputs = [output for _, output in with_output(page, SHELLS, "yaml")]
    for i, block in enumerate(blocks(page)):
        if block.language == "yaml" and block.text not in outputs:
            file = tmp_path / f"{i}.yaml"
            file.write_text(block.text)
            resolved = config.resolve([file])
            if "class" in resolved.values.get("module", {}):
                config.check(resolved)


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in TEXTS])
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{name(page)} links to {target}"
        if anchor:
            anchors = {
                re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            }
            assert anchor in anchors, f"{name(page)} links to {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()

    def visit(page: Path) -> None:
        seen.add(page)
        for target in LINK.findall(page.read_text()):
            path = (page.parent / target.partition("#")[0]).resolve()
            if path.suffix == ".md" and path not in seen:
                visit(path)

    visit(REPO_ROOT / "README.md")
    assert not [name(page) for page in PAGES if page not in seen]


def test_readme_names_the_strategies_that_there_are() -> None:
    cells = re.findall(r"^\| (.*?) \|", (REPO_ROOT / "README.md").read_text(), re.MULTILINE)
    named = {word for cell in cells for word in re.findall(r'`"([^"]+)"`', cell)}
    assert named >= set(registry.names())
    for word in named:
        registry.build(word, accelerator="cpu")  # raises for a name that nobody registered


def test_readme_example_is_short() -> None:
    example = next(block for block in blocks(REPO_ROOT / "README.md") if block.language == "python")
    assert len(example.text.splitlines()) <= 25


def test_the_picture_of_the_architecture_is_that_of_the_imports() -> None:
    assert picture() in PAGE.read_text(), "run `python -m docs.make_architecture`"
