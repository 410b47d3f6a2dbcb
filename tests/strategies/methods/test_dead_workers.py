"""A worker of a parameter server that is killed: what it leaves, the others compute."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lockstep import RankFailure, Trainer
from lockstep.callbacks import Callback, ModelCheckpoint
from lockstep.strategies import ParameterServer
from lockstep.strategies.methods.parameter_server.dealer import Dealer
from tests.strategies.methods.served import difference, fit

OPTIONS: dict[str, Any] = {"drop": 0.3, "norm": True, "gradient_clip_val": 0.3, "samples": 96, "max_epochs": 2}


class _Dies(Callback):
    """By the number that a rank began with the step in whose first batch it kills itself."""

    def __init__(self, at: dict[int, int]) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step >= self.at.get(int(os.environ["RANK"]), 1000):
            os.kill(os.getpid(), signal.SIGKILL)


def check(got: Any, trainer: Trainer, workers: int, folder: Path) -> Path:
    """Every batch and sample was trained on once, within the bound, and a replay without deaths has the same bits."""
    record = Path(str(trainer.log_dir)) / "schedule.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()[1:]]
    assert sorted(line["batch"] for line in lines) == [*range(workers * trainer.global_step)]
    assert all(0 <= line["batch"] // workers - line["read"][0] <= 2 for line in lines)
    again, replayed = fit(ParameterServer(replay=record), folder, devices=1, **OPTIONS)
    assert difference(again, got) == 0
    seen = Counter((step // (replayed.global_step // 2), index) for step, index in again.seen)
    assert seen == Counter((epoch, index) for epoch in range(2) for index in range(96))
    return record


@pytest.mark.long
@pytest.mark.faults
def test_others_compute_the_batches_of_a_worker_that_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    saver = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    options = {**OPTIONS, "callbacks": [_Dies({2: 5}), saver], "enable_checkpointing": True}
    got, trainer = fit(ParameterServer(2), tmp_path, devices=3, slow=0.02, **options)
    [line] = [message for message in caplog.messages if "killed" in message]
    assert line.startswith("rank 2 was killed by SIGKILL (step ")
    said = "the other ranks compute the batches of the one that died; what it logged in this epoch is lost"
    assert capfd.readouterr().err.count(said) == 1  # rank 0 does
    record = check(got, trainer, 3, tmp_path)
    later = next(path for path in saver.best_k_models if "step=12" in path)  # of two ranks
    resumed, _ = fit(ParameterServer(replay=record), tmp_path, devices=3, ckpt_path=later, **OPTIONS)
    assert difference(resumed, got) == 0


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("at", [{1: 0}, {1: 0, 3: 0}, {1: 3, 2: 3, 3: 3}, {3: 8, 2: 9}, {1: 11}], ids=str)
@pytest.mark.parametrize("meet_every", [3, 50])
def test_all_workers_but_the_first_may_die(tmp_path: Path, at: dict[int, int], meet_every: int) -> None:
    strategy = ParameterServer(2, servers=1, meet_every=meet_every)
    got, trainer = fit(strategy, tmp_path, devices=4, slow=0.01, callbacks=[_Dies(at)], **OPTIONS)
    check(got, trainer, 4, tmp_path)


class _IsKilled(Callback):
    """A rank is killed from outside some time after step 3, wherever it is."""

    def __init__(self, folder: Path, after_s: float) -> None:
        self.folder, self.after_s = folder, after_s

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.global_rank == 2:
            (self.folder / "process").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 3 and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            threading.Thread(target=self._kill, args=(int((self.folder / "process").read_text()),)).start()

    def _kill(self, process: int) -> None:
        time.sleep(self.after_s)
        os.kill(process, signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_may_be_killed_at_any_instant(tmp_path: Path) -> None:
    """In a batch, while it sends, waits or meets the others, who then restart from the newest checkpoint."""
    times = random.Random(0)
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        options = {"callbacks": [_IsKilled(folder, times.uniform(0, 0.25))], "max_restarts": 1, **OPTIONS}
        got, trainer = fit(ParameterServer(2, servers=1), folder, devices=3, slow=0.005, **options)
        check(got, trainer, 3, folder)


class _TwoServers(ParameterServer):
    """What a model of 8 MB gets."""

    def _enough_servers(self, wrapped: Any) -> int:
        return 2


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        pytest.param(ParameterServer(2, servers=1), 0, id="the only server"),
        pytest.param(ParameterServer(2, servers=2), 2, id="a worker of two servers"),
        pytest.param(_TwoServers(2), 1, id="a server of two by default"),
        pytest.param(_TwoServers(2), 2, id="a worker of two by default"),
    ],
)
def test_a_run_that_cannot_do_without_a_rank_ends_by_its_name(
    tmp_path: Path, strategy: ParameterServer, rank: int
) -> None:
    with pytest.raises(RankFailure, match=f"rank {rank} was killed by SIGKILL"):
        fit(strategy, tmp_path, devices=3, callbacks=[_Dies({rank: 5})], **OPTIONS)


def test_what_a_rank_that_died_had_is_handed_out_to_those_who_know_its_clock() -> None:
    dealer = Dealer(workers=4, ranks=3, clock=10)
    assert [dealer.take(rank, 10, 0)[0] for rank in (0, 1, 2)] == [40, 41, 42]
    dealer.arrived(0, 40)
    assert dealer.take(0, 10, 0) == (None, 0) and dealer.take(0, 11, 0)[0] == 44
    dealer.died(2)  # with batch 42 in its hands, and 43, its own of the first clock, not yet
    assert dealer.take(1, 9, 0, late=True)[0] is None
    assert dealer.take(1, 11, 0)[0] == 42 and dealer.take(0, 11, 0, late=True)[0] == 43
    assert dealer.take(0, 11, 0, late=True)[0] is None and dealer.take(0, 11, 0)[0] == 45


def test_ranks_meet_without_those_that_died() -> None:
    dealer, met = Dealer(workers=3, ranks=3, clock=0), []
    waits = threading.Thread(target=lambda: met.append(dealer.meet(0, lambda: False)))
    waits.start()
    assert dealer.meet(2, lambda: True) == [0, 1, 2]  # a failure elsewhere: it does not wait
    dealer.died(1)
    waits.join(5)
    assert met == [[0, 2]]
