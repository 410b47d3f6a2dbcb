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
from lockstep.trainer.run.folder import read_summary

USAGE = "lockstep runs [FOLDER] [--json]"

DESCRIPTION = """
A run is running, finished, interrupted (killed, or stopped by a signal) or failed. Steps of a run that has not ended
are those of its newest checkpoint, or what it has computed if it was never restarted. "best" is the best value of the
metric that a ModelCheckpoint monitors. "when" is when a run ended, or when it was started if it is running.
"""


def main(words: Sequence[str], parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> int:
    """Print the table and return the exit code. Raises ConfigError if there is no such folder."""
    given = parse(words, parser_class)
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


def parse(
    words: Sequence[str], parser_class: type[argparse.ArgumentParser] = argparse.ArgumentParser
) -> argparse.Namespace:
    """The arguments. Raises what `parser_class` raises for a wrong one."""
    parser = parser_class(
        prog="lockstep runs",
        usage=USAGE,
        description=__doc__,
        epilog=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    steps, epochs = summary.get("steps", 0), summary.get("epochs", 0)
    saved = _newest_state(folder / "checkpoints")
    if reason in ("running", "killed"):
        progress = saved.get("progress", {})
        computed = 0 if summary.get("restarts") else summary.get("first_step", 0) + summary.get("computed_steps", 0)
        steps, epochs = (
            max(steps, progress.get("global_step", 0), computed),
            max(epochs, progress.get("current_epoch", 0)),
        )
    metric, best = _best(saved.get("callbacks", {}))
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


def _state(reason: str) -> str:
    if reason in ("running", "finished"):
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


def _best(callbacks: dict[str, Any]) -> tuple[str | None, float | None]:
    """The metric of the first ModelCheckpoint that monitors one, and its best value."""
    for key, state in callbacks.items():
        found = re.match(r"ModelCheckpoint\[monitor=(.+), mode=(min|max),", key)
        scores = [score for _, score in state.get("best_k_models", [])] if found and isinstance(state, dict) else []
        if found and scores:
            return found[1], (min if found[2] == "min" else max)(scores)
    return None, None
