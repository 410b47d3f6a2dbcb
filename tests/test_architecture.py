"""Ratchets: what the design promises of the shape of the code, and what may only shrink."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import REPO_ROOT

PACKAGES = ("trainer", "strategies", "callbacks")
FILES = sorted(path for package in PACKAGES for path in (REPO_ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    relative = path.relative_to(REPO_ROOT).with_suffix("")
    return ".".join(("lockstep", *relative.parts)).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}

# Limits that may be lowered, never raised.
MAX_STRATEGY_VERBS = 26  # raised by decisions 0019, 0028, 0030 and 0045
MAX_STRATEGY_HOOKS = 18  # raised by decisions 0028 and 0045
MAX_CALLBACK_HOOKS = 37
MAX_TRAINER_ARGUMENTS = 40  # raised by decisions 0025 and 0027

PUBLIC = {
    "lockstep": {
        "__version__",
        "Trainer",
        "Module",
        "DataModule",
        "CombinedLoader",
        "Loss",
        "seed_everything",
        "CheckpointError",
        "ConfigError",
        "RankFailure",
        "split_parameters",
    },
    "lockstep.callbacks": {
        "Callback",
        "CSVLogger",
        "ChannelsLast",
        "ClientMetrics",
        "CommunicationLedger",
        "EarlyStopping",
        "BatchSizeFinder",
        "LRFinder",
        "BackboneFinetuning",
        "BaseFinetuning",
        "DeviceStats",
        "GradientNorm",
        "LambdaCallback",
        "PredictionWriter",
        "GradientAccumulationScheduler",
        "Guard",
        "LRScaling",
        "LRWarmup",
        "LearningRateMonitor",
        "Logger",
        "MLflowLogger",
        "ModelCheckpoint",
        "ModelSummary",
        "Profiler",
        "ProgressBar",
        "TensorBoardLogger",
        "ThroughputMonitor",
        "Timer",
        "WandbLogger",
        "WeightAveraging",
    },
    "lockstep.strategies": {
        "Compressor",
        "DDP",
        "DataParallel",
        "DeepSpeed",
        "Encoding",
        "Federated",
        "DiLoCo",
        "FSDP",
        "LocalSGD",
        "Loss",
        "MeshParallel",
        "ModelParallel",
        "ParameterServer",
        "Pipeline",
        "SPMDStrategy",
        "SingleDevice",
        "Strategy",
        "TensorParallel",
        "build",
        "dirichlet",
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
    return [importlib.import_module(name) for name in sorted(MODULES) if name.startswith(f"lockstep.{package}.")]


@pytest.mark.ranks
def test_imports_point_one_way() -> None:
    outside = ("tests", "examples", "benchmarks")
    foreign = {
        "trainer": outside,
        "callbacks": ("lockstep.strategies", *outside),
        "strategies": ("lockstep.callbacks", "lockstep.trainer", *outside),
    }
    wrong = []
    for path in FILES:
        package = path.relative_to(REPO_ROOT).parts[0]
        at_import = set(imports(path, type_checking=False))
        bad = {name for name in imports(path, type_checking=True) if name.startswith(foreign[package])}
        bad |= at_import & {"lockstep", f"lockstep.{package}"}  # a package's own root
        if package == "callbacks":  # they name the Trainer under TYPE_CHECKING only
            bad |= {name for name in at_import if name.startswith("lockstep.trainer")}
        wrong += [f"{module_name(path)} imports {name}" for name in bad]
    assert not wrong


def test_the_layers_of_strategies() -> None:
    """`launch` imports none of the other folders, `modules` and `sync` only `launch`, `data` also `modules`; engines
    come on top."""
    below = {"launch": set(), "data": {"launch", "modules"}, "modules": {"launch"}, "sync": {"launch"}}
    wrong = []
    for path in FILES:
        parts = path.relative_to(REPO_ROOT).parts
        if parts[0] == "strategies" and len(parts) == 3 and parts[1] in below:
            for name in imports(path, type_checking=False):
                target = name.split(".")
                inner = target[:2] == ["lockstep", "strategies"] and len(target) == 4
                if inner and target[2] not in {parts[1], *below[parts[1]]}:
                    wrong.append(f"{module_name(path)} imports {name}")
    assert not wrong


def test_no_import_cycles() -> None:
    graph = {}
    for path in FILES:
        graph[module_name(path)] = {target for target in imports(path, type_checking=False) if target in MODULES}
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in finished:
            for target in sorted(graph.get(name, ())):
                visit(target, [*trail, name])
            finished.add(name)

    for name in graph:
        visit(name, [])


def test_nobody_asks_which_strategy_it_has() -> None:
    """A caller that would ask means that the contract lacks a question."""
    package_modules("strategies")
    classes = {cls.__name__ for cls in strategy_classes()} - {"Strategy"}
    assert "DDP" in classes
    asked = []
    for path in (
        path
        for folder in ("trainer", "callbacks", "examples", "benchmarks")
        for path in (REPO_ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                names = {name.split(".")[-1] for name in re.findall(r"[\w.]+", ast.unparse(node.args[1]))}
                asked += [f"{path}:{node.lineno}: {name}" for name in names & classes]
    assert not asked


def strategy_classes() -> set[type]:
    from lockstep.strategies.base import Strategy

    def below(cls: type) -> set[type]:
        return {cls}.union(*(below(child) for child in cls.__subclasses__()))

    return {cls for cls in below(Strategy) if cls.__module__ in MODULES}


def test_a_class_of_strategies_is_abstract_or_has_no_subclass() -> None:
    package_modules("strategies")
    for cls in strategy_classes():
        children = [child for child in cls.__subclasses__() if child in strategy_classes()]
        assert inspect.isabstract(cls) or not children, (
            f"{cls.__name__} is concrete and {[child.__name__ for child in children]} derive from it"
        )


def test_the_strategy_contract_does_not_grow() -> None:
    from lockstep.strategies.base import Strategy
    from lockstep.strategies.hooks import SPMDHooks
    from lockstep.strategies.virtual.hooks import ShareHooks

    verbs = [name for name, value in vars(Strategy).items() if not name.startswith("_") and callable(value)]
    assert len(verbs) <= MAX_STRATEGY_VERBS, verbs
    hooks = [name for name, value in vars(SPMDHooks).items() if not name.startswith("_") and callable(value)]
    assert len(hooks) <= MAX_STRATEGY_HOOKS, hooks
    assert all(inspect.getdoc(getattr(SPMDHooks, name)) for name in hooks)
    hooks += [name for name, value in vars(ShareHooks).items() if inspect.isfunction(value) and inspect.getdoc(value)]
    for cls in strategy_classes():
        extra = {name for name, value in vars(cls).items() if inspect.isfunction(value) and not name.startswith("_")}
        extra -= {*verbs, *hooks}
        assert not extra, f"{cls.__name__} has public methods that are neither verbs of the contract nor hooks: {extra}"


def test_no_class_of_strategies_overrides_what_is_private_to_another_file() -> None:
    """What a strategy may override is a verb or a hook: it has a name without underscore, and a docstring."""
    modules = package_modules("strategies")
    private = []
    for cls in {value for module in modules for value in vars(module).values() if inspect.isclass(value)}:
        own = {name for name in vars(cls) if name.startswith("_") and not name.endswith("_") and "_abc_" not in name}
        for base in cls.__mro__[1:]:
            if cls.__module__ in MODULES and base.__module__ in MODULES and base.__module__ != cls.__module__:
                private += [f"{cls.__name__} overrides {base.__name__}.{name}" for name in own & set(vars(base))]
    assert not private


def test_the_callback_contract_does_not_grow() -> None:
    from lockstep.callbacks.base import Callback

    hooks = [name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    assert len(hooks) <= MAX_CALLBACK_HOOKS, f"{len(hooks)} hooks"


def test_the_trainer_does_not_grow() -> None:
    from lockstep import Trainer

    arguments = [parameter for name, parameter in inspect.signature(Trainer).parameters.items() if name != "self"]
    assert all(argument.kind is argument.KEYWORD_ONLY for argument in arguments)
    assert len(arguments) <= MAX_TRAINER_ARGUMENTS, f"{len(arguments)} arguments"


# What users read on a Trainer and docs/trainer.md describes. What a run owns is in its RunState.
TRAINER = {
    *("fit", "validate", "test", "predict", "save_checkpoint", "whole", "print"),
    *("arguments", "strategy", "callbacks", "checkpoint_callback", "logger", "loggers", "log_dir"),
    *("callback_metrics", "logged_metrics", "progress_bar_metrics", "global_step", "current_epoch"),
    *("max_epochs", "max_steps", "accumulate_grad_batches", "should_stop", "sanity_checking"),
    *("global_rank", "local_rank", "world_size", "is_global_zero", "optimizers", "datamodule"),
    "lr_scheduler_configs",
    *("train_dataloader", "val_dataloaders", "num_training_batches", "num_val_batches"),
    *("estimated_stepping_batches", "is_last_batch", "test_dataloaders", "predict_dataloaders"),
    *("model", "lightning_module", "state", "training", "validating", "testing", "predicting", "interrupted"),
    *("precision", "num_devices", "node_rank", "checkpoint_callbacks", "early_stopping_callback"),
}


def test_the_trainer_shows_what_users_need() -> None:
    from lockstep import Trainer

    trainer = Trainer(logger=False, enable_checkpointing=False)
    assert {name for name in dir(trainer) if not name.startswith("_")} == TRAINER
    assert set(vars(trainer)) == {"_run"}
    page = (REPO_ROOT / "docs" / "trainer.md").read_text()
    assert [name for name in sorted(TRAINER) if f"`{name}" not in page] == []


def test_nobody_assigns_to_the_trainer() -> None:
    """What a run changes is in its RunState; callbacks set what users may set."""
    assigned, may_be_set = [], ("should_stop", "accumulate_grad_batches", "lr_scheduler_configs")
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr in may_be_set:
                continue
            if ast.unparse(node.value) in ("trainer", "self.trainer", "self._trainer", "run.trainer"):
                assigned.append(f"{path}:{node.lineno}: {node.attr}")
    assert not assigned


def test_no_hook_is_called_by_a_name_that_is_built() -> None:
    from lockstep.callbacks.base import Callback
    from lockstep.trainer.run.hooks import Hooks

    hooks = {name for name in vars(Callback) if name.startswith("on_")}
    assert set(Hooks.__dataclass_fields__) == hooks | {"module_train_epoch_end"}
    built = []
    for path in (path for path in FILES if path.is_relative_to(REPO_ROOT / "trainer")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
                built += [f"{path}:{node.lineno}"] if isinstance(node.args[1], ast.JoinedStr | ast.BinOp) else []
    assert not built


def test_public_names() -> None:
    for package, names in PUBLIC.items():
        module = importlib.import_module(package)
        assert set(module.__all__) == names
        undocumented = [
            name for name in names if not name.startswith("_") and not inspect.getdoc(getattr(module, name))
        ]
        assert not undocumented


def test_package_roots_only_re_export() -> None:
    """Names that are imported at their first use are imported for type checkers as well, and listed."""
    for path in (path for path in FILES if path.name == "__init__.py"):
        for node in ast.parse(path.read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            lazy = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            imports_ = isinstance(node, ast.Import | ast.ImportFrom)
            assert docstring or names or lazy or imports_, f"{path}: {ast.unparse(node)}"


def test_lazy_names_are_the_names_that_type_checkers_see() -> None:
    for package in PUBLIC:
        root = REPO_ROOT.joinpath(package, "__init__.py") if package == "lockstep" else None
        path = root or REPO_ROOT.joinpath(*package.split(".")[1:], "__init__.py")
        lazy: Any = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
        seen = {f"{node.module}.{alias.name}" for node in lazy.body for alias in node.names}
        modules = ast.literal_eval(lazy.orelse[0].value.args[1])
        assert seen == {f"{package}.{module}.{name}" for module, names in modules.items() for name in names}
        assert {name.rpartition(".")[2] for name in seen} == PUBLIC[package] - {"__version__"}


PRIVATE = {
    "dist.group.WORLD._get_sequence_number_for_group": "counts this rank's collectives; no public counter",
    "nn.Module._apply": "casts by a rule of ours (complex stays complex), which Module.to has not",
    "nn.modules.batchnorm._BatchNorm": "the base of all BatchNorm layers, SyncBatchNorm and users' included",
    "nn.modules.batchnorm._NormBase": "the base of BatchNorm and InstanceNorm",
    "subprocess._args_from_interpreter_flags": "starts ranks with this interpreter's flags, as multiprocessing does",
    "torch._C._current_graph_task_id": "whether a hook is called within a backward",
    "torch._C._current_autograd_node": "planning: which operation a backward is at, to name its module",
    "torch._C._disabled_torch_function_impl": "what subclasses of Tensor are to use, by torch's own documentation",
    "torch._C._distributed_c10d.ProcessGroup.unbox": "planning: the group of a collective, which operators hide",
    "torch._C._autograd._top_saved_tensors_default_hooks": "whether saved_tensors_hooks surround a run, to refuse it",
    "torch._amp_foreach_non_finite_check_and_unscale_": "one kernel that finds NaN and infinity, as GradScaler uses it",
    "torch._foreach_add_": "documented, though it has an underscore: adds the gradients of a share by one kernel",
    "torch._foreach_mul_": "documented, though it has an underscore: scales all gradients by one kernel",
    "torch._subclasses.fake_tensor.DataDependentOutputException": "fake tensors of a pipeline",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": "fake tensors of a pipeline",
    "torch._subclasses.fake_tensor.FakeCopyMode": "fake tensors of a pipeline",
    "torch._subclasses.fake_tensor.FakeTensor": "fake tensors of a pipeline",
    "torch._subclasses.fake_tensor.FakeTensorMode": "fake tensors of a pipeline",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "real numbers within a run that is planned",
    "torch.autograd._get_sequence_nr": "planning: the number by which a backward knows its forward",
    "torch.distributed._composable.replicate_with_fsdp.replicate": "FSDP2's replicate has no public name yet",
    "torch.distributed._composable_state._module_state_mapping": "no public way to take fully_shard off a module",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": "what DTensor returns at first",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather": "a base class",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter": "a base class",
    "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops": "order of a schedule",
    "torch.distributed.pipelining.schedules._Action": "the type of these operations",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "offset of a shard",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache": "a second run in a process got groups of the first",
    "torch.ops.aten._local_scalar_dense.default": "what `.item()` calls",
    "torch.overrides._get_current_function_mode_stack": "modes that surround a run, to refuse them",
    "torch.utils._python_dispatch.TorchDispatchMode": "documented under this name; sees each operation",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "modes that surround a run, to refuse them",
    "torch.utils._pytree.register_pytree_node": "lets torch walk dataclasses; the public one imports torch.export",
    "torch.utils._pytree.tree_flatten": "walks batches and outputs as torch does; no public name",
    "torch.utils._pytree.tree_leaves": "walks batches and outputs as torch does; no public name",
    "torch.utils._pytree.tree_map_only": "walks batches and outputs as torch does; no public name",
    "torch.utils._pytree.tree_unflatten": "walks batches and outputs as torch does; no public name",
}
"""What we use of other packages though its name says that it is theirs, and why; may only shrink."""


def test_private_names_of_other_packages_are_listed() -> None:
    used = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            used |= {
                name
                for name in names
                if name.split(".")[0] in ("torch", "dist", "nn", "deepspeed", "subprocess", "multiprocessing")
                and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
            }
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    assert used == set(PRIVATE)


MAX_FILES = 15  # in a folder
MAX_LINES = 400  # in a file; those that are longer may only shrink
LONGER: dict[str, int] = {}
MAX_FUNCTION_LINES = 60  # those that are longer may only shrink
LONGER_FUNCTIONS: dict[str, int] = {}


def test_a_file_and_a_folder_fit_in_the_head() -> None:
    crowded = {str(folder): len(list(folder.glob("*.py"))) for folder in {path.parent for path in FILES}}
    assert not {folder: count for folder, count in crowded.items() if count > MAX_FILES}
    lines = {str(path.relative_to(REPO_ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > LONGER.get(name, MAX_LINES)} == {}
    assert {name: limit for name, limit in LONGER.items() if lines.get(name, 0) < limit - 20} == {}, (
        "lower these limits"
    )


def test_a_function_fits_on_a_screen() -> None:
    lines: dict[str, int] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                name = f"{path.relative_to(REPO_ROOT)}:{node.name}"
                lines[name] = max(lines.get(name, 0), (node.end_lineno or 0) - node.lineno + 1)
    long = {name: count for name, count in lines.items() if count > LONGER_FUNCTIONS.get(name, MAX_FUNCTION_LINES)}
    assert long == {}
    assert {name for name in LONGER_FUNCTIONS if lines.get(name, 0) <= MAX_FUNCTION_LINES} == set(), "remove these"


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
from lockstep import *
from lockstep.strategies import *
from lockstep.callbacks import *
after = state()
added = {name.split(".")[0] for name in set(sys.modules) - modules} - set(sys.stdlib_module_names)
print(json.dumps({"before": before, "after": after, "added": sorted(added),
    "torch": sorted(n for n in set(sys.modules) - modules if n.startswith("torch."))}))
"""


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_importing_starts_nothing_and_costs_torch_and_little_more() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_COST], cwd=REPO_ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["after"] == seen["before"], "threads, child processes, sockets and pipes"
    assert set(seen["added"]) - {"torch"} <= {"lockstep", "cloudpickle", "isal", "numpy", "safetensors"}
    assert not [
        name
        for name in seen["torch"]
        if name.startswith(("torch.utils.tensorboard", "torch._dynamo", "torch.distributed.tensor"))
    ]


@pytest.mark.ranks
@pytest.mark.parametrize(("statement", "most"), [("import lockstep", 5), ("from lockstep import Trainer, Module", 30)])
def test_importing_a_name_imports_what_it_needs(statement: str, most: int) -> None:
    """`import lockstep` alone does not even import torch."""
    code = f"import sys\n{statement}\nprint('torch' in sys.modules, *sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=100)
    torch, *modules = run.stdout.split()
    assert torch == str("Trainer" in statement), run.stderr
    assert len([name for name in modules if name.split(".")[0] == "lockstep"]) <= most
