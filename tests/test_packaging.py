"""What is installed: metadata, the command, and that every import is declared and every dependency pinned."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
import yaml

import lockstep
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

FOLDERS = ("trainer", "strategies", "callbacks")
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
    installed = distribution("lockstep-trainer")
    assert installed.version == "0.1.0"
    assert installed.metadata["Requires-Python"] == ">=3.10"
    assert installed.metadata["License-Expression"] == "Apache-2.0"
    assert "torch>=2.11" in (installed.requires or [])
    extras = {
        "bench",
        "deepspeed",
        "dev",
        "docs",
        "examples",
        "mlflow",
        "onnx",
        "plot",
        "timm",
        "transformers",
        "wandb",
    }
    assert set(installed.metadata.get_all("Provides-Extra") or []) == extras


def test_the_command_is_installed() -> None:
    (command,) = distribution("lockstep-trainer").entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("lockstep", "lockstep.trainer.cli.main:main")
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
    folders = [Path("lockstep"), *(Path("lockstep", name) for name in FOLDERS)]
    folders += [
        Path("lockstep", path.relative_to(repo_root))
        for name in FOLDERS
        for path in (repo_root / name).rglob("*")
        if path.is_dir() and path.name != "__pycache__"
    ]
    assert sorted(setup_cfg["options"]["packages"].split()) == sorted(".".join(folder.parts) for folder in folders)
    assert all((repo_root / folder / "__init__.py").is_file() for folder in folders)


@pytest.mark.long
def test_every_import_is_declared(repo_root: Path, setup_cfg: configparser.ConfigParser) -> None:
    declared = requirement_names(setup_cfg["options"]["install_requires"])
    for extra in ("deepspeed", "mlflow", "onnx", "plot", "wandb"):
        declared |= requirement_names(setup_cfg["options.extras_require"][extra])
    declared |= PROVIDED_BY_THE_HOST
    distributions = packages_distributions()
    for path in (file for folder in FOLDERS for file in (repo_root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"lockstep"}:
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


def test_what_repeats_the_version_agrees(repo_root: Path, setup_cfg: configparser.ConfigParser) -> None:
    citation = yaml.safe_load((repo_root / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lockstep.__version__, "Apache-2.0")
    spec = importlib.util.spec_from_file_location("matrix", repo_root / ".ci" / "matrix.py")
    assert spec is not None and spec.loader is not None
    matrix = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matrix)
    least = f"python_requires = >={matrix.PYTHONS[0]}", f"torch>={matrix.TORCHES[0].removesuffix('.0')}"
    assert all(text in (repo_root / "setup.cfg").read_text() for text in least)
    assert f"torch=={matrix.TORCHES[1]}" in (repo_root / "constraints.txt").read_text()
    assert Path(sys.executable).exists() and matrix.interpreter(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert matrix.interpreter("3.99") is None


def test_the_workflow_does_what_ci_does(repo_root: Path) -> None:
    workflow = yaml.safe_load((repo_root / ".github" / "workflows" / "ci.yaml").read_text())
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in workflow["jobs"].items()}
    assert commands["run"] == ["bash .ci/run"] and commands["docs"] == ["make docs"]
    assert commands["matrix"][0].startswith("python .ci/matrix.py")
    for form in (repo_root / ".github" / "ISSUE_TEMPLATE").glob("*.yaml"):
        found = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(found), form
        assert all(part["type"] in ("textarea", "markdown") for part in found["body"]), form


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves files behind
    source.mkdir()
    for name in (*FOLDERS, "lockstep", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        if (REPO_ROOT / name).is_dir():
            shutil.copytree(
                REPO_ROOT / name,
                source / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(REPO_ROOT / name, source)
    build = "from setuptools import build_meta; build_meta.build_sdist('.')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100)
    (sdist,) = source.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, check=True, capture_output=True, timeout=100)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_lockstep_and_nothing_else_at_top_level(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"lockstep", "lockstep_trainer-0.1.0.dist-info"}
    assert {"lockstep/py.typed", "lockstep/__main__.py", "lockstep/trainer/run/fit.py"} <= set(names)
    assert "lockstep/strategies/planning/devices.json" in names


SCRIPT = """
import config, strategies, trainer, utils  # the user's own, in this folder
import torch
from callbacks import mine
from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        assert utils.NAME == "utils" and trainer.NAME == "trainer"
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)

class Quiet(mine.Base, Callback):
    pass

if __name__ == "__main__":
    import sys
    run = Trainer(max_epochs=1, devices=int(sys.argv[1]), accelerator="cpu", callbacks=Quiet(), logger=False,
                  enable_checkpointing=False, enable_progress_bar=False)
    run.fit(Net())
    print(trainer.NAME, run.global_step)
"""


@pytest.mark.long
def test_a_script_beside_modules_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    """Its own `trainer.py`, `callbacks/`, `strategies.py`, `utils.py` and `config.py` stay its own, on every rank."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder = tmp_path / "project"
    (folder / "callbacks").mkdir(parents=True)
    (folder / "callbacks" / "__init__.py").write_text("")
    (folder / "callbacks" / "mine.py").write_text("class Base:\n    pass\n")
    for name in ("trainer", "strategies", "utils", "config"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.yaml").write_text(
        "module: {class: script.Net}\ntrainer: {max_epochs: 1, logger: false, enable_checkpointing: false,"
        " enable_progress_bar: false, accelerator: cpu}\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for command, said in (
        (["script.py", "2"], "trainer 2\n"),
        (["-m", "lockstep", "fit", "run.yaml", "devices=2"], "2 steps"),  # its launcher imports what one rank would
    ):
        result = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, timeout=100
        )
        assert result.returncode == 0 and said in result.stdout, result.stdout + result.stderr


CLIENT = """
from typing import Any

import torch
from lockstep import DataModule, Loss, Module, Trainer
from lockstep.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lockstep.strategies import FSDP
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Loss:
        value = self.layer(batch[0]).square().sum()
        self.log("train/loss", value, prog_bar=True, on_epoch=True)
        return Loss(value, len(batch[0]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_dict({"val/loss": self.layer(batch[0]).mean()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Data(DataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)


class Steps(Callback):
    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        print(trainer.global_step, trainer.callback_metrics["train/loss"])


trainer = Trainer(strategy=FSDP(), devices=2, max_epochs=1, callbacks=[Steps(), EarlyStopping("x"), ModelCheckpoint()])
trainer.fit(Net(), datamodule=Data())
"""


NOT_IN_A_CLIENT = """deepspeed lightning mlflow onnx onnxscript tokenizers torchmetrics transformers wandb
torch._dynamo torch._export torch._functorch torch._inductor torch.ao torch.distributed torch.export torch.fx
torch.onnx"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_typed_client_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the types are checked where the tools of development are installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "client.py").write_text(CLIENT)
    # thousands of files that others import and the client shows nothing of; without them, a fourth of the time
    skipped = ",".join(f"{name}.*" for name in NOT_IN_A_CLIENT.split())
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{skipped}]\nfollow_imports = skip\n")
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini", "client.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert not [line for line in result.stdout.splitlines() if line.startswith("client.py")], result.stdout


COUNTED = """
import gc, sys
passes = []
gc.callbacks.append(lambda phase, info: passes.append(phase) if phase == "start" else None)
{before}
import lockstep
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
