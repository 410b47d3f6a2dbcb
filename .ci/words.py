"""Find banned phrases in code, tests and docs, and lines of code that are too long.

    python3 .ci/words.py              print what is new and exit with 1
    python3 .ci/words.py docs/a.md    print every finding in these files or folders
    python3 .ci/words.py --lower      write lower limits after a clean-up

`.ci/words.json` holds the number of findings that each folder may have. A limit may only fall.
CONTRIBUTING.md has the glossary.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / ".ci" / "words.json"
GLOSSARIES = (Path(__file__).resolve(), ROOT / "CONTRIBUTING.md")
"""They quote what they ban."""
SUFFIXES = (".py", ".md", ".yaml", ".cfg", ".toml")
MAX_COLUMNS = 120

BANNED = {
    r"walk(s|ed|ing)? back": "run backward",
    r"(go|goes|went|going|gone) on(?! (any|one|all|the|a|CUDA|GPU))": "resume, continue",
    r"look(s|ed|ing)? at": "check, read, see",
    r"(leave|leaves|left|leaving) out": "skip, omit",
    r"pass(es|ed|ing)? over": "skip",
    r"told": "reported, set, configured",
    r"(?<!there )(is|are) no(?= \w)(?! longer| more)": "is not a, is not an",
    r"(?<!there )(is|are) (?-i:none)": "is not, none is",
    r"without a word": "silently",
    r"beside the training": "asynchronously, in the background",
    r"(compute|computes|computed|computing) again": "recompute, activation checkpointing",
    r"cut (over|by|along|for|anew)": "sharded over, split along",
    r"gradients meet": "gradients are all-reduced",
    r"traceless": "side-effect free",
    r"(dice|rehears\w+)": "RNG state; shape inference",
    r"(lie|lies|lay)( \w+)? (in|on|at|under|beside|between)": "is in, is on",
    r"anew": "again, newly",
    r"for ever": "forever",
    r"thaw\w*": "unfreeze",
    r"comes? home": "is returned",
    r"(initial|material|normal|optim|recogn|synchron|serial|parametr|general|minim|maxim|summar|util|special|vector|"
    r"random|final|organ|real|penal|token|visual|local|factor|custom|quant)is(e|es|ed|ing|ation|ations|er|ers)": "US "
    "spelling: -ize, -ization",
    r"(behaviour|colour|favour|neighbour|honour|labelled|labelling|modelled|cancelled|centre|licence|catalogue|grey)s?": (
        "US spelling: -or, -eled, -er"
    ),
}
PATTERN = re.compile(
    "|".join(
        rf"(?<![a-z])(?P<p{i}>{phrase.replace(' ', '[ _]')})(?![a-z])"  # names are read as sentences
        for i, phrase in enumerate(BANNED)
    ),
    re.IGNORECASE,
)


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and what to write instead, for each finding in a file."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for found in PATTERN.finditer(line):
            yield number, found[0], list(BANNED.values())[int(str(found.lastgroup)[1:])]
        if path.suffix == ".py" and len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns", f"at most {MAX_COLUMNS} columns"


def files(places: list[str]) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *places],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    paths = [ROOT / name for name in listed if name.endswith(SUFFIXES)]
    return [path for path in paths if path.is_file() and path not in GLOSSARIES]


def room(path: Path) -> str:
    """Where a file is counted: its folder at the root, or the file itself."""
    return path.relative_to(ROOT).parts[0]


def main(arguments: list[str]) -> int:
    limits: dict[str, int] = json.loads(LIMITS.read_text()) if LIMITS.exists() else {}
    lower = "--lower" in arguments
    places = [argument for argument in arguments if not argument.startswith("-")]
    counts: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    for path in files(places):
        for number, phrase, instead in findings(path):
            counts[room(path)] += 1
            lines.setdefault(room(path), []).append(f"{path.relative_to(ROOT)}:{number}: {phrase!r}: write {instead}")
    if places:
        print("\n".join(line for found in lines.values() for line in found))
        return int(bool(counts))
    if lower:
        kept = {name: min(count, limits.get(name, 0 if limits else count)) for name, count in sorted(counts.items())}
        LIMITS.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    failed = False
    for name, count in sorted(counts.items()):
        if count > limits.get(name, 0):
            failed = True
            print("\n".join(lines[name]))
            print(f"{name}: {count} banned phrases or long lines, at most {limits.get(name, 0)} are allowed\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
