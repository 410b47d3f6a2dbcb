"""Install the wheel and the sdist into clean environments, and test them with several versions of Python and torch.

    python3 .ci/matrix.py                                  every cell; slow, gigabytes of wheels pass through
    python3 .ci/matrix.py --python 3.12 --torch 2.13.0     some cells
    python3 .ci/matrix.py --quick                          a run on two ranks in place of the unit tests

Each cell is an environment of its own in build/matrix, removed when the cell is done. torch comes as a CPU wheel, from
`--index` or wherever pip looks by itself. A cell for which there is no interpreter is skipped. Where there is no CPU
wheel of torch, what runs without torch is tested: that the package installs, compiles, and shows its help.
Exit code 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import glob
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
INDEX = "https://download.pytorch.org/whl/cpu"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.11.0", "2.13.0", "newest")
TESTED = ("tests/trainer", "tests/callbacks", "tests/strategies", "--ignore=tests/strategies/test_capabilities.py")
"""What pytest gets. The ignored file needs DeepSpeed, whose build takes longer than all else."""
CONFIG = """
module: {class: examples.digits.Digits}
data: {class: examples.digits.DigitsData}
trainer: {max_steps: 4, strategy: ddp, devices: 2, accelerator: cpu, enable_progress_bar: false}
"""


class Failed(Exception):
    """A command of a cell that failed, with the end of its output."""


def run(*command: str | Path, cwd: Path = WORK, timeout: float = 1800, **environ: str) -> str:
    """The output of a command. Raises Failed."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    try:
        done = subprocess.run(
            [str(word) for word in command], cwd=cwd, env={**given, "OMP_NUM_THREADS": "1", **environ}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(map(str, command))}: not done after {timeout:.0f} s") from error
    if done.returncode:
        tail = "\n    ".join(done.stdout.strip().splitlines()[-15:])
        raise Failed(f"{' '.join(map(str, command))}: exit code {done.returncode}\n    {tail}")
    return done.stdout


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, of pyenv, or of uv; None if there is none."""
    places = [
        shutil.which(f"python{version}"),
        *sorted(glob.glob(f"{Path.home()}/.pyenv/versions/{version}.*/bin/python")),
    ]
    if uv := shutil.which("uv"):
        found = subprocess.run([uv, "python", "find", version], capture_output=True, text=True)
        places.append(found.stdout.strip() if found.returncode == 0 else None)
    for place in filter(None, places):  # a shim of pyenv is on the path without a version behind it
        said = subprocess.run([place, "--version"], capture_output=True, text=True)
        if said.returncode == 0 and said.stdout.startswith(f"Python {version}."):
            return place
    return None


def distributions() -> tuple[Path, Path]:
    """Build the sdist of this checkout, and the wheel of the sdist."""
    source, built = WORK / "source", WORK / "dist"
    for folder in (source, built):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    ):
        if name and not name.startswith(("docs/", "benchmarks/")) and os.path.lexists(ROOT / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    python = environment(sys.executable, "build")
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", built, source)
    shutil.rmtree(WORK / "build")
    return next(built.glob("*.whl")), next(built.glob("*.tar.gz"))


def environment(python: str, name: str) -> Path:
    shutil.rmtree(WORK / name, ignore_errors=True)
    run(python, "-m", "venv", WORK / name)
    return WORK / name / "bin" / "python"


def newest(python: Path, index: str) -> str:
    """The newest version of torch that pip lists."""
    listed = run(python, "-m", "pip", "index", "versions", "torch", "--extra-index-url", index)
    return listed.split("torch (", 1)[1].split(")")[0].partition("+")[0]


def install_torch(python: Path, version: str, index: str) -> str | None:
    """Install the CPU wheel; None if there is none for this Python."""
    version = newest(python, index) if version == "newest" else version
    wheel = f"torch=={version}" + ("+cpu" if sys.platform == "linux" else "")
    try:
        run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--extra-index-url", index, wheel)
    except Failed as error:
        if "No matching distribution" in str(error):
            return None
        raise
    return version


def without_torch(python: Path, wheel: Path, sdist: Path) -> str:
    """What can be tested where torch cannot be installed."""
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel)
    code = "import lockstep, pathlib; print(pathlib.Path(lockstep.__file__).parent)"
    run(python, "-m", "compileall", "-q", "-f", run(python, "-c", code).strip())
    for words in (["--version"], ["--help"], ["fit", "--help"]):
        run(python.parent / "lockstep", *words)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", sdist)
    run(python.parent / "lockstep", "--version")
    return "installs, compiles, shows its help"


def with_torch(python: Path, wheel: Path, sdist: Path, quick: bool) -> str:
    """The unit tests against the installed wheel, and a run on two ranks from wheel and sdist."""
    run(python, "-m", "pip", "install", "--quiet", wheel, "scikit-learn")  # no extras: what is optional must be so
    place = WORK / "place"  # without the sources of the package, which would be imported in its place
    shutil.rmtree(place, ignore_errors=True)
    for name in ("tests", "examples"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", place)
    (place / "run.yaml").write_text(CONFIG)
    fit = (python.parent / "lockstep", "fit", "run.yaml")
    result = "run on two ranks"
    if "4 steps" not in run(*fit, cwd=place):
        raise Failed("lockstep fit did not report its 4 steps")
    if not quick:
        tools = ["pytest>=8.4", "pytest-timeout", "pytest-xdist", "hypothesis", "torchdata"]
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[plot,wandb,mlflow]", *tools)
        # Other versions of other packages warn of other things.
        said = run(
            python, "-m", "pytest", "-q", "-n", "2", "-m", "unit and not slow", "-W", "default", *TESTED, cwd=place
        )
        result = said.strip().splitlines()[-1].strip("= ")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", sdist)
    run(*fit, cwd=place)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, help=f"versions (default: {' '.join(PYTHONS)})")
    parser.add_argument("--torch", nargs="+", default=TORCHES, help=f"versions (default: {' '.join(TORCHES)})")
    parser.add_argument("--index", default=INDEX, help="index of torch's CPU wheels (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a run on two ranks in place of the unit tests")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    given = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    wheel, sdist = distributions()
    rows, failed = [("Python", "torch", "result", "s")], False
    for version in given.python:
        found = interpreter(version)
        bare = False  # what runs without torch has been tested
        for torch in given.torch:
            began, result = time.monotonic(), "no interpreter"
            print(f"-- Python {version}, torch {torch}", flush=True)
            if found is not None:
                name = f"{version}-{torch}"
                try:
                    python = environment(found, name)
                    there = install_torch(python, torch, given.index)
                    torch = there or torch
                    if there is not None:
                        result = with_torch(python, wheel, sdist, given.quick)
                    else:
                        result = "no CPU wheel" + ("" if bare else f": {without_torch(python, wheel, sdist)}")
                        bare = True
                except Failed as error:
                    failed, result = True, "FAILED"
                    print(error, flush=True)
                if not given.keep:
                    shutil.rmtree(WORK / name, ignore_errors=True)
            rows.append((version, torch, result, f"{time.monotonic() - began:.0f}"))
            print(result, flush=True)
    print("\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ("---",) * 4, *rows[1:])))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
