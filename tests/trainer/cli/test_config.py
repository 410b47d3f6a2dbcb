"""Config: merging, spellings, and one line for every mistake."""

from __future__ import annotations

import functools
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.strategies.ddp import DDP
from lockstep.trainer.cli.config import ConfigError, Resolved, build, check, resolve
from lockstep.trainer.trainer import Trainer

SHOP = """
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from lockstep.callbacks import Callback
from lockstep import DataModule, Module
if TYPE_CHECKING:
    from nowhere import Unknown

@dataclass(frozen=True)
class Augment:
    flip: bool
    angle: float = 0.0

class Net(Module):
    def __init__(self, width: int, lr: float = 1e-3, act: Literal["relu", "gelu"] = "relu",
                 sizes: list[int] | None = None, kernel: tuple[int, int] = (3, 3), cache: Optional[Path] = None,
                 every: timedelta | None = None, extra: dict[str, float] | None = None, anything=None,
                 unknown: Unknown = None,
                 augment: Augment | None = None, name: str = "net",
                 optimizer: Callable[..., Optimizer] = torch.optim.SGD,
                 lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None):
        super().__init__()
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.layer = torch.nn.Linear(width, width)

class Wide(Net):
    def __init__(self, depth: int = 2, **kwargs: Any):
        super().__init__(**kwargs)
        self.depth = depth

class Bare(Module):
    def __init__(self, width: int):
        super().__init__()

class Loose(Module):
    def __init__(self, **kwargs: Any):
        super().__init__()
        self.given = kwargs

class Numbers(Dataset):
    def __init__(self, n: int):
        self.n = n

class Data(DataModule):
    def __init__(self, batch_size: int = 4, train: Dataset | None = None):
        self.batch_size, self.train = batch_size, train

class Watch(Callback):
    def __init__(self, every: int = 1):
        self.every = every
"""


@pytest.fixture(autouse=True)
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("shop", "broken"):
        sys.modules.pop(name, None)


def write(text: str, name: str = "run.yaml") -> str:
    Path(name).write_text(text)
    return name


def test_options_of_a_strategy_that_is_given_by_its_name() -> None:
    def strategy(*overrides: str) -> Any:
        return resolve([], overrides).values["trainer"]["strategy"]

    assert strategy("strategy=ddp", "strategy.compress=sign") == {"class": "DDP", "compress": "sign"}
    assert strategy("strategy=deepspeed_stage_1", "strategy.timeout_s=9")["stage"] == 1
    assert strategy("strategy='ddp=2,fsdp'", "strategy.wrap=null")["axes"] == "ddp=2,fsdp"
    with pytest.raises(ConfigError, match=r"trainer.strategy is 'auto', which has no keys"):
        resolve([], ["strategy=auto", "strategy.compress=sign"])


def minimal(*overrides: str) -> Resolved:
    return resolve([write("module: {class: shop.Net, width: 8}\n")], overrides)


def message(*overrides: str, text: str = "module: {class: shop.Net, width: 8}\n") -> str:
    """The one line that a bad config gives."""
    with pytest.raises(ConfigError) as caught:
        check(resolve([write(text)], overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- merging -----------------------------------------------------------------------------------------


def test_files_then_overrides_in_order() -> None:
    first = write(
        "module: {class: shop.Net, width: 8, lr: 0.1}\n"
        "trainer: {max_epochs: 1, callbacks: [{class: Timer}, {class: LearningRateMonitor}]}\n",
        "a.yaml",
    )
    second = write("module: {lr: 0.2}\ntrainer: {callbacks: [{class: LRWarmup, steps: 5}]}\n", "b.yaml")
    values = resolve([first, second], ["module.width=16", "trainer.max_epochs=2", "trainer.max_epochs=3"]).values
    assert values["module"] == {"class": "shop.Net", "width": 16, "lr": 0.2}
    assert values["trainer"] == {"max_epochs": 3, "callbacks": [{"class": "LRWarmup", "steps": 5}]}


def test_a_mapping_of_another_class_replaces_the_one_before() -> None:
    first = write("module: {class: shop.Net, width: 8}\n", "a.yaml")
    second = write("module: {class: shop.Loose, color: red}\n", "b.yaml")
    assert resolve([first, second]).values["module"] == {"class": "shop.Loose", "color": "red"}
    assert resolve([first], ["module={class: shop.Loose}"]).values["module"] == {"class": "shop.Loose"}
    assert resolve([first], ["module={width: 9}"]).values["module"] == {"class": "shop.Net", "width": 9}


@pytest.mark.parametrize("key", ["trainer.callbacks.0.steps", "trainer.callbacks[0].steps", "callbacks.0.steps"])
def test_an_override_reaches_into_lists(key: str) -> None:
    config = write("module: {class: shop.Net, width: 8}\ntrainer: {callbacks: [{class: LRWarmup, steps: 5}]}\n")
    assert resolve([config], [f"{key}=7"]).values["trainer"]["callbacks"] == [{"class": "LRWarmup", "steps": 7}]


def test_top_level_spellings_are_the_trainers() -> None:
    short = resolve(
        [write("module: {class: shop.Net, width: 8}\nseed: 3\nmax_epochs: 2\n")],
        ["strategy=ddp", "devices=2", "split_batches=true"],
    ).values
    long = minimal(
        "trainer.seed=3",
        "trainer.max_epochs=2",
        "trainer.strategy=ddp",
        "trainer.devices=2",
        "trainer.split_batches=true",
    ).values
    assert short == long
    assert long["trainer"] == {"seed": 3, "max_epochs": 2, "strategy": "ddp", "devices": 2, "split_batches": True}


def test_a_class_alone_is_the_section_in_a_file_and_on_the_command_line() -> None:
    Path("alone.yaml").write_text("module: toys.Net\n")
    assert (
        resolve(["alone.yaml"]).values == resolve([], ["module=toys.Net"]).values == {"module": {"class": "toys.Net"}}
    )
    values = resolve([], ["module=toys.Net", "module.width=3", "data=toys.Data"]).values
    assert values == {"module": {"class": "toys.Net", "width": 3}, "data": {"class": "toys.Data"}}


def test_merge_keys_of_yaml_at_the_top_level() -> None:
    first, second = "{max_epochs: 1}", "{max_epochs: 2, max_steps: 3}"
    Path("merged.yaml").write_text(f"vars:\n  a: &a {first}\n  b: &b {second}\n<<: [*a, *b]\nmodule: toys.Net\n")
    resolved = resolve(["merged.yaml"])
    assert resolved.values["trainer"] == {"max_epochs": 1, "max_steps": 3}
    assert "(merged.yaml:2)" in str(resolved.error(("trainer", "max_epochs"), ""))
    Path("merged.yaml").write_text("true: 1\n")
    with pytest.raises(ConfigError, match=r"^True \(merged\.yaml\): no such key"):
        resolve(["merged.yaml"])


def test_both_spellings_in_one_file_is_an_error() -> None:
    text = "module: {class: shop.Net, width: 8}\nseed: 3\ntrainer:\n  seed: 4\n"
    assert message(text=text) == (
        "seed (run.yaml:2): is short for trainer.seed, which the same file sets as well (run.yaml:4); keep one of them"
    )


def test_optimizer_and_scheduler_sections_are_the_modules_arguments() -> None:
    run = build(
        minimal(
            "optimizer={class: AdamW, lr: 0.5}", "lr_scheduler={class: torch.optim.lr_scheduler.StepLR, step_size: 2}"
        )
    )
    optimizer = run.module.given["optimizer"](run.module.parameters())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert run.module.given["lr_scheduler"](optimizer).step_size == 2
    assert message("optimizer.class=AdamW", text="module: shop.Loose2\n").startswith(
        "module.class (run.yaml:1): shop has no class 'Loose2'; did you mean 'Loose'?"
    )


def test_interpolation_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_NAME", "corner")
    values = minimal("module.sizes=['${module.width}', 2]", "module.name=${oc.env:SHOP_NAME}").values
    assert values["module"]["sizes"] == [8, 2]
    assert values["module"]["name"] == "corner"
    assert (
        message("module.name=${module.nope}") == "module.name (command line): Interpolation key 'module.nope' not found"
    )
    assert message("module.width=???") == "module.width (command line): missing: it is '???', give it a value"


def test_text_is_the_same_config_again() -> None:
    resolved = minimal("strategy={class: DDP, static_graph: true}", "module.lr=1e-4", "module.name='12'")
    assert resolve([write(resolved.text, "again.yaml")]).values == resolved.values
    assert resolved.values["module"]["lr"] == 1e-4


# ---- building ----------------------------------------------------------------------------------------


def test_build_makes_what_the_config_says() -> None:
    run = build(
        minimal(
            "data={class: shop.Data, batch_size: 2, train: {class: shop.Numbers, n: 5}}",
            "trainer.callbacks=[{class: LRWarmup, steps: 5}, {class: shop.Watch, every: 3}]",
            "trainer.strategy={class: DDP, static_graph: true}",
            "devices=2",
            "max_epochs=4",
            "ckpt_path=auto",
        )
    )
    assert isinstance(run.trainer, Trainer)
    assert run.trainer.max_epochs == 4
    assert isinstance(run.trainer.strategy, DDP)
    assert {"LRWarmup", "Watch"} <= {type(callback).__name__ for callback in run.trainer.callbacks}
    assert run.trainer._run.config.startswith("module:\n  class: shop.Net\n")
    assert run.datamodule.train.n == 5
    assert run.ckpt_path == "auto"


def test_values_arrive_as_the_annotations_say() -> None:
    module = build(
        minimal(
            "module.cache=store",
            "module.every={minutes: 2}",
            "module.kernel=[5, 1]",
            "module.lr=1",
            "module.augment={flip: true}",
            "module.unknown={a: 1}",
        )
    ).module
    given = module.given
    assert given["cache"] == Path("store")
    assert given["every"] == timedelta(minutes=2)
    assert given["kernel"] == (5, 1)
    assert given["lr"] == 1
    assert (given["augment"].flip, given["augment"].angle) == (True, 0.0)
    assert given["unknown"] == {"a": 1}


def test_the_seed_decides_the_initial_weights() -> None:
    first, second, third = (build(minimal(f"seed={seed}")).module.layer.weight for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_kwargs_pass_on_to_the_base_class() -> None:
    module = build(minimal("module.class=shop.Wide", "module.depth=3")).module
    assert module.depth == 3
    assert module.given["width"] == 8
    assert (
        message("module.class=shop.Wide", "module.dept=3")
        == "module.dept (command line): Wide has no argument 'dept'; did you mean 'depth'?"
    )
    assert build(resolve([write("module: {class: shop.Loose, color: red}")])).module.given == {"color": "red"}


def test_nothing_is_built_where_anything_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import shop

    monkeypatch.setattr(
        shop.Net, "__init__", functools.wraps(shop.Net.__init__)(lambda *args, **kwargs: pytest.fail("built"))
    )
    with pytest.raises(ConfigError, match="batch_sise"):
        build(minimal("data={class: shop.Data, batch_sise: 2}"))


# ---- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("module.widht=3", "module.widht (command line): Net has no argument 'widht'; did you mean 'width'?"),
        ("modul.width=3", "modul (command line): no such key; did you mean 'module'?"),
        (
            "trainer.max_epoch=3",
            "trainer.max_epoch (command line): Trainer has no argument 'max_epoch'; did you mean 'max_epochs'?",
        ),
        ("max_epoch=3", "max_epoch (command line): no such key; did you mean 'max_epochs'?"),
        (
            "trainer.max_epochs=three",
            "trainer.max_epochs (command line): must be an integer or null, but it is 'three'",
        ),
        ("module.width=2.5", "module.width (command line): must be an integer, but it is 2.5"),
        ("module.width=true", "module.width (command line): must be an integer, but it is True"),
        ("module.lr=fast", "module.lr (command line): must be a number, but it is 'fast'"),
        ("module.act=tanh", "module.act (command line): must be one of 'relu', 'gelu', but it is 'tanh'"),
        (
            "module.sizes=[1, x]",
            "module.sizes (command line): must be a list, each an integer, or null, but it is [1, 'x']",
        ),
        ("module.kernel=[1]", "module.kernel (command line): must be a list of 2 values, but it is [1]"),
        ("module.extra={a: b}", "module.extra (command line): must be a mapping or null, but it is {'a': 'b'}"),
        (
            "module.every={minuts: 3}",
            "module.every.minuts (command line): timedelta has no argument 'minuts'; did you mean 'minutes'?",
        ),
        ("module.augment={flip: 3}", "module.augment.flip (command line): must be true or false, but it is 3"),
        ("module.augment={angle: 3}", "module.augment.flip (command line): missing; Augment needs it (true or false)"),
        ("module.name=5", "module.name (command line): must be a string, but it is 5"),
        ("module.width.x=5", "module.width.x (command line): module.width is 8, which has no keys"),
        ("module.class=shop.Nett", "module.class (command line): shop has no class 'Nett'; did you mean 'Net'?"),
        (
            "module.class=shop.Data",
            "module.class (command line): shop.Data is not a subclass of Module, which is required here",
        ),
        (
            "module.class=os.system",
            "module.class (command line): os.system is not a subclass of Module, which is required here",
        ),
        ("module.class=Net", "module.class (command line): 'Net' is not an import path; write package.file.Net"),
        (
            "module.class='shop; Net'",
            "module.class (command line): must be an import path such as package.file.Class, but it is 'shop; Net'",
        ),
        (
            "module.class=shopp.Net",
            "module.class (command line): cannot import shopp: ModuleNotFoundError: No module named 'shopp'",
        ),
        (
            "data={batch_size: 3}",
            "data.class (command line): missing; name a subclass of DataModule by its import path",
        ),
        (
            "callbacks=[{class: LRWarmpu}]",
            "trainer.callbacks.0.class (command line): lockstep.callbacks has no class 'LRWarmpu'; did you mean "
            "'LRWarmup'?",
        ),
        (
            "callbacks=[{class: LRWarmup, step: 1}]",
            "trainer.callbacks.0.step (command line): LRWarmup has no argument 'step'; did you mean 'steps'?",
        ),
        (
            "callbacks=[{class: shop.Net, width: 1}]",
            "trainer.callbacks.0.class (command line): shop.Net is not a subclass of Callback, which is required here",
        ),
        (
            "callbacks=[{class_path: LRWarmup}]",
            "trainer.callbacks.0.class_path (command line): is LightningCLI's; write class, with the arguments "
            "beside it",
        ),
        (
            "strategy.class=Strategy",
            "trainer.strategy.class (command line): Strategy is abstract; name a subclass of it",
        ),
        (
            "strategy.class=DPP",
            "trainer.strategy.class (command line): lockstep.strategies has no class 'DPP'; did you mean 'DDP'?",
        ),
        (
            "optimizer={class: AdamW, batas: 1}",
            "module.optimizer.batas (command line): AdamW has no argument 'batas'; did you mean 'betas'?",
        ),
        (
            "optimizer={class: shop.Net}",
            "module.optimizer.class (command line): shop.Net is not a subclass of Optimizer, which is required here",
        ),
        ("ckpt_path=3", "ckpt_path (command line): must be a string or null, but it is 3"),
        ("module=[1]", "module (command line): must be a mapping of arguments, but it is [1]"),
        (
            "module.sizes=[1,",
            "module.sizes (command line): '[1,' is not valid YAML: did not find expected node content",
        ),
        (
            "module.width=${foo",
            "module.width (command line): '${foo' is not a valid interpolation; write ${vars.name} or ${oc.env:NAME}",
        ),
        (
            "optimizers.lr=1",
            "optimizers (command line): no such key; did you mean 'optimizer'? Sections are module, data",
        ),
        (
            "callbacks=[3]",
            "trainer.callbacks (command line): must be a list, each a mapping with the class of a Callback, a mapping "
            "with the class of a Callback or null, but it is [3]",
        ),
        ("+seed=1", "'+seed=1' (command line): an override is key=value, such as trainer.max_epochs=3"),
        (
            "trainer.callbacks.0.steps=5",
            "trainer.callbacks.0 (command line): the list has 0 elements; name one by its number, from 0",
        ),
    ],
)
def test_a_mistake_is_one_line(override: str, expected: str) -> None:
    text = "module: {class: shop.Net, width: 8}\n" + ("trainer: {callbacks: []}\n" if "callbacks.0" in override else "")
    assert message(override, text=text).startswith(expected)


def test_a_mistake_in_a_file_names_file_and_line() -> None:
    assert message(text="module:\n  class: shop.Net\n  width: 8\n  lrr: 3\n").startswith("module.lrr (run.yaml:4): ")
    assert (
        message(text="module: {class: shop.Net}\n") == "module.width (run.yaml:1): missing; Net needs it (an integer)"
    )
    assert (
        message(text="seed: 1\n")
        == "module: missing; name the class to train, such as module.class=examples.digits.Digits"
    )
    assert message(text="module: {class: shop.Net\n").startswith("run.yaml:2: not valid YAML: ")
    assert message(text="module: {class: shop.Net, width: 1, width: 2}\n").startswith("run.yaml:1: not valid YAML: ")
    for text, kind in (("- 1", "sequence"), ("text", "scalar"), ("3", "scalar"), ("!!python/object:a.b x", "scalar")):
        found = message(text=f"{text}\n")
        assert found.startswith("run.yaml: a config is a mapping of sections") and found.endswith(f"not a {kind}")


def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"^cannot read config file 'none\.yaml': No such file or directory$"):
        resolve(["none.yaml"])


def test_an_import_that_fails_names_module_and_line() -> None:
    Path("broken.py").write_text("x = 1\nprint(y)\n")
    expected = "module.class (command line): cannot import broken: NameError: name 'y' is not defined ("
    line = message("module.class=broken.Net")
    assert line.startswith(expected)
    assert line.endswith("broken.py, line 2)")


@pytest.mark.ranks
def test_importing_the_trainer_does_not_load_omegaconf(repo_root: Path) -> None:
    code = "import sys, trainer, trainer.cli; sys.exit('omegaconf' in sys.modules or 'yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo_root, timeout=60).returncode == 0


@pytest.mark.parametrize("text", ["a: " + "[" * 2000 + "]" * 2000, "module: " + "{a: " * 2000 + "1" + "}" * 2000])
def test_a_config_that_is_nested_too_deeply_is_a_config_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(ConfigError, match="nested too deeply"):
        resolve([tmp_path / "deep.yaml"])
    with pytest.raises(ConfigError, match="nested too deeply"):
        resolve([], ["module.x=" + "[" * 2000 + "]" * 2000])


def test_a_number_from_the_environment_names_what_makes_one_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHS", "3")
    given = ["module.class=tests.trainer.toy.Net", "trainer.max_epochs=${oc.env:EPOCHS}"]
    with pytest.raises(ConfigError) as error:
        check(resolve([], given))
    assert str(error.value).endswith("an environment variable is a string: write ${oc.decode:${oc.env:EPOCHS}}")
    check(resolve([], [given[0], "trainer.max_epochs=${oc.decode:${oc.env:EPOCHS}}"]))
    with pytest.raises(ConfigError, match=r"a string: write \$\{oc.decode:\$\{oc.env:EPOCHS\}\}$"):
        check(resolve([], [given[0], "vars.long=${oc.env:EPOCHS}", "trainer.max_epochs=${vars.long}"]))


def test_values_of_the_users_own_are_for_interpolations_alone(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("vars: {width: 4}\nmodule: {class: shop.Loose, a: '${vars.width}'}\n")
    resolved = resolve([tmp_path / "run.yaml"], ["vars.width=6", "vars.more.depth=2"])
    assert resolved.values["module"]["a"] == 6
    assert resolve_again(resolved, tmp_path) == resolved.values
    check(resolved)
    with pytest.raises(ConfigError, match=r"vars \(command line\): must be a mapping of arguments, but it is 3"):
        check(resolve([tmp_path / "run.yaml"], ["module.a=1", "vars=3"]))


def resolve_again(resolved: Resolved, folder: Path) -> Any:
    (folder / "again.yaml").write_text(resolved.text)
    return resolve([folder / "again.yaml"]).values


def test_a_mistake_in_an_argument_names_where_its_part_was_set() -> None:
    text = "module:\n  class: shop.Wide\n  width: 8\n"
    expected = "module.optimizer (command line): "
    assert message("optimizer.class=SGD", text=text.replace("Wide", "Bare")).startswith(expected)
