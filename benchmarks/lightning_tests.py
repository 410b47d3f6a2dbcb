"""How many of Lightning's own tests pass with `lockstep.lightning` in the place of `lightning`.

    python -m benchmarks.lightning_tests CHECKOUT [--match TEXT] [--timeout 300] [--json FILE]

CHECKOUT is a clone of github.com/Lightning-AI/pytorch-lightning. Each file below its tests/tests_pytorch runs in a
process of its own, whose imports of `lightning` and `pytorch_lightning` give `lockstep.lightning`; only Fabric, the
demos and what the tests' helpers need come from the clone itself. Counted are the tests that passed, failed and were
skipped. A name that is not offered, private ones among them, may be imported, and fails the tests that use it. A file
that runs longer than the timeout is not counted. Some files import jsonargparse, and are collected where it is
installed. Without CHECKOUT nothing runs. `--match loops` takes the files with "loops" in their path.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKOUT = "LOCKSTEP_LIGHTNING_CHECKOUT"
"""Names the clone to the process of a file, in which this module is a plugin of pytest, and to the ranks that it
starts."""
FROM_CHECKOUT = (
    "lightning.fabric",
    "lightning.pytorch.demos",
    "lightning.pytorch.utilities.imports",
    "lightning.pytorch.utilities.testing",
    "lightning.pytorch.utilities.warnings",
)
"""What helpers of the tests import, and `lockstep.lightning` does not have."""
KINDS = ("passed", "failed", "skipped", "not collected", "timed out")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run Lightning's tests with lockstep.lightning.")
    parser.add_argument("checkout", type=Path, nargs="?", help="a clone of Lightning's repository")
    parser.add_argument("--match", default="", metavar="TEXT", help="only files whose path contains it")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="for each file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    found: dict[str, Counter[str]] = {}
    if arguments.checkout is None:
        print("give the path of a clone of github.com/Lightning-AI/pytorch-lightning to run its tests")
    else:
        tests = arguments.checkout.resolve() / "tests" / "tests_pytorch"
        for file in sorted(tests.rglob("test_*.py")):
            name = file.relative_to(tests).as_posix()
            if arguments.match in name:
                found[name] = outcome(file, arguments.checkout.resolve(), arguments.timeout)
                print(row(name, found[name]), flush=True)
        print(row("all", sum(found.values(), Counter())))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2))


def row(name: str, counts: Counter[str]) -> str:
    return f"{name:60} " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind] or kind == "passed")


def outcome(file: Path, checkout: Path, timeout: float) -> Counter[str]:
    """How many tests of a file passed, failed and so on."""
    paths = [str(ROOT), str(checkout / "tests"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as start:
        Path(start, "sitecustomize.py").write_text("import benchmarks.lightning_tests\n")  # of the ranks of a run
        environment = os.environ | {
            CHECKOUT: str(checkout),
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, start])),
        }
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.lightning_tests", "-p", "no:cacheprovider"]
        command += ["--noconftest", "-c", os.devnull, "--rootdir", folder, "-o", "tmp_path_retention_count=1"]
        command += [f"--basetemp={folder}/tmp", f"--junitxml={report}", str(file)]
        try:
            subprocess.run(command, cwd=folder, env=environment, timeout=timeout, capture_output=True)
        except subprocess.TimeoutExpired:
            return Counter({"timed out": 1})
        return counted(report) if report.exists() else Counter({"not collected": 1})


def counted(report: Path) -> Counter[str]:
    """The outcomes in pytest's report."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if "error" in kinds and not case.get("classname"):
            counts["not collected"] += 1
        elif kinds & {"error", "failure"}:
            counts["failed"] += 1
        else:
            counts["skipped" if "skipped" in kinds else "passed"] += 1
    return counts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Any:
    """A KeyboardInterrupt fails the test that ends in it, and not all tests of the file after it."""
    try:
        return (yield)
    except KeyboardInterrupt:
        pytest.fail("KeyboardInterrupt")


class Mapped(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives `lockstep.lightning` to imports of `lightning` and `pytorch_lightning`."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("lightning", "pytorch_lightning"):
            return None
        try:
            importlib.import_module(ours(name))
        except ModuleNotFoundError:
            if self._is_attribute(name):  # `mock.patch` tries to import each part of a path
                return None
            return self._of_checkout(name) or ModuleSpec(name, self, is_package=True)
        return ModuleSpec(name, self, is_package=True)

    def _is_attribute(self, name: str) -> bool:
        """Whether `name` is an object of a module of ours, or would be one of Lightning's."""
        parent, _, last = name.rpartition(".")
        value = getattr(sys.modules.get(parent), last, None)
        return last.lstrip("_")[:1].isupper() or not isinstance(value, (NoneType, ModuleType, _Absent))

    def _of_checkout(self, name: str) -> ModuleSpec | None:
        full = name.replace("pytorch_lightning", "lightning.pytorch", 1)
        if full.startswith(FROM_CHECKOUT):
            place = self.checkout.joinpath("src", *full.split("."))
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.exists():
                    inside = [str(place)] if file.name == "__init__.py" else None
                    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
                    assert spec is not None
                    return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        try:
            module = importlib.import_module(ours(spec.name))
        except ModuleNotFoundError:
            module = ModuleType(spec.name)
        offered = getattr(module, "__getattr__", None)

        def find(name: str) -> Any:
            if offered is not None:
                with suppress(ImportError, AttributeError):
                    return offered(name)
            return _Absent.__getattr__(NotOffered, name)

        vars(module)["__getattr__"] = find
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class _Absent(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name, (NotOffered,), {})


class NotOffered(Exception, metaclass=_Absent):
    """A placeholder for a name that `lockstep.lightning` lacks."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pytest.fail(f"lockstep.lightning has no {type(self).__name__}")


def ours(name: str) -> str:
    return "lockstep." + name.replace("pytorch_lightning", "lightning.pytorch", 1)


if __name__ == "__main__":
    main()
elif CHECKOUT in os.environ:
    sys.meta_path.insert(0, Mapped(Path(os.environ[CHECKOUT])))
