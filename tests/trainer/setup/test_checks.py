"""What would be ignored, do nothing or give other numbers in silence is used, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import DDP, LocalSGD
from lockstep.strategies.sync.collectives import sum_gradients
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights


def cpu(**options: Any) -> Trainer:
    return quiet(**{"accelerator": "cpu", "devices": 1} | options)


# ---- loaders --------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize("dataset", [data(4), Subset(data(4), [0, 1]), ConcatDataset([data(2), data(2)]), Endless()])
def test_a_dataset_in_the_place_of_a_loader_is_refused(dataset: Dataset[Any]) -> None:
    message = rf"{type(dataset).__name__} is a dataset, which yields samples; pass DataLoader"
    with pytest.raises(TypeError, match=message):
        cpu(devices=2).fit(net(), dataset)
    with pytest.raises(TypeError, match=message):
        cpu().fit(net(), loader(), dataset)
    with pytest.raises(TypeError, match=message):
        cpu().validate(net(), [dataset], verbose=False)

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return dataset

    with pytest.raises(TypeError, match=message):
        cpu().fit(net(), datamodule=Data())


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shapes.append(
            (
                list(batch),
                [len(part[1]) for part in batch["b"]],
                {name: len(part[1]) for name, part in batch["c"].items()},
            )
        )
        parts = [batch["a"], *batch["b"], *batch["c"].values()]
        return torch.stack([F.cross_entropy(self(x), y) for x, y in parts]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("count", float(len(batch[1])), reduce_fx="sum")


def test_loaders_in_nested_dicts_and_lists_give_batches_in_the_same_form() -> None:
    module = Nested()
    loaders = {"a": loader(8, 4), "b": [loader(8, 4), loader(4, 2)], "c": {"d": loader(6, 3)}}
    trainer = cpu()
    trainer.fit(module, loaders, {"x": loader(8, 4), "y": [loader(6, 3), loader(5, 3)]})
    assert module.shapes == [(["a", "b", "c"], [4, 2], {"d": 3})] * 2
    assert [float(trainer.callback_metrics[f"count/dataloader_idx_{i}"]) for i in range(3)] == [8, 6, 5]


def test_a_list_of_batches_in_a_dict_is_a_loader() -> None:
    class Lists(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch["a"][0]), batch["a"][1])

    trainer = cpu()
    trainer.fit(Lists(), {"a": list(loader(16, 4))})
    assert trainer.global_step == 4


class Unvalidated(Net):
    validation_step = None  # type: ignore[assignment]

    def val_dataloader(self) -> Any:
        return None


def test_validation_data_without_a_step_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="Unvalidated has no validation_step, so its validation data is not used"):
        cpu().fit(Unvalidated(), loader(8), loader(8))
    cpu(limit_val_batches=0).fit(Unvalidated(), loader(8), loader(8))


def test_an_interval_of_validation_is_ignored_if_validation_is_off() -> None:
    cpu(val_check_interval=1000).fit(net(), loader(8))
    cpu(val_check_interval=1000, limit_val_batches=0).fit(net(), loader(8), loader(8))
    with pytest.raises(ValueError, match="val_check_interval=1000 is more than the 1 batches"):
        cpu(val_check_interval=1000).fit(net(), loader(8), loader(8))


class Counted(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch[1])), reduce_fx="sum")
        self.log("mean", self(batch[0]).mean())

    test_step = validation_step


@pytest.mark.long
@pytest.mark.ranks
def test_limits_of_evaluation_are_global_where_batches_are_split() -> None:
    found = []
    for devices in (1, 2, 3):
        torch.manual_seed(0)
        trainer = cpu(
            devices=devices,
            split_batches=True,
            limit_val_batches=3,
            limit_test_batches=0.5,
            precision="64-true",
            seed=0,
        )
        module = Counted()
        found.append(trainer.validate(module, loader(30, 4), verbose=False)[0])
        found[-1] |= {
            f"test {name}": value for name, value in trainer.test(module, loader(30, 4), verbose=False)[0].items()
        }
        trainer.fit(module, loader(8), loader(30, 4))
        assert float(trainer.callback_metrics["seen"]) == 12
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[2] == pytest.approx(found[0], rel=1e-12)


@pytest.mark.ranks
def test_ready_batches_share_out_under_a_limit_or_are_refused() -> None:
    batches = list(loader(40, 4))
    options: dict[str, Any] = {"devices": 2, "split_batches": True}
    result = cpu(limit_val_batches=4, **options).validate(Counted(), batches, verbose=False)
    assert result[0]["seen"] == 16
    with pytest.raises(
        ValueError, match=r"limit_val_batches=3 is 3 batches in all with split_batches=True.*multiple of 2"
    ):
        cpu(limit_val_batches=3, **options).validate(Counted(), batches, verbose=False)


# ---- optimizers -----------------------------------------------------------------------------------


class Elsewhere(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer, other = (torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2))
        schedulers: dict[str, Any] = {
            "step": torch.optim.lr_scheduler.StepLR(other, 1),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(other),
            "chain": torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.StepLR(other, 1)]),
        }
        return {"optimizer": optimizer, "lr_scheduler": schedulers[self.kind], "monitor": "train/loss_epoch"}


@pytest.mark.parametrize("kind", ["step", "plateau", "chain"])
def test_a_scheduler_of_an_optimizer_that_was_not_returned_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="drives a SGD that Elsewhere.configure_optimizers did not return"):
        cpu().fit(Elsewhere(kind), loader())


class HeldApart(Net):
    """Holds an optimizer besides, of a tensor that is not a parameter, or of one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.rate = torch.nn.Parameter(torch.zeros(())) if where == "parameter" else torch.zeros((), requires_grad=True)
        optimizer = torch.optim.SGD([self.rate], lr=0.1)
        self.own: Any = {"list": [optimizer], "dict": {"rate": optimizer}}.get(where, optimizer)


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
def test_an_optimizer_of_other_tensors_is_refused_where_a_batch_has_parts(where: str) -> None:
    cpu().fit(HeldApart(where), loader())
    cpu(strategy="dp", devices=2).fit(HeldApart("parameter"), loader())
    with pytest.raises(ValueError, match=r"the optimizer in own \(SGD\) steps a tensor that is not a parameter of"):
        cpu(strategy="dp", devices=2).fit(HeldApart(where), loader())


@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy", ["ddp", DDP(compress="topk=1.0"), LocalSGD(period=1)], ids=["ddp", "compressed", "local"]
)
def test_so_it_is_on_ranks(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"the optimizer in own \(SGD\) steps a tensor that is not a parameter of"):
        cpu(strategy=strategy, devices=2).fit(HeldApart("attribute"), loader())


class Shuffled(Net):
    """Gives the optimizer its parameters in another order than the model has them, in two groups."""

    def configure_optimizers(self) -> Any:
        backwards = list(self.parameters())[::-1]
        return torch.optim.SGD([{"params": backwards[:1]}, {"params": backwards[1:], "lr": 0.3}], lr=0.1)


def test_clipping_is_that_of_the_loop_by_hand_bit_for_bit() -> None:
    torch.manual_seed(0)
    by_hand, module = Shuffled(width=37), Shuffled(width=37)
    module.load_state_dict(by_hand.state_dict())
    optimizer = by_hand.configure_optimizers()
    for _ in range(3):
        for x, y in loader(50, 8):
            optimizer.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
            optimizer.step()
    cpu(max_epochs=3, gradient_clip_val=0.05).fit(module, loader(50, 8))
    assert all(torch.equal(a, b) for a, b in zip(by_hand.parameters(), module.parameters(), strict=True))


# ---- runs that train nothing, or within a run ---------------------------------------------------------


class Silent(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class Later(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if self.current_epoch else None


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_without_any_loss_fails(devices: int) -> None:
    with pytest.raises(ValueError, match="training_step of Silent returned a loss in none of the run's"):
        cpu(max_epochs=2, devices=devices).fit(Silent(), loader(8, 4))
    cpu(max_epochs=2, devices=devices).fit(Later(), loader(8, 4))


class Nests(Callback):
    def __init__(self, method: str) -> None:
        self.method = method

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        getattr(trainer, self.method)(net(), loader(8))


@pytest.mark.ranks
@pytest.mark.parametrize("method", ["test", "validate", "predict", "fit"])
def test_a_run_within_a_run_is_refused(method: str) -> None:
    with pytest.raises(RuntimeError, match=f"trainer.{method} was called while this Trainer runs fit"):
        cpu(callbacks=[Nests(method)]).fit(net(), loader(8))
    with pytest.raises(RuntimeError, match=f"trainer.{method} was called while this Trainer runs fit"):
        cpu(callbacks=[Nests(method)], devices=2).fit(net(), loader(8))


class Validates(Callback):
    """Runs another Trainer at the end of an epoch."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        quiet(accelerator="cpu").validate(self.choose(module), loader(16), verbose=False)


class Whole(Net):
    """Holds a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part = net()


@pytest.mark.parametrize("choose", [lambda module: module, lambda module: module.part])
def test_another_trainer_does_not_take_a_module_that_is_in_a_run(choose: Any) -> None:
    module, trainer = Whole(), cpu(callbacks=Validates(choose))
    with pytest.raises(RuntimeError, match="validate was called with a module that is in fit of another Trainer"):
        trainer.fit(module, loader(16))
    assert module.trainer is trainer
    holder = Whole()
    holder.part = module
    inner = cpu(callbacks=Validates(lambda _: holder))
    with pytest.raises(RuntimeError, match="with a module whose part is in fit of another Trainer"):
        inner.fit(module, loader(16))


def test_another_trainer_evaluates_a_copy_of_a_module_that_is_in_a_run() -> None:
    plain, watched = net(dropout=0.0), net(dropout=0.0)
    cpu(max_epochs=2, seed=0).fit(plain, loader(16))
    trainer = cpu(max_epochs=2, seed=0, callbacks=Validates(copy.deepcopy))
    trainer.fit(watched, loader(16))
    assert watched.trainer is trainer and equal(weights(plain), weights(watched))


@pytest.mark.ranks
def test_another_trainer_on_a_rank_of_a_run_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="this process is in a torch.distributed group already"):
        cpu(strategy="ddp", devices=2, callbacks=Validates(lambda _: net())).fit(net(), loader(16))


# ---- metrics of several values ------------------------------------------------------------------------


def test_flags_hold_for_every_value_of_a_metric_that_computes_a_dict() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Both(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, values: torch.Tensor) -> None:
            self.total += values.sum()

        def compute(self) -> dict[str, torch.Tensor]:
            return {"one": self.total, "two": 2 * self.total}

    class Dicts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.seen = Both(), Both()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            for name in ("hidden", "seen"):
                getattr(self, name).update(batch[1].double())
            self.log("hidden", self.hidden, logger=False)
            self.log("seen", self.seen, prog_bar=True)

    trainer = cpu()
    trainer.validate(Dicts(), loader(8), verbose=False)
    assert {"hidden/one", "hidden/two", "seen/one", "seen/two"} <= set(trainer.callback_metrics)
    assert set(trainer.logged_metrics) == set(trainer.progress_bar_metrics) == {"seen/one", "seen/two"}


def test_an_optimizer_with_a_graph_through_its_step_is_refused() -> None:
    class Differentiable(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, differentiable=True)

    with pytest.raises(ValueError, match=r"optimizer '0' \(SGD\) has differentiable=True, .*; leave it out"):
        quiet().fit(Differentiable(), loader(8))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_layer_is_trained_on_one_process() -> None:
    model, plain = net(), net()
    model.net[0] = torch.jit.script(model.net[0])
    for module in (model, plain):
        quiet().fit(module, loader(16))
    assert equal(weights(model), weights(plain))


def test_sparse_gradients_of_manual_optimization_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.grad = torch.ones(4, 2).to_sparse(1)
    with pytest.raises(
        ValueError, match=r"shape \[4, 2\] has a sparse gradient, which only strategy='ddp' .* use that"
    ):
        sum_gradients([parameter])
