"""BatchSizeFinder: the largest batch that fits into memory."""

from __future__ import annotations

from typing import Any

from lockstep.callbacks._support.monitored_metric import check_state, is_count_or_none
from lockstep.callbacks.base import Callback


class BatchSizeFinder(Callback):
    """Before `fit`, train copies of the module with larger and larger batches, and set the largest that fits.

    Each trial is a run of its own under the same strategy, of a few steps, so nothing of the run that follows is
    moved. A batch does not fit if any rank runs out of memory. The size found replaces `module.batch_size`, the
    hyperparameter of that name, or the DataModule's, which `train_dataloader` must use. It is the batch of each rank,
    or the global batch with `split_batches`; scale the learning rate with it (`LRScaling`). A run that is resumed
    (`ckpt_path`) is not searched, but has the size that was found for it.

    Args:
        mode: "power" doubles until a trial fails; "binsearch" then searches between the last two.
        steps_per_trial: Optimizer steps of a trial; the second allocates optimizer state beside activations.
        init_val: Batch size of the first trial.
        max_trials: Trials at most.
        batch_arg_name: Name of the attribute or hyperparameter.
        margin: Share of the size found that is given up at the end, as memory fragments over a run: 0.05 is 5 %.

    Under torchrun, Slurm or MPI with several ranks it is refused, as a rank that runs out of memory ends the job.
    """

    result: int | None = None
    """What the last search found."""

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.0,
    ) -> None:
        if mode not in ("power", "binsearch"):
            raise ValueError(f"mode must be 'power' or 'binsearch', got {mode!r}")
        for name, value in (("steps_per_trial", steps_per_trial), ("init_val", init_val), ("max_trials", max_trials)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0 <= margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, got {margin}")
        self.mode, self.steps_per_trial, self.init_val = mode, steps_per_trial, init_val
        self.max_trials, self.batch_arg_name, self.margin = max_trials, batch_arg_name, margin

    @property
    def state_key(self) -> str:
        of_other = "" if self.batch_arg_name == "batch_size" else f"[{self.batch_arg_name}]"
        return super().state_key + of_other

    def state_dict(self) -> dict[str, Any]:
        return {} if self.result is None else {"found": self.result}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {"found": None} | state_dict
        check_state("BatchSizeFinder", state_dict, {"found": is_count_or_none})
        self.result = state_dict["found"]
