"""The command line as a user sees it: what it prints, and the exit codes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.trainer.arguments import TrainerArguments
from lockstep.trainer.cli.config import resolve
from lockstep.trainer.cli.main import main

HELP = """
import contextlib, io, sys
from lockstep.trainer.cli.main import main
for words in (["--help"], ["fit", "--help"], ["plan", "--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(words)
    print(len(out.getvalue()) > 500, "torch" in sys.modules, len(sys.modules))
"""

TINY = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import DataModule, Module

class Line(Module):
    def __init__(self, lr: float = 0.1, fail: bool = False, sleep_s: float = 0.0, says: str = ""):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        if self.hparams.fail:
            raise ValueError("the user's own mistake")
        time.sleep(self.hparams.sleep_s)
        loss = (self.layer(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        if self.hparams.sleep_s:
            open("started", "w").close()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("error", (self.layer(batch[0]) - batch[1]).abs().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_error", (self.layer(batch[0]) - batch[1]).abs().mean())

    def predict_step(self, batch, batch_idx):
        if self.hparams.says == "str":
            return "a"
        return {"input": batch[0]} | ({} if self.hparams.says and batch_idx else {"output": self.layer(batch[0])})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

class Bare(Module):
    pass

class Data(DataModule):
    def __init__(self, size: int = 22):
        self.size = size

    def loader(self):
        x = torch.arange(self.size, dtype=torch.float32).unsqueeze(1) / max(self.size, 1)
        return DataLoader(TensorDataset(x, 2 * x + 1), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader
"""

CONFIG = """
module: {class: tiny.Line}
data: {class: tiny.Data}
trainer:
  seed: 1
  max_epochs: 2
  default_root_dir: runs
  enable_progress_bar: false
  accelerator: cpu
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tiny.py").write_text(TINY)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("tiny", None)


def environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def block(output: str, title: str) -> dict[str, str]:
    """The rows printed under a line that begins with `title`."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rows = [line.split(maxsplit=1) for line in lines[start + 1 :] if line.startswith("  ")]
    return {name: value.strip() for name, value in rows}


def checkpoint(run_dir: str) -> str:
    return str(next(path.parent for path in Path(run_dir).rglob("manifest.json")))


def test_fit_ends_with_metrics_and_where_the_run_lies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "run.yaml", "max_epochs=3"]) == 0
    output = capsys.readouterr().out
    assert "fit: 3 epochs, 18 steps" in output
    rows = block(output, "fit: ")
    assert 0 < float(rows["loss"]) < 5
    assert 0 < float(rows["error"]) < 5
    assert Path(rows["run"]).is_dir()
    assert rows["view"] == f"tensorboard --logdir {rows['run']}"


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [["strategy=single"], ["strategy=ddp", "devices=2"]], ids=["single", "ddp"])
def test_a_damaged_checkpoint_is_one_line_and_refused_before_the_run(
    layout: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "run.yaml"]) == 0
    path = checkpoint(block(capsys.readouterr().out, "fit: ")["run"])
    weights = Path(path, "model.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["fit", "run.yaml", f"ckpt_path={path}", *layout]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: error: checkpoint ")
    assert f"{path} cannot be used: model.safetensors has changed" in line


def test_evaluation_and_prediction_of_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "run.yaml"]) == 0
    fitted = block(capsys.readouterr().out, "fit: ")
    ckpt_path = checkpoint(fitted["run"])

    assert main(["validate", "run.yaml", f"ckpt_path={ckpt_path}"]) == 0
    assert block(capsys.readouterr().out, "validate: ")["error"] == fitted["error"]
    assert main(["test", "run.yaml", f"ckpt_path={ckpt_path}"]) == 0
    assert block(capsys.readouterr().out, "test: ")["test_error"] == fitted["error"]

    runs = {*Path("runs/Line").iterdir()}
    assert main(["predict", "run.yaml", f"ckpt_path={ckpt_path}", "output=there/out.safetensors"]) == 0
    rows = block(capsys.readouterr().out, "predict: ")
    assert rows == {"input": "[22, 1]", "output": "there/out.safetensors"} | {"output": rows["output"]}
    assert {*Path("runs/Line").iterdir()} == runs, "a run that wrote nothing in its folder leaves none"
    tensors = load_file("there/out.safetensors")
    assert torch.equal(tensors["input"], torch.arange(22.0).unsqueeze(1) / 22)
    assert (tensors["output"] - 2 * tensors["input"] - 1).abs().mean() == pytest.approx(
        float(fitted["error"]), rel=1e-4
    )


PREDICTS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import DataModule, Module

class Several(DataModule):
    def predict_dataloader(self):
        return [DataLoader(TensorDataset(torch.full((6, 2), value)), batch_size=4) for value in (1.0, 2.0)]

class Lists(Module):
    def predict_step(self, batch, batch_idx, dataloader_idx):
        return [batch[0][:, 0], torch.tensor(batch_idx)]

class One(DataModule):
    def predict_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(24.0).reshape(6, 4)), batch_size=4)

class Images(Module):
    def predict_step(self, batch, batch_idx):
        return batch[0][:, :, None, None].expand(-1, -1, 2, 3).contiguous(memory_format=torch.channels_last)

class Views(Module):
    def predict_step(self, batch, batch_idx):
        ragged = batch[0][:, : batch_idx + 2]
        return {"whole": ragged, "again": ragged, "first": ragged[0]}
"""


def predictions_of(module: str, data: str) -> dict[str, torch.Tensor]:
    Path("predicts.py").write_text(PREDICTS)
    words = [
        f"module.class=predicts.{module}",
        f"data.class=predicts.{data}",
        "accelerator=cpu",
        "default_root_dir=runs",
    ]
    assert main(["predict", *words, "ckpt_path=null", "output=out.safetensors"]) == 0
    sys.modules.pop("predicts")
    return load_file("out.safetensors")


def test_predictions_of_several_loaders_are_joined_one_by_one() -> None:
    found = predictions_of("Lists", "Several")
    assert {*found} == {f"{name}/dataloader_idx_{i}" for i in (0, 1) for name in ("0", "1.000000", "1.000001")}, (
        "by the names in what predict_step returned"
    )
    assert found["0/dataloader_idx_0"].tolist() == [1.0] * 6 and found["0/dataloader_idx_1"].tolist() == [2.0] * 6


def test_predictions_are_written_in_whatever_memory_they_are() -> None:
    rows = torch.arange(24.0).reshape(6, 4)
    images = predictions_of("Images", "One")["predictions"]
    assert torch.equal(images, rows[:, :, None, None].expand(-1, -1, 2, 3))
    found = predictions_of("Views", "One")
    assert torch.equal(found["whole.000001"], rows[4:, :3]) and torch.equal(found["again.000001"], rows[4:, :3])
    assert found["first"].tolist() == [*rows[0, :2].tolist(), *rows[4, :3].tolist()]


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", ""])
def test_a_class_whose_file_or_constructor_exits_is_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("exits.py").write_text(
        f"{text}from tiny import Line\nclass Net(Line):\n    def __init__(self):\n        raise SystemExit(0)\n"
    )
    assert main(["fit", "run.yaml", "module.class=exits.Net"]) == 2
    sys.modules.pop("exits", None)
    said = "cannot import exits: SystemExit: 0" if text else "building Net ended in sys.exit(0); raise an error"
    assert said in capsys.readouterr().err


def test_a_run_continues_where_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "run.yaml", "max_epochs=4", "default_root_dir=whole"]) == 0
    whole = block(capsys.readouterr().out, "fit: ")
    assert main(["fit", "run.yaml", "ckpt_path=auto", "default_root_dir=halves"]) == 0
    assert main(["fit", "run.yaml", "ckpt_path=auto", "default_root_dir=halves", "max_epochs=4"]) == 0
    captured = capsys.readouterr()
    assert "starting afresh" in captured.err
    assert "resuming" in captured.err
    halves = block(captured.out, "fit: 4 epochs, 24 steps")
    assert (halves["loss"], halves["error"]) == (whole["loss"], whole["error"])


def test_evaluation_without_a_checkpoint_must_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "run.yaml"]) == 2
    assert capsys.readouterr().err.startswith(
        "lockstep: error: ckpt_path: missing; validate needs ckpt_path=CHECKPOINT, or ckpt_path=null"
    )
    assert main(["validate", "run.yaml", "ckpt_path=null"]) == 0
    assert float(block(capsys.readouterr().out, "validate: initial weights")["error"]) > 0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_missing_checkpoint_is_invalid_input_on_any_number_of_ranks(
    devices: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "run.yaml", "ckpt_path=last", f"devices={devices}"]) == 2
    assert "ckpt_path='last' finds no valid checkpoint below" in capsys.readouterr().err


def test_config_prints_what_can_be_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "run.yaml", "module.lr=0.5", "devices=2"]) == 0
    Path("again.yaml").write_text(capsys.readouterr().out)
    assert resolve(["again.yaml"]).values == resolve(["run.yaml"], ["module.lr=0.5", "devices=2"]).values
    assert main(["config", "run.yaml", "module.lrr=0.5"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (
            ["fit", "run.yaml", "module.lrr=1"],
            2,
            r"module\.lrr \(command line\): Line has no argument 'lrr'; did you mean 'lr'\?",
        ),
        (["fit", "none.yaml"], 2, r"cannot read config file 'none\.yaml': No such file or directory"),
        (["fitt", "run.yaml"], 2, r"there is no command 'fitt'; .*; did you mean 'fit'\?"),
        (["fit"], 2, r".*required.*\(usage: lockstep .*\)"),
        (["fit", "run.yaml", "--fast"], 2, r".*--fast.*"),
        (["fit", "run.yaml", "strategy=dddp"], 2, r".*strategy='dddp'; did you mean 'ddp'\?"),
        (["fit", "run.yaml", "precision=33"], 2, r"precision must be one of .*, but precision='33'.*"),
        (["fit", "run.yaml", "--max_epochs", "3"], 2, r"--max_epochs is not an option; write max_epochs=VALUE.*"),
        (["fit", "run.yaml", "--max-epoch=3"], 2, r"--max-epoch=3 is not an option; write max_epochs=VALUE.*"),
        (["fit", "run.yaml", "--gpus=2"], 2, r"--gpus=2 is not an option; give devices= and accelerator='gpu'.*"),
        (["fit", "run.yaml", "gpus=2"], 2, r"gpus \(command line\): the Trainer has no such argument; give devices=.*"),
        (
            ["fit", "run.yaml", "trainer.plugins=2"],
            2,
            r"trainer\.plugins .*: Trainer has no argument 'plugins'; precision.*",
        ),
        (["fit", "run.yaml", "data.size=0"], 1, r".*empty.*"),
        (["fit", "run.yaml", "ckpt_path=runs/none"], 2, r".*runs/none.*"),
        (["fit", "run.yaml", "default_root_dir=tiny.py"], 2, r".*tiny\.py.*"),
        (["fit", "run.yaml", "max_epochs=0"], 2, r"max_epochs must be a whole number of at least 1, but max_epochs=0"),
        (["predict", "run.yaml", "ckpt_path=null", "output=tiny.py/a"], 2, r"output=tiny\.py/a cannot be written: .*"),
        (["predict", "run.yaml", "ckpt_path=null", "output=tiny.py"], 2, r"output=tiny\.py would replace a file .*"),
        (["predict", "run.yaml", "ckpt_path=null", "output=."], 2, r"output=\. would replace a folder; .*"),
        (
            ["predict", "run.yaml", "ckpt_path=null", "module.says=str"],
            1,
            r"`lockstep predict` writes tensors, .* str.*",
        ),
        (
            ["predict", "run.yaml", "ckpt_path=null", "module.says=some"],
            1,
            r"`lockstep predict` joins .*'input', 'out.*",
        ),
    ],
)
def test_what_a_user_can_mend_is_one_line(
    arguments: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert re.fullmatch("lockstep: error: " + expected, line)
    assert "Traceback" not in captured.err
    assert not [*Path("runs").glob("*")], "no folder of a run is left"
    assert Path("tiny.py").read_text() == TINY


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_an_error_in_the_users_code_comes_with_its_traceback(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "run.yaml", "module.fail=true", f"devices={devices}"]) == 1
    errors = capsys.readouterr().err
    assert "the user's own mistake" in errors
    assert 'raise ValueError("the user\'s own mistake")' in errors
    assert "tiny.py" in errors


@pytest.mark.ranks
def test_a_mistake_is_one_line_on_several_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "run.yaml", "data.size=0", "devices=2"]) == 1
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    assert errors.strip().splitlines()[-1].startswith("lockstep: error: ")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_signals_end_with_a_checkpoint_and_their_own_code(number: signal.Signals, code: int) -> None:
    arguments = [sys.executable, "-m", "lockstep", "fit", "run.yaml", "module.sleep_s=0.05", "max_epochs=1000"]
    process = subprocess.Popen(arguments, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Path("started").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert checkpoint("runs")
    assert "Traceback" not in errors


@pytest.mark.long
@pytest.mark.ranks
def test_the_modules_of_the_working_folder_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """By the installed script too, which has only its own folder on the path."""
    assert main(["config", "run.yaml"]) == 0
    script = Path(sys.executable).parent / "lockstep"
    result = subprocess.run(
        [script, "config", "run.yaml"], capture_output=True, text=True, timeout=60, env=environment()
    )
    assert (result.returncode, result.stdout) == (0, capsys.readouterr().out), result.stderr


@pytest.mark.parametrize(
    ("option", "expected"),
    [("--help", "usage: lockstep fit|validate|test|predict|config|"), ("--version", "lockstep 0.")],
)
def test_help_and_version(option: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.ranks
def test_a_page_of_help_imports_no_torch() -> None:
    result = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=100, check=True)
    for line in result.stdout.splitlines():
        printed, imported, modules = line.split()
        assert (printed, imported) == ("True", "False")
        assert int(modules) < 200, "modules, of which Python itself has some 60"


@pytest.mark.ranks
def test_a_reader_of_help_that_goes_leaves_exit_code_0() -> None:
    command = f"{sys.executable} -m lockstep fit --help | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    assert result.stdout.startswith("usage: lockstep fit")


def test_the_help_of_fit_lists_every_argument_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for field in dataclasses.fields(TrainerArguments):
        at = lines.index(f"  {field.name}={field.default!r}")
        assert re.fullmatch(r" {6}\S.{5,}", lines[at + 1]), lines[at + 1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fti", "run.yaml"], "there is no command 'fti'; the commands are fit, "),
        (["fti", "run.yaml"], "; did you mean 'fit'?"),
        (["fit", "run.yaml", "max_epochs"], "max_epochs has no value; write max_epochs=VALUE"),
        (["fit", "run.yaml", "module.lr"], "module.lr has no value; write module.lr=VALUE"),
        (["fit", "module.yaml"], "cannot read config file 'module.yaml'"),
    ],
)
def test_a_mistyped_word_says_what_to_write(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_its_step_is_refused_before_the_run_begins(
    tmp_path: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare.yaml").write_text(CONFIG.replace("tiny.Line", "tiny.Bare"))
    assert main([stage, "bare.yaml", "ckpt_path=null"]) == 2
    assert f"{stage} needs Bare." in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
