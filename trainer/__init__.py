"""Lockstep's Trainer: the loop, the user's Module and DataModule, checkpoints, configuration."""

from strategies.imports import uncollected

with uncollected():
    from strategies.base import Loss
    from strategies.combined import CombinedLoader
    from strategies.processes import RankFailure
    from trainer.checkpoint import CheckpointError
    from trainer.config import ConfigError
    from trainer.datamodule import DataModule
    from trainer.module import Module
    from trainer.seeding import seed_everything
    from trainer.trainer import Trainer

__all__ = [
    "CheckpointError",
    "CombinedLoader",
    "ConfigError",
    "DataModule",
    "Loss",
    "Module",
    "RankFailure",
    "Trainer",
    "seed_everything",
]
