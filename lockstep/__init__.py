"""A trainer for PyTorch: the strategy changes where and how the work runs, never the numbers it produces."""

from typing import TYPE_CHECKING

from lockstep._lazy import exports
from lockstep.callbacks._support.printing import set_up_logging

if TYPE_CHECKING:
    from lockstep.strategies.base import Loss
    from lockstep.strategies.data.combined import CombinedLoader
    from lockstep.strategies.launch.failure import RankFailure
    from lockstep.strategies.optimizers.split import split_parameters
    from lockstep.trainer.checkpoint.store import CheckpointError
    from lockstep.trainer.cli.errors import ConfigError
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.module import Module
    from lockstep.trainer.seeding import seed_everything
    from lockstep.trainer.trainer import Trainer
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "strategies.base": ["Loss"],
            "strategies.data.combined": ["CombinedLoader"],
            "strategies.launch.failure": ["RankFailure"],
            "strategies.optimizers.split": ["split_parameters"],
            "trainer.checkpoint.store": ["CheckpointError"],
            "trainer.cli.errors": ["ConfigError"],
            "trainer.datamodule": ["DataModule"],
            "trainer.module": ["Module"],
            "trainer.seeding": ["seed_everything"],
            "trainer.trainer": ["Trainer"],
            "callbacks": [],
            "strategies": [],
            "trainer": [],
        },
    )

__version__ = "0.1.0"

set_up_logging()

__all__ = [
    "CheckpointError",
    "CombinedLoader",
    "ConfigError",
    "DataModule",
    "Loss",
    "Module",
    "RankFailure",
    "Trainer",
    "__version__",
    "seed_everything",
    "split_parameters",
]
