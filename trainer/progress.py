"""Where a run is: one counter a quantity, each incremented at one place of the loop."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Counters of a fit; saved as they are."""

    global_step: int = 0
    """Optimizer steps completed."""
    current_epoch: int = 0
    """Epochs completed."""
    samples_seen: int = 0
    """Global samples consumed in the running epoch."""
    batches_seen: int = 0
    """Batches of each rank consumed in the running epoch."""
    total_batches: int = 0
    """Batches of each rank consumed in the run."""
    total_samples: int = 0
    """Global samples consumed in the run."""
    validations: int = 0
    """Validations that this epoch's val_check_interval has had (over the run where it counts across epochs)."""
    epoch_begun: bool = False
    """The hooks at the start of the running epoch are done."""
    epoch_validated: bool = False
    """The validation at the end of the running epoch is done."""
    epoch_closed: bool = False
    """The hooks at the end of the running epoch are done."""
    validated_at: int = 0
    """`global_step` of the last validation; 0 for none."""
    ended_at: int = 0
    """`global_step` at which training ended within the running epoch, with what it had measured shown; 0 for none."""
    publishes: bool = False
    """Values are due to be published, as soon as all ranks meet."""

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.current_epoch += 1
        self.samples_seen = self.batches_seen = 0
        self.epoch_begun = self.epoch_validated = self.epoch_closed = self.publishes = False

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        older = {"validated_at": 0, "ended_at": 0, "publishes": False, "epoch_begun": state.get("batches_seen", 0) != 0}
        state = {**older, **state}  # what older checkpoints do not have
        if set(state) != set(asdict(self)):
            raise ValueError(f"progress must hold {sorted(asdict(self))}, but the checkpoint has {sorted(state)}")
        for name, value in state.items():
            if type(value) is not type(getattr(self, name)) or value < 0:
                raise ValueError(f"progress.{name} must be a count or a flag, but the checkpoint has {value!r:.60}")
        for name, value in state.items():
            setattr(self, name, value)
