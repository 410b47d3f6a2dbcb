"""ProgressBar: what is on the screen, in the log file, and how often."""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import os
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from torch import nn

import lockstep.callbacks.progress_bar
from lockstep.callbacks._support import bar_lines
from lockstep.callbacks.progress_bar import ProgressBar

MODULE: Any = nn.Identity()


class Clock:
    """Time that passes when the test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (lockstep.callbacks.progress_bar, bar_lines):
        monkeypatch.setattr(module, "time", clock)
    return clock


# pytest puts its own streams in place after the fixtures have run, so the tests ask for theirs.
def open_log_file(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


class Terminal:
    """A real pseudo-terminal as stdout and stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, encoding: str, columns: int) -> None:
        self._columns = columns
        self._parent, child = os.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream: TextIO = os.fdopen(child, "w", encoding=encoding)
        monkeypatch.setattr(sys, "stderr", self.stream)
        monkeypatch.setattr(sys, "stdout", self.stream)
        monkeypatch.setenv("TERM", "xterm")
        self._written = bytearray()
        self._reads = 0
        self._reader = threading.Thread(target=self._listen)  # who writes to a terminal that nobody reads is held up
        self._reader.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the other end has been closed
            while True:
                self._written += os.read(self._parent, 1 << 16)

    def read(self) -> str:
        """Everything written so far."""
        self.stream.write("\0")
        self.stream.flush()
        self._reads += 1
        while self._written.count(b"\0") < self._reads:  # the mark of an earlier read may still be the last byte
            time.sleep(0.0005)
        return self._written.decode().replace("\0", "")

    def lines(self) -> list[str]:
        """What the user sees: carriage returns obeyed, long lines wrapped."""
        lines, column = [""], 0
        for character in self.read():
            if character == "\r":
                column = 0
            elif character == "\n":
                lines.append("")
                column = 0
            else:
                if column == self._columns:
                    lines.append("")
                    column = 0
                lines[-1] = lines[-1][:column].ljust(column) + character + lines[-1][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]

    def close(self) -> None:
        self.stream.close()
        self._reader.join()
        os.close(self._parent)


@pytest.fixture
def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Terminal]]:
    with contextlib.ExitStack() as stack:

        def make(encoding: str = "utf-8", columns: int = 80) -> Terminal:
            terminal = Terminal(monkeypatch, encoding, columns)
            stack.callback(terminal.close)
            return terminal

        yield make


def make_trainer(**facts: Any) -> Any:
    known = {
        "is_global_zero": True,
        "max_epochs": 3,
        "max_steps": -1,
        "current_epoch": 0,
        "global_step": 0,
        "accumulate_grad_batches": 1,
        "num_training_batches": 100,
        "num_val_batches": [10, 10],
        "_run": SimpleNamespace(
            evaluation_batches={"test": [8], "predict": [8]}, progress=SimpleNamespace(batches_seen=0)
        ),
        "sanity_checking": False,
        "progress_bar_metrics": {},
        "lightning_module": MODULE,
    }
    return SimpleNamespace(**known | facts)


def fit(
    bar: ProgressBar,
    trainer: Any,
    clock: Clock,
    *,
    batch_s: float = 0.1,
    first_batch: int = 0,
    each_batch: Callable[[int], None] = lambda n: None,
) -> None:
    """The hooks of a run in their order, 2 seconds of validation and 1 of checkpoint an epoch; `each_batch` hears the
    number of batches done."""
    trainer._run.progress.batches_seen = first_batch
    bar.setup(trainer, MODULE, "fit")
    bar.on_fit_start(trainer, MODULE)
    bar.on_train_start(trainer, MODULE)
    num_batches = trainer.num_training_batches if math.isfinite(trainer.num_training_batches) else 50
    for _ in range(trainer.max_epochs or 1):
        if not first_batch:
            bar.on_train_epoch_start(trainer, MODULE)
        for batch_idx in range(first_batch, num_batches):
            clock.now += batch_s
            trainer.global_step += 1
            trainer.progress_bar_metrics = {"loss": torch.tensor(1 / trainer.global_step)}
            bar.on_train_batch_end(trainer, MODULE, None, None, batch_idx)
            each_batch(trainer.global_step)
        bar.on_validation_start(trainer, MODULE)
        for dataloader_idx, num_batches_of_loader in enumerate(trainer.num_val_batches):
            for batch_idx in range(num_batches_of_loader):
                clock.now += 0.1
                bar.on_validation_batch_end(trainer, MODULE, None, None, batch_idx, dataloader_idx)
        bar.on_validation_end(trainer, MODULE)
        bar.on_train_epoch_end(trainer, MODULE)
        clock.now += 1.0
        trainer.current_epoch += 1
        trainer.progress_bar_metrics |= {"acc": 0.98765}
        first_batch = 0
    bar.on_train_end(trainer, MODULE)
    bar.on_fit_end(trainer, MODULE)
    bar.teardown(trainer, MODULE, "fit")


def test_a_terminal_shows_one_line_that_fits(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    seen: list[str] = []

    def look(done: int) -> None:
        seen.extend(terminal.lines())

    trainer = make_trainer()
    fit(ProgressBar(), trainer, clock, each_batch=look)
    assert all(len(line) < 80 for line in seen)
    assert any(
        re.match(r"Epoch 2/3:  5\d%\|[^|]+\| 5\d/100 \[00:05<00:0[45], 10\.00it/s, run<00:", line) for line in seen
    )
    last, empty = terminal.lines()
    assert re.match(
        r"Epoch 3/3: 100%\|█+\| 100/100 \[00:1[23]<00:00, 10\.00it/s, loss=0\.003333, acc=0\.9877\]?$", last
    )
    assert empty == "", "the shell's prompt begins on a line of its own"


def test_validation_has_its_own_short_bar(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    fit(ProgressBar(), make_trainer(max_epochs=1), clock)
    assert re.search(r"\rValidation:  60%\|█+[^|]*\| 12/20 \[00:01<00:00, 10\.00it/s\] +\r", terminal.read())


def test_it_is_redrawn_ten_times_a_second_at_most(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    fit(ProgressBar(), make_trainer(num_training_batches=10_000, max_epochs=1), clock, batch_s=0.001)
    assert 50 <= terminal.read().count("\rEpoch") <= 102
    before = terminal.read().count("\r")
    fit(
        ProgressBar(refresh_per_second=1), make_trainer(num_training_batches=10_000, max_epochs=1), clock, batch_s=0.001
    )
    assert terminal.read().count("\r") - before <= 15


def test_printing_in_between_leaves_both_readable(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal(columns=120)
    bar = ProgressBar()

    def talk(done: int) -> None:
        if done == 42:
            bar.print("above", "the bar", sep=" = ")
        if done == 43:
            print("plain print")

    fit(bar, make_trainer(max_epochs=1), clock, each_batch=talk)
    above, beside, last, empty = terminal.lines()
    assert above == "above = the bar"
    assert re.match(r"Epoch 1/1: .* loss=[\d.]+\] plain print$", beside)
    assert last.startswith("Epoch 1/1")
    assert empty == ""


def test_an_exception_leaves_the_terminal_clean(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    bar = ProgressBar()

    def fail(done: int) -> None:
        if done == 42:
            raise KeyboardInterrupt

    trainer = make_trainer()
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(bar, trainer, clock, each_batch=fail)
    bar.on_exception(trainer, MODULE, caught.value)
    bar.teardown(trainer, MODULE, "fit")
    print("Traceback")
    assert terminal.lines()[-2:] == ["Traceback", ""]


def test_a_log_file_gets_a_line_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file = open_log_file(monkeypatch)
    fit(ProgressBar(), make_trainer(num_training_batches=1000), clock)
    lines = log_file.getvalue().splitlines()
    assert "\r" not in log_file.getvalue()
    assert len(lines) == 12, "after 30, 60 and 90 s of an epoch of 100 s, and at its end"
    for epoch, line in enumerate((line for line in lines if "1000/1000" in line), start=1):
        assert line.startswith(f"Epoch {epoch}/3: 100% 1000/1000 [")
        assert line.endswith("acc=0.9877]") and "10.00it/s" in line, "with what was logged at the end of the epoch"


def test_epochs_of_milliseconds_do_not_flood_a_log_file(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file = open_log_file(monkeypatch)
    trainer = make_trainer(num_training_batches=1, max_epochs=200, num_val_batches=[])
    fit(ProgressBar(), trainer, clock, batch_s=0.001)  # and 1 s between epochs
    assert len(log_file.getvalue().splitlines()) <= 202
    bar = ProgressBar()
    bar.setup(trainer, MODULE, "fit")
    before = len(log_file.getvalue().splitlines())
    for trainer.current_epoch in range(200):
        bar.on_train_epoch_start(trainer, MODULE)
        clock.now += 0.001
        bar.on_train_batch_end(trainer, MODULE, None, None, 0)
        bar.on_train_epoch_end(trainer, MODULE)
    bar.on_train_end(trainer, MODULE)
    lines = log_file.getvalue().splitlines()[before:]
    assert len(lines) <= 4, "of 200 epochs in 0.2 s"
    assert lines[-1] == "Epoch 200/200: 100% 1/1 [00:00<00:00, 1000.00it/s, loss=0.005, acc=0.9877]"


def test_the_time_left_is_honest(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second epoch on, validation and checkpoints are counted; the estimate is that of the recent rate."""
    log_file = open_log_file(monkeypatch)
    shown: list[tuple[float, str]] = []
    monkeypatch.setattr(log_file, "write", lambda text: shown.append((clock.now, text)))
    fit(ProgressBar(), make_trainer(num_training_batches=1000, max_epochs=4), clock)
    end, later = clock.now, 0
    for when, line in shown:
        estimate = re.search(r"run<(\d+):(\d+)", line)
        if "Epoch 1" not in line and estimate:
            later += 1
            assert int(estimate[1]) * 60 + int(estimate[2]) == pytest.approx(end - when, rel=0.01, abs=4)
    assert later == 8, "four lines in each of the epochs 2 and 3"


def test_the_time_left_follows_a_change_of_speed(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()

    def slow_down(done: int) -> None:
        clock.now += 0.9 if done > 500 else 0.0

    fit(ProgressBar(), make_trainer(num_training_batches=600, max_epochs=1), clock, each_batch=slow_down)
    assert re.search(r"\rEpoch 1/1:  93%\|█+[^|]*\| 560/600 \[01:49<00:40,  1\.00it/s", terminal.read())


def test_a_run_that_is_resumed_within_an_epoch_shows_the_true_rate(
    open_terminal: Callable[..., Terminal], clock: Clock
) -> None:
    terminal = open_terminal()
    fit(ProgressBar(), make_trainer(max_epochs=1), clock, batch_s=2.0, first_batch=90)
    assert re.search(r"\rEpoch 1/1:  91%\|█+[^|]*\| 91/100 \[00:02<00:18,  2\.00s/it", terminal.read())


def test_an_epoch_shorter_than_the_interval_has_a_rate(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log_file = open_log_file(monkeypatch)
    fit(ProgressBar(), make_trainer(num_training_batches=40, max_epochs=1), clock, batch_s=0.02)
    assert "40/40 [00:03<00:00, 50.00it/s" in log_file.getvalue()


def test_limits_by_steps_and_loaders_without_length(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    trainer = make_trainer(
        num_training_batches=math.inf, max_epochs=None, max_steps=200, accumulate_grad_batches=2, num_val_batches=[5]
    )
    fit(ProgressBar(), trainer, clock)
    assert re.search(r"\rEpoch 1:   2%\|[^|]*\| 10/400 \[00:01<00:39, 10\.00it/s", terminal.read())
    trainer = make_trainer(num_training_batches=1000, max_epochs=None, max_steps=20)
    fit(ProgressBar(), trainer, clock, each_batch=lambda done: None)
    assert "| 20/20 [00:02<00:00, 10.00it/s" in terminal.read(), "the steps of the run, not the batches of the epoch"


def test_loaders_without_length_count_batches(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    fit(ProgressBar(), make_trainer(num_training_batches=math.inf, max_epochs=1), clock)
    assert re.search(r"\rEpoch 1/1: 10it \[00:01, 10\.00it/s, loss=0\.1\]", terminal.read())


def test_metrics_are_shown_from_the_first_step(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    seen: list[str] = []
    fit(
        ProgressBar(),
        make_trainer(max_epochs=1),
        clock,
        batch_s=0.2,
        each_batch=lambda _: seen.append(terminal.read()),
    )
    assert "| 1/100 [" in seen[0] and "loss=1" in seen[0]


def test_sanity_check_test_and_predict(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    bar, trainer = ProgressBar(), make_trainer(sanity_checking=True)
    bar.setup(trainer, MODULE, "fit")
    bar.on_validation_start(trainer, MODULE)
    clock.now += 1
    bar.on_validation_batch_end(trainer, MODULE, None, None, 0)
    bar.on_validation_end(trainer, MODULE)
    bar.teardown(trainer, MODULE, "fit")
    trainer = make_trainer(progress_bar_metrics={"acc": 0.5}, num_val_batches=[4, 4])
    for stage, start, batch_end, end in (
        ("validate", bar.on_validation_start, bar.on_validation_batch_end, bar.on_validation_end),
        ("test", bar.on_test_start, bar.on_test_batch_end, bar.on_test_end),
        ("predict", bar.on_predict_start, bar.on_predict_batch_end, bar.on_predict_end),
    ):
        bar.setup(trainer, MODULE, stage)
        start(trainer, MODULE)
        for batch_idx in range(8):
            clock.now += 0.01
            batch_end(trainer, MODULE, None, None, batch_idx)
        end(trainer, MODULE)
        bar.teardown(trainer, MODULE, stage)
    assert [re.sub("█+", "█", line) for line in terminal.lines()] == [
        "Sanity check: 1it [00:01,  1.00it/s]",
        "Validation: 100%|█| 8/8 [00:00<00:00, 100.00it/s, acc=0.5]",
        "Test: 100%|█| 8/8 [00:00<00:00, 100.00it/s, acc=0.5]",
        "Predict: 100%|█| 8/8 [00:00<00:00, 100.00it/s, acc=0.5]",
        "",
    ]


def test_ranks_other_than_zero_are_silent(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    bar = ProgressBar()
    fit(bar, make_trainer(is_global_zero=False), clock, each_batch=lambda done: bar.print("x"))
    assert terminal.read() == ""


def test_a_stream_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stderr", full)
        fit(ProgressBar(), make_trainer(), clock)
        with pytest.raises(OSError, match="No space left"):
            full.write("x")


@pytest.mark.parametrize("returned", [KeyError("v_num"), None, {"rates": [0.1, 0.2]}])
def test_metrics_that_fail_do_not_end_the_run(
    returned: Any, open_terminal: Callable[..., Terminal], clock: Clock
) -> None:
    class Bar(ProgressBar):
        def get_metrics(self, trainer: Any, module: Any) -> Any:
            if isinstance(returned, Exception):
                raise returned
            return returned

    terminal = open_terminal()
    with pytest.warns(RuntimeWarning, match="Bar.get_metrics failed, and the bar shows no metrics, training") as warned:
        fit(Bar(), make_trainer(max_epochs=1), clock)
    assert len(warned) == 1 and "| 100/100 [" in terminal.lines()[0]


def test_a_terminal_without_unicode_gets_ascii(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal("ascii")
    fit(ProgressBar(), make_trainer(max_epochs=1), clock)
    assert re.match(r"Epoch 1/1: 100%\|#+\| 100/100", terminal.lines()[0])


def test_a_terminal_without_a_size_has_80_columns(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    fcntl.ioctl(terminal.stream, termios.TIOCSWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
    fit(ProgressBar(), make_trainer(max_epochs=1), clock)
    lines = terminal.read().split("\r")
    assert any("50/100" in line or "51/100" in line for line in lines) and max(map(len, lines)) == 79


def test_wide_characters_count_double(open_terminal: Callable[..., Terminal], clock: Clock) -> None:
    terminal = open_terminal()
    bar, trainer = ProgressBar(), make_trainer(progress_bar_metrics={"損失" * 20: 1.0})
    bar.setup(trainer, MODULE, "test")
    bar.on_test_start(trainer, MODULE)
    bar.on_test_end(trainer, MODULE)
    frame = terminal.read().split("\r")[-2 if terminal.read().endswith("\r\n") else -1].rstrip()
    assert "損失" in frame
    assert len(frame) + frame.count("損") + frame.count("失") < 80


def test_the_refresh_rate_is_checked() -> None:
    with pytest.raises(ValueError, match="refresh_per_second must be above 0, but it is 0"):
        ProgressBar(refresh_per_second=0)
