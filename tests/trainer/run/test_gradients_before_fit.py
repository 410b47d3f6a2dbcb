"""A fit begins without gradients: those of code before it, or of a fit that failed, are in no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep.callbacks import ModelCheckpoint
from tests.trainer.toy import Net, data, distance, equal, loader, quiet, weights


def with_earlier_gradients(has_gradients: bool, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net(optimizer="SGD", lr=0.1)
    if has_gradients:
        x, y = data(8).tensors
        F.cross_entropy(model(x), y).backward()
    quiet(seed=0, split_batches=True, **options).fit(model, loader(16, 4))
    return weights(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"virtual_ranks": 2},
        {"strategy": "dp", "devices": 2},
        pytest.param({"strategy": "ddp", "devices": 2}, marks=pytest.mark.ranks),
    ],
    ids=["single", "accumulated", "virtual ranks", "dp", "ddp"],
)
def test_gradients_of_code_before_fit_are_in_no_step(options: dict[str, Any]) -> None:
    if options.get("strategy") == "dp":
        options = options | {"accelerator": "cpu"}
    assert equal(with_earlier_gradients(True, **options), with_earlier_gradients(False, **options))


class FailsOnce(Net):
    """A file is not there for a moment, in the middle of an accumulation window."""

    fails_in: int | None = None
    calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls == self.fails_in:
            self.fails_in = None
            raise OSError("a file is not there")
        return super().training_step(batch, batch_idx)


def test_a_fit_resumed_in_the_same_process_has_no_gradients_of_the_one_that_failed() -> None:
    found = []
    for fails_in in (None, 6):
        torch.manual_seed(0)
        model = FailsOnce(optimizer="SGD", lr=0.1)
        model.fails_in = fails_in

        def fit(ckpt_path: str | None = None, model: FailsOnce = model, folder: str = f"run{fails_in}") -> None:
            quiet(
                seed=0,
                max_epochs=2,
                accumulate_grad_batches=2,
                split_batches=False,
                enable_checkpointing=True,
                callbacks=[ModelCheckpoint(every_n_train_steps=1)],
                default_root_dir=folder,
            ).fit(model, loader(16, 4), ckpt_path=ckpt_path)

        if fails_in is None:
            fit()
        else:
            with pytest.raises(OSError, match="a file is not there"):
                fit()
            fit("last")
        found.append(weights(model))
    assert distance(found[1], found[0]) == 0
