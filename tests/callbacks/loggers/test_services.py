"""WandbLogger and MLflowLogger: what the services' own files hold, beside what CSV and TensorBoard hold."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lockstep import Trainer
from lockstep.callbacks import CSVLogger, Guard, MLflowLogger, ModelCheckpoint, TensorBoardLogger, WandbLogger
from lockstep.strategies.launch import fault_injection
from tests.trainer.toy import Net, loader, net, quiet

Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "DO_NOT_TRACK": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")  # the logger sets it; undone after the test


def records(path: Path) -> Iterator[Any]:
    """The records of a W&B file: a header of 7 bytes, then blocks of 32 KiB as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def written(path: Path) -> list[Any]:
    """The records of a finished run; W&B's service writes the last of them by itself, some time after `finish`."""
    deadline = time.monotonic() + 30
    found = list(records(path))
    while not any(record.HasField("exit") for record in found):
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} was not finished: {len(found)} records")
        time.sleep(0.05)
        found = list(records(path))
    return found


def of_wandb(log_dir: Path) -> tuple[Points, list[str], dict[str, Any]]:
    """Values, run ids and config of all offline runs that `wandb sync` would send."""
    points: Points = {}
    ids, settings = [], {}
    for path in sorted(log_dir.glob("wandb/offline-run-*/*.wandb")):
        for record in written(path):
            if record.HasField("run"):
                ids.append(record.run.run_id)
            for item in record.config.update:
                settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("history"):
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for name in row.keys() - {"trainer/global_step"}:
                    if not name.startswith("_"):
                        points.setdefault(name, []).append((row["trainer/global_step"], row[name]))
    return points, ids, settings


def of_mlflow(folder: Path) -> tuple[Points, list[Any]]:
    from mlflow.tracking import MlflowClient

    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=f"file:{folder.absolute()}")
    runs = client.search_runs([item.experiment_id for item in client.search_experiments()])
    points = {
        key: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]
        for run in runs
        for key in run.data.metrics
    }
    return points, runs


def of_csv(path: Path) -> Points:
    points: Points = {}
    for row in csv.DictReader(path.read_text().splitlines()):
        for name, value in row.items():
            if value and name != "step":
                points.setdefault(name, []).append((int(row["step"]), float(value)))
    return points


def of_tensorboard(log_dir: Path) -> Points:
    events = EventAccumulator(str(log_dir)).Reload()
    return {tag: [(item.step, item.value) for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


KILL = "rank={rank},step=6,point=backward,action=sigkill,file=count"


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "kill"), [pytest.param("single", 1, True, marks=pytest.mark.slow), ("ddp", 2, False)]
)
def test_every_logger_holds_the_same_numbers_and_each_step_once(
    monkeypatch: pytest.MonkeyPatch, strategy: str, devices: int, kill: bool
) -> None:
    if kill:
        monkeypatch.setenv(fault_injection.VARIABLE, KILL.format(rank=0))
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=2,
        seed=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        max_restarts=int(kill),
        logger=[CSVLogger(), TensorBoardLogger(), WandbLogger(), MLflowLogger()],
        callbacks=ModelCheckpoint(every_n_train_steps=4),
    )
    trainer.fit(net(), loader(20 * devices, 4, shuffle=True), loader(8, 4))
    log_dir = Path(trainer.log_dir or "")
    table = of_csv(log_dir / "metrics.csv")
    assert [step for step, _ in table["train/loss_step"]] == list(range(1, 11))
    assert [step for step, _ in table["val/acc"]] == [5, 10]
    points, ids, config = of_wandb(log_dir)
    assert points == table  # bit for bit
    assert len(ids) == 1 and config["width"] == 16
    points, runs = of_mlflow(Path("runs/mlruns"))
    del points["epoch"], table["epoch"]  # logged with training and validation at one step; MLflow has it once
    assert points == table
    (run,) = runs
    assert run.info.status == "FINISHED" and run.data.params["lr"] == "0.01" and run.info.run_name == "version_0"
    shown = of_tensorboard(log_dir)
    assert {tag: [(step, pytest.approx(value)) for step, value in shown[tag]] for tag in table} == table


@pytest.mark.long
@pytest.mark.ranks
def test_a_second_trainer_resumes_the_services_runs(repo_root: Path) -> None:
    def fit(epochs: int, ckpt_path: str | None) -> Trainer:
        trainer = quiet(
            logger=[CSVLogger(), WandbLogger(), MLflowLogger()],
            callbacks=ModelCheckpoint(every_n_train_steps=3),
            enable_checkpointing=True,
            max_epochs=epochs,
            log_every_n_steps=1,
        )
        trainer.fit(net(), loader(32), loader(8), ckpt_path=ckpt_path)
        return trainer

    log_dir = Path(fit(1, None).log_dir or "")
    before = of_wandb(log_dir)
    newest = max(log_dir.glob("checkpoints/*"), key=lambda path: path.stat().st_mtime)
    resumed = fit(2, str(newest))
    assert resumed.log_dir != str(log_dir)
    after = of_wandb(Path(resumed.log_dir or ""))
    assert not of_wandb(log_dir)[1] and after[1] == before[1]  # the same id, in one place
    table = of_csv(log_dir / "metrics.csv")
    assert [step for step, _ in after[0]["train/loss_step"]] == list(range(1, 9))
    assert after[0]["train/loss_step"][:4] == table["train/loss_step"]
    points, runs = of_mlflow(Path("runs/mlruns"))
    assert len(runs) == 1 and [step for step, _ in points["train/loss_step"]] == list(range(1, 9))


def begun(logger: Any, log_dir: Path, rank: int = 0, step: int = 0) -> Any:
    """`logger` as a `fit` that has just begun has it."""
    trainer: Any = SimpleNamespace(is_global_zero=rank == 0, global_step=step)
    logger.log_dir = str(log_dir)
    logger.setup(trainer, nn.Linear(1, 1), "fit")
    logger.on_fit_start(trainer, nn.Linear(1, 1))
    return logger


@pytest.mark.ranks
def test_mlflow_has_the_step_of_a_resumed_checkpoint_once(tmp_path: Path) -> None:
    logger = begun(MLflowLogger(), tmp_path / "Net" / "version_0")
    logger.log_metrics({"loss": 1.0}, step=4)
    saved = logger.state_dict()
    logger.log_metrics({"val": 0.5}, step=4)  # after the checkpoint, as an epoch's validation, and then a kill
    logger.log_metrics({"loss": 0.9}, step=5)
    resumed = MLflowLogger()
    begun(resumed, tmp_path / "Net" / "version_0", step=4)
    resumed.load_state_dict(saved)
    for values, step in (({"val": 0.5}, 4), ({"loss": 0.9}, 5), ({"loss": 0.8}, 6)):
        resumed.log_metrics(values, step=step)
    points, _ = of_mlflow(tmp_path / "mlruns")
    assert points == {"loss": [(4, 1.0), (5, 0.9), (6, 0.8)], "val": [(4, 0.5)]}


@pytest.mark.ranks
def test_a_killed_mlflow_run_that_begins_again_in_its_folder_is_one_run(tmp_path: Path) -> None:
    for steps in ((1, 2), (1, 2, 3)):  # killed after the first
        logger = begun(MLflowLogger(), tmp_path / "Net" / "version_0")
        for step in steps:
            logger.log_metrics({"loss": 1 / step}, step=step)
    logger.finalize("success")
    points, (run,) = of_mlflow(tmp_path / "mlruns")
    assert points == {"loss": [(1, 1.0), (2, 0.5), (3, 1 / 3)]} and run.info.status == "FINISHED"
    begun(MLflowLogger(), tmp_path / "Net" / "version_0").log_metrics({"loss": 1.0}, step=1)
    assert len(of_mlflow(tmp_path / "mlruns")[1]) == 2  # the first has ended


@pytest.mark.parametrize("kind", [WandbLogger, MLflowLogger])
def test_other_ranks_write_nothing(tmp_path: Path, kind: type) -> None:
    logger = begun(kind(), tmp_path / "n" / "v", rank=1)
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_hyperparams({"lr": 0.1})
    logger.log_text("note", "text")
    logger.experiment.log({"a": 1})
    logger.save()
    logger.finalize("success")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "package"), [(WandbLogger, "wandb"), (MLflowLogger, "mlflow")])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, kind: type, package: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'lockstep-trainer\[{package}\]'"):
        kind()


class _Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_text_and_names_reach_mlflow_and_an_unserializable_hyperparameter_is_a_warning(tmp_path: Path) -> None:
    logger = begun(MLflowLogger(tags={"kind": "test"}), tmp_path / "n" / "v")
    with pytest.warns(UserWarning, match="hyperparameter 'odd' is not logged: a _Hostile that cannot be converted"):
        logger.log_hyperparams({"odd": _Hostile(), "net": {"width": 3}})
    logger.log_metrics({"loss (mean)": 2.0, "nan": float("nan")}, step=7)
    logger.log_text("note", "**bold**", step=7)
    assert logger.experiment.get_run(logger.run_id).info.status == "RUNNING"
    logger.finalize("failed")
    points, (run,) = of_mlflow(tmp_path / "mlruns")
    assert points["loss _mean_"] == [(7, 2.0)] and str(points["nan"]) == "[(7, nan)]"
    assert run.data.params == {"net/width": "3"} and run.data.tags["kind"] == "test" and run.info.status == "FAILED"
    assert next(tmp_path.glob("mlruns/*/*/artifacts/note-step=7.md")).read_text() == "**bold**"


class _Service(ModuleType):
    """A module with W&B's calls that remembers them, such as Trackio or an online W&B."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.run, self.calls = None, []
        self.stored: list[Any] = []

    def Api(self) -> Any:
        return SimpleNamespace(runs=lambda project: self.stored)

    def Settings(self, **options: Any) -> Any:
        return options

    def init(self, **options: Any) -> Any:
        self.calls.append(("init", options))
        if options.get("resume_from") == "gone?_step=2":
            raise RuntimeError("this server cannot rewind")
        config = SimpleNamespace(update=lambda values, **options: self.calls.append(("config", values)))
        return SimpleNamespace(
            offline=False,
            step=3,
            config=config,
            define_metric=lambda *args, **options: None,
            log=lambda values, **options: self.calls.append(("log", values, options)),
            finish=lambda **options: self.calls.append(("finish", options)),
        )


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Service]:
    torch.optim.SGD([torch.zeros(1)])  # the first one imports what reads the specs of many modules, wandb's too
    monkeypatch.setenv("WANDB_MODE", "online")
    found = _Service("wandb")
    monkeypatch.setitem(sys.modules, "wandb", found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    return found


def test_an_online_run_is_rewound_to_the_checkpoint(tmp_path: Path, service: _Service) -> None:
    first = begun(WandbLogger(entity="team"), tmp_path / "n" / "v")
    for step in (1, 2, 3):
        first.log_metrics({"loss": 1.0}, step=step)
    state = first.state_dict()
    assert service.calls[0][1]["resume"] == "allow" and service.calls[0][1]["entity"] == "team"
    for run_id in (state["id"], "gone"):
        service.calls.clear()
        resumed = begun(WandbLogger(), tmp_path / "n" / "v", step=3)
        resumed.load_state_dict(state | {"id": run_id})
        if run_id == "gone":
            with pytest.warns(UserWarning, match="could not drop what run gone logged after the checkpoint"):
                resumed.log_metrics({"loss": 1.0}, step=4)
            assert service.calls[1][1]["resume"] == "allow"
        else:
            resumed.log_metrics({"loss": 1.0}, step=4)
            assert service.calls[0][1]["resume_from"] == f"{run_id}?_step=2"
        assert [call[1] for call in service.calls if call[0] == "log"] == [{"trainer/global_step": 4, "loss": 1.0}]


def test_metrics_may_have_the_names_that_wandb_rows_have_of_their_own(tmp_path: Path, service: _Service) -> None:
    logger, states = begun(WandbLogger(), tmp_path / "n" / "v"), []
    for step in (1, 2, 3):
        logger.log_metrics({"trainer/global_step": 9.0, "outside": 0.5}, step=step)
        states.append(logger.state_dict())
    resumed = begun(WandbLogger(), tmp_path / "n" / "v", step=2)
    resumed.load_state_dict(states[1])
    resumed.log_metrics({"outside": 0.25}, step=3)
    _, *rows = map(json.loads, (tmp_path / "n" / "v" / "wandb_rows.jsonl").read_text().splitlines())
    own = [{"trainer/global_step": step, "metric/trainer/global_step": 9.0, "outside": 0.5} for step in (1, 2)]
    assert rows == [*own, {"trainer/global_step": 3, "outside": 0.25}]


def test_rows_outside_of_a_fit_of_an_old_journal_stay_outside(tmp_path: Path, service: _Service) -> None:
    logger = begun(WandbLogger(), tmp_path / "n" / "v")
    for step in (1, 2):
        logger.log_metrics({"loss": 1.0}, step=step)
    state, journal = logger.state_dict(), tmp_path / "n" / "v" / "wandb_rows.jsonl"
    with open(journal, "a", encoding="utf-8") as file:
        file.write(json.dumps({"trainer/global_step": 2, "val": 0.5, "outside": True}) + "\n")
    resumed = begun(WandbLogger(), tmp_path / "n" / "v", step=2)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 1.0}, step=3)
    _, *rows = map(json.loads, journal.read_text().splitlines())
    assert rows[2] == {"trainer/global_step": 2, "val": 0.5, "_outside": True} and len(rows) == 4


def test_a_run_that_the_user_began_is_used_and_not_finished(tmp_path: Path, service: _Service) -> None:
    service.run = service.init()
    service.calls.clear()
    logger = begun(WandbLogger(), tmp_path / "n" / "v")
    logger.log_metrics({"loss": 1.0}, step=4)
    logger.finalize("success")
    assert logger.experiment is service.run and [call[0] for call in service.calls] == ["log"]


def test_a_drop_in_gets_steps_and_a_resumed_run_replaces_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: _Service
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", service)
    logger = begun(WandbLogger(module="trackio"), tmp_path / "n" / "v")
    logger.log_hyperparams({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, step=4)
    state = logger.state_dict()
    logger.log_metrics({"loss": 1.0}, step=5)
    logger.finalize("success")
    assert [call[0] for call in service.calls] == ["init", "config", "log", "log", "finish"]
    name = f"v-{state['id']}"
    assert service.calls[0] == ("init", {"project": "n", "name": name, "config": {"lr": 0.1}})
    monkeypatch.setenv("WANDB_PROJECT", "points")
    begun(WandbLogger(module="trackio"), tmp_path / "n" / "other").log_metrics({"loss": 1.0}, step=1)
    assert next(call for call in reversed(service.calls) if call[0] == "init")[1]["project"] == "points"
    assert service.calls[2] == ("log", {"loss": 1.0}, {"step": 4})
    logger.log_metrics({"test": 3.0}, step=5)  # as of a test between two fits, which a resumed one keeps
    logger.finalize("success")

    service.calls.clear()
    service.stored = [
        SimpleNamespace(name=kind, delete=lambda kind=kind: service.calls.append(("delete", kind)))
        for kind in ("other-1", name)
    ]
    resumed = begun(WandbLogger(module="trackio"), tmp_path / "n" / "v", step=4)
    resumed.load_state_dict(state)
    resumed.log_metrics({"loss": 2.0}, step=5)
    assert [call[:2] for call in service.calls if call[0] != "init"] == [
        ("delete", name),
        ("log", {"loss": 1.0}),
        ("log", {"test": 3.0}),
        ("log", {"loss": 2.0}),
    ]


def test_a_service_that_fails_costs_one_warning(monkeypatch: pytest.MonkeyPatch, service: _Service) -> None:
    monkeypatch.setattr(service, "init", lambda **options: (_ for _ in ()).throw(RuntimeError("no key")))

    class Watched(Net):
        def on_train_epoch_end(self) -> None:
            self.logger.experiment.log({"image": 1})

    trainer = quiet(logger=WandbLogger())
    with pytest.warns(RuntimeWarning, match="WandbLogger stops logging, training continues: RuntimeError: no key") as w:
        trainer.fit(Watched(), loader())
    assert len(w) == 1 and trainer.global_step == 7 and os.path.isdir(trainer.log_dir or "")


def test_a_fit_that_begins_again_in_its_folder_has_its_first_step_once(tmp_path: Path, service: _Service) -> None:
    """As where a rank dies before there is a checkpoint."""
    for kind in (CSVLogger, TensorBoardLogger, WandbLogger):
        for _ in range(3):
            logger = begun(kind(), tmp_path)
            logger.log_metrics({"rate": 0.5}, step=0)
            logger.log_metrics({"rate": 0.5}, step=1)
            logger.save()
            if kind is TensorBoardLogger:
                logger.experiment.flush()
        logger.finalize("success")
    assert of_csv(tmp_path / "metrics.csv")["rate"] == of_tensorboard(tmp_path)["rate"] == [(0, 0.5), (1, 0.5)]
    _, *rows = map(json.loads, (tmp_path / "wandb_rows.jsonl").read_text().splitlines())
    assert rows == [{"trainer/global_step": step, "rate": 0.5} for step in (0, 1)]


class Breaks(Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == 7 else 1)


@pytest.mark.ranks
def test_wandb_has_each_step_once_when_a_run_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=3,
        logger=WandbLogger(tmp_path),
        callbacks=[ModelCheckpoint(every_n_train_steps=4), Guard(non_finite="roll_back")],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Breaks(), loader(32))
    points, _, _ = of_wandb(Path(str(trainer.log_dir)))
    assert [step for step, _ in points["train/loss_step"]] == [*range(1, 10)]
    assert [step for step, _ in points["train/loss_epoch"]] == [4, 5, 9], "an epoch is not run again"
