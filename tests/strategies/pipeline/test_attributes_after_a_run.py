"""After a run each layer has in the program what it has on the rank of its stage, as after a run on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.pipeline.classifiers import Base, fit, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Remembering(nn.Linear):
    """Keeps values in attributes of several kinds as it is called first, and divides by one of them."""

    def __init__(self) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.is_built, self.scale, self.shape, self.table = False, 1.0, (), None
        self.by_width, self.unused, self.num_evaluations = dict[int, Tensor](), 3, 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_built:
            self.is_built, self.scale, self.shape = True, 2.0, (16, "wide")
            self.table = torch.full((16,), 0.5, dtype=x.dtype)
            self.by_width[x.shape[-1]] = torch.full((16,), 3.0, dtype=x.dtype)
            self.register_buffer("cache", torch.full((16,), 1.25, dtype=x.dtype), persistent=False)
            del self.unused
        self.num_evaluations += not self.training
        return super().forward(x * self.table * self.by_width[16] * self.cache / self.scale)


class Table(nn.Module):
    """Without weights, so that no stage has it for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.full((16,), 0.5, dtype=x.dtype)
        return x * self.table


class Net(nn.Module):
    def __init__(self, first: nn.Module, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.table = nn.ModuleList([first, *layers]), Table()

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(self.table(x) if i == 3 else x)
        return x


class Keeping(Base):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        first, *_, last = self.net
        between = [nn.Linear(16, 16, dtype=torch.float64) for _ in range(2)]
        self.net: Any = Net(first, *between, Remembering(), last)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    test_step = validation_step


def kept(module: Keeping) -> list[Any]:
    """What the layers of the last stage hold."""
    layer, table = module.net.layers[3], module.net.table.table
    tensors = (layer.table, table, layer.by_width[16], layer._buffers["cache"])
    own = {name: getattr(layer, name, "gone") for name in ("is_built", "scale", "shape", "unused", "num_evaluations")}
    return [own, *(tensor.tolist() for tensor in tensors)]


def runs(strategy: str, devices: int) -> list[Any]:
    """What the layers hold after a fit, a test and a second fit, and the losses."""
    module, data = Keeping(), DataLoader(samples(16), batch_size=8)
    options = {"strategy": strategy, "devices": devices, "seed": 0, "split_batches": True, "precision": "64-true"}
    found: list[Any] = []
    for _ in range(2):
        trainer = quiet(max_epochs=1, **options)
        trainer.fit(module, data, data)
        found.append(kept(module))
        loss = trainer.test(module, data)[0]["loss"]
        found += [kept(module), pytest.approx(loss, abs=1e-12)]
    return found


@pytest.mark.parametrize(("strategy", "devices"), [("pipeline", 2), ("ddp=2,pipeline=2", 4), ("fsdp=2,pipeline=2", 4)])
def test_layers_hold_what_the_rank_of_their_stage_has(strategy: str, devices: int) -> None:
    assert runs(strategy, devices) == runs("single", 1)


class Growing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "act"):
            self.act = nn.Tanh()
        return self.act(super().forward(x))


def test_a_layer_that_is_made_in_a_step_is_refused_by_name() -> None:
    module = Keeping()
    module.net.layers[3] = Growing(16, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"other layers than when the run began \(net\.layers\.3\.act\); add and"):
        fit(module, "pipeline", 2, max_epochs=1)


@dataclass
class Config:
    scale: float = 1.0


class Scaling(nn.Linear):
    def __init__(self, config: Config) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.config, self.codes = config, torch.ones(2, dtype=torch.uint16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.config.scale)


def test_what_no_layer_changes_is_shared_after_a_run() -> None:
    module = Keeping()
    module.config = Config()
    for i in (1, 3):
        module.net.layers[i] = Scaling(module.config)
    fit(module, "pipeline", 2, max_epochs=1)
    assert all(module.net.layers[i].config is module.config for i in (1, 3))


class Building(Scaling):
    """Notes in a record that others share that it was called."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.config, "built"):
            self.config.built = "in float64"  # type: ignore[attr-defined]
        return super().forward(x)


def test_a_record_that_a_layer_of_another_rank_changes_stays_the_same_object() -> None:
    module = Keeping()
    module.config = config = Config()
    module.net.layers[3] = Building(config)
    fit(module, "pipeline", 2, max_epochs=1)
    assert module.net.layers[3].config is module.config is config
    assert config.built == "in float64"  # type: ignore[attr-defined]


class Noting(Base):
    """Has an object that parameters of two stages hold, and changes others of theirs in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.steps = Config(), [0]
        for i in (0, 2, 4):
            self.net[i].weight.config, self.net[i].weight.steps = self.config, self.steps
            self.net[i].weight.large = [0] * 20_000

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.config.scale += 1
        self.steps[0] += 1
        for i in (0, 2, 4):
            weight: Any = self.net[i].weight
            weight.rate, weight.large[7] = i / 10, batch_idx


@pytest.mark.parametrize("strategy", ["pipeline", "fsdp=2,pipeline=2"])
def test_what_parameters_share_is_shared_after_a_run(strategy: str) -> None:
    module = Noting()
    config, steps = module.config, module.steps
    fit(module, strategy, 4 if "fsdp" in strategy else 2, max_epochs=1)
    weights: list[Any] = [module.net[i].weight for i in (0, 2, 4)]
    assert all(w.config is module.config and w.steps is steps is module.steps for w in weights)
    assert module.config is config and (config.scale, steps) == (4.0, [3])
    assert [(w.rate, w.large[7]) for w in weights] == [(i / 10, 2) for i in (0, 2, 4)]
