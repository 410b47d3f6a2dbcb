"""A trainer for PyTorch: the strategy changes where and how the work runs, never the numbers it produces."""

import gc

__version__ = "0.1.0"

# An import makes hundreds of thousands of objects that stay. The collector, which runs by their number, would scan all
# of them several times and find next to nothing.
_collects = gc.isenabled()
gc.disable()
try:
    from lockstep.callbacks._support.printing import set_up_logging
    from lockstep.strategies.base import Loss
    from lockstep.strategies.data.combined import CombinedLoader
    from lockstep.strategies.launch.failure import RankFailure
    from lockstep.trainer.checkpoint.store import CheckpointError
    from lockstep.trainer.cli.config import ConfigError
    from lockstep.trainer.datamodule import DataModule
    from lockstep.trainer.module import Module
    from lockstep.trainer.seeding import seed_everything
    from lockstep.trainer.trainer import Trainer
finally:
    if _collects:
        gc.enable()

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
]
