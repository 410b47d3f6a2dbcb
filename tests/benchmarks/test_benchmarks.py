"""The benchmarks run and print sane numbers; how fast anything is, no test says."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import _page, plan_gpu
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.ranks

Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark as `python -m benchmarks.NAME` does, but here, where torch is imported; returns what it printed
    and its JSON."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # which one of them sets

    def run(name: str, *arguments: str, file: Path) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(file)])
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # another one may have imported it
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        output, errors = capfd.readouterr()
        assert not errors
        return output, json.loads(file.read_text())

    return run


def sane(rows: dict[str, Any], unit: str, output: str, rounds: int, least: float, most: float) -> None:
    """Each row is in the table, its numbers fit each other, and each is between `least` and `most`."""
    for name, row in rows.items():
        assert name in output
        assert len(row[f"rounds_{unit}"]) == rounds
        assert least < row[f"min_{unit}"] <= row[f"median_{unit}"] <= row[f"max_{unit}"] < most
        assert row.get("ratio", 1) > 0


@pytest.mark.slow
def test_step_overhead(run: Run, tmp_path: Path) -> None:
    output, numbers = run("step_overhead", "--rounds", "1", "--steps", "20", file=tmp_path / "numbers.json")
    results = numbers["results"]
    expected = {"hand-written loop", "hand-written loop, 5 values to TensorBoard"}
    assert expected | {
        "lockstep, its strategy alone",
        "lockstep, bare",
        "lockstep, 1 logged value",
        "lockstep, 5 logged values",
        "lockstep, everything on",
    } <= set(results)
    sane(results, "us", output, 1, least=1, most=1e6)
    assert results["hand-written loop"]["ratio"] == results["hand-written loop"]["cpu_ratio"] == 1
    assert all(1 < row["cpu_us"] < 1e6 for row in results.values())
    assert results["hand-written loop, 5 values to TensorBoard"]["ratio_to_logging"] == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "runs of the benchmark leave nothing behind"


@pytest.mark.long
def test_dp_slices(run: Run, tmp_path: Path) -> None:
    output, numbers = run(
        "dp_slices", "--rounds", "2", "--steps", "3", "--match", "MLP", file=tmp_path / "numbers.json"
    )
    results = numbers["results"]
    assert set(results) == {
        f"{model}, {who}" for model in ("MLP", "MLP, large containers") for who in ("by hand", "dp")
    }
    sane(results, "us", output, 2, least=1, most=1e8)
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "runs of the benchmark leave nothing behind"


@pytest.mark.slow  # fresh processes; step_overhead and additions measure ranks and steps every day
@pytest.mark.parametrize("match", ["fsdp", ""])
def test_engines(match: str, run: Run, tmp_path: Path) -> None:
    size = ("--width", "64", "--depth", "2", "--batch", "2")
    output, numbers = run(
        "engines", "--rounds", "1", "--steps", "2", "--match", match, *size, file=tmp_path / "numbers.json"
    )
    results = numbers["results"]
    assert set(results) == {
        f"{name}, {who}"
        for name in ("ddp", "fsdp", "tensor", "pipeline")
        if match in name
        for who in ("by hand", "lockstep")
    }
    sane(results, "ms", output, 1, least=0.01, most=1e5)
    size_bytes = 4 * numbers["model"]["parameters"]
    for name, row in results.items():
        held = (
            4 * size_bytes if "ddp" in name else 2 * size_bytes
        )  # parameters, gradients, two moments; elsewhere half of most of it
        assert held < row["peak_bytes"] < 20 * size_bytes, name


@pytest.mark.slow  # starts 1, 2 and 4 ranks of each variant
def test_scaling(run: Run, tmp_path: Path) -> None:
    output, numbers = run(
        "scaling", "--rounds", "2", "--effort", "0.01", "--ranks", "2", file=tmp_path / "numbers.json"
    )
    results = numbers["results"]
    for part in ("tensors", "values", "callbacks", "ranks"):
        sane(results[part], "us", output, 2, least=1, most=1e8)
    assert set(results["ranks"]) == {"2 ranks", "2 ranks, by hand"} and len(results["tensors"]) == 4
    for name, total in (("values logged", 10_000), ("steps of a fit", 10_000)):
        row = results["memory"][name]
        assert row["total"] == total
        assert row["blocks"] < total // 2, "nothing is kept of a step"
    samples = results["samples"]
    assert samples["10^7"]["peak_bytes"] < 1.1 * samples["10^4"]["peak_bytes"] < 1e6
    assert samples["10^4, DistributedSampler"]["peak_bytes"] > 8 * 10**4, "a number for each index"


@pytest.mark.long
def test_data(run: Run, tmp_path: Path) -> None:
    output, numbers = run("data", "--rounds", "2", "--batches", "5", file=tmp_path / "numbers.json")
    assert {f"{kind}, {who}" for kind in ("no workers", "2 workers") for who in ("bare loop", "lockstep")} <= set(
        numbers["results"]
    )
    sane(numbers["results"], "per_s", output, 2, least=1, most=1e7)


@pytest.mark.long
@pytest.mark.parametrize("match", ["fused", "accumulate", pytest.param("", marks=pytest.mark.slow)])
def test_additions(match: str, run: Run, tmp_path: Path) -> None:
    size = ("--width", "32", "--depth", "2", "--batch", "1")
    output, numbers = run(
        "additions", "--rounds", "1", "--steps", "4", "--match", match, *size, file=tmp_path / "numbers.json"
    )
    results = numbers["results"]
    assert len(results) == {"fused": 4, "accumulate": 3, "": 21 + 2 * torch.cuda.is_available()}[match]
    assert all(match in name for name in results)
    sane(results, "ms", output, 1, least=0.01, most=1e5)
    for name, row in results.items():
        without = results[name.rpartition(", ")[0] + ", off"] if name.endswith(", on") else row
        assert row.get("loss") == pytest.approx(without.get("loss"), abs=1e-3), (
            "what makes a step faster trains the same"
        )
        if "graphs" in row:
            assert (row["graphs"] > 0) == (not name.endswith(", off")) and row["first_s"] > 0
    if match in ("accumulate", ""):
        each, *once = (row["exchanges"] for name, row in results.items() if name.startswith("accumulate"))
        assert once == [each / 8] * 2, "one exchange a window"
    if not match:
        kept, recomputed = (results[f"activation_checkpointing=True, {how}"]["kept_bytes"] for how in ("off", "on"))
        assert 0 < 2 * recomputed < kept
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "runs of the benchmark leave nothing behind"


def test_checkpoint(run: Run, tmp_path: Path) -> None:
    output, numbers = run(
        "checkpoint", "--megabytes", "2", "--rounds", "2", "--folder", str(tmp_path), file=tmp_path / "numbers.json"
    )
    results = numbers["results"]
    assert {
        "memory copy of the state",
        "raw write and fsync",
        "save",
        "save, no checksums",
        "asynchronous save",
        "verify, one thread",
        "verify, as a resume does",
    } <= set(results)
    sane(results, "ms", output, 2, least=0.001, most=1e5)
    assert all(0 < row["blocked_ms"] <= row["median_ms"] for row in results.values())
    assert 1.99e6 < numbers["num_bytes"] < 2.01e6 and numbers["checksum_share"] < 1
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "checkpoints of the benchmark are gone"


@pytest.mark.slow  # runs the same as another process for comparison; bytes a rank reads are counted in other tests
def test_resume(run: Run, tmp_path: Path) -> None:
    size = ("--megabytes", "6", "--ranks", "1", "2", "--rounds", "2", "--folder", str(tmp_path))
    output, numbers = run("resume", *size, "--against", str(REPO_ROOT), file=tmp_path / "numbers.json")
    results = numbers["results"]
    assert set(results) == {"1 rank", "1 rank, against", "2 ranks", "2 ranks, against"}
    sane(results, "s", output, 2, least=0.001, most=100)
    assert all(row["read_by_one_mb"] >= numbers["megabytes"] / int(name[0]) > 2.9 for name, row in results.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "checkpoints of the benchmark are gone"


def test_gpu(run: Run, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the other test runs it")
    output, numbers = run("gpu", file=tmp_path / "numbers.json")
    assert numbers["results"] == {} and output.startswith("skipped: this benchmark needs a CUDA device")


@pytest.mark.gpu
def test_gpu_on_a_gpu(run: Run, tmp_path: Path) -> None:
    size = ("--width", "128", "--depth", "2", "--context", "64", "--batch", "2", "--vocabulary", "512")
    output, numbers = run("gpu", "--rounds", "2", "--steps", "3", *size, file=tmp_path / "numbers.json")
    sane(numbers["results"], "per_s", output, 2, least=1, most=1e9)
    assert all(row["peak_bytes"] > 4 * 4 * numbers["parameters"] for row in numbers["results"].values())
    assert len(numbers["results"]) == 5


@pytest.mark.parametrize("holds", [0, 8, 100, 256, 999])
def test_the_largest_batch_is_found(holds: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= holds

    assert plan_gpu.largest(fits, step=8, most=256) == min(holds // 8 * 8, 256)
    assert len(tried) == len(set(tried)) <= 6


def test_plan_gpu(run: Run, tmp_path: Path) -> None:
    """Without a GPU: that it says so, and that a plan grows with the batch."""
    job = plan_gpu.Job(argparse.Namespace(width=64, depth=1, context=16, vocabulary=128, batch=8, steps=3))
    small, large = (plan_gpu.planned(job, batch).ranks[0].peak for batch in (8, 16))
    assert 0 < small < large < 2 * small + 4 * 128 * 64
    if not torch.cuda.is_available():
        output, numbers = run("plan_gpu", file=tmp_path / "numbers.json")
        assert numbers["results"] == {} and output.startswith("skipped: this benchmark needs a CUDA device")


def test_plan_gpu_says_how_fast_a_device_is_planned_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ("--width", "64", "--depth", "1", "--context", "16", "--vocabulary", "128")
    speeds = []
    for name in ("h200", "l4"):
        monkeypatch.setattr(sys, "argv", ["plan_gpu", "--speed", name, *size])
        plan_gpu.main()
        speeds.append(int(capsys.readouterr().out.split()[0].replace(",", "")))
    assert speeds[0] > speeds[1] > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own compiler
def test_plan_gpu_on_a_gpu(run: Run, tmp_path: Path) -> None:
    size = ("--width", "128", "--depth", "2", "--context", "64", "--vocabulary", "512")
    output, numbers = run("plan_gpu", "--most", "24", "--step", "8", *size, file=tmp_path / "numbers.json")
    assert numbers["planned"] == numbers["found"] == 24 and "largest batch: 24 planned, 24 found" in output
    assert all(0 < row["allocated"] <= row["reserved"] for row in numbers["results"].values())


@pytest.mark.slow  # fresh processes; tests/test_architecture.py holds the cost of the import every day
@pytest.mark.parametrize("match", ["import", "lockstep, 1", "by hand"])
def test_start(match: str, run: Run, tmp_path: Path) -> None:
    output, numbers = run("start", "--rounds", "1", "--match", match, file=tmp_path / "numbers.json")
    assert numbers["results"] and all(match in name for name in numbers["results"])
    sane(numbers["results"], "s", output, 1, least=0, most=280)


def test_recompute(run: Run, tmp_path: Path) -> None:
    output, numbers = run("recompute", "--width", "64", "--depth", "2", "--steps", "1", file=tmp_path / "numbers.json")
    kept, recomputed = (numbers["results"][on] for on in ("False", "True"))
    assert 0 < 2 * recomputed["kept_bytes"] < kept["kept_bytes"] and min(kept["step_s"], recomputed["step_s"]) > 0
    assert "activation_checkpointing" in output


@pytest.mark.slow  # kills a run and starts it again, twice
def test_restart(run: Run, tmp_path: Path) -> None:
    output, numbers = run("restart", "--restarts", "2", file=tmp_path / "numbers.json")
    results = numbers["results"]
    assert len(results["downs_s"]) == 2 and "2 ranks of ddp" in output
    assert 0 < min(results["downs_s"]) <= results["median_s"] <= results["p95_s"] < 60


@pytest.mark.slow  # several fresh processes
def test_memory(run: Run, tmp_path: Path) -> None:
    output, numbers = run("memory", "--ranks", "2", "--match", "dp", file=tmp_path / "numbers.json")
    rows = {row["strategy"]: row for row in numbers["results"]}
    assert set(rows) == {"dp", "ddp", "fsdp"} and all(name in output for name in rows)
    size = 4 * numbers["model"]["parameters"]
    for name, share in (("dp", 1), ("ddp", 1), ("fsdp", 2)):
        row = rows[name]
        assert row["parameters"] == row["gradients"] == size // share
        assert 2 * size // share < row["optimizer"] < 2.01 * size // share, "two moments, and a counter a tensor"
        assert row["total"] == row["parameters"] + row["gradients"] + row["optimizer"] + row["other"]
        assert row["other"] == (size if name == "ddp" else 0), "ddp: the buckets in which it sums gradients"
        assert row["steps"] > row["total"] > 0


@pytest.mark.long
@pytest.mark.parametrize("match", ["everything", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_step_profile(match: str, run: Run, tmp_path: Path) -> None:
    output, numbers = run(
        "step_profile", "--rounds", "2", "--steps", "50", "--match", match, file=tmp_path / "numbers.json"
    )
    ((name, rows),) = numbers["results"].items()
    assert match in name and f"{name} " in output
    whole = rows.pop("all")
    for who in ("by_hand_us", "lockstep_us"):
        assert 1 < whole[who] < 1e6
        assert sum(row[who] or 0 for row in rows.values()) == pytest.approx(whole[who], rel=0.3), "medians of the parts"
    assert rows["torch, the model, the loop by hand"]["by_hand_us"] == pytest.approx(whole["by_hand_us"], rel=0.1)
    own = {file: row["lockstep_us"] for file, row in rows.items() if file.endswith(".py")}
    everywhere = {f"lockstep/{name}.py" for name in ("strategies/spmd", "strategies/step", "trainer/run/fit")}
    assert everywhere & set(own) and all(row["by_hand_us"] is None for file, row in rows.items() if file in own)


def test_page() -> None:
    """What a benchmark writes lands between its marks on the page, and nowhere else."""
    text = _page.PAGE.read_text()
    marks = re.findall(r"<!-- (\w+) -->\n", text)
    assert set(marks) == {
        "step_overhead",
        "step_profile",
        "start",
        "engines",
        "scaling",
        "data",
        "additions",
        "checkpoint",
        "gpu",
    }
    row = {"median_us": 1.25, "ratio": None}
    columns = {"us a step": ["median_us", ".1f"], "ratio": ["ratio", ".2f"]}
    numbers = {"machine": {"torch": "2.13"}, "rounds": 3, "columns": columns, "results": {"a loop": row}}
    before, after = _page.filled(text, "data", numbers).split("torch 2.13; 3 rounds:\n")
    assert before.endswith("<!-- data -->\n") and text.startswith(before)
    assert after.startswith("\n|  | us a step | ratio |\n|---|---|---|\n| a loop | 1.2 |  |\n<!-- /data -->\n")
    parts = {**numbers, "columns": {"ranks": columns}, "results": {"ranks": {"2 ranks": row}}}
    assert "| ranks | us a step | ratio |\n|---|---|---|\n| 2 ranks | 1.2 |  |\n<!-- /scaling -->" in _page.filled(
        text, "scaling", parts
    )


@pytest.mark.long
def test_control_message(run: Run, tmp_path: Path) -> None:
    output, numbers = run(
        "control_message", "--steps", "8", "--width", "32", "--collectives", "1", file=tmp_path / "numbers.json"
    )
    row = numbers["results"]
    assert 0 < row["without_ms"] < 1000 and 0 < row["with_ms"] < 1000 and abs(row["over_ms"]) < 1000
    assert "with the message" in output
    assert list(tmp_path.iterdir()) == [tmp_path / "numbers.json"], "runs of the benchmark leave nothing behind"


def test_control_tree(run: Run, tmp_path: Path) -> None:
    output, numbers = run("control_tree", "--ranks", "10", "--steps", "6", file=tmp_path / "numbers.json")
    before, now = numbers["results"]["all-gather, 10 ranks"], numbers["results"]["tree, 10 ranks"]
    assert "tree, 10 ranks" in output
    assert before["sockets"] >= 45 and now["sockets"] == 9, (
        "all pairs before, an edge of the tree for each rank but the first now"
    )
    assert (before["hops"], now["hops"]) == (9, 4)
    if "packets" in now:  # where the kernel gives it a network of its own
        assert 2 * 9 <= now["packets"] < 100 < before["packets"]
    assert all(0 < row[key] < 1e5 for row in (before, now) for key in ("setup_s", "ms", "cpu_ms"))


@pytest.mark.slow  # starts 1, 2 and 4 ranks
def test_price_of_owners(run: Run, tmp_path: Path) -> None:
    size = ("--rounds", "1", "--steps", "2", "--width", "32")
    output, numbers = run("optimizers", "--price", *size, file=tmp_path / "numbers.json")
    results = numbers["results"]
    assert set(results) == {"1 rank", "2 ranks", "4 ranks"} and "matrices" in output
    assert all(row["calls"] == row["matrices"] == 8 * 6 and 0.99 < row["state"] < 1.15 for row in results.values())
    assert results["1 rank"]["cpu"] == 1 and results["4 ranks"]["orthogonalizing"] > 0


@pytest.mark.slow  # fresh processes
def test_methods(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.methods", "multitask", "max_epochs=1", "trainer.limit_train_batches=4"]
    options = ["--seeds", "1", "--figure", str(tmp_path / "figure.svg")]
    done = subprocess.run([*command, *options], cwd=REPO_ROOT, capture_output=True, text=True, timeout=110, check=True)
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == ["equal", "uncertainty"]
    assert all(0 < float(row[2]) < 1 and float(row[-1]) > 0 for row in rows), "an accuracy, and CPU seconds"
    assert (tmp_path / "figure.svg").read_text().count("<polyline") == 2


@pytest.mark.slow
def test_parameter_server(run: Run, tmp_path: Path) -> None:
    output, numbers = run("parameter_server", "--rounds", "1", "--steps", "5", file=tmp_path / "numbers.json")
    assert "staleness 8" in output and "4 MB" in output
    assert all(1 < value < 1e5 for values in numbers["results"]["samples_per_s"].values() for value in values)
    assert all(0 < value < 1e5 for values in numbers["results"]["update_ms"].values() for value in values)


def test_make_bench_gives_each_script_the_options_that_it_has() -> None:
    recipe = re.search(r"case \$\$name in (\S+)\) ;; (\S+)\) ", (REPO_ROOT / "Makefile").read_text())
    assert recipe is not None
    skipped, without = (set(names.split("|")) for names in recipe.groups())
    scripts = {path.stem: path.read_text() for path in (REPO_ROOT / "benchmarks").glob("[a-z]*.py")}
    assert skipped | without <= set(scripts)
    for name in scripts.keys() - skipped:
        takes_file = any(text in scripts[name] for text in ('"--json"', "make_parser("))
        assert takes_file == (name not in without), name
