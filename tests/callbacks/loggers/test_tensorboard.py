"""TensorBoardLogger: what TensorBoard itself reads from the run's folder."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from torch import nn

from lockstep.callbacks import Callback, Guard, ModelCheckpoint
from lockstep.callbacks.loggers.tensorboard import TensorBoardLogger
from tests.trainer import toy
from tests.trainer.toy import loader, net, quiet


def begun(log_dir: Path, *, global_step: int = 0, rank: int = 0, **options: Any) -> tuple[TensorBoardLogger, Any]:
    """A logger whose `fit` has just begun, and its trainer."""
    trainer: Any = SimpleNamespace(is_global_zero=rank == 0, global_step=global_step)
    logger = TensorBoardLogger(**options)
    logger.log_dir = str(log_dir)
    module: Any = nn.Linear(1, 1)
    logger.setup(trainer, module, "fit")
    logger.on_fit_start(trainer, module)
    return logger, trainer


def read(log_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(log_dir)).Reload()


def points(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(log_dir).Scalars(tag)]


def test_scalars_text_and_images_reach_tensorboard(tmp_path: Path) -> None:
    logger, trainer = begun(tmp_path)
    logger.log_metrics({"loss": 2.0, "acc": 0.5}, step=10)
    trainer.global_step = 17
    logger.log_metrics({"loss": 1.0})  # at the last step
    logger.log_text("note", "**bold**")
    logger.experiment.add_image("picture", torch.rand(3, 4, 4), 17)
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(10, 2.0), (17, 1.0)]
    assert points(tmp_path, "acc") == [(10, 0.5)]
    assert read(tmp_path).Tags()["images"] == ["picture"]
    (text,) = read(tmp_path).Tensors("note/text_summary")
    assert text.step == 17
    assert text.tensor_proto.string_val == [b"**bold**"]


def test_scalars_that_are_held_keep_their_step_and_time_and_come_in_time(tmp_path: Path) -> None:
    logger, trainer = begun(tmp_path, flush_secs=1000)
    module: Any = nn.Identity()
    times = [time.time()]
    for step in range(30):
        logger.log_metrics({"loss": 1.0 / (step + 1), "acc": 1.0}, step=step)
        times.append(time.time())
    logger.on_save_checkpoint(trainer, module, {})
    events = read(tmp_path).Scalars("loss")
    assert [(event.step, event.value) for event in events] == [
        (step, pytest.approx(1.0 / (step + 1))) for step in range(30)
    ]
    assert all(
        before <= event.wall_time <= after for event, before, after in zip(events, times, times[1:], strict=False)
    )
    assert len(points(tmp_path, "acc")) == 30

    logger.log_metrics({"loss": 3.0}, step=30)
    logger.log_text("note", "after it", 30)
    logger.log_metrics({"loss": 4.0}, step=31)
    logger.on_validation_start(trainer, module)
    assert logger._writer is not None
    logger._writer.flush()
    assert points(tmp_path, "loss")[30:] == [(30, 3.0), (31, 4.0)]
    order = [
        (event.step, event.summary.value[0].tag)
        for event in EventFileLoader(next(map(str, tmp_path.glob("events*")))).Load()
        if event.summary.value
    ]
    assert order[-3:] == [(30, "loss"), (30, "note/text_summary"), (31, "loss")], (
        "in the order in which they were logged"
    )

    logger.log_metrics({"loss": 5.0}, step=32)
    logger.on_train_epoch_end(trainer, module)
    logger._writer.flush()
    assert points(tmp_path, "loss")[-1] == (32, 5.0)
    logger.finalize("success")


class ReadsBack(Callback):
    """Reads what is on disk where a step begins, when the checkpoint of the step before has just been written."""

    def __init__(self) -> None:
        self.found: dict[int, list[int]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 4:
            self.found[trainer.global_step] = [step for step, _ in points(Path(trainer.log_dir), "train/loss_step")]


def test_what_was_logged_before_a_checkpoint_is_on_disk_before_it() -> None:
    """A run that is killed and resumed begins at the checkpoint: nothing logged before it may be lost."""
    reads = ReadsBack()
    callbacks = [ModelCheckpoint(every_n_train_steps=4), reads]
    logger = TensorBoardLogger(flush_secs=1000)
    quiet(logger=logger, enable_checkpointing=True, callbacks=callbacks, log_every_n_steps=1).fit(net(), loader(64))
    assert reads.found[4] == [1, 2, 3, 4]
    assert reads.found[5] == [1, 2, 3, 4], "the next one is still held: it is the checkpoint that wrote those before it"


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    killed, _ = begun(tmp_path)
    for step in range(0, 60, 10):
        killed.log_metrics({"loss": 1.0}, step=step)
    killed.save()  # and nothing more: the process is gone
    resumed, _ = begun(tmp_path, global_step=30)
    for step in (40, 50, 60):
        resumed.log_metrics({"loss": 2.0}, step=step)
    resumed.finalize("success")
    assert points(tmp_path, "loss") == [(0, 1.0), (10, 1.0), (20, 1.0), (30, 1.0), (40, 2.0), (50, 2.0), (60, 2.0)]
    killed.finalize("failed")


def test_a_run_that_is_resumed_by_a_clock_that_is_behind_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorBoard reads event files by their names, which begin with the time."""
    clock, behind = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: clock() - behind[0])
    for start in (0, 10, 20):
        logger, _ = begun(tmp_path, global_step=start)
        for step in (start + 10, start + 20):
            logger.log_metrics({"loss": float(start)}, step=step)
        logger.finalize("failed")
        behind[0] += 3600
    assert points(tmp_path, "loss") == [(10, 0.0), (20, 10.0), (30, 20.0), (40, 20.0)]


def test_what_a_killed_run_logged_at_the_step_of_its_checkpoint_is_shown_once(tmp_path: Path) -> None:
    def log_end_of_epoch(logger: TensorBoardLogger) -> None:
        logger.log_metrics({"val": 0.5, "epoch": 0}, step=4)
        logger.experiment.add_image("picture", torch.ones(3, 4, 4), 4)
        logger.save()

    logger, _ = begun(tmp_path)
    logger.log_metrics({"loss": 1.0, "epoch": 0}, step=4)
    logger.save()
    saved = logger.state_dict()
    log_end_of_epoch(logger)  # after the checkpoint, and then a kill
    for _ in range(2):
        logger, _ = begun(tmp_path, global_step=4)
        logger.load_state_dict(saved)
        log_end_of_epoch(logger)
        logger.log_metrics({"loss": 0.5}, step=5)
        logger.save()
    logger.log_metrics({"val": 0.25}, step=4)  # another value is another one
    logger.finalize("success")
    assert points(tmp_path, "loss") == [(4, 1.0), (5, 0.5)]
    assert points(tmp_path, "val") == [(4, 0.5), (4, 0.25)]
    assert points(tmp_path, "epoch") == [(4, 0.0), (4, 0.0)]
    assert [image.step for image in read(tmp_path).Images("picture")] == [4]


def test_the_hparams_page_compares_runs_by_all_their_values(tmp_path: Path) -> None:
    """Runs may differ in which hyperparameters they have, and no metric has to be announced."""
    for index, params in enumerate(
        ({"lr": 0.1, "net": {"width": 8, "bias": True}}, {"lr": 0.2, "seed": 7, "path": Path("data"), "none": None})
    ):
        logger, _ = begun(tmp_path / f"version_{index}")
        logger.log_hyperparams(params)
        logger.log_hyperparams({"extra": [1, 2]})  # the user's, beside the module's
        logger.log_metrics({"acc": 0.25 * (index + 1)}, step=5)
        logger.finalize("success" if index == 0 else "failed")
    assert yaml.safe_load((tmp_path / "version_1" / "hparams.yaml").read_text()) == {
        "lr": 0.2,
        "seed": 7,
        "path": "data",
        "none": None,
        "extra": [1, 2],
    }

    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(tmp_path))))
    statuses = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING]
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=9, allowed_statuses=statuses)
    groups = {group.name: group for group in Handler(RequestContext(), context, "", request).run().session_groups}
    assert sorted(groups) == ["version_0", "version_1"]
    values = {
        name: {key: value.string_value or value.number_value for key, value in group.hparams.items()}
        | {m.name.tag: m.value for m in group.metric_values}
        for name, group in groups.items()
    }
    assert values["version_0"] == {"lr": 0.1, "net/width": 8, "net/bias": "True", "extra": "[1, 2]", "acc": 0.25}
    assert values["version_1"] == {"lr": 0.2, "seed": 7, "path": "data", "extra": "[1, 2]", "acc": 0.5}
    assert groups["version_0"].sessions[0].status == api_pb2.STATUS_SUCCESS
    assert groups["version_1"].sessions[0].status == api_pb2.STATUS_UNKNOWN
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.parent != tmp_path], "one folder a run"
    (text,) = read(tmp_path / "version_0").Tensors("hparams/text_summary")
    assert b"width: 8" in text.tensor_proto.string_val[0]


def test_a_logger_travels_to_another_process_before_and_after_it_was_opened(tmp_path: Path) -> None:
    logger, _ = begun(tmp_path)
    logger.log_metrics({"loss": 1.0}, step=1)
    other = pickle.loads(pickle.dumps(logger))
    other.log_metrics({"loss": 2.0}, step=2)
    other.finalize("success")
    logger.finalize("success")
    assert sorted(points(tmp_path, "loss")) == [(1, 1.0), (2, 2.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    logger, _ = begun(tmp_path, rank=1)
    logger.log_hyperparams({"lr": 0.1}, {"acc": 0.0})
    logger.log_metrics({"loss": 1.0}, step=1)
    logger.log_text("note", "x")
    logger.experiment.add_histogram("weights", torch.rand(4), 1)
    logger.save()
    logger.finalize("success")
    assert not list(tmp_path.iterdir())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.counts: Any = {"calls": 0, "samples": torch.zeros(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        self.counts["calls"] += 1
        self.counts["samples"] += len(x)
        return (self.norm(x) + torch.randn_like(x)).relu()


def test_the_graph_is_drawn_without_a_trace_on_the_module(tmp_path: Path) -> None:
    logger, _ = begun(tmp_path, log_graph=True)
    net: Any = Net()
    before, rng = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    logger.log_graph(net, torch.rand(3, 4, generator=torch.Generator().manual_seed(0)))
    logger.finalize("success")
    assert any("norm" in node.name for node in read(tmp_path).Graph().node)
    assert net.training
    assert net.counts == {"calls": 0, "samples": torch.zeros(())}
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_graph_that_cannot_be_drawn_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger, _ = begun(tmp_path, log_graph=True)
    net: Any = Net()
    with pytest.warns(UserWarning, match=r"could not trace the graph of Net\.forward") as caught:
        logger.log_graph(net, torch.rand(3, 5))
    assert len(caught) == 1
    assert capsys.readouterr().out == ""
    logger.finalize("success")


FULL_DISK = """
import resource, torch
from lockstep.callbacks.loggers.tensorboard import TensorBoardLogger

logger = TensorBoardLogger(flush_secs=0.01)
logger.log_dir = "run"
logger.log_metrics({"loss": 1.0}, step=1)
logger.save()
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for step in range(2, 200):
    logger.experiment.add_histogram("weights", torch.rand(1000), step)
    logger.log_metrics({"loss": 1.0}, step=step)
logger.finalize("success")
print("trained")
"""


@pytest.mark.long
@pytest.mark.ranks
def test_a_file_that_cannot_grow_costs_one_warning(tmp_path: Path, repo_root: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (result.returncode, result.stdout) == (0, "trained\n"), result.stderr
    assert (
        result.stderr.count(
            "RuntimeWarning: TensorBoardLogger stops logging, training continues: [Errno 27] File too large"
        )
        == 1
    )
    assert len(result.stderr.splitlines()) == 2, "the warning and the line it came from"
    assert points(tmp_path / "run", "loss")[0] == (1, 1.0)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="pip install tensorboard"):
        TensorBoardLogger()


def test_the_writer_before_the_run_says_when_it_exists() -> None:
    with pytest.raises(RuntimeError, match="no folder yet"):
        _ = TensorBoardLogger().experiment


class Breaks(toy.Net):
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (float("nan") if self.calls == 7 else 1)


def test_a_run_that_goes_back_to_a_checkpoint_shows_each_step_once(tmp_path: Path) -> None:
    quiet(
        max_epochs=3,
        logger=TensorBoardLogger(tmp_path),
        callbacks=[ModelCheckpoint(every_n_train_steps=4), Guard(non_finite="roll_back")],
        enable_checkpointing=True,
        log_every_n_steps=1,
    ).fit(Breaks(), loader(32))
    (folder,) = tmp_path.glob("*/version_0")
    assert [step for step, _ in points(folder, "train/loss_step")] == [*range(1, 10)]
    assert [step for step, _ in points(folder, "train/loss_epoch")] == [4, 5, 9], "an epoch is not run again"
