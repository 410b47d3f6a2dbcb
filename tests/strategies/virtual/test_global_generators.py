"""A generator of random numbers that is a global of the user's file: shares would have it in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.toy import Net, loader, quiet

TORCHS = torch.Generator().manual_seed(3)
NUMPYS = np.random.default_rng(3)


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.as_tensor(NUMPYS.standard_normal(x.shape)).to(x)


class Direct(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return super().training_step((x + torch.randn(x.shape, generator=TORCHS), y), batch_idx)


class ByFunction(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((noise(batch[0]), batch[1]), batch_idx)


@pytest.mark.parametrize(("kind", "name"), [(Direct, "TORCHS"), (ByFunction, "NUMPYS")])
def test_a_global_generator_is_refused_by_name(kind: type[Net], name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"training_step changed .*{name}, which would depend on how many shares"):
        quiet(strategy="single", virtual_ranks=2).fit(kind(), loader(32))
