"""Utilities, loaders and loggers of `lockstep.lightning` outside of a run, and hooks that are None."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import lockstep.lightning.pytorch as pl
from lockstep.callbacks.loggers.wandb import STEP
from lockstep.lightning.pytorch import loggers
from lockstep.lightning.pytorch.core import saving
from lockstep.lightning.pytorch.loggers.logger import DummyExperiment, rank_zero_experiment
from lockstep.lightning.pytorch.tuner import Tuner
from lockstep.lightning.pytorch.utilities import (
    CombinedLoader,
    find_shared_parameters,
    model_summary,
    parsing,
    set_shared_parameters,
)
from lockstep.lightning.pytorch.utilities.memory import is_oom_error, recursive_detach
from tests.trainer.lightning.differences.probe import QUIET, fit
from tests.trainer.lightning.projects import classifier, loader


class Split(nn.Module):
    """Two branches, the inner one of which is given its input by name, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
        self.right = nn.Bilinear(3, 4, 2)
        self.unused = nn.Linear(2, 2)
        self.example_input_array: Any = torch.zeros(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.left[1].training
        return self.right(input1=self.left(x), input2=x)


def test_a_summary_knows_the_sizes_of_layers() -> None:
    module = Split()
    module.unused.eval()
    summary = model_summary.summarize(module)
    assert summary.in_sizes == [[5, 4], [[5, 3], [5, 4]], model_summary.UNKNOWN_SIZE]
    assert summary.out_sizes == [[5, 3], [5, 2], "?"]
    assert summary.training_modes == [True, True, False] == [child.training for child in module.children()]
    assert module.left[1].training
    assert summary.total_flops > 0
    assert not any(layer._forward_hooks for layer in module.modules())


@pytest.mark.parametrize(
    ("example", "size"),
    [([], "?"), ((1, torch.zeros(2)), ["?", [2]]), ({"x": torch.zeros(2, 3)}, [2, 3]), (torch.tensor(0), "?")],
)
def test_an_example_may_be_arguments_of_any_kind(example: Any, size: Any) -> None:
    class Any_(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Any_()
            self.example_input_array = example

        def forward(self, *args: Any, **kwargs: Any) -> None:
            self.inner(*args, **kwargs)

    summary = model_summary.ModelSummary(Outer())
    assert summary.in_sizes == [size] and summary.out_sizes == ["?"]


def test_words_for_truth_and_what_can_be_pickled() -> None:
    assert [parsing.str_to_bool_or_int(word) for word in ("On", "0", "-12", "x")] == [True, False, -12, "x"]
    with pytest.raises(ValueError, match="val must be one of y, yes, t, true, on, 1, n, no, f, false, off, 0, got 'x'"):
        parsing.str_to_bool("x")
    kept = {"a": 1, "b": lambda: 1}
    with pytest.warns(UserWarning, match="'b' cannot be pickled, and is removed"):
        parsing.clean_namespace(kept)
    assert kept == {"a": 1}


def test_tied_parameters_are_found_and_tied() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert find_shared_parameters(module) == []
    tied = [["0.weight", "1.0.weight"], ["1.0.bias", "1.1.bias"]]
    assert set_shared_parameters(module, tied) is module
    assert find_shared_parameters(module) == tied and module[1][0].weight is module[0].weight


def test_what_is_not_plain_data_is_written_as_text_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="hyperparameter 'kind' is written as text: a dtype is not plain data"
    ) as found:
        saving.save_hparams_to_yaml(tmp_path / "x.yaml", {"kind": torch.float32, "path": tmp_path, "width": 3})
    assert len(found) == 1 and saving.load_hparams_from_yaml(tmp_path / "x.yaml")["kind"] == "torch.float32"


def test_memory() -> None:
    held = torch.ones(1, requires_grad=True)
    found = recursive_detach({"a": [held * 2], "b": 3}, to_cpu=True)
    assert not found["a"][0].requires_grad and found["b"] == 3
    assert is_oom_error(RuntimeError("CUDA out of memory")) and not is_oom_error(ValueError("out of memory"))


@pytest.mark.parametrize(
    ("mode", "batches"),
    [
        ("max_size_cycle", [({"a": 0, "b": [3]}, 0, 0), ({"a": 1, "b": [4]}, 1, 0), ({"a": 2, "b": [3]}, 2, 0)]),
        ("max_size", [({"a": 0, "b": [3]}, 0, 0), ({"a": 1, "b": [4]}, 1, 0), ({"a": 2, "b": None}, 2, 0)]),
        (None, [({"a": 0, "b": [3]}, 0, 0), ({"a": 1, "b": [4]}, 1, 0)]),
        ("sequential", [(0, 0, 0), (1, 1, 0), (2, 2, 0), ([3], 0, 1), ([4], 1, 1)]),
    ],
)
def test_combined_loaders_are_iterated_in_each_mode(mode: str | None, batches: list[Any]) -> None:
    options = {} if mode is None else {"mode": mode}
    both = CombinedLoader(iterables={"a": range(3), "b": [[3], [4]]}, **options)
    assert both.flattened == [range(3), [[3], [4]]]
    assert list(both) == list(both) == batches


def test_combined_loaders_are_as_long_as_the_shortest_unless_they_say_another_mode() -> None:
    def steps(*mode: str) -> int:
        step = classifier(pl, training_step=lambda self, batch, _: self(batch["a"][0]).sum())
        return fit(pl, step(), CombinedLoader({"a": loader(8), "b": loader(12)}, *mode)).global_step

    assert steps() == 2
    assert steps("max_size_cycle") == 3


@pytest.mark.parametrize("kind", [loggers.CSVLogger, loggers.TensorBoardLogger])
def test_hparams_file_of_a_module_without_hyperparameters_is_empty(kind: Any, tmp_path: Path) -> None:
    class Bare(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = fit(pl, Bare(), logger=kind(tmp_path), default_root_dir=tmp_path)
    path = Path(trainer.log_dir, "hparams.yaml")
    assert yaml.safe_load(path.read_text()) == {}
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert isinstance(Bare.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=path), Bare)


@pytest.mark.parametrize("kind", [loggers.CSVLogger, loggers.TensorBoardLogger])
def test_hyperparameters_may_be_an_argparse_namespace(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path, name="")
    logger.log_hyperparams(argparse.Namespace(width=3, more=argparse.Namespace(depth=2)))
    logger.save()
    assert yaml.safe_load((tmp_path / "version_0/hparams.yaml").read_text()) == {"width": 3, "more": {"depth": 2}}


def test_a_graph_is_of_the_example_by_default(tmp_path: Path) -> None:
    module = classifier(pl)()
    with pytest.warns(UserWarning, match="TensorBoardLogger shows no graph: .* has no example_input_array"):
        loggers.TensorBoardLogger(tmp_path, log_graph=True).log_graph(module)
    module.example_input_array = torch.zeros(1, 4)
    logger = loggers.TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(module)
    logger.finalize("success")
    (events,) = Path(logger.log_dir).glob("events.out.*")
    assert b"Linear" in events.read_bytes()
    loggers.CSVLogger(tmp_path).log_graph(model=module, input_array=torch.zeros(1, 4))  # does nothing, as in Lightning


class Made:
    def __init__(self, kind: str, *args: Any, **options: Any) -> None:
        self.seen = kind, args, options


def test_media_and_watched_modules_reach_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []
    kinds = {kind: functools.partial(Made, kind) for kind in ("Image", "Audio", "Video", "Table")}
    begun = SimpleNamespace(
        log=given.append,
        watch=lambda **options: given.append(options),
        config=SimpleNamespace(update=lambda *args, **options: None),
        define_metric=lambda *args, **options: None,
        finish=lambda **options: None,
        offline=True,
        step=0,
    )
    pytest.importorskip("wandb")
    logger = loggers.WandbLogger(project="p", save_dir=tmp_path, prefix="a")
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=begun, **kinds))
    with pytest.raises(RuntimeError, match="WandbLogger has no folder yet"):
        _ = logger.experiment
    module = classifier(pl)()
    logger.watch(module, log_freq=3)
    trainer = pl.Trainer(**QUIET | {"logger": logger})

    def on_train_end() -> None:
        logger.log_image("i", [1, 2], step=5, caption=["x", "y"])
        logger.log_table("t", columns=["c"], data=[[1]])
        logger.log_text("w", columns=["c"], data=[["word"]])
        with pytest.raises(ValueError, match="rate must have an item for each of 1, but it has 2"):
            logger.log_audio("s", [1], rate=[1, 2])

    module.on_train_end = on_train_end
    trainer.fit(module, loader(4))
    assert given[0] == {"models": module, "log": "gradients", "log_freq": 3, "log_graph": True}
    (images,), (table,), (text,) = ([row[name] for row in given if name in row] for name in ("a-i", "a-t", "a-w"))
    assert [image.seen for image in images] == [("Image", (1,), {"caption": "x"}), ("Image", (2,), {"caption": "y"})]
    assert table.seen == ("Table", (), {"columns": ["c"], "data": [[1]], "dataframe": None})
    assert text.seen[2]["data"] == [["word"]] and 5 in [row.get(STEP) for row in given]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="it is in the extra mlflow")
def test_an_mlflow_logger_begins_its_run_in_a_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="MLFlowLogger has no folder yet"):
        _ = loggers.MLFlowLogger(save_dir=tmp_path).experiment


def test_the_writer_of_other_ranks_is_a_dummy_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(loggers.Logger):
        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            return "writer"

    assert Own().experiment == "writer"
    monkeypatch.setattr("lockstep.trainer.lightning.utilities._rank", lambda: 1)
    other = Own().experiment
    other["a"] = 1
    assert isinstance(other, DummyExperiment) and isinstance(other["a"].append(2), type(None))
    assert isinstance(loggers.CSVLogger("runs").experiment, DummyExperiment)
    trial = pl.Trainer(**QUIET | {"logger": True, "fast_dev_run": True, "max_epochs": None})
    assert isinstance(trial.logger.experiment, DummyExperiment)


@pytest.mark.ranks
def test_a_module_knows_its_trainer_after_a_search() -> None:
    module, trainer = classifier(pl)(), pl.Trainer(**QUIET)
    module.learning_rate = 0.1
    Tuner(trainer).lr_find(module, loader(8), num_training=14)
    assert module.trainer is trainer and module.logger is trainer.logger


@pytest.mark.parametrize("stage", ["validation", "test", "predict"])
def test_hooks_of_modes_set_to_none_are_skipped(stage: str) -> None:
    modes: list[bool] = []
    module = classifier(pl, **{f"{stage}_step": lambda self, batch, _: modes.append(self.training)})()
    setattr(module, f"on_{stage}_model_eval", None)
    setattr(module, f"on_{stage}_model_train", None)
    run = {"validation": "validate"}.get(stage, stage)
    getattr(pl.Trainer(**QUIET), run)(module, loader(4))
    assert modes == [True] and module.training


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # torch's exporter's
def test_onnx_is_written_to_an_open_file_or_returned() -> None:
    import onnx

    file = io.BytesIO()
    classifier(pl)().to_onnx(file, torch.zeros(1, 4))
    assert classifier(pl)().to_onnx(input_sample=torch.zeros(1, 4)).model_proto.graph.output
    assert onnx.load_from_string(file.getvalue()).graph.output


class Outer(pl.LightningModule):
    """A module within which another is, with hyperparameters and a property of its own."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.inner = nn.Sequential(classifier(pl)(), nn.Dropout(rate))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_a_module_becomes_torchscript(method: str, tmp_path: Path) -> None:
    module, x = Outer(), torch.randn(3, 4)
    graph = module.to_torchscript(tmp_path / "module.pt", method, x if method == "trace" else None)
    assert module.training and isinstance(graph, torch.jit.ScriptModule) and not graph.training
    want = module.eval()(x)
    assert torch.equal(graph(x), want)
    assert torch.equal(torch.jit.load(tmp_path / "module.pt")(x), want)
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        _ = module.trainer
    module.example_input_array = {"x": x}
    assert torch.equal(module.to_torchscript(method=method)(x), want)


def test_torchscript_needs_a_method_and_an_input() -> None:
    with pytest.raises(ValueError, match="method of to_torchscript must be 'script' or 'trace', got 'onnx'"):
        Outer().to_torchscript(method="onnx")
    with pytest.raises(ValueError, match="exporting Outer needs an input of forward"):
        Outer().to_torchscript(method="trace")


@pytest.mark.parametrize("by_name", [False, True])
def test_what_torch_compile_has_made_of_a_module_is_compiled_in_the_run(by_name: bool) -> None:
    module = classifier(pl)()
    compiled: Any = torch.compile(module, backend="eager")
    trainer = pl.Trainer(**QUIET, compile={"backend": "eager"})
    if by_name:
        trainer.fit(model=compiled, train_dataloaders=loader(4))
    else:
        trainer.fit(compiled, loader(4))
    assert trainer.lightning_module is module and trainer.global_step == 1


def test_only_such_a_module_is_compiled() -> None:
    trainer = pl.Trainer(**QUIET)
    trainer._plain(torch.compile(classifier(pl)(), backend="eager"))
    assert trainer._run.compile_options == {}
    trainer._plain(classifier(pl)())
    assert trainer._run.compile_options is None
