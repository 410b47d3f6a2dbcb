"""A run of the parameter server that resumes with another number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import ParameterServer
from tests.strategies.methods.served import Toy, difference, fit

OPTIONS: dict[str, Any] = {"drop": 0.0, "gradient_clip_val": 0.3, "samples": 93, "devices": 1}


def saved_at(step: int, strategy: ParameterServer, folder: Path, **options: Any) -> tuple[str, Toy, Trainer]:
    saver = ModelCheckpoint(every_n_train_steps=8, save_top_k=-1)
    module, trainer = fit(strategy, folder, callbacks=[saver], enable_checkpointing=True, **OPTIONS, **options)
    return next(path for path in saver.best_k_models if f"step={step}" in path), module, trainer


@pytest.mark.ranks
def test_without_staleness_the_numbers_of_workers_before_and_after_do_not_matter(tmp_path: Path) -> None:
    path, got, trainer = saved_at(16, ParameterServer(0, workers=2), tmp_path, tokens=True)
    for workers in (2, 4, 3, 1):
        resumed, again = fit(ParameterServer(0, workers=workers), tmp_path, ckpt_path=path, tokens=True, **OPTIONS)
        assert again.global_step == trainer.global_step
        tolerance = 0 if workers == 2 else 1e-12
        assert difference(resumed.net, got.net) <= tolerance
        for name, value in trainer.callback_metrics.items():
            assert abs(float(again.callback_metrics[name] - value)) <= 1e-12, (workers, name)
        assert sorted(i for step, i in resumed.seen if step >= 16) == sorted(i for step, i in got.seen if step >= 16)


@pytest.mark.long
@pytest.mark.ranks
def test_a_run_with_other_workers_begins_a_record_that_replays_from_its_checkpoint(tmp_path: Path) -> None:
    path, _, first = saved_at(16, ParameterServer(2, workers=2), tmp_path, max_steps=16)
    old = (Path(str(first.log_dir)) / "schedule.jsonl").read_text()
    options = {**OPTIONS, "devices": 2, "enable_checkpointing": True}
    got, trainer = fit(ParameterServer(2, workers=4), tmp_path, ckpt_path="auto", slow=0.01, **options)
    folder = Path(str(trainer.log_dir))
    assert trainer.log_dir == first.log_dir
    assert (folder / "schedule-before-step=16.jsonl").read_text() == old
    head, *lines = map(json.loads, (folder / "schedule.jsonl").read_text().splitlines())
    assert head == {"workers": 4, "servers": 1, "staleness": 2}
    assert sorted(line["batch"] for line in lines) == [*range(4 * 16, 4 * trainer.global_step)]
    replay = ParameterServer(replay=folder / "schedule.jsonl")
    again, _ = fit(replay, tmp_path, ckpt_path=path, **OPTIONS)
    assert difference(again, got) == 0
    with pytest.raises(RuntimeError, match="begins with step 16, where the run resumed with other workers"):
        fit(replay, tmp_path, **OPTIONS)


class _ChangesAndSaves(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            with trainer.whole(module):
                module.net[0].weight.data.mul_(0.5)
            trainer.save_checkpoint(self.path)


@pytest.mark.ranks
def test_a_checkpoint_after_weights_were_changed_has_the_state_of_all_servers(tmp_path: Path) -> None:
    options = {**OPTIONS, "devices": 2, "callbacks": [_ChangesAndSaves(tmp_path / "saved")]}
    got, _ = fit(ParameterServer(0, servers=2), tmp_path, **options)
    resumed, _ = fit(ParameterServer(0, workers=2), tmp_path, ckpt_path=str(tmp_path / "saved"), **OPTIONS)
    assert difference(resumed.net, got.net) == 0
