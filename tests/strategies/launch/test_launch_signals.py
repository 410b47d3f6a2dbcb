"""Signals to the launcher reach the ranks, which may save before they exit."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from lockstep.strategies.launch.failure import RankFailure
from lockstep.strategies.launch.launcher import late_signals_held, launch
from tests.strategies.launch.programs import Program, own_rank

pytestmark = pytest.mark.ranks


def work_until_signalled(folder: Path, how: str) -> str:
    got: list[int] = []
    if how != "no handler":
        signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))
    (folder / f"ready{own_rank()}").touch()
    while not got or how == "never":
        time.sleep(0.01)
    if how == "exit":
        time.sleep(2.6 * own_rank())  # rank 1 still writes its checkpoint
        (folder / f"saved{own_rank()}").touch()
        raise SystemExit(143)
    return "stopped"


@pytest.fixture
def signal_when_ready(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Send this process a signal when the ranks work; if `launch` leaves it to the process, the test fails and not
    the run."""
    stray: list[int] = []
    over = threading.Event()
    before = {
        signum: signal.signal(signum, lambda signum, frame: stray.append(signum))
        for signum in (signal.SIGTERM, signal.SIGINT)
    }

    def start(signum: int) -> None:
        def send() -> None:
            while not over.wait(0.02):
                if all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
                    os.kill(os.getpid(), signum)
                    return

        threading.Thread(target=send).start()

    yield start
    over.set()
    for signum, handler in before.items():
        signal.signal(signum, handler)
    assert not stray


@pytest.mark.long
def test_ranks_may_return_after_sigterm(tmp_path: Path, signal_when_ready: Callable[[int], None]) -> None:
    signal_when_ready(signal.SIGTERM)
    assert launch(work_until_signalled, (tmp_path, "return"), 2) == "stopped"


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_signals_without_a_handler_end_the_launch_as_they_end_a_program(
    signum: int, expected: type[BaseException], tmp_path: Path, signal_when_ready: Callable[[int], None]
) -> None:
    signal_when_ready(signum)
    with pytest.raises(expected) as caught:
        launch(work_until_signalled, (tmp_path, "no handler"), 2)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143


def test_ranks_that_do_not_stop_are_killed_after_the_grace_period(
    tmp_path: Path, signal_when_ready: Callable[[int], None]
) -> None:
    signal_when_ready(signal.SIGTERM)
    with pytest.raises(RankFailure, match=r"rank \d had not ended 1 s after SIGTERM and was killed \(in setting up\)"):
        launch(work_until_signalled, (tmp_path, "never"), 2, grace_s=1.0)


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_third_signal_kills_ranks_that_do_not_stop_and_keeps_the_exit_code(
    signum: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    over = threading.Event()

    def send() -> None:
        while len(list(tmp_path.glob("ready*"))) < 2 and not over.wait(0.02):
            pass
        os.kill(os.getpid(), signum)  # with the next one a single request
        for _ in range(8):  # on a busy machine more of them may be handled together
            if not over.is_set():
                os.kill(os.getpid(), signum)
            over.wait(1.0)

    before = signal.signal(signum, lambda *_: None)  # for one that comes after the launcher is done
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
            launch(hold_on, (tmp_path,), 2)
    finally:
        over.set()
        sender.join()
        signal.signal(signum, before)
    assert isinstance(caught.value, KeyboardInterrupt) if signum == signal.SIGINT else caught.value.code == 143
    assert (
        f"was killed at the third signal, {signal.Signals(signum).name}, before it had stopped"
        in capfd.readouterr().err
    )


def hold_on(folder: Path) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    (folder / f"ready{own_rank()}").touch()
    time.sleep(100)


@pytest.mark.long
def test_a_program_that_gets_sigterm_lets_every_rank_save_and_exits_with_143(
    program: Callable[[str], Program], tmp_path: Path
) -> None:
    run = program("""
        from pathlib import Path
        from lockstep.strategies.launch.launcher import launch
        from tests.strategies.launch.test_launch_signals import work_until_signalled
        launch(work_until_signalled, (Path(), "exit"), 2)
    """)
    run.wait_for("ready0", "ready1")
    run.process.terminate()
    assert run.finish() == (143, "", "")
    assert len(list(tmp_path.glob("saved*"))) == 2
    run.wait_until_gone(5)


def test_handlers_are_back_afterwards() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    launch(own_rank, (), 1)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before


def work_and_linger(folder: Path) -> str:
    """Reports at once; a thread of its own, such as an upload, keeps the rank for a while."""
    threading.Thread(target=_upload, args=(folder / f"ready{own_rank()}",)).start()
    return "done"


def _upload(ready: Path) -> None:
    time.sleep(1)  # by then the rank has reported
    ready.touch()
    time.sleep(30)


@pytest.mark.parametrize("holds", [True, False])
def test_a_signal_after_the_report_of_the_ranks_reaches_the_program(holds: bool, tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: got.append(signum))

    def send() -> None:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        threading.Thread(target=send).start()
        with late_signals_held() if holds else nullcontext():
            assert launch(work_and_linger, (tmp_path,), 2) == "done"
            assert got == ([] if holds else [signal.SIGTERM])
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
