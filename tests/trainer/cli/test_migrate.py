"""`lockstep migrate`: the imports of a program, and what has no counterpart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.trainer.cli.main import main
from lockstep.trainer.cli.migrate import migrate

BEFORE = """\
import os, lightning as L
import pytorch_lightning as pl
import lightning.pytorch
import pytorch_lightning
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    SpikeDetection,
)
from pytorch_lightning.cli import LightningArgumentParser
from lightning.pytorch.demos import WikiText2
if True:
    from lightning.pytorch.loggers import TensorBoardLogger as Logger, CometLogger

é = "lightning"; from lightning import seed_everything  # lightning


class Net(pl.LightningModule):
    def training_epoch_end(self, outputs):
        self.trainer.fit_loop
        return self.use_amp

    def mine(self):
        self.on_gpu = 1
        return self.on_gpu


trainer = L.Trainer(gpus=2, max_epochs=3, plugins=None, use_distributed_sampler=False)
callback = pl.callbacks.OnExceptionCheckpoint("x")
lightning.pytorch.callbacks.EarlyStopping("loss")
pytorch_lightning.utilities.rank_zero.rank_zero_only(print)
"""
IMPORTS = """\
import os, lockstep.lightning as L
import lockstep.lightning.pytorch as pl
import lockstep.lightning as lightning
import lockstep.lightning.pytorch as pytorch_lightning
from lockstep.lightning.pytorch.callbacks import (
    ModelCheckpoint,
    SpikeDetection,
)
from lockstep.lightning.pytorch.cli import LightningArgumentParser
from lockstep.lightning.pytorch.demos import WikiText2
if True:
    from lockstep.lightning.pytorch.loggers import TensorBoardLogger as Logger, CometLogger

é = "lightning"; from lockstep.lightning import seed_everything  # lightning
"""
FOUND = [
    (7, "SpikeDetection has no counterpart; use lockstep.callbacks.Guard"),
    (9, "LightningArgumentParser has no counterpart; write a YAML file"),
    (10, "lightning.pytorch.demos has no counterpart"),
    (12, "CometLogger has no counterpart"),
    (18, "Net.training_epoch_end is not called; log in the step"),
    (19, "Trainer has no attribute 'fit_loop'"),
    (20, "a module has no attribute 'use_amp'"),
    (27, "Trainer has no argument 'gpus'"),
    (27, "Trainer has no argument 'use_distributed_sampler'"),
    (28, "OnExceptionCheckpoint has no counterpart; signals commit a checkpoint"),
]


def test_imports_are_replaced_and_the_rest_is_listed() -> None:
    new, findings = migrate(BEFORE)
    assert new.startswith(IMPORTS)
    assert new[len(IMPORTS) :] == BEFORE[BEFORE.index("\n\nclass Net") - 0 :]
    assert [finding.line for finding in findings] == [line for line, _ in FOUND]
    for finding, (_, text) in zip(findings, FOUND, strict=True):
        assert finding.text.startswith(text)


def test_the_command_shows_or_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = tmp_path / "train.py", tmp_path / "other.py"
    file.write_text("import lightning as L\n\nL.seed_everything(1)\n")
    other.write_text("import torch\n")
    assert main(["migrate", str(file), str(other)]) == 0
    shown = capsys.readouterr().out
    assert "-import lightning as L\n+import lockstep.lightning as L\n" in shown and "other.py" not in shown
    assert file.read_text().startswith("import lightning")
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_text() == "import lockstep.lightning as L\n\nL.seed_everything(1)\n"
    capsys.readouterr()
    assert main(["migrate", str(file)]) == 0 and capsys.readouterr().out == ""
    file.write_text("from lightning import Fabric\n")
    assert main(["migrate", str(file)]) == 1
    assert f"{file}:1: Fabric has no counterpart; drive a strategy" in capsys.readouterr().out
    file.write_text("import (\n")
    assert main(["migrate", str(file)]) == 2
    assert "cannot be read as Python" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"import lightning as L\r\nx = 1\r\n", b"import lockstep.lightning as L\r\nx = 1\r\n"),
        (b"\xef\xbb\xbfimport lightning as L\n", b"\xef\xbb\xbfimport lockstep.lightning as L\n"),
        (
            b"\x0c\nx = '\xe2\x80\xa8'\nimport lightning\n",
            b"\x0c\nx = '\xe2\x80\xa8'\nimport lockstep.lightning as lightning\n",
        ),
    ],
)
def test_what_is_not_an_import_of_lightning_keeps_its_bytes(before: bytes, after: bytes, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_bytes(before)
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_bytes() == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from  lightning.pytorch  import Trainer\n", "from  lockstep.lightning.pytorch  import Trainer\n"),
        ("from\tlightning import Trainer\n", "from\tlockstep.lightning import Trainer\n"),
        ("é = 1; from  lightning import Trainer\n", "é = 1; from  lockstep.lightning import Trainer\n"),
        ("import  lightning.pytorch  as  pl\n", "import  lockstep.lightning.pytorch as pl\n"),
    ],
)
def test_spaces_in_imports(before: str, after: str) -> None:
    assert migrate(before) == (after, [])


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "from \\\n  lightning import Trainer\n",
            "lightning is not on the line of its from; write from lockstep.light",
        ),
        (
            "from lightning . pytorch import Trainer\n",
            "lightning.pytorch is not on the line of its from; write from lo",
        ),
        ("import lightning \\\n  as L\n", "the import is on several lines; write import lockstep.lightning as L"),
    ],
)
def test_an_import_that_cannot_be_placed_is_listed(program: str, text: str) -> None:
    new, findings = migrate(program)
    assert new == program and [(line, found[: len(text)]) for line, found in findings] == [(1, text)]


CALLED = """\
from lightning.pytorch import Trainer, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

class Saves(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath): ...
class More(Saves):
    def _remove_checkpoint(self, trainer, filepath): ...
class Own(DDPStrategy):
    def setup(self, trainer): ...
trainer = Trainer.from_argparse_args(1)
model.to_tensorrt()
"""


def test_what_is_never_called_is_listed() -> None:
    assert [(line, text[:55]) for line, text in migrate(CALLED)[1]] == [
        (6, "Saves._save_checkpoint is not called; override on_save_"[:55]),
        (8, "More._remove_checkpoint is not called; override on_save"[:55]),
        (9, "DDPStrategy has no subclasses; derive from lockstep.stra"[:55]),
        (11, "Trainer has no attribute 'from_argparse_args'; write Tra"[:55]),
        (12, "a module has no attribute 'to_tensorrt'; call torch_tens"[:55]),
    ]


def test_what_only_the_compatibility_package_offers_is_not_listed() -> None:
    program = """\
from lightning.pytorch import LightningModule
class Own(LightningModule):
    def export(self):
        return self.hparams_initial, self.to_torchscript()
"""
    assert migrate(program)[1] == []


def test_a_notebook_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.ipynb").write_text('{"cells": []}')  # an expression of Python too
    assert main(["migrate", str(tmp_path / "a.ipynb")]) == 2
    assert "is a notebook; `jupyter nbconvert --to script" in capsys.readouterr().err


def test_a_class_of_the_program_between_counts_as_lightnings() -> None:
    program = (
        "import lightning as L\nclass A(L.LightningModule): pass\nclass B(A):\n    def test_epoch_end(self, x): ...\n"
    )
    assert [(line, text[:35]) for line, text in migrate(program)[1]] == [(4, "B.test_epoch_end is not called; log")]


@pytest.mark.ranks
def test_it_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import lightning as L\n")
    code = f"import sys; from lockstep.trainer.cli.main import main; main(['migrate', {str(tmp_path / 'a.py')!r}])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("False\n")
