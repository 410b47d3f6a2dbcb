"""What callbacks take of a state: with what a subclass adds, and with numbers of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.callbacks import (
    BatchSizeFinder,
    CommunicationLedger,
    EarlyStopping,
    Guard,
    LRFinder,
    ModelCheckpoint,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStopping("val/loss"),
        ModelCheckpoint(monitor="val/loss"),
        Guard(),
        Timer(),
        CommunicationLedger(),
        ThroughputMonitor(),
        WeightAveraging(),
    ],
)
def test_a_subclass_may_save_more_and_take_it_before_or_after(callback: Any) -> None:
    saved = callback.state_dict()
    more = {**saved, "own": 1}
    callback.load_state_dict(more)
    callback.__class__ = type("Adds", (type(callback),), {"state_dict": lambda self: more})
    callback.load_state_dict(saved)


def test_numbers_that_come_of_arguments_may_be_numpys() -> None:
    """Such as those that a rank returns after the run, which has trained."""
    finder, sizes, monitor = LRFinder(), BatchSizeFinder(), ThroughputMonitor()
    finder.load_state_dict({"lrs": [np.float64(0.1)], "losses": [np.float32(1)]})
    sizes.load_state_dict({"found": np.int64(4)})
    monitor.load_state_dict({"values": {"throughput/mfu": np.float64(0.5)}, "measured_flops_per_sample": np.int64(5)})
    assert finder.result is not None and finder.result.lrs == [0.1]
    assert (sizes.result, monitor.measured_flops_per_sample) == (4, 5)
    for wrong in (np.True_, np.int64(-1), np.float64(1)):
        with pytest.raises(ValueError, match="saved state of BatchSizeFinder has no valid found, but "):
            sizes.load_state_dict({"found": wrong})
