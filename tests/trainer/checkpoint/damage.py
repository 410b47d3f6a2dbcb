"""Runs that write checkpoints to damage, and resume from what is left."""

from __future__ import annotations

import contextlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import torch

from lockstep.callbacks import Callback, EarlyStopping, LRWarmup
from lockstep.trainer.checkpoint import manifest as checkpoint_format
from tests.trainer.run.test_resume import Rich
from tests.trainer.toy import loader, quiet


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(ckpt_path: Path | None, *callbacks: Callback) -> None:
    torch.manual_seed(0)
    with contextlib.redirect_stderr(io.StringIO()):
        trainer = quiet(
            max_epochs=None,
            max_steps=4,
            callbacks=[EarlyStopping("val/loss", patience=99), LRWarmup(steps=5), *callbacks],
        )
        trainer.fit(Rich(), loader(40, 4), loader(8), ckpt_path=ckpt_path)


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with its right checksum, as a forger would."""
    manifest.pop("checksum", None)
    (folder / "manifest.json").write_text(
        json.dumps({"checksum": checkpoint_format.manifest_checksum(manifest), **manifest})
    )


def replace(folder: Path, manifest: dict[str, Any], name: str, content: bytes) -> None:
    """Put a file in the folder and in the manifest, with its right size and checksum."""
    (folder / name).write_bytes(content)
    manifest["files"][name] = {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}
