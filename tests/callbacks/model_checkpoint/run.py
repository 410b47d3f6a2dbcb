"""A run as ModelCheckpoint sees it, with real checkpoints and files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.strategies.base import Topology
from lockstep.strategies.checkpoint_state import TensorShard
from lockstep.trainer.checkpoint.store import Checkpoint, is_checkpoint, save
from tests.trainer.toy import Net


class Run:
    """What ModelCheckpoint uses of a Trainer, and the loop's calls of its hooks; checkpoints and files are real."""

    def __init__(self, callback: ModelCheckpoint, log_dir: Path, resume: str | None = None, start: bool = True) -> None:
        self.callback = callback
        self.log_dir = str(log_dir)
        self.arguments = SimpleNamespace(default_root_dir=str(log_dir.parent), fast_dev_run=False, log_every_n_steps=50)
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self._run = self
        self.measured_at: dict[str, int] = {}
        self.validation_follows = False
        self.progress = SimpleNamespace(batches_seen=0, epoch_validated=False, validated_at=-1)
        self.global_step = self.current_epoch = 0
        self.is_global_zero = True
        self.sanity_checking = False
        self.num_val_batches: list[int] = [1]
        self.strategy: Any = SimpleNamespace(
            topology=Topology(), broadcast=lambda value: value, barrier=lambda: None, ranks_meet=True
        )
        self.print = print
        self.has_saved = lambda callback: None
        self.events: list[str] = []
        self.removes = True
        if start:
            self.start(resume)

    def start(self, resume: str | None = None) -> Run:
        self("setup", "fit")
        if resume:
            state = Checkpoint.open(resume).state
            self.global_step = state["progress"]["global_step"]
            self.callback.load_state_dict(state["callback"])
        self("on_fit_start")
        self("on_train_start")
        return self

    def __call__(self, hook: str, *args: Any) -> None:
        getattr(self.callback, hook)(self, None, *args)

    def save_checkpoint(
        self,
        path: str,
        weights_only: bool = False,
        wait: bool = True,
        also: Sequence[str] = (),
        outdated: Sequence[str] = (),
    ) -> None:
        assert wait and not weights_only
        self.events.append(f"save {os.path.basename(path)}")
        tensors = {"model/step": TensorShard.whole(torch.tensor(self.global_step))}
        state = {"progress": {"global_step": self.global_step}, "callback": self.callback.state_dict()}
        s = self.strategy
        save(
            path,
            rank=s.topology.rank,
            world_size=s.topology.world_size,
            tensors=tensors if s.topology.rank == 0 else {},
            state=state,
            barrier=s.barrier,
            broadcast=s.broadcast,
            also=also,
            outdated=outdated if self.removes else (),
        )
        self.events += [
            *(f"save {os.path.basename(name)}" for name in also),
            *(f"remove {os.path.basename(name)}" for name in outdated),
        ]

    def is_checkpoint(self, path: str) -> bool:
        return is_checkpoint(path)

    def finish_saving(self) -> None: ...

    def publish_due(self) -> None: ...

    def train(self, steps: int, micro_batches: int = 1) -> Run:
        for _ in range(steps):
            for _ in range(micro_batches - 1):
                self("on_train_batch_end", None, None, 0)
            self.global_step += 1
            self.progress.batches_seen += 1
            self("on_train_batch_end", None, None, 0)
        return self

    def measure(self, metrics: dict[str, float]) -> None:
        measured = {name.replace("_", "/", 1): torch.tensor(value) for name, value in metrics.items()}
        self.callback_metrics |= measured
        self.measured_at |= dict.fromkeys(measured, self.global_step)

    def validate(self, **metrics: float) -> Run:
        self.measure(metrics)
        self("on_validation_end")
        return self

    def end_epoch(self, **metrics: float) -> Run:
        self.measure(metrics)
        self("on_train_epoch_end")
        self.current_epoch += 1
        self.progress.batches_seen, self.progress.epoch_validated = 0, False
        return self

    def epoch(self, **metrics: float) -> Run:
        self.train(10).progress.epoch_validated = True
        return self.validate(**metrics).end_epoch()

    def found(self) -> dict[str, int]:
        """Every checkpoint on the disk, and the step that its tensors are of; asserts that nothing else is there."""
        folder = Path(self.callback.dirpath or "")
        assert all(is_checkpoint(path) for path in folder.iterdir())
        return {path.name: int(Checkpoint.open(path).read("model/step")) for path in folder.iterdir()}


class Measures(Net):
    """Its validation metric falls from step to step, or rises."""

    sign = -1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.sign * self.global_step)
