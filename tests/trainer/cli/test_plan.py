"""`lockstep plan`: what it prints, its exit codes, and its search."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import find_device, known_devices
from lockstep.strategies.planning.plan import Block, Plan, RankPlan, Work
from lockstep.trainer.cli.main import main
from lockstep.trainer.cli.plan import search, trial
from tests.conftest import REPO_ROOT

PROGRAM = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import DataModule, Module

class Line(Module):
    def __init__(self, branches: bool = False, loss_chunks: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        if self.hparams.branches and loss > 0:
            return 2 * loss
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4)
"""
CONFIG = "module: {class: planned.Line}\ndata: {class: planned.Data}\ntrainer: {max_steps: 7200}\n"
GPU = "memory=24,flops=1e12,bandwidth=1e12,link=1e10,network=1e9"


@pytest.fixture(autouse=True)
def folder(isolate: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planned.py").write_text(PROGRAM)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("planned", None)


def test_the_page_has_memory_collectives_time_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "strategy=ddp", "--devices", "2", "--gpu", GPU, "--price", "2.5"]) == 0
    page = capsys.readouterr().out
    assert "ddp on 2 ranks, 32-true: 385 parameters, 8 samples a step" in page
    assert "1.50 KiB" in page and "of 24.00 GiB" in page and "fits" in page  # 385 parameters in float32
    assert "all-reduce" in page and "1,540" in page and "ddp in backward" in page
    assert "7,200 steps" in page and "2.5 a device and hour" in page and "note: " in page
    assert main(["plan", "run.yaml", "--gpu", "memory=1,flops=1e12"]) == 1  # of which the driver takes all
    assert "does not fit" in capsys.readouterr().out


def test_json_is_the_plan_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", "strategy=ddp", "devices=2", "num_nodes=2", "--gpu", GPU, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (rank,) = found["plan"]["ranks"]
    assert found["plan"]["world_size"] == 4 == rank["num_ranks"] and rank["parameters"] == 4 * 385
    assert found["fits"] and found["time"]["steps"] == 7200
    assert found["time"]["hours"] == pytest.approx(2 * found["time"]["seconds"])
    assert found["reserved"] == [int(rank["peak"] * (1 + timing.ALLOCATOR) + timing.CONTEXT_BYTES)]


def test_the_picture_is_a_png(capsys: pytest.CaptureFixture[str]) -> None:
    images = pytest.importorskip("PIL.Image", reason="pictures need the extra plot")
    words = ["plan", "run.yaml", "--gpu", GPU, "--plot", "plan.png", "--logdir", "board"]
    assert main(words) == 0
    with images.open("plan.png") as image:
        assert image.format == "PNG" and len(image.getcolors(10**6)) > 5
    assert list(Path("board").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=fsdp=2,tensor=3", "--devices", "8"], "the mesh fsdp=2 × tensor=3 = 6 ranks is not the number of"),
        (["--gpu", "h100"], "did you mean h100-80 or h100-pcie?"),
        (["module.branches=true"], "planned.py:14 branches on the value of a tensor"),
        (["--fit"], "--fit needs the device: add --gpu NAME"),
        (["--price", "2"], "--price needs the device"),
        (["--gpu", "memory=80", "--options"], "a search orders layouts by time: give the device's FLOP/s"),
        (["--devices", "0"], "--devices must be at least 1"),
        (["--devices", "16", "strategy=ddp", "--gpu", "l40s"], "on several nodes of 8 l40s, whose data sheet has no"),
        (["--plot", "plan.svg"], "--plot writes a .png file"),
        (["--price", "-1", "--gpu", "l4"], "--price must be a number of at least 0"),
        (["trainer.max_step=3"], "max_step"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else None,
)
def test_what_is_wrong_is_one_sentence(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "run.yaml", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("lockstep: error: ") and said.err.count("\n") == 1
    assert message in said.err


def test_layouts_are_those_whose_sizes_multiply_to_the_devices() -> None:
    assert list(search.layouts_of(1, 8)) == ["single"]
    assert set(search.layouts_of(2, 8)) == {"ddp", "fsdp", "tensor", "pipeline"}
    assert {"ddp=2,fsdp=8", "fsdp=2,tensor=8", "ddp=2,fsdp=4,tensor=2", "ddp=4,pipeline=4"} <= set(
        search.layouts_of(16, 8)
    )
    assert not any("tensor=16" in layout for layout in search.layouts_of(16, 8))
    assert list(search.layouts_of(3, 2)) == ["ddp", "fsdp", "pipeline"]


def made(strategy: Any, chunks: int) -> Plan:
    """ddp holds 100 GiB, fsdp 10 and 30 of activations, of which checkpointing and chunks save; tensor cannot be."""
    text = str(strategy)
    if "tensor" in text or "pipeline" in text:
        raise ValueError("a number of heads that\nthe ranks do not divide")
    state = 100 if "ddp" in text.lower() else 10
    saved = (15 if "net.1" in text else 25) if "activation_checkpointing" in text else 0
    peak = (state + 30 - saved - (chunks > 1)) << 30
    work = (Work("aten.mm", "float32", "forward", 1, 1e12 * (1 + saved), 0),)
    parts = (("parameters", state << 30), ("activations", peak - (state << 30)))
    blocks = (Block("net.0", 1), Block("net.1", 1))
    rank = RankPlan(0, "all", 4, state << 30, 0, 0, 0, 1, blocks, 0, 0, 0, peak, parts, "forward", "", (), work)
    return Plan(text, 4, (("fsdp", 4),), "32-true", 8, None, 10, (rank,))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a search tries, without trials."""
    found: list[str] = []

    def try_config(resolved: Any) -> tuple[Plan, str]:
        strategy = resolved.values["trainer"]["strategy"]
        chunks = resolved.values["module"].get("loss_chunks", 1)
        found.append(f"{strategy} {chunks}")
        return made(strategy, chunks), ""

    monkeypatch.setattr(trial, "try_config", try_config)
    monkeypatch.setattr(search, "MAX_PROCESSES", 1)
    return found


def test_the_search_finds_the_mildest_options_that_fit(tried: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "run.yaml", "--devices", "4", "--gpu", "memory=30,flops=1e12", "--fit", "--price", "1"]
    assert main(words) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[1].startswith("fsdp") and "checkpointing selective" in lines[1] and "for 1,000,000 samples" in lines[1]
    assert any("ddp: " in line and "parameters 100.00 GiB" in line for line in lines)
    assert "tensor: a number of heads that the ranks do not divide" in lines
    assert lines[-1].endswith('"trainer.strategy={class: FSDP, activation_checkpointing: [net.1]}"')
    assert sum("'DDP'" in text or text.startswith("ddp ") for text in tried) == 1  # no option helps
    assert len(tried) == len(set(tried)) or "precision" in said.out
    assert "1 of " in said.err and "fsdp with precision bf16-mixed " in said.err
    assert "keep gathered after forward" in said.out and "loss in 8 chunks" in said.out


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_mixed_precision_may_gather_all_in_16_bits(
    precision: str, tried: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["strategy=fsdp", f"precision={precision}", "--devices", "4", "--gpu", "memory=99,flops=1e12", "--options"]
    assert main(["plan", "run.yaml", *words]) == 0
    assert ("gather all in 16 bits" in capsys.readouterr().out) == (precision == "bf16-mixed")
    assert any("'low_precision_gather': 'all'" in text for text in tried) == (precision == "bf16-mixed")


@pytest.mark.ranks
def test_a_search_in_processes_finds_what_one_process_finds(
    tried: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "run.yaml", "--devices", "4", "--gpu", "memory=30,flops=1e12", "--fit", "--json"]
    assert main(words) == 0
    alone, count = capsys.readouterr().out, len(tried)
    monkeypatch.setattr(search, "MAX_PROCESSES", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert main(words) == 0
    assert capsys.readouterr().out == alone
    assert len(tried) == count  # no trial in this process
    monkeypatch.setattr(trial, "try_config", lambda _: os.kill(os.getpid(), signal.SIGKILL))
    assert main(words) == 2
    assert "a process that tried a layout was killed" in capsys.readouterr().err


def test_a_search_in_json_and_one_in_which_nothing_fits(tried: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "run.yaml", "--devices", "4", "--gpu", "memory=8,flops=1e12", "--fit", "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["layouts"] and not any(entry["fits"] for entry in found["layouts"])
    assert main(["plan", "run.yaml", "strategy=fsdp", "--devices", "4", *words[4:6], "--options", "--json"]) == 1
    options = json.loads(capsys.readouterr().out)["options"]
    assert [entry["options"] for entry in options[:2]] == ["", "checkpointing off"]
    assert "offload to the host" in {entry["options"] for entry in options}
    full = next(entry for entry in options if entry["options"] == "checkpointing full")
    assert full["peak"] < options[0]["peak"] and full["seconds"] > options[0]["seconds"]


def test_what_does_not_fit_says_what_takes_the_most() -> None:
    device = replace(find_device("h100-80"), memory=2.0**30)
    assert (
        search.why_not(made("fsdp", 1), device) == "45.80 GiB of 1.00 GiB: activations 30.00 GiB, parameters 10.00 GiB"
    )


def test_the_documented_devices_are_those_of_the_file() -> None:
    page = (REPO_ROOT / "docs" / "planning.md").read_text()
    for device in known_devices().values():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{device.name}` |"))
        cells = [cell.strip().replace(",", "") for cell in row.split("|")[2:-1]]
        assert float(cells[0]) * 2**30 == device.memory and float(cells[4]) * 1e9 == device.bandwidth
        assert float(cells[5]) * 1e9 == device.link and int(cells[7]) == device.node
        assert (cells[6] == "-") == (device.network is None)
        assert float(cells[8]) * 1e9 == device.host
        assert (None if cells[9] == "-" else float(cells[9]) * 1e9) == device.host_memory
