"""What is written for people to see may fail in any way: loggers, the terminal, a disk. Training and checkpoints do
not."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import Callback, ModelCheckpoint, ProgressBar, TensorBoardLogger
from lockstep.callbacks._support.printing import safe_print
from tests.trainer.metrics.test_store import Recorder
from tests.trainer.toy import Net, equal, loader, net, quiet, weights

# ---- loggers -------------------------------------------------------------------------------------


class ClientError(Exception):
    """What a logger's client library may raise; no class of ours."""


def failing(where: str, error: Callable[[], BaseException]) -> Recorder:
    """A logger that fails in the method or property `where`."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error()

    hook = where.startswith("on_") or where in ("setup", "teardown", "state_dict", "load_state_dict")
    return type(
        "Failing", (Recorder,), {where: fail if hook or where.startswith(("log_m", "log_h", "fin")) else property(fail)}
    )()


TOUCHED = (
    "save_dir name version setup teardown log_metrics log_hyperparams finalize on_fit_start on_train_batch_end "
    "on_save_checkpoint state_dict"
).split()


@pytest.mark.parametrize("where", TOUCHED)
@pytest.mark.parametrize("error", [ClientError, KeyError, AssertionError])
def test_no_error_of_a_logger_ends_training_or_loses_a_checkpoint(
    tmp_path: Path, where: str, error: type[Exception]
) -> None:
    broken, works, model = failing(where, lambda: error("HTTP 500")), Recorder(), net()
    trainer = quiet(logger=[broken, works], log_every_n_steps=1, enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.warns(
        RuntimeWarning, match=f"Failing stops logging, training continues: {error.__name__}.*500"
    ) as caught:
        trainer.fit(model, loader(32))
    assert len(caught) == 1 and len(works.values("train/loss_step")) == 4
    assert equal(weights(model), weights(Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)))


def test_a_loggers_failure_when_a_run_is_resumed_costs_one_warning(tmp_path: Path) -> None:
    def state(_: Any) -> dict[str, Any]:
        return {"cursor": 3}

    saves = ModelCheckpoint(tmp_path, "a", every_n_train_steps=2)
    logger = type("Failing", (Recorder,), {"state_dict": state})()
    quiet(logger=logger, callbacks=[saves], enable_checkpointing=True, max_steps=2).fit(net(), loader(32))
    broken = failing("load_state_dict", lambda: ClientError("gone"))
    trainer = quiet(logger=broken)
    with pytest.warns(RuntimeWarning, match="Failing stops logging, training continues: ClientError: gone"):
        trainer.fit(net(), loader(32), ckpt_path=tmp_path / "a")
    assert trainer.global_step == 4


@pytest.mark.ranks
def test_a_loggers_failure_on_a_started_rank_is_a_warning_too(tmp_path: Path) -> None:
    model = net()
    trainer = quiet(
        logger=failing("log_metrics", lambda: ClientError("HTTP 500")),
        log_every_n_steps=1,
        strategy="ddp",
        devices=2,
        accelerator="cpu",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # it is the rank that warns
        trainer.fit(model, loader(32))
    assert trainer.global_step == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_a_logger_does_not_swallow_what_ends_a_process(error: BaseException) -> None:
    with pytest.raises(type(error)):
        quiet(logger=failing("log_metrics", lambda: error), log_every_n_steps=1).fit(Net(), loader(8))


def test_a_writer_that_cannot_be_opened_by_the_users_step_costs_one_warning(tmp_path: Path) -> None:
    class Draws(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.logger.experiment.add_histogram("x", batch[0], self.global_step)
            return super().training_step(batch, batch_idx)

    class InTheWay(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            shutil.rmtree(trainer.log_dir)
            Path(trainer.log_dir).write_text("")

    trainer = quiet(logger=TensorBoardLogger(tmp_path), callbacks=[InTheWay()])
    with pytest.warns(RuntimeWarning, match="TensorBoardLogger stops logging, training continues") as caught:
        trainer.fit(Draws(), loader(32))
    assert len(caught) == 1 and trainer.global_step == 4


# ---- standard output and error -------------------------------------------------------------------

SCRIPT = """
import os, sys, warnings
warnings.filterwarnings("ignore")
from lockstep.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from tests.trainer.toy import Net, loader, net
from lockstep import Trainer

if __name__ == "__main__":
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, module, *rest):
            if trainer.global_step == 3 and WHEN == "later":
                end()
            trainer.print("step", trainer.global_step)
            module.print("step", trainer.global_step)
    def end():
        if KIND == "pipe":
            os.close(READ)
        elif KIND == "full":
            for fd in (1, 2):
                os.dup2(os.open("/dev/full", os.O_WRONLY), fd)
        else:
            sys.stdout.close(); sys.stderr.close()
    WHEN, KIND, root = sys.argv[1:4]
    if KIND == "pipe":
        READ, write = os.pipe()
        os.dup2(write, 1); os.dup2(write, 2); os.close(write)
    if WHEN == "before":
        end()
    trainer = Trainer(strategy=sys.argv[4], devices=int(sys.argv[5]), accelerator="cpu", max_epochs=2, seed=0,
        logger=False, default_root_dir=root, callbacks=[Breaks(), EarlyStopping("val/loss", verbose=True),
            Timer("00:01:00:00"),
        ModelCheckpoint(root + "/kept", "{step}", verbose=True)])
    trainer.fit(net(), loader(32), loader(8), ckpt_path="auto")
    trainer.validate(net(), loader(8))
    open(root + "/done", "w").write(str(trainer.global_step))
"""


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "when", "strategy", "devices", "steps"),
    [
        pytest.param("pipe", "later", "single", 1, 8, marks=pytest.mark.slow),
        pytest.param("full", "before", "single", 1, 8, marks=pytest.mark.slow),
        pytest.param("closed", "later", "single", 1, 8, marks=pytest.mark.slow),
        ("pipe", "before", "ddp", 2, 4),
    ],
)
def test_output_that_breaks_ends_no_training_and_loses_no_checkpoint(
    tmp_path: Path, repo_root: Path, kind: str, when: str, strategy: str, devices: int, steps: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, tmp_path / "train.py", when, kind, tmp_path / "root", strategy, str(devices)],
        env=os.environ | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (tmp_path / "root" / "done").read_text() == str(steps), result.stderr
    assert (tmp_path / "root" / "kept" / f"step={steps}" / "manifest.json").is_file()


@pytest.mark.long
@pytest.mark.ranks
def test_a_reader_that_goes_leaves_exit_code_0(tmp_path: Path, repo_root: Path) -> None:
    """`python train.py | head -1`: neither the end of the process nor the user's own prints fail."""
    script = SCRIPT.replace('if KIND == "pipe":\n        READ', "if False:\n        READ").replace(
        'open(root + "/done"', 'print("mine"); open(root + "/done"'
    )
    (tmp_path / "train.py").write_text(script)
    program = f"{sys.executable} {tmp_path / 'train.py'} never none {tmp_path / 'root'} single 1"
    command = f"{program} | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command],
        env=os.environ | {"PYTHONPATH": str(repo_root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "root" / "done").read_text() == "8"
    assert "Broken" not in result.stderr and len(result.stdout.splitlines()) == 1


class Fails(io.StringIO):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), OSError(5, "gone"), ValueError("closed")])
def test_safe_print_raises_nothing_but_what_ends_a_process(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    safe_print("x", file=Fails(error))
    monkeypatch.setattr(sys, "stdout", Fails(error))
    safe_print("x")
    ProgressBar().print("x")
    with pytest.raises(KeyboardInterrupt):
        safe_print("x", file=Fails(KeyboardInterrupt()))
    monkeypatch.setattr(sys, "stdout", None)
    safe_print("x")


def test_what_a_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    safe_print("é", 3, file=stream)
    assert raw.getvalue() == b"\\xe9 3\n"
