"""What the program's own code raises about its state in a checkpoint is raised by `fit` unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import Callback
from tests.trainer.toy import loader, net, quiet


class Raises(Callback):
    """One of its methods raises what it is given, as the run continues."""

    def __init__(self, error: Exception | None = None, method: str = "load_state_dict") -> None:
        self.error, self.method = error, method

    def _raise(self, method: str) -> None:
        if self.error is not None and method == self.method:
            raise self.error

    def state_dict(self) -> dict[str, Any]:
        self._raise("state_dict")
        return {"seen": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._raise("load_state_dict")

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self._raise("on_load_checkpoint")
        if self.method == "missing":
            checkpoint["words_seen"]


def continue_and_save(trainer: Trainer, folder: Path) -> None:
    trainer.fit(net(), loader(8), ckpt_path=folder / "saved")
    trainer.save_checkpoint(folder / "again")


@pytest.mark.parametrize("method", ["load_state_dict", "on_load_checkpoint", "state_dict"])
@pytest.mark.parametrize("error", [KeyError("boom"), ValueError("boom"), json.JSONDecodeError("boom", "", 0)])
def test_what_methods_of_the_program_raise_about_state_stays_as_it_is(
    tmp_path: Path, method: str, error: Exception
) -> None:
    trainer = quiet(callbacks=[Raises()], max_epochs=2)
    trainer.fit(net(), loader(8))
    trainer.save_checkpoint(tmp_path / "saved")
    failing = quiet(callbacks=[Raises(error, method)], max_epochs=3)
    with pytest.raises(type(error), match="boom") as raised:
        continue_and_save(failing, tmp_path)
    assert raised.value is error


def test_what_a_hook_does_not_find_in_a_checkpoint_is_a_key_error(tmp_path: Path) -> None:
    trainer = quiet(callbacks=[Raises()])
    trainer.fit(net(), loader(8))
    trainer.save_checkpoint(tmp_path / "saved")
    with pytest.raises(KeyError, match="^'words_seen'$"):
        quiet(callbacks=[Raises(method="missing")], max_epochs=2).fit(net(), loader(8), ckpt_path=tmp_path / "saved")
