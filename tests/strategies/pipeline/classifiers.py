"""A classifier that a pipeline splits in two, and its weights after training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.strategies import Pipeline
from tests.trainer.toy import quiet


def layers() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def samples(n: int = 22) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(n, 8, generator=generator, dtype=torch.float64), torch.randint(0, 4, (n,), generator=generator)
    )


class Base(Module):
    """A classifier that a pipeline cuts in two."""

    def __init__(self) -> None:
        super().__init__()
        self.net = layers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(module: Module, strategy: Any, devices: int, n: int = 22, **options: Any) -> dict[str, Tensor]:
    """Two epochs in double precision, the last batch smaller; the state of the module afterwards."""
    options = {"max_epochs": 2, "seed": 0, "split_batches": True, "precision": "64-true"} | options
    loader, ckpt_path = (
        DataLoader(samples(n), **{"batch_size": 8} | options.pop("loader", {})),
        options.pop("ckpt_path", None),
    )
    quiet(strategy=strategy, devices=devices, **options).fit(module, loader, ckpt_path=ckpt_path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def exact(make: Callable[[], Module], strategies: dict[Any, int], **options: Any) -> None:
    expected = fit(make(), "single", 1, **options)
    for strategy, devices in strategies.items():
        found = fit(make(), strategy() if callable(strategy) else strategy, devices, **options)
        assert difference(found, expected) < 1e-12, strategy


TWO = {"pipeline": 2}
ALL = {"pipeline": 2, "ddp=2,pipeline=2": 4, "fsdp=2,pipeline=2": 4}


def refusals(uses: dict[str, Callable[[nn.Module], Any]]) -> dict[str, list[str]]:
    """The error of each use of the model, by rank."""
    strategy = Pipeline()
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    found = {}
    try:
        model = nn.ModuleDict({"net": layers()})
        strategy.setup_module(model)
        for name, use in uses.items():
            try:
                use(model)
                message = ""
            except RuntimeError as error:
                message = str(error)
            texts = strategy.all_gather(torch.tensor(list(message.encode().ljust(400))[:400]))
            found[name] = [bytes(text.tolist()).decode().strip() for text in texts]
    finally:
        strategy.teardown()
    return found
