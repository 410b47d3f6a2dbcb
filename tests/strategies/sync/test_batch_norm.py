"""BatchNorm over all ranks: the numbers of one process, of which no rank's own samples are the measure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module
from lockstep.strategies import DDP
from lockstep.strategies.sync import batch_norm
from tests.trainer.toy import distance, quiet


class Normed(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, **options), nn.ReLU())
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5, **options), nn.Linear(5, 2))
        self.penalty = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_(bool(self.penalty))
        y = self.last(self.first(x))
        loss = (y.mean(1) - batch[1]).square().mean()
        if self.penalty:  # needs the gradient of a gradient, through the statistics
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            loss = loss + self.penalty * gradient.flatten(1).square().sum(1).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", (self.last(self.first(batch[0])).mean(1) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def data(n: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 6, generator=generator) * 3 + 1
    return DataLoader(TensorDataset(x, torch.randn(n, generator=generator)), 8)


def trained(module: Module, samples: int, **options: Any) -> tuple[list[Tensor], float]:
    trainer = quiet(precision="64-true", max_epochs=2, split_batches=True, seed=0, accelerator="cpu", **options)
    trainer.fit(module, data(samples), data(13))
    return [value.double() for value in module.state_dict().values()], float(trainer.callback_metrics["val"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("devices", "samples", "options", "ddp"),
    [
        pytest.param(2, 21, {}, {}, id="uneven"),  # of 5 in the last batch, 3 and 2
        pytest.param(3, 18, {}, {"broadcast_buffers": False}, id="a rank without samples"),  # 2 in the last batch
        pytest.param(3, 18, {"momentum": None}, {"find_unused_parameters": True}, id="cumulative"),
        pytest.param(2, 21, {"affine": False}, {"static_graph": True}, id="without weights"),
        pytest.param(2, 21, {}, {"activation_checkpointing": ["first"]}, id="recomputed"),
    ],
)
def test_the_numbers_are_those_of_one_process(devices: int, samples: int, options: Any, ddp: Any) -> None:
    torch.manual_seed(0)
    module = Normed(**options)
    expected, value = trained(copy.deepcopy(module), samples)
    seen, found = trained(module, samples, strategy=DDP(sync_batchnorm=True, **ddp), devices=devices)
    assert distance(seen, expected) < 1e-12
    assert found == pytest.approx(value, rel=1e-12)
    assert type(module.first[1]) is nn.BatchNorm1d


@pytest.mark.ranks
def test_gradients_of_gradients_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    module = Normed()
    module.penalty = 0.1
    expected, _ = trained(copy.deepcopy(module), 24)
    seen, _ = trained(module, 24, strategy=DDP(sync_batchnorm=True), devices=2)
    assert distance(seen, expected) < 1e-12


def test_a_forward_of_a_users_own_is_refused() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(ValueError, match=r"but 1 has a forward of its own"):
        batch_norm.synchronize(nn.Sequential(nn.Linear(2, 2), Own(2)))
    with pytest.raises(ValueError, match="but norm has track_running_stats=False"):
        batch_norm.synchronize(nn.ModuleDict({"norm": nn.BatchNorm1d(2, track_running_stats=False)}))


def test_a_layer_that_a_failed_run_has_left_is_a_plain_one() -> None:
    layer, plain = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    for _ in range(2):
        assert batch_norm.synchronize(nn.Sequential(layer)) == [layer]
    x = torch.randn(5, 3)
    assert torch.equal(layer(x), plain(x)) and torch.equal(layer.running_var, plain.running_var)
    batch_norm.restore([layer])
    assert type(layer) is nn.BatchNorm1d


class Skipping(Normed):
    """Has a loss on one of two ranks only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if torch.distributed.get_rank() else super().training_step(batch, batch_idx)


@pytest.mark.ranks
def test_a_rank_without_a_loss_is_refused_before_the_others_wait_for_it() -> None:
    with pytest.raises(
        RuntimeError, match=r"training_step returned no loss, but sync_batchnorm=True .*Loss\(loss \* 0"
    ):
        trained(Skipping(), 16, strategy=DDP(sync_batchnorm=True, timeout_s=60), devices=2)


class Filtering(Normed):
    """Gives the layers only the samples with a positive target."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = batch[1] > 0
        y = self.last(self.first(batch[0][chosen]))
        return Loss((y.mean(1) - batch[1][chosen]).square().sum(), int(chosen.sum()))


@pytest.mark.ranks
def test_a_rank_may_give_a_layer_no_rows() -> None:
    targets = torch.tensor([1.0] * 4 + [-1.0] * 4).repeat(2)  # these of the second rank
    loader = DataLoader(TensorDataset(torch.randn(16, 2, 6, generator=torch.Generator().manual_seed(1)), targets), 8)
    torch.manual_seed(0)
    one = Filtering()
    several = copy.deepcopy(one)
    for module, options in ((one, {}), (several, {"strategy": DDP(sync_batchnorm=True), "devices": 2})):
        trainer = quiet(precision="64-true", max_epochs=2, split_batches=True, seed=0, accelerator="cpu", **options)
        trainer.fit(module, loader)
    assert distance([*one.state_dict().values()], [*several.state_dict().values()]) < 1e-12
