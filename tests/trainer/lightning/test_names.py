"""`lockstep.lightning`: names, arguments and what is refused."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

import lockstep.lightning as L
import lockstep.lightning.pytorch as pl
from lockstep import callbacks, strategies
from lockstep.lightning.pytorch import loggers, utilities
from lockstep.lightning.pytorch.callbacks import early_stopping, model_checkpoint
from lockstep.lightning.pytorch.loggers import logger as logger_names
from lockstep.lightning.pytorch.tuner import Tuner
from lockstep.lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from lockstep.trainer.lightning.install import places
from lockstep.trainer.lightning.names import REFUSED
from tests.trainer.lightning.projects import BARE, classifier, loader

QUIET = BARE | {"devices": 1}


@pytest.mark.parametrize("path", sorted(places()))
def test_every_name_of_the_table_exists(path: str) -> None:
    module = importlib.import_module(f"lockstep.lightning.{path}".rstrip("."))
    assert [name for name in places()[path] if getattr(module, name, None) is None] == []
    assert not places()[path].keys() & REFUSED.keys()


def test_names_are_the_same_objects_by_every_path() -> None:
    assert L.LightningModule is pl.LightningModule and L.pytorch is pl
    assert model_checkpoint.ModelCheckpoint is pl.callbacks.ModelCheckpoint
    assert early_stopping.EarlyStoppingReason(0).name == "NOT_STOPPED"
    assert early_stopping.EarlyStopping is importlib.import_module("lockstep.lightning").pytorch.callbacks.EarlyStopping
    assert L.Callback is callbacks.Callback
    assert importlib.import_module("lockstep.lightning.fabric").seed_everything is L.seed_everything
    assert L.__version__ == pl.__version__ >= "2.6" and "__version__" not in pl.__all__
    assert issubclass(L.LightningModule, importlib.import_module("lockstep").Module)


def test_a_name_that_is_not_offered_says_what_to_write() -> None:
    with pytest.raises(ImportError, match=r"^lockstep.lightning has no LightningArgumentParser; write a YAML"):
        from lockstep.lightning.pytorch.cli import LightningArgumentParser  # noqa: F401
    with pytest.raises(ImportError, match=r"SpikeDetection; use lockstep.callbacks.Guard"):
        pl.callbacks.SpikeDetection  # noqa: B018
    with pytest.raises(ImportError, match="Fabric; drive a strategy"):
        L.Fabric  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'EarlyStoping'; did you mean 'EarlyStopping'"):
        pl.callbacks.EarlyStoping  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("lockstep.lightning.pytorch.no_such_module")


@pytest.mark.ranks
def test_importing_it_imports_no_torch() -> None:
    code = "import sys, lockstep.lightning.pytorch as pl; print('torch' in sys.modules, pl.callbacks.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False lockstep.lightning.pytorch.callbacks\n"


def test_arguments_of_the_trainer() -> None:
    trainer = L.Trainer(
        **QUIET, max_epochs=None, plugins=None, inference_mode=True, use_distributed_sampler=True, profiler=None,
        gradient_clip_val=0.0, precision=None, callbacks=None, benchmark=None, sync_batchnorm=True,
    )  # fmt: skip
    assert (trainer.max_epochs, trainer.precision, trainer.arguments.gradient_clip_val) == (None, "32-true", None)
    assert not L.Trainer(barebones=True, max_epochs=1).loggers
    ddp = L.Trainer(**QUIET | {"devices": 2}, max_epochs=1, strategy="ddp_find_unused_parameters_true")
    assert isinstance(ddp.strategy, strategies.DDP)
    assert isinstance(L.Trainer(**QUIET, strategy="single_device").strategy, strategies.SingleDevice)
    for name, value in {
        "plugins": [object()],
        "use_distributed_sampler": False,
        "gpus": 1,
        "model_registry": "m",
    }.items():
        with pytest.raises(TypeError, match=f"Trainer has no argument '{name}'; "):
            L.Trainer(**QUIET, **{name: value})


def test_the_default_logger_writes_where_lightning_does(tmp_path: Path) -> None:
    trainer = L.Trainer(**QUIET | {"logger": True}, max_epochs=1, default_root_dir=tmp_path)
    assert isinstance(trainer.logger, loggers.TensorBoardLogger)
    trainer.fit(classifier(pl)(), loader())
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    csv = loggers.CSVLogger(tmp_path / "here", name=None)
    second = L.Trainer(**QUIET | {"logger": csv}, max_epochs=1)
    second.fit(classifier(pl)(), loader())
    assert second.log_dir == str(tmp_path / "here" / "version_0")


@pytest.mark.parametrize("kind", [loggers.TensorBoardLogger, loggers.CSVLogger])
def test_a_logger_works_before_the_run(kind: type, tmp_path: Path) -> None:
    (tmp_path / "mine" / "version_3").mkdir(parents=True)
    logger = kind(tmp_path, "mine")
    logger.log_hyperparams({"rate": 0.5})
    logger.log_metrics({"before": 7.0}, 2)
    assert not list(tmp_path.rglob("*.*"))
    trainer = L.Trainer(**QUIET | {"logger": logger}, max_epochs=1)
    assert trainer.log_dir == logger.log_dir == str(tmp_path / "mine" / "version_4")
    assert (logger.version, logger.root_dir) == (4, str(tmp_path / "mine"))
    module, batches = classifier(pl)(), loader()
    with pytest.raises(ValueError, match="log_dir was read before fit, which has taken version 4; give the logger"):
        trainer.fit(module, batches, ckpt_path="auto")
    trainer.fit(module, batches)
    assert trainer.log_dir == logger.log_dir == str(tmp_path / "mine" / "version_4")
    assert "rate: 0.5" in Path(logger.log_dir, "hparams.yaml").read_text()
    written = b"".join(path.read_bytes() for path in Path(logger.log_dir).iterdir() if path.is_file())
    assert written.count(b"before") == 1


@pytest.mark.parametrize("kind", [loggers.TensorBoardLogger, loggers.CSVLogger])
def test_a_logger_writes_without_a_run_at_save(kind: type, tmp_path: Path) -> None:
    logger = kind(tmp_path, "mine")
    logger.log_hyperparams({"rate": 0.5})
    logger.log_metrics({"alone": 7.0}, 900)
    logger.save()
    folder = tmp_path / "mine" / "version_0"
    assert "rate: 0.5" in (folder / logger.NAME_HPARAMS_FILE).read_text()
    L.Trainer(**QUIET | {"logger": logger}, max_epochs=1, log_every_n_steps=1).fit(classifier(pl)(), loader())
    assert logger.log_dir == str(folder) and logger.version == 0
    written = b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
    assert written.count(b"alone") == 1
    if kind is loggers.CSVLogger:
        rows = Path(logger.metrics_file_path).read_text().splitlines()
        assert rows[1].startswith("900,7.0,") and len(rows) > 3 and logger.metrics == []


class Dies(L.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            raise KeyError("killed")


@pytest.mark.parametrize("saves", [True, False])
def test_a_resumed_run_has_what_was_written_before_it_once(saves: bool, tmp_path: Path) -> None:
    def rows(name: str, callbacks: list[Any], ckpt_path: Any = None) -> str:
        logger = loggers.CSVLogger(tmp_path, name, version=0)
        logger.log_metrics({"alone": 7.0}, 900)
        if saves:
            logger.save()
        logger.log_metrics({"alone": 8.0}, 800)
        saver = model_checkpoint.ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=4, save_top_k=-1)
        options = QUIET | {"logger": logger, "enable_checkpointing": True, "callbacks": [saver, *callbacks]}
        trainer = L.Trainer(**options, max_epochs=2, log_every_n_steps=1)
        trainer.fit(classifier(pl)(), loader(), ckpt_path=ckpt_path)
        return Path(logger.metrics_file_path).read_text()

    with pytest.raises(KeyError, match="killed"):
        rows("killed", [Dies()])
    resumed = rows("killed", [], tmp_path / "killed" / "step=4.ckpt")
    assert resumed == rows("whole", []) and resumed.count("900,7.0") == 1


def test_a_logger_writes_below_the_folder_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGS", str(tmp_path))
    logger = loggers.TensorBoardLogger("$LOGS/all", "mine", prefix="a", sub_dir="events")
    trainer = L.Trainer(**QUIET | {"logger": logger, "enable_checkpointing": True}, max_epochs=1)
    folder = tmp_path / "all" / "mine" / "version_0"
    assert trainer.log_dir == str(folder / "events") and logger.root_dir == str(folder.parent)
    trainer.fit(classifier(pl)(), loader())
    assert trainer.log_dir == logger.log_dir == str(folder / "events") and logger.root_dir == str(folder.parent)
    assert trainer.checkpoint_callback.best_model_path.startswith(str(folder / "checkpoints"))
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert "a-train_loss_epoch" in events.Tags()["scalars"]
    second = L.Trainer(**QUIET | {"logger": logger, "enable_checkpointing": True}, max_epochs=2)
    assert second.fit(classifier(pl)(), loader(), ckpt_path=trainer.checkpoint_callback.best_model_path) is None


def test_the_names_of_metrics_begin_with_a_prefix(tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path, prefix="a")
    L.Trainer(**QUIET | {"logger": logger}, max_epochs=1).fit(classifier(pl)(), loader())
    columns = Path(logger.metrics_file_path).read_text().partition("\n")[0].split(",")
    assert columns == ["step", "a-epoch", "a-train_loss_step", "a-train_loss_epoch"]


def test_rows_without_a_run_are_counted(tmp_path: Path) -> None:
    writer = loggers.CSVLogger(tmp_path).experiment
    writer.log_hparams({"rate": 0.5})
    for step in (None, None, 9):
        writer.log_metrics({"a": 1.0}, step)
    writer.save()
    assert Path(writer.metrics_file_path).read_text().split() == ["step,a", "0,1.0", "1,1.0", "9,1.0"]


def test_what_the_writer_of_a_logger_got_before_a_run_is_shown(tmp_path: Path) -> None:
    logger = loggers.TensorBoardLogger(tmp_path, "mine")
    logger.log_metrics({"held": 8.0}, 4)
    logger.experiment.add_scalar("drawn", 7.0, 5)
    L.Trainer(**QUIET | {"logger": logger}, max_epochs=1).fit(classifier(pl)(), loader())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [[event.value for event in events.Scalars(name)] for name in ("held", "drawn")] == [[8.0], [7.0]]


def test_a_logger_that_does_nothing(tmp_path: Path) -> None:
    logger = logger_names.DummyLogger()
    logger.log_image("a", key=3)
    logger.experiment["a"] = 1
    logger.experiment["a"].append(2)
    options = QUIET | {"logger": logger, "default_root_dir": tmp_path}
    L.Trainer(**options, max_epochs=1).fit(classifier(pl)(), loader())
    assert isinstance(L.Trainer(**QUIET, fast_dev_run=True).logger, logger_names.DummyLogger)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_what_was_logged_before_a_run_is_written_once(strategy: str, tmp_path: Path) -> None:
    logger = loggers.CSVLogger(tmp_path, "mine")
    assert logger.log_dir
    logger.log_metrics({"saved": 7.0}, 700)
    logger.save()
    logger.log_metrics({"held": 8.0}, 800)
    options = QUIET | {"logger": logger, "strategy": strategy, "devices": 1 if strategy == "auto" else 2}
    with pytest.raises(ValueError, match="ckpt_path='last' looks for the newest version, but logger.log_dir was read"):
        L.Trainer(**options, max_epochs=1).fit(classifier(pl)(), loader(), ckpt_path="last")
    trainer = L.Trainer(**options, max_epochs=1)
    trainer.fit(classifier(pl)(), loader())
    logger.log_metrics({"between": 90.5}, 900)
    logger.save()
    logger.log_metrics({"between": 80.5}, 950)
    trainer.max_epochs = 2
    trainer.fit(classifier(pl)(), loader())
    (file,) = tmp_path.rglob("metrics.csv")
    assert [line[:7] for line in file.read_text().splitlines()[1:3]] == ["700,7.0", "800,,8."]
    assert [file.read_text().count(value) for value in ("7.0", "8.0", "90.5", "80.5")] == [1, 1, 1, 1]


def test_arguments_of_callbacks() -> None:
    saver = pl.callbacks.ModelCheckpoint("folder", "{epoch}", "val_loss", True, None, 2)
    assert (saver.monitor, saver.save_top_k, saver.verbose, saver.save_last) == ("val_loss", 2, True, False)
    assert isinstance(saver, pl.callbacks.Checkpoint) and isinstance(saver, callbacks.ModelCheckpoint)
    assert pl.callbacks.EarlyStopping("loss", 0.1, 2, True, "max").mode == "max"
    assert isinstance(pl.callbacks.TQDMProgressBar(refresh_rate=10), callbacks.ProgressBar)
    assert isinstance(pl.callbacks.RichModelSummary(max_depth=2), callbacks.ModelSummary)
    assert isinstance(pl.callbacks.DeviceStatsMonitor(cpu_stats=True), callbacks.DeviceStats)
    assert pl.callbacks.Timer("00:00:10:00", verbose=False).duration_s == 600
    assert pl.callbacks.BackboneFinetuning(3, train_bn=False).train_bn is False
    with pytest.raises(ValueError, match="takes avg_fn or multi_avg_fn, but both are given"):
        pl.callbacks.WeightAveraging(avg_fn=max, multi_avg_fn=max)
    with pytest.raises(ValueError, match="write_interval must be"):
        pl.callbacks.BasePredictionWriter("step")
    with pytest.raises(TypeError, match="no save_on_exception"):
        pl.callbacks.ModelCheckpoint(save_on_exception=True)


def test_callbacks_that_a_trainer_adds(capfd: pytest.CaptureFixture[str]) -> None:
    shown = {"enable_progress_bar": True, "enable_model_summary": True}
    trainer = L.Trainer(**QUIET | shown, max_epochs=1)
    bar = trainer.progress_bar_callback
    assert isinstance(bar, pl.callbacks.TQDMProgressBar) and (bar.refresh_rate, bar.is_enabled) == (1, True)
    assert any(isinstance(item, pl.callbacks.ModelSummary) for item in trainer.callbacks)
    assert L.Trainer(**QUIET, max_epochs=1).progress_bar_callback is None
    stopping = pl.callbacks.EarlyStopping("loss")
    assert L.Trainer(**QUIET, max_epochs=1, callbacks=[stopping]).early_stopping_callbacks == [stopping]
    with pytest.raises(ValueError, match="callbacks has 2 of ProgressBar, and a Trainer takes one"):
        L.Trainer(**QUIET | shown, callbacks=[pl.callbacks.TQDMProgressBar(), pl.callbacks.RichProgressBar()])
    silent = pl.callbacks.TQDMProgressBar(refresh_rate=0)
    for bar in (silent, trainer.progress_bar_callback):
        bar.disable()
        L.Trainer(**QUIET | shown, max_epochs=1, callbacks=[bar]).fit(classifier(pl)(), loader())
    assert "Epoch 1" not in capfd.readouterr().err and silent.is_disabled
    bar.enable()
    L.Trainer(**QUIET | shown, max_epochs=1, callbacks=[bar]).fit(classifier(pl)(), loader())
    assert "Epoch 1" in capfd.readouterr().err


@pytest.mark.parametrize(("given", "least", "rate"), [(0, "1", 1), (1, "0", 1), (2, "1", 2), (0, "", 0)])
def test_the_environment_sets_the_least_refresh_rate(
    given: int, least: str, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQDM_MINITERS", least)
    assert pl.callbacks.TQDMProgressBar(given).refresh_rate == rate


def test_a_bar_shows_what_get_metrics_returns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Bar(pl.callbacks.TQDMProgressBar):
        def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            items["version"] = items.pop("v_num")
            return items | {"lr": pl_module.optimizers().param_groups[0]["lr"]}

    logger = pl.loggers.CSVLogger(tmp_path, version=3)
    trainer = L.Trainer(**QUIET | {"logger": logger, "enable_progress_bar": True}, max_epochs=1, callbacks=[Bar()])
    trainer.fit(classifier(pl)(), loader())
    shown = capfd.readouterr().err
    assert "version=3, lr=0.1" in shown and "train_loss_epoch=" in shown and "v_num" not in shown


def test_arguments_of_strategies() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    ddp = pl.strategies.DDPStrategy(find_unused_parameters=True, start_method="spawn", process_group_backend=backend)
    assert isinstance(ddp, strategies.DDP) and isinstance(ddp, pl.strategies.DDPStrategy)
    assert not isinstance(strategies.SingleDevice(), pl.strategies.DDPStrategy)
    fsdp = pl.strategies.FSDPStrategy(auto_wrap_policy={torch.nn.Linear}, cpu_offload=True, state_dict_type="full")
    assert isinstance(fsdp, strategies.FSDP)
    with pytest.raises(TypeError, match=r"DDPStrategy of lockstep.lightning: .*'process_group_backend'; see DDP"):
        pl.strategies.DDPStrategy(process_group_backend="mpi")
    with pytest.raises(TypeError, match=r"DDPStrategy of lockstep.lightning: .*'ddp_comm_hook'; see DDP for options"):
        pl.strategies.DDPStrategy(ddp_comm_hook=print)
    assert isinstance(pl.strategies.SingleDeviceStrategy("cuda"), strategies.SingleDevice)
    with pytest.raises(TypeError, match="chosen by CUDA_VISIBLE_DEVICES"):
        pl.strategies.SingleDeviceStrategy(device="cuda:1")
    assert (pl.accelerators.CPUAccelerator(), pl.profilers.PyTorchProfiler()) == ("cpu", "torch")
    assert pl.accelerators.CPUAccelerator.is_available() and pl.accelerators.CPUAccelerator.auto_device_count() == 1
    assert pl.accelerators.CUDAAccelerator.is_available() is torch.cuda.is_available()
    assert pl.accelerators.CUDAAccelerator.auto_device_count() == torch.cuda.device_count()
    with pytest.raises(TypeError, match="SimpleProfiler of lockstep.lightning is a word for Lockstep"):
        type("Own", (pl.profilers.SimpleProfiler,), {})
    with pytest.raises(TypeError, match="SimpleProfiler of lockstep.lightning takes no options"):
        pl.profilers.SimpleProfiler(dirpath="x")


@pytest.mark.ranks
def test_the_tuner_finds_a_rate_and_leaves_the_run_alone() -> None:
    trainer, module = pl.Trainer(**QUIET, max_epochs=1), classifier(pl)(lr=0.5)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = Tuner(trainer).lr_find(module, loader(), num_training=20, max_lr=0.1, update_attr=True)
    assert found.suggestion() == module.hparams.lr != 0.5
    assert len(found.results["lr"]) == len(found.results["loss"]) == 20
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not any(isinstance(item, callbacks.LRFinder) for item in trainer.callbacks)
    with pytest.warns(UserWarning, match="lr_find searches nothing, as fast_dev_run is set"):
        assert Tuner(L.Trainer(**QUIET, fast_dev_run=True)).lr_find(module, loader()) is None
    with pytest.warns(UserWarning, match="scale_batch_size searches nothing"):
        assert Tuner(L.Trainer(**QUIET, fast_dev_run=True)).scale_batch_size(module) is None


@pytest.mark.ranks
def test_a_search_in_a_few_steps_has_a_rate_if_fewer_points_are_skipped() -> None:
    trainer, module = pl.Trainer(**QUIET, max_epochs=1), classifier(pl)(lr=0.5)
    found = Tuner(trainer).lr_find(module, loader(), num_training=5, update_attr=True, weights_only=False)
    assert len(found.results["lr"]) == 5 and found.suggestion() is None and module.hparams.lr == 0.5
    assert found.suggestion(skip_begin=0, skip_end=0) in found.results["lr"][1:4]
    assert found.suggestion(2, 0) == found.results["lr"][3]
    finder = pl.callbacks.LearningRateFinder(num_training_steps=1)
    pl.Trainer(**QUIET, max_epochs=1, callbacks=[finder]).fit(module, loader())
    assert finder.optimal_lr.suggestion() is None and module.hparams.lr == 0.5


def test_utilities(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert utilities.AttributeDict({"a": 1}).a == 1
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(3, 2)).sum().backward()
    norms = utilities.grad_norm(layer, 2)
    assert norms["grad_2.0_norm_total"] == pytest.approx(27**0.5)
    assert set(norms) == {"grad_2.0_norm/weight", "grad_2.0_norm/bias", "grad_2.0_norm_total"}
    assert rank_zero_only(lambda: 3)() == 3 and rank_zero_only.rank == 0
    rank_zero_info("begins")
    with pytest.warns(UserWarning, match="careful"):
        rank_zero_warn("careful")
    nested = torch.nn.Sequential(layer, torch.nn.Sequential(torch.nn.ReLU(), torch.nn.LazyLinear(2)))
    table = utilities.model_summary.ModelSummary(nested, max_depth=-1)
    assert table.layer_names == ["0", "1", "1.0", "1.1"] and table.param_nums == [3, 0, 0, 0]
    assert utilities.model_summary.ModelSummary(nested).layer_types == ["Linear", "Sequential"]
    assert utilities.model_summary.ModelSummary(nested, 0).layer_names == []
    summary = utilities.model_summary.summarize(layer)
    assert (summary.total_parameters, summary.trainable_parameters) == (3, 3)
    module = classifier(pl)()
    module.on_fit_end = None
    assert utilities.model_helpers.is_overridden("training_step", module)
    assert not any(utilities.model_helpers.is_overridden(name, module) for name in ("on_fit_start", "on_fit_end"))
    assert not utilities.model_helpers.is_overridden("training_step")
    assert utilities.model_helpers.is_overridden("setup", callbacks.ModelCheckpoint())
    with pytest.raises(ValueError, match="Linear has no 'training_step'; give parent="):
        utilities.model_helpers.is_overridden("training_step", layer, torch.nn.Linear)
    with utilities.seed.isolate_rng():
        first = torch.rand(2)
    assert torch.equal(first, torch.rand(2))
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rank_zero_only(lambda: 3, default=4)() == 4


@pytest.mark.ranks
def test_a_run_on_two_ranks(tmp_path: Path) -> None:
    """Classes of `lockstep.lightning` travel to the ranks."""
    single, double = (pl.Trainer(**QUIET | {"devices": devices}, max_epochs=1) for devices in (1, 2))
    modules = [classifier(pl)(), classifier(pl)()]
    single.fit(modules[0], loader(batch_size=8))
    double.fit(modules[1], loader(batch_size=4))
    for one, two in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(one, two)

    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            (own,) = batch_indices
            rows = {
                i: row.tolist()
                for batch, found in zip(predictions, own, strict=True)
                for i, row in zip(found, batch, strict=True)
            }
            (tmp_path / f"{trainer.world_size}.{trainer.global_rank}.json").write_text(json.dumps(rows))

    for devices in (1, 2):
        trainer = pl.Trainer(**QUIET | {"devices": devices}, callbacks=[Writer("epoch")])
        trainer.predict(classifier(pl)(), loader(samples=23))
    whole, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1.0", "2.0", "2.1"))
    assert len(whole) == 23 and first and second
    assert not first.keys() & second.keys()
    assert first | second == whole


def test_what_would_have_no_effect_is_refused() -> None:
    module = classifier(pl)()
    with pytest.raises(TypeError, match="Bar overrides init_train_tqdm, which TQDMProgressBar of lockstep.lightning"):
        type("Bar", (pl.callbacks.TQDMProgressBar,), {"init_train_tqdm": lambda *args: None})
    with pytest.raises(ValueError, match="gradient_clip_algorithm must be 'norm' or 'value', got 'foo'"):
        module.clip_gradients(None, 1.0, "foo")
    with pytest.raises(ValueError, match="max_depth must be -1, 0 or above, got -2"):
        utilities.model_summary.ModelSummary(module, -2)


def test_enums_say_how_names_begin() -> None:
    stages = importlib.import_module("lockstep.lightning.pytorch.trainer.states").RunningStage
    found = [stage.dataloader_prefix for stage in stages]
    assert found == ["train", "val", "val", "test", "predict"]


def test_an_optimizer_of_a_module_is_one_of_torch() -> None:
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), lr=0.5)
    held = pl.core.LightningOptimizer(optimizer)
    assert isinstance(held, torch.optim.Adam) and isinstance(held, pl.core.LightningOptimizer)
    assert held.optimizer is optimizer and held.param_groups is optimizer.param_groups
    groups = [dict(optimizer.param_groups[0], lr=0.25)]
    held.param_groups, held.note = groups, 3
    assert optimizer.param_groups is groups and not hasattr(optimizer, "note")
    kinds: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        kinds.append(self.optimizers())
        return self(batch[0]).sum()

    module = classifier(pl, training_step=training_step)()
    L.Trainer(**QUIET, max_steps=1).fit(module, loader())
    assert isinstance(kinds[0], type(kinds[0].optimizer)) and isinstance(kinds[0], pl.core.LightningOptimizer)


def test_from_datasets_gives_its_arguments_to_a_class_that_takes_them() -> None:
    class Sized(pl.LightningDataModule):
        def __init__(self, other: int, batch_size: int = 1) -> None:
            super().__init__()
            self.given = other, batch_size

    assert Sized.from_datasets(loader().dataset, batch_size=4, other=5).given == (5, 4)


def test_from_datasets_shuffles_training_alone() -> None:
    places = TensorDataset(torch.arange(64))
    made = pl.LightningDataModule.from_datasets(places, places, places, places, batch_size=64)
    in_order = [
        torch.equal(next(iter(loader))[0], places.tensors[0])
        for loader in (
            made.train_dataloader(),
            made.val_dataloader(),
            made.test_dataloader(),
            made.predict_dataloader(),
        )
    ]
    assert in_order == [False, True, True, True]


def test_what_moves_itself_is_moved() -> None:
    class Graph:
        place = "cpu"

        def to(self, device: Any, **options: Any) -> Any:
            self.place = torch.device(device).type
            return self

    assert pl.utilities.move_data_to_device({"graph": Graph()}, "meta")["graph"].place == "meta"


def test_frozen_modules_are_returned() -> None:
    module = classifier(pl)()
    assert module.freeze() is module and not module.training
    assert module.unfreeze() is module and module.training
