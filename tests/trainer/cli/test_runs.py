"""`lockstep runs`: the runs of a folder as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import CSVLogger, ModelCheckpoint
from lockstep.trainer.cli.main import main
from tests.trainer.toy import Net, loader, net, quiet


class FailsLate(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            raise self.error
        return super().training_step(batch, batch_idx)


def fit(module: Net, **options: Any) -> str:
    """Run two epochs of 4 steps each; return the run's folder."""
    best = ModelCheckpoint(monitor="val/loss", save_last=True)
    trainer = quiet(
        default_root_dir="runs",
        logger=CSVLogger(),
        callbacks=[best],
        enable_checkpointing=True,
        max_epochs=2,
        **options,
    )
    try:
        trainer.fit(module, loader(32), loader(8))
    except BaseException:
        if not hasattr(module, "error"):
            raise
    return str(trainer.log_dir)


def test_a_table_of_states_and_best_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    failing, stopped = FailsLate(), FailsLate()
    failing.error, stopped.error = ValueError("too late"), KeyboardInterrupt()  # type: ignore[assignment]
    folders = [fit(net()), fit(failing), fit(stopped), fit(net(), max_steps=2)]
    summary = Path(folders[3], "summary.json")
    killed = json.loads(summary.read_text()) | {"exit": "running", "steps": 0}
    summary.write_text(json.dumps(killed))
    for seconds, folder in enumerate(folders):
        os.utime(Path(folder, "summary.json"), (seconds, seconds))
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [run["run"] for run in found] == folders
    assert [run["state"] for run in found] == ["finished", "failed", "interrupted", "interrupted"]
    assert [run["steps"] for run in found] == [8, 5, 5, 2]
    assert found[1]["exit"] == "failed: ValueError: too late" and found[3]["exit"] == "killed"
    assert all(run["metric"] == "val/loss" and 0 < run["best"] < 3 for run in found[:3])
    assert main(["runs", "runs/Net"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "epochs", "best", "when"]
    assert lines[1].split()[:5] == [folders[0], "finished", "8", "2", f"val/loss={found[0]['best']:.6g}"]


def test_a_run_under_way_is_running(capsys: pytest.CaptureFixture[str]) -> None:
    class Looks(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:  # before the first checkpoint
                main(["runs", "--json"])

    fit(Looks())
    said = json.loads(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("{")))
    assert (said["state"], said["steps"], said["when"] > 0) == ("running", 3, True)


def test_folders_without_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "none"]) == 2
    assert "there is no folder none" in capsys.readouterr().err
    Path("none").mkdir()
    assert main(["runs", "none"]) == 0
    assert capsys.readouterr().out == "no run in none\n"


def test_files_that_are_damaged_are_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    key = "ModelCheckpoint[monitor=val/loss, mode=min, every_n_epochs=None]"
    for i, (summary, state) in enumerate(
        [
            ("not JSON", "[]"),
            ('{"exit": "killed", "steps": "many", "restarts": 1}', '{"progress": 3, "callbacks": []}'),
            ('{"exit": "finished", "steps": 3}', json.dumps({"callbacks": {key: {"best_k_models": [["a", "b"], 3]}}})),
        ]
    ):
        saved = Path("runs", str(i), "checkpoints", "last")
        saved.mkdir(parents=True)
        (saved / "manifest.json").touch()
        (saved / "state.json").write_text(state)
        Path("runs", str(i), "summary.json").write_text(summary)
    assert main(["runs", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(run["state"], run["steps"], run["best"]) for run in found} == {
        *(("unknown", 0, None), ("interrupted", 0, None), ("finished", 3, None))
    }


@pytest.mark.ranks
def test_listing_runs_and_completing_words_import_no_torch() -> None:
    code = (
        "import sys; from lockstep.trainer.cli.main import main; main(['runs', '.']); main(['completion', 'zsh']);"
        "print('torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True).stdout
    assert said.splitlines()[-1] == "False"
