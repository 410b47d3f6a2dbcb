"""What is installed: metadata, the command, and that every import is declared and every dependency pinned."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest

PACKAGES = ("trainer", "strategies", "callbacks")
PROVIDED_BY_THE_HOST = {
    "ipython",
    "pytest",
}  # used where the program runs in a notebook or in tests, so never missing there


@pytest.fixture
def setup_cfg(repo_root: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(repo_root / "setup.cfg")
    return parser


def requirement_names(text: str) -> set[str]:
    return {
        re.split(r"[<>=!~;\[ ]", line)[0].lower()
        for line in text.split("\n")
        if line.strip() and not line.startswith("#")
    }


def test_metadata() -> None:
    installed = distribution("lockstep")
    assert installed.version == "0.1.0"
    assert installed.metadata["Requires-Python"] == ">=3.10"
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert "torch>=2.11" in (installed.requires or [])
    assert set(installed.metadata.get_all("Provides-Extra") or []) == {"bench", "deepspeed", "dev", "examples"}


def test_the_command_is_installed() -> None:
    (command,) = distribution("lockstep").entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("lockstep", "trainer.cli:main")
    result = subprocess.run(
        [Path(sys.executable).parent / "lockstep", "--help"],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stderr
    for verb in ("fit", "validate", "test", "predict", "config"):
        assert verb in result.stdout


def test_packages_are_those_in_the_repository(repo_root: Path, setup_cfg: configparser.ConfigParser) -> None:
    assert setup_cfg["options"]["packages"].replace(" ", "").split(",") == list(PACKAGES)
    for package in PACKAGES:
        assert (repo_root / package / "__init__.py").is_file()
        assert not [path for path in (repo_root / package).rglob("*.py") if path.parent != repo_root / package], (
            "folders are flat: others are not packaged"
        )


def test_every_import_is_declared(repo_root: Path, setup_cfg: configparser.ConfigParser) -> None:
    declared = requirement_names(setup_cfg["options"]["install_requires"]) | requirement_names(
        setup_cfg["options.extras_require"]["deepspeed"]
    )
    declared |= PROVIDED_BY_THE_HOST
    distributions = packages_distributions()
    for path in (file for package in PACKAGES for file in (repo_root / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - set(PACKAGES):
                assert {found.lower() for found in distributions.get(name, [name])} & declared, (
                    f"{path} imports {name}, which setup.cfg does not declare"
                )


def test_every_dependency_is_pinned(repo_root: Path, setup_cfg: configparser.ConfigParser) -> None:
    constraints = (repo_root / "constraints.txt").read_text()
    wanted = set().union(
        requirement_names(setup_cfg["options"]["install_requires"]),
        *map(requirement_names, setup_cfg["options.extras_require"].values()),
    )
    pins = {line.split("==")[0] for line in constraints.splitlines() if "==" in line}
    assert pins == wanted


@pytest.mark.slow
def test_a_wheel_installs_alone(repo_root: Path, tmp_path: Path) -> None:
    """The wheel holds the three packages and nothing else, and works outside the repository."""
    source = tmp_path / "source"  # a build leaves files behind
    for package in PACKAGES:
        shutil.copytree(repo_root / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, "lockstep-0.1.0.dist-info"}
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel],
        check=True,
        timeout=300,
    )
    code = "import sys; sys.path.insert(0, 'site'); import trainer, callbacks, strategies; print(trainer.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.stdout.startswith(str(tmp_path / "site")), result.stderr


COUNTED = """
import gc, sys
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase) if phase == "start" else None)
{before}
import trainer
print(len(passes), gc.isenabled())
"""


@pytest.mark.parametrize(("before", "collects"), [("", "True"), ("gc.disable()", "False")])
def test_the_garbage_collector_rests_during_the_import(before: str, collects: str) -> None:
    """It is left as it was found. Importing torch alone would have it pass some 360 times."""
    counted = subprocess.run(
        [sys.executable, "-c", COUNTED.format(before=before)], capture_output=True, text=True, timeout=100, check=True
    )
    passes, enabled = counted.stdout.split()
    assert (int(passes) < 10, enabled) == (True, collects), counted.stdout
