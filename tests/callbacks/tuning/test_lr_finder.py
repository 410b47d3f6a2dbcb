"""LRFinder against a sweep by hand; on several ranks; and that it moves nothing of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.callbacks import BatchSizeFinder, Callback, EarlyStopping, LRFinder
from lockstep.callbacks.tuning.lr_finder import LRSweep
from lockstep.trainer import tuner
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights

pytestmark = pytest.mark.ranks  # a search runs in processes of its own

OPTIONS: dict[str, Any] = {"precision": "64-true", "split_batches": True, "seed": 3}


def finder(**options: Any) -> LRFinder:
    return LRFinder(**{"min_lr": 1e-5, "max_lr": 1.0, "num_training_steps": 40} | options)


def find(callback: LRFinder, **options: Any) -> Net:
    module = net()
    quiet(**OPTIONS | options, callbacks=[callback]).fit(module, loader())
    return module


def test_losses_are_those_of_a_sweep_by_hand() -> None:
    callback = finder(early_stop_threshold=None)
    module = find(callback)
    reference = net().double()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    lrs, losses = [], []
    while len(lrs) < 40:
        for x, y in loader():
            if len(lrs) == 40:
                break
            rate = 1e-5 * 1e5 ** (len(lrs) / 39)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = F.cross_entropy(reference(x.double()), y)
            loss.backward()
            optimizer.step()
            lrs.append(rate)
            losses.append(loss.item())
    assert callback.result is not None
    assert callback.result.lrs == pytest.approx(lrs, rel=1e-15)
    assert callback.result.losses == pytest.approx(losses, rel=1e-10)
    assert module.hparams.lr == callback.result.suggestion()


def test_a_warm_up_from_zero_changes_nothing_of_the_search() -> None:
    class Warm(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    torch.manual_seed(0)
    callback, plain = finder(), finder()
    quiet(**OPTIONS, callbacks=[callback]).fit(Warm(), loader())
    find(plain)
    assert callback.result is not None and plain.result is not None
    assert callback.result.losses == plain.result.losses and callback.result.lrs == plain.result.lrs


def test_the_run_is_the_one_that_had_the_rate_from_the_start() -> None:
    callback = finder()
    module = find(callback)
    assert callback.result is not None
    expected = net(lr=callback.result.suggestion())
    quiet(**OPTIONS).fit(expected, loader())
    assert equal(weights(module), weights(expected))


def test_a_resumed_run_has_the_rate_that_was_found(tmp_path: Path) -> None:
    def run(steps: int, ckpt_path: Path | None = None) -> Net:
        torch.manual_seed(0)
        module, callback = net(optimizer="SGD"), finder()
        trainer = quiet(max_steps=steps, max_epochs=None, callbacks=[callback], seed=0)
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / f"{steps}")
        assert callback.result is not None and module.hparams.lr == callback.result.suggestion()
        return module

    whole = run(6)
    run(3)
    assert equal(weights(run(6, tmp_path / "3")), weights(whole))


def test_random_streams_are_where_they_were() -> None:
    """Dropout draws in the search, and the shuffled order of the run depends on the seed alone."""

    def train(*callbacks: Any) -> Net:
        torch.manual_seed(0)
        module = Net(dropout=0.5)
        quiet(callbacks=list(callbacks)).fit(module, DataLoader(data(), 8, shuffle=True))
        return module

    assert equal(weights(train(finder(update_attr=False))), weights(train()))


class Stream(IterableDataset):
    """Keeps its position: who reads it twice gets nothing."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        samples = data(400)
        while self.position < len(samples):
            self.position += 1
            yield samples[self.position - 1]


def test_a_dataset_that_keeps_its_position_is_where_it_was() -> None:
    found, plain = net(), net()
    options = {"max_steps": 5, "max_epochs": None}
    quiet(**options, callbacks=[finder(update_attr=False)]).fit(found, DataLoader(Stream(), 8))
    quiet(**options).fit(plain, DataLoader(Stream(), 8))
    assert equal(weights(found), weights(plain))


COUNTED = {"steps": 0}


class Noisy(Dataset):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.samples, self.generator = data(24), np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return x + self.generator.normal(), y


class Entangled(Net):
    """A hook holds the module itself, and steps count in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.net.register_forward_hook(lambda layer, args, output: self.track(output))

    def track(self, output: torch.Tensor) -> None:
        self.mean.lerp_(output.detach().mean(0), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        COUNTED["steps"] += 1
        return super().training_step(batch, batch_idx) * COUNTED["steps"] + self.mean.sum()

    batch_size = 4

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Noisy(), self.batch_size)


@pytest.mark.parametrize("callback", [finder(update_attr=False), BatchSizeFinder(init_val=2, max_trials=2)])
def test_a_search_moves_nothing_that_code_shares_with_the_module(callback: Callback) -> None:
    def train(*callbacks: Callback, **attributes: int) -> Entangled:
        torch.manual_seed(0)
        COUNTED["steps"], module = 0, Entangled()
        vars(module).update(attributes)
        quiet(callbacks=list(callbacks)).fit(module)
        return module

    found = train(callback)
    plain = train(batch_size=found.batch_size)
    assert equal(weights(found), weights(plain)) and torch.equal(found.mean, plain.mean)


def test_a_search_has_the_gradient_hooks_of_parameters() -> None:
    torch.manual_seed(0)
    module, callback = net(optimizer="SGD"), finder(update_attr=False)
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient * 0)
    with pytest.warns(RuntimeWarning, match="every gradient of the first step is zero"):
        quiet(callbacks=[callback], overfit_batches=1).fit(module, loader())
    assert callback.result is not None and len({*callback.result.losses}) == 1


def test_a_copy_on_ranks_of_a_launcher_keeps_hooks_and_attributes_of_parameters() -> None:
    class Counts(Net):
        calls = 0

        def count(self, gradient: torch.Tensor) -> None:
            self.calls += 1

    module = Counts()
    weight = module.net[0].weight
    weight.register_hook(module.count)
    weight.no_decay = True
    copied = tuner._copied(module)
    copied.net[0].weight.sum().backward()
    assert (module.calls, copied.calls, copied.net[0].weight.no_decay) == (0, 1, True)


def test_what_cannot_be_copied_is_named() -> None:
    batches = (batch for batch in loader())
    with pytest.raises(TypeError, match=r"^LRFinder .* processes of their own.*loaders\['train'\] is a generator"):
        quiet(callbacks=[finder()]).fit(net(), batches)


def test_a_finder_of_the_module_is_refused() -> None:
    class Finds(Net):
        def configure_callbacks(self) -> Any:
            return [finder()]

    with pytest.raises(TypeError, match="configure_callbacks returned LRFinder"):
        quiet().fit(Finds(), loader())


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "devices"), [pytest.param("ddp", 4, marks=pytest.mark.slow), ("fsdp", 2), ("pipeline", 2)]
)
def test_ranks_find_the_rate_of_one_process(strategy: str, devices: int) -> None:
    one, several = finder(), finder()
    find(one)
    find(several, strategy=strategy, devices=devices)
    assert one.result is not None and several.result is not None
    assert several.result.losses == pytest.approx(one.result.losses, rel=1e-10)
    assert several.result.suggestion() == one.result.suggestion()


def test_a_diverging_sweep_ends_early_and_a_nan_ends_it() -> None:
    class Diverges(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (1 if self.trainer.global_step < 25 else torch.nan)

    callback = finder()
    quiet(callbacks=[callback], limit_train_batches=1).fit(Diverges(), loader())
    assert callback.result is not None and len(callback.result.lrs) == 25


def test_the_steepest_point_is_suggested() -> None:
    losses = [1.0] * 30 + [0.2] * 20 + [0.19] * 10
    sweep = LRSweep([10.0**i for i in range(60)], losses)
    assert sweep.suggestion() in (1e30, 1e31, 1e29)
    assert LRSweep([1.0] * 5, [1.0] * 5).suggestion() is None


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra plot")
    find(finder(plot=tmp_path / "lr.png"))
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("callback", [finder(), BatchSizeFinder(init_val=16)], ids=["rate", "size"])
def test_a_trial_needs_no_value_of_the_validation(callback: Callback) -> None:
    class Plateau(Net):
        batch_size = 16

        def train_dataloader(self) -> DataLoader:
            return DataLoader(data(32), self.batch_size)

        def val_dataloader(self) -> DataLoader:
            return loader()

        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val/loss")]

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}

    trainer = quiet(callbacks=[callback], max_epochs=2)
    trainer.fit(Plateau())
    assert callback.result is not None and trainer.current_epoch == 2  # type: ignore[attr-defined]


def test_a_module_without_a_rate_is_named() -> None:
    class Fixed(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.hparams["lr"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="LRFinder found no attribute or hyperparameter lr or learning_rate on Fixed"):
        quiet(callbacks=[finder()]).fit(Fixed(), loader())
    quiet(callbacks=[searched := finder(update_attr=False)]).fit(Fixed(), loader())
    assert searched.result is not None and searched.result.suggestion()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_lr": 1.0}, "min_lr must be above 0 and below max_lr"),
        ({"num_training_steps": 3}, "num_training_steps must be at least"),
        ({"mode": "square"}, "mode must be 'exponential' or 'linear'"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        finder(**arguments)
