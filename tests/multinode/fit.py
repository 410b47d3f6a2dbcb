"""What every rank runs: `torchrun … fit.py STRATEGIES NUM_NODES DEVICES FOLDER` (names with commas); leaves what it
finds in FOLDER/<strategy>."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import torch

from lockstep import DataModule, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import DDP, FSDP
from tests.trainer.toy import loader, net, quiet

STRATEGIES = {"ddp": DDP, "fsdp": FSDP, "hybrid": lambda: FSDP(replicas=2)}


class Data(DataModule):
    """50 samples to train on, shuffled, and 21 for validation; leaves a file each time that it is prepared."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder

    def prepare_data(self) -> None:
        if self.folder is not None:
            Path(self.folder, f"prepared-on-node-{os.environ.get('GROUP_RANK', 0)}-{uuid.uuid4()}").touch()

    def train_dataloader(self) -> Any:
        return loader(50, 8, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(21, 8)


class PreparedOnce(Data):
    prepare_data_per_node = False


def trainer(folder: Path, **options: Any) -> Trainer:
    """Epochs of seven steps, the last with two samples, so with more ranks than samples on four; leaves a checkpoint
    `last`."""
    options = {
        "precision": "64-true",
        "accelerator": "cpu",
        "max_epochs": 2,
        "split_batches": True,
        "seed": 0,
        "log_every_n_steps": 1,
    } | options
    return quiet(
        callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True, save_top_k=0)],
        enable_checkpointing=True,
        default_root_dir=folder,
        **options,
    )


def on_rank(strategy: str, num_nodes: int, devices: int, folder: Path) -> None:
    (folder / "once").mkdir(parents=True, exist_ok=True)
    run, module = trainer(folder, strategy=STRATEGIES[strategy](), num_nodes=num_nodes, devices=devices), net()
    run.fit(module, datamodule=Data(folder))
    facts: dict[str, Any] = {
        name: getattr(run, name)
        for name in ("global_rank", "local_rank", "world_size", "is_global_zero", "global_step")
    }
    facts["metrics"] = {name: float(value) for name, value in run.callback_metrics.items()}
    once = PreparedOnce(folder / "once")
    (facts["validated"],) = run.validate(module, datamodule=once, verbose=False)  # the ranks join again
    facts["refused"] = []
    for wrong in ({"num_nodes": num_nodes + 1}, {"devices": devices + 1}):
        try:
            trainer(folder, **{"strategy": STRATEGIES[strategy](), "num_nodes": num_nodes, "devices": devices} | wrong)
        except ValueError as error:
            facts["refused"].append(str(error))
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        on_rank(name, int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4], name))
