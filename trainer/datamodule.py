"""DataModule: the loaders of a run in one object."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from lockstep.trainer.hparams import HyperParameters

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

    from lockstep.trainer.trainer import Trainer


class DataModule(HyperParameters):
    """Override what you need; a loader is a DataLoader or any iterable of batches, or a list of them for evaluation."""

    trainer: Trainer | None = None
    prepare_data_per_node = True
    """Whether `prepare_data` runs on one rank of each node; False: on one rank of the run, for a shared file system."""

    def prepare_data(self) -> None:
        """Download, unpack: called by one rank on each node (see `prepare_data_per_node`), the others wait.

        Set no state here.
        """

    def setup(self, stage: str) -> None:
        """Build datasets; every rank calls it. `stage` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Undo `setup`; every rank calls it."""

    def train_dataloader(self) -> Any:
        return None

    def val_dataloader(self) -> Any:
        return None

    def test_dataloader(self) -> Any:
        return None

    def predict_dataloader(self) -> Any:
        return None

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device. The three methods of a transfer go before a Module's."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch; the default is the strategy's `to_device`."""
        assert self.trainer is not None
        return self.trainer.strategy.to_device(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step, such as one augmented on the device."""
        return batch

    def on_exception(self, exception: BaseException) -> None:
        """A run is leaving with `exception`; called on the ranks that raise it."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart: tensors and JSON data; rank 0's is saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path | BinaryIO,
        map_location: Any = None,
        weights_only: bool | None = None,
        **overrides: Any,
    ) -> Self:
        """Build the DataModule from the hyperparameters in a checkpoint of a run with it, and give it the state that it
        had there; a checkpoint of weights alone has no state.

        Arguments as those of `Module.load_from_checkpoint`; `map_location` changes nothing. Raises CheckpointError and
        TypeError as that.
        """
        from lockstep.trainer.loading import load_datamodule  # here, as loading.py builds on this file

        return load_datamodule(cls, checkpoint_path, overrides, trusts=weights_only is False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}
