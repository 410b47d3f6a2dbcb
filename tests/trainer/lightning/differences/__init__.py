"""The programs of all rows; importing this fills DIFFERENCES."""

from tests.trainer.lightning.differences import loaders, logged, others, runs, steps
from tests.trainer.lightning.differences.probe import DIFFERENCES, ELSEWHERE, RANKS

__all__ = ["DIFFERENCES", "ELSEWHERE", "RANKS", "loaders", "logged", "others", "runs", "steps"]
