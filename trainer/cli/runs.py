"""`lockstep runs`: the runs below a folder, with their state and best metric. Reads files only; imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.callbacks._support.tables import columns
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import page
from lockstep.trainer.run.folder import read_summary

USAGE = "lockstep runs [FOLDER] [--json]"

DESCRIPTION = """
A run is running, finished, interrupted (killed, or stopped by a signal), failed, or unknown if its summary.json cannot
be read. Steps of a run that has not ended are those of its newest checkpoint, or what it has computed if it was never
restarted. "best" is the best value of the metric that a ModelCheckpoint monitors. "when" is when a run ended, or when
it was started if it is running.
"""


def main(words: Sequence[str]) -> int:
    """Print the table and return the exit code. Raises ConfigError if there is no such folder."""
    given = parse(words)
    if not given.folder.is_dir():
        raise ConfigError(f"there is no folder {given.folder}; name the folder of runs (usage: {USAGE})")
    found = sorted((describe(path) for path in run_folders(given.folder)), key=lambda run: run["when"])
    if given.json:
        print("".join(json.dumps(run) + "\n" for run in found), end="")
        return 0
    if not found:
        print(f"no run in {given.folder}")
        return 0
    rows = [("run", "state", "steps", "epochs", "best", "when")]
    for run in found:
        best = f"{run['metric']}={run['best']:.6g}" if run["metric"] else "-"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["when"]))
        rows.append((run["run"], run["state"], str(run["steps"]), str(run["epochs"]), best, when))
    print("\n".join(columns(rows)))
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises ConfigError for a wrong one."""
    parser = page(USAGE, __doc__, DESCRIPTION)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="one JSON object for each run, a line each")
    return parser.parse_args(words)


def run_folders(folder: Path) -> Iterator[Path]:
    """The folders of runs in `folder`, itself included; what is within a run's is not searched."""
    for path, folders, files in os.walk(folder):
        if "summary.json" in files:
            folders.clear()
            yield Path(path)
        folders.sort()


def describe(folder: Path) -> dict[str, Any]:
    """A row of the table: run, state, why it ended, steps, epochs, metric, best (None without one) and when (seconds
    since 1970)."""
    summary = read_summary(folder)
    reason = str(summary.get("exit", "unknown"))
    steps, epochs = _number(summary.get("steps")), _number(summary.get("epochs"))
    saved = _newest_state(folder / "checkpoints")
    if reason in ("running", "killed"):
        progress = saved.get("progress")
        progress = progress if isinstance(progress, dict) else {}
        computed = 0 if summary.get("restarts") else _number(summary.get("first_step")) + _computed(folder)
        steps = max(steps, _number(progress.get("global_step")), computed)
        epochs = max(epochs, _number(progress.get("current_epoch")))
    metric, best = _best(saved.get("callbacks"))
    return {
        "run": str(folder),
        "state": _state(reason),
        "exit": reason,
        "steps": steps,
        "epochs": epochs,
        "metric": metric,
        "best": best,
        "when": (folder / "summary.json").stat().st_mtime,
    }


def _computed(folder: Path) -> int:
    """Optimizer steps that were computed in a run's folder, which a living run counts in its lock file."""
    with suppress(OSError), open(folder / "run.lock", "rb") as file:
        return int.from_bytes(file.read(8), "little")
    return 0


def _state(reason: str) -> str:
    if reason in ("running", "finished", "unknown"):
        return reason
    return "interrupted" if reason == "killed" or reason.startswith("stopped") else "failed"


def _newest_state(folder: Path) -> dict[str, Any]:
    """The state of the checkpoint that was saved last; empty if there is none that can be read."""
    newest: tuple[float, Path] | None = None
    for manifest in folder.glob("[!.]*/manifest.json"):
        with suppress(OSError):
            newest = max(newest or (0.0, manifest), (manifest.stat().st_mtime, manifest))
    if newest is not None:
        with suppress(OSError, ValueError):
            found = json.loads((newest[1].parent / "state.json").read_text())
            return found if isinstance(found, dict) else {}
    return {}


def _best(callbacks: Any) -> tuple[str | None, float | None]:
    """The metric of the first ModelCheckpoint that monitors one, and its best value."""
    for key, state in callbacks.items() if isinstance(callbacks, dict) else ():
        found = re.match(r"ModelCheckpoint\[monitor=(.+), mode=(min|max),", key)
        if found and isinstance(state, dict):
            with suppress(KeyError, TypeError, ValueError):
                scores = [float(score) for _, score in state["best_k_models"]]
                return found[1], (min if found[2] == "min" else max)(scores)
    return None, None


def _number(value: Any) -> int:
    """A count of a file that anybody may have written."""
    return value if isinstance(value, int) else 0
