"""Ratchets: what the design promises of the shape of the code, and what may only shrink."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import REPO_ROOT

PACKAGES = ("trainer", "strategies", "callbacks")
FILES = sorted(path for package in PACKAGES for path in (REPO_ROOT / package).glob("*.py"))
MODULES = {f"{path.parent.name}.{path.stem}" for path in FILES} | set(PACKAGES)

# Limits that may be lowered, never raised.
MAX_STRATEGY_VERBS = 22  # raised by decision 0019
MAX_CALLBACK_HOOKS = 37
MAX_TRAINER_ARGUMENTS = 32

PUBLIC = {
    "trainer": {
        "Trainer",
        "Module",
        "DataModule",
        "CombinedLoader",
        "Loss",
        "seed_everything",
        "CheckpointError",
        "ConfigError",
        "RankFailure",
    },
    "callbacks": {
        "Callback",
        "CSVLogger",
        "ChannelsLast",
        "CommunicationLedger",
        "EarlyStopping",
        "Guard",
        "LRScaling",
        "LRWarmup",
        "LearningRateMonitor",
        "Logger",
        "ModelCheckpoint",
        "ModelSummary",
        "Profiler",
        "ProgressBar",
        "TensorBoardLogger",
        "ThroughputMonitor",
        "Timer",
    },
    "strategies": {
        "DDP",
        "DataParallel",
        "DeepSpeed",
        "FSDP",
        "Loss",
        "MeshParallel",
        "ModelParallel",
        "Pipeline",
        "SingleDevice",
        "Strategy",
        "TensorParallel",
        "build",
    },
}


def imports(path: Path, *, type_checking: bool) -> Iterator[str]:
    """Names of the modules that a file imports, anywhere in it; those under `if TYPE_CHECKING` only if asked for."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not type_checking:
            for child in node.orelse:
                yield from walk(child)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child)

    return walk(ast.parse(path.read_text(), str(path)))


def package_modules(package: str) -> list[ModuleType]:
    return [
        importlib.import_module(f"{package}.{path.stem}") for path in sorted((REPO_ROOT / package).glob("[a-z]*.py"))
    ]


def ids(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_point_one_way(path: Path) -> None:
    foreign = {
        "trainer": {"tests", "examples", "benchmarks"},
        "callbacks": {"strategies"},
        "strategies": {"callbacks", "trainer"},
    }
    forbidden = {"tests", "examples", "benchmarks"} | foreign[path.parent.name]
    everything = {name.split(".")[0] for name in imports(path, type_checking=True)}
    assert not everything & forbidden
    if path.parent.name == "callbacks":
        assert "trainer" not in {name.split(".")[0] for name in imports(path, type_checking=False)}, (
            "callbacks name the Trainer under TYPE_CHECKING only"
        )


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_no_package_imports_its_own_root(path: Path) -> None:
    assert path.parent.name not in set(imports(path, type_checking=True))


def test_no_import_cycles() -> None:
    graph = {}
    for path in FILES:
        name = path.parent.name if path.stem == "__init__" else f"{path.parent.name}.{path.stem}"
        graph[name] = {target for target in imports(path, type_checking=False) if target in MODULES}
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in finished:
            for target in sorted(graph.get(name, ())):
                visit(target, [*trail, name])
            finished.add(name)

    for name in graph:
        visit(name, [])


@pytest.mark.parametrize("folder", ["trainer", "callbacks", "examples", "benchmarks"])
def test_nobody_asks_which_strategy_it_has(folder: str) -> None:
    """A caller that would ask means that the contract lacks a question."""
    classes = {
        name
        for module in package_modules("strategies")
        for name, value in vars(module).items()
        if inspect.isclass(value) and value in strategy_classes()
    }
    assert {"Strategy"} < classes
    for path in (REPO_ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("isinstance", "issubclass")
            ):
                asked = {
                    name.split(".")[-1]
                    for name in ast.unparse(node.args[1]).strip("()").replace("|", ",").replace(" ", "").split(",")
                }
                assert not asked & (classes - {"Strategy"}), f"{path}:{node.lineno}"


def strategy_classes() -> set[type]:
    from strategies.base import Strategy

    def below(cls: type) -> set[type]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    modules = {f"strategies.{path.stem}" for path in (REPO_ROOT / "strategies").glob("*.py")}
    return {cls for cls in below(Strategy) if cls.__module__ in modules}


def test_a_class_of_strategies_is_abstract_or_has_no_subclass() -> None:
    package_modules("strategies")
    for cls in strategy_classes():
        children = [child for child in cls.__subclasses__() if child in strategy_classes()]
        assert inspect.isabstract(cls) or not children, (
            f"{cls.__name__} is concrete and {[child.__name__ for child in children]} derive from it"
        )


def test_the_strategy_contract_does_not_grow() -> None:
    from strategies.base import Strategy

    verbs = [name for name in vars(Strategy) if not name.startswith("_")]
    assert len(verbs) <= MAX_STRATEGY_VERBS, verbs
    for cls in strategy_classes():
        extra = {name for name, value in vars(cls).items() if not name.startswith("_") and callable(value)} - set(verbs)
        assert not extra, f"{cls.__name__} has public methods that are not of the contract: {extra}"


def test_the_callback_contract_does_not_grow() -> None:
    from callbacks.base import Callback

    hooks = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    assert len(hooks) <= MAX_CALLBACK_HOOKS, f"{len(hooks)} hooks"


def test_the_trainer_does_not_grow() -> None:
    from trainer import Trainer

    arguments = [parameter for name, parameter in inspect.signature(Trainer).parameters.items() if name != "self"]
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in arguments)
    assert len(arguments) <= MAX_TRAINER_ARGUMENTS, f"{len(arguments)} arguments"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == PUBLIC[package]
    for name in module.__all__:
        assert inspect.getdoc(getattr(module, name)), f"{package}.{name} has no docstring"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_roots_only_re_export(package: str) -> None:
    statements = ast.parse((REPO_ROOT / package / "__init__.py").read_text()).body
    uncollected = [
        outer for outer in statements if isinstance(outer, ast.With) and ast.unparse(outer.items[0]) == "uncollected()"
    ]
    for node in [inner for outer in statements for inner in (outer.body if outer in uncollected else [outer])]:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert docstring or names or isinstance(node, ast.Import | ast.ImportFrom), ast.unparse(node)


IMPORT_COST = """
import contextlib, json, os, sys
import torch

def state():
    tasks = os.listdir("/proc/self/task")
    children = [pid for task in tasks for pid in open(f"/proc/self/task/{task}/children").read().split()]
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return len(tasks), len(children), sorted(link for link in links if link.startswith(("socket:", "pipe:")))

modules, before = set(sys.modules), state()
import trainer, strategies, callbacks
after = state()
added = {name.split(".")[0] for name in set(sys.modules) - modules} - set(sys.stdlib_module_names)
print(json.dumps({"before": before, "after": after, "added": sorted(added), "torch": sorted(n for n in set(sys.modules) - modules if n.startswith("torch."))}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_importing_starts_nothing_and_costs_torch_and_little_more() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_COST], cwd=REPO_ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["after"] == seen["before"], "threads, child processes, sockets and pipes"
    assert set(seen["added"]) - {"torch"} <= {*PACKAGES, "cloudpickle", "isal", "numpy", "safetensors"}
    assert not [
        name
        for name in seen["torch"]
        if name.startswith(("torch.utils.tensorboard", "torch._dynamo", "torch.distributed.tensor"))
    ]
