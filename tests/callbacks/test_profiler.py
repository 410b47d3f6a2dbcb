"""What Profiler shows is where the time of training went."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import Profiler
from tests.trainer.toy import Net, loader, quiet


class Slow(Net):
    """Sleeps where a test can tell the parts apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.01)


def test_simple_tells_the_parts_apart(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler()
    quiet(callbacks=[profiler]).fit(Slow(), loader(48), loader(16))
    assert sum(profiler.seconds.values()) + profiler.first_s >= 6 * 0.02 + 2 * 0.01
    assert profiler.first_s >= 0.02
    assert profiler.seconds["forward"] >= 5 * 0.02
    assert profiler.seconds["validation"] >= 2 * 0.01
    shown = capsys.readouterr().out
    assert "then 5 steps" in shown
    assert all(name in shown for name in profiler.seconds)


def test_an_argument_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    run = quiet(profiler="simple", accumulate_grad_batches=2)
    run.fit(Net(), loader(48))
    assert "then 2 steps" in capsys.readouterr().out
    with pytest.raises(ValueError, match="profiler must be one of 'simple', 'torch', but it is 'advanced'"):
        quiet(profiler="advanced")


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_torch_writes_a_trace_of_the_steps_asked_for(devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    quiet(devices=devices, callbacks=[Profiler("torch", first_step=2, num_steps=2)]).fit(Net(), loader(64))
    for rank in range(devices):
        names = [
            event.get("name", "")
            for event in json.loads(Path(f"runs/profile/rank-{rank}.json").read_text())["traceEvents"]
        ]
        assert sum(name.startswith("ProfilerStep#") for name in set(names)) == 2
        assert any("addmm" in name for name in names)
    assert "profile: runs/profile/rank-0.json" in capfd.readouterr().out


def test_a_run_that_is_too_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(callbacks=[Profiler("torch", first_step=20)]).fit(Net(), loader(64))
    assert "profile: not measured, because training ended before step 23; lower first_step" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"first_step": 0}, {"num_steps": 1.5}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        Profiler("torch", **options)
