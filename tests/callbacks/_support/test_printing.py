"""What Lockstep reports goes through the logger "lockstep": shown on stderr, silenced and redirected as any library."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks._support.printing import StderrHandler
from tests.trainer.toy import loader, net, quiet


def test_a_run_says_its_strategy_on_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    quiet().fit(net(), loader(8))
    out, err = capfd.readouterr()
    assert "strategy SingleDevice: one cpu device\n" in err and "SingleDevice" not in out


@pytest.mark.long
@pytest.mark.ranks
def test_the_level_holds_on_every_rank(capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    try:
        quiet(devices=2).fit(net(), loader(16))
    finally:
        logging.getLogger("lockstep").setLevel(logging.INFO)
    assert capfd.readouterr().err == ""


def test_records_go_where_the_program_sends_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("lockstep")
    handlers, logger.handlers = logger.handlers, [logging.FileHandler(tmp_path / "log.txt")]
    try:
        quiet().fit(net(), loader(8))
    finally:
        logger.handlers[0].close()
        logger.handlers = handlers
    assert "strategy SingleDevice" in (tmp_path / "log.txt").read_text() and not capfd.readouterr().err


def test_a_stream_that_is_gone_loses_the_text_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> Any:
            raise BrokenPipeError

        def flush(self) -> None: ...

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stderr", Gone())
    StderrHandler().handle(logging.LogRecord("lockstep", logging.INFO, "", 0, "text", None, None))
