"""Validation, test and prediction: each sample once, the numbers of one process, no trace in the training."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lockstep.strategies.launch.launcher import launch
from lockstep.trainer.metrics import gathering
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights


class Pair(NamedTuple):
    ids: Any
    found: Any


@dataclasses.dataclass(frozen=True)
class Found:
    ids: Any
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", len(self.ids))  # no field


class Ids(Module):
    """Knows its samples by number: the bits of `seen` are those that were seen exactly once."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.returns = returns

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.measure(batch, "train")
        return (self.weight * batch[0].double()).mean()

    def measure(self, batch: Any, stage: str, **options: Any) -> None:
        (ids,) = batch
        self.log(f"{stage}/seen", (2.0 ** ids.double()).sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log(f"{stage}/mean", ids.double().mean(), on_step=False, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (ids,) = batch
        nested = {"ids": ids, "more": [(ids * 2, "text"), {"n": len(ids), "none": None}]}
        pair = Pair(ids, [Found(ids, 1), "text"])
        return {"tensor": ids, "dict": {"ids": ids, "half": ids / 2}, "nested": nested, "pair": pair}[self.returns]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbered(n: int, batch_size: int, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(n)), batch_size=batch_size, **options)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_each_sample_is_seen_once_on_any_number_of_ranks(devices: int) -> None:
    """5 samples in batches of 2: the ranks' shares are uneven, and on 3 ranks the last batch leaves some without."""
    trainer = quiet(devices=devices)
    trainer.fit(Ids(), numbered(5, 2, shuffle=True), numbered(5, 2))
    for stage in ("train", "val"):
        assert trainer.callback_metrics[f"{stage}/seen"] == 2**5 - 1
        assert trainer.callback_metrics[f"{stage}/mean"] == 2.0
    trainer = quiet(devices=devices)
    for name in ("validate", "test"):
        prefix = {"validate": "val"}.get(name, name)
        (returned,) = getattr(trainer, name)(Ids(), numbered(7, 2), verbose=False)
        assert returned == {f"{prefix}/seen": 2**7 - 1, f"{prefix}/mean": pytest.approx(3.0)}
    for n in (1, 5, 13):
        predicted = trainer.predict(Ids(), numbered(n, 2))
        assert torch.cat(predicted).tolist() == list(range(n))


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_predictions_of_every_kind_come_in_dataset_order(devices: int) -> None:
    trainer = quiet(devices=devices)
    found = trainer.predict(Ids("dict"), numbered(9, 2))
    assert torch.cat([part["ids"] for part in found]).tolist() == list(range(9))
    assert torch.cat([part["half"] for part in found]).tolist() == [i / 2 for i in range(9)]
    found = trainer.predict(Ids("nested"), numbered(9, 2))
    assert torch.cat([part["more"][0][0] for part in found]).tolist() == [2 * i for i in range(9)]
    assert all(
        part["more"][0][1] == "text" and part["more"][1] == {"n": len(part["ids"]), "none": None} for part in found
    )
    assert all(isinstance(part["more"][0], tuple) for part in found)
    found = trainer.predict(Ids("pair"), numbered(9, 2))
    assert all(type(pair) is Pair and type(pair.found[0]) is Found for pair in found)
    assert torch.cat([pair.ids for pair in found]).tolist() == list(range(9))
    assert [(part.count, part.seen) for _, (part, _) in found] == [(1, len(pair.ids)) for pair in found]
    several = trainer.predict(Ids(), [numbered(3, 2), numbered(4, 3)])
    assert [torch.cat(part).tolist() for part in several] == [[0, 1, 2], [0, 1, 2, 3]]


def without_6_and_7(items: list[Any]) -> Any:
    kept = [item for item in items if int(item[0]) not in (6, 7)]
    return default_collate(kept) if kept else None


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["batches", "filter", "filter of whole batches"])
def test_the_order_is_kept_where_a_rank_has_no_sample_of_a_batch(kind: str, devices: int) -> None:
    """Small batches of a batch sampler that are split, and a collate function that drops a rank's share."""
    own = [[0, 1, 2], [3], [4, 5], [8, 9, 10, 11], [12]]
    loaders = {
        "batches": DataLoader(TensorDataset(torch.arange(13)), batch_sampler=own),
        "filter": numbered(13, 4, collate_fn=without_6_and_7),
        "filter of whole batches": numbered(13, 2, collate_fn=without_6_and_7),
    }
    trainer = quiet(devices=devices, accelerator="cpu", split_batches=kind != "filter of whole batches")
    found = torch.cat(trainer.predict(Ids(), loaders[kind])).tolist()
    assert found == [i for i in range(13) if i not in (6, 7)]


def predict_on_this_rank(folder: Path) -> Any:
    gathering.MESSAGE_BYTES = 48  # many messages, and items larger than one
    trainer = quiet(devices=2)
    found = trainer.predict(Ids("nested"), [numbered(21, 2), numbered(1, 2)])
    (folder / f"rank{trainer.global_rank}").write_text(json.dumps(found is None))
    return found


@pytest.mark.ranks
def test_only_rank_0_gets_the_predictions_of_all_ranks_in_small_messages(tmp_path: Path) -> None:
    found = launch(predict_on_this_rank, (tmp_path,), 2)
    assert (tmp_path / "rank0").read_text() == "false" and (tmp_path / "rank1").read_text() == "true"
    assert [torch.cat([part["ids"] for part in loader]).tolist() for loader in found] == [list(range(21)), [0]]
    assert all(part["more"][1] == {"n": len(part["ids"]), "none": None} for part in found[0])


@pytest.mark.ranks
def test_default_predict_step_is_forward_of_the_inputs() -> None:
    model = net()
    predicted = torch.cat(quiet(devices=2).predict(model, loader(20)))
    assert predicted.shape == (20, 3) and not predicted.requires_grad
    assert torch.allclose(predicted, model(data(20).tensors[0]), atol=1e-6)


@pytest.mark.ranks
def test_predictions_that_cannot_travel_are_named() -> None:
    class Objects(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"deep": [object()]}

    assert isinstance(quiet().predict(Objects(), loader(8))[0]["deep"][0], object)
    with pytest.raises(
        TypeError,
        match=(
            "predict_step on several ranks must return tensors, numbers, strings.*predictions.0.deep.0 is "
            "builtins.object"
        ),
    ):
        quiet(devices=2).predict(Objects(), loader(8))


def test_predictions_that_would_be_computed_later_are_refused() -> None:
    class Later(Net):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return {"deep": [map(self, batch[0])]}

    with pytest.raises(TypeError, match="predict_step must return what it has computed, but returned a map"):
        quiet().predict(Later(), loader(8))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_step_that_yields_is_refused(stage: str) -> None:
    class Yields(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("never", 1.0)
            yield 1

        test_step = predict_step = validation_step

    with pytest.raises(TypeError, match="Yields.validation_step yields, so a call of it runs none of its lines"):
        getattr(quiet(), stage)(Yields(), loader(8))


def test_several_loaders_in_a_list_or_dict() -> None:
    for loaders in (
        [numbered(3, 2), numbered(5, 2)],
        {"a": numbered(3, 2), "b": numbered(5, 2)},
        (numbered(3, 2), numbered(5, 2)),
    ):
        trainer = quiet()
        returned = trainer.validate(Ids(), loaders, verbose=False)
        assert [metrics[f"val/seen/dataloader_idx_{i}"] for i, metrics in enumerate(returned)] == [7.0, 31.0]
        assert len(returned[0]) == len(returned[1]) == 2
        assert trainer.num_val_batches == [2, 3]


@pytest.mark.ranks
def test_loaders_of_every_kind() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(5))

    class Indexed:
        def __getitem__(self, i: int) -> Any:
            if i > 2:
                raise IndexError
            return [torch.arange(2 * i, min(2 * i + 2, 5))]

        def __len__(self) -> int:
            return 3

    batches = [[torch.tensor([0, 1])], [torch.tensor([2, 3])], [torch.tensor([4])]]
    kinds: dict[str, Any] = {
        "stream": DataLoader(Stream(), batch_size=2, collate_fn=lambda items: [torch.stack(items)]),
        "batches": batches,
        "indexed": Indexed(),
        "function": lambda: iter(batches),
        "generator": (batch for batch in batches),
    }
    for name, kind in kinds.items():
        assert quiet().validate(Ids(), kind, verbose=False)[0]["val/seen"] == 31, name
        if name != "generator":
            trainer = quiet(max_epochs=2)
            trainer.fit(Ids(), kind, kind)
            assert trainer.callback_metrics["train/seen"] == trainer.callback_metrics["val/seen"] == 31, name
            assert trainer.global_step == 6, name
    for name in ("stream", "batches"):
        trainer = quiet(devices=2)
        trainer.fit(Ids(), kinds[name], kinds[name])
        assert trainer.callback_metrics["train/seen"] == trainer.callback_metrics["val/seen"] == 31, name


@pytest.mark.parametrize(
    ("limit", "batches"),
    [(2, 2), (0.5, 4), (1.0, 8), (100, 8), (None, 8), (0, 0), (0.0, 0)],
    ids=lambda value: f"{type(value).__name__}-{value}",
)
def test_limits_of_evaluation(limit: Any, batches: int) -> None:
    trainer = quiet(limit_val_batches=limit, limit_test_batches=limit)
    returned = trainer.test(Ids(), numbered(16, 2), verbose=False)
    assert returned == [{}] if not batches else returned[0]["test/seen"] == 2.0 ** (2 * batches) - 1
    trainer.fit(Ids(), numbered(4, 2), numbered(16, 2))
    assert trainer.callback_metrics.get("val/seen") == (2.0 ** (2 * batches) - 1 if batches else None)


@pytest.mark.parametrize(("limit", "steps"), [(3, 3), (0.5, 4), (1.0, 8), (99, 8)])
def test_limits_of_training(limit: Any, steps: int) -> None:
    trainer = quiet(limit_train_batches=limit, accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(Ids(), numbered(16, 2))
    assert trainer.num_training_batches == steps and trainer.global_step == 2 * -(-steps // 2)
    assert trainer.callback_metrics["train/seen"] == 2.0 ** (2 * steps) - 1


# ---- beside training -------------------------------------------------------------------------------------


class Noisy(Net):
    """Draws from every random stream while it evaluates, and keeps a metric over training."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.frozen = nn.BatchNorm1d(8)
        from torchmetrics import MeanMetric

        self.count = MeanMetric()
        self.frozen.eval()
        self.log_of_modes: list[tuple[bool, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note()
        self.count(batch[0][:, 0])
        self.log("train/count", self.count, on_step=False, on_epoch=True)
        return super().training_step((self.frozen(batch[0]) + random.random() + np.random.rand(), batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note()
        self.log("val/noise", torch.rand(()).item() + random.random() + np.random.rand())

    def note(self) -> None:
        self.log_of_modes.append((self.training, self.net[2].training, self.frozen.training))


@pytest.mark.parametrize(
    "options",
    [
        {"num_sanity_val_steps": 2},
        {"num_sanity_val_steps": -1},
        {"val_check_interval": 2},
        {"check_val_every_n_epoch": 2},
    ],
    ids=str,
)
def test_validation_leaves_no_trace_in_training(options: dict[str, Any]) -> None:
    def fit(val: Any, **options: Any) -> tuple[Trainer, Noisy]:
        torch.manual_seed(0)
        trainer, model = quiet(max_epochs=2, seed=1, **options), Noisy()
        trainer.fit(model, loader(32, shuffle=True), val)
        return trainer, model

    reference, straight = fit(None)
    trainer, model = fit(loader(16), **options)
    assert equal(weights(model), weights(straight))
    assert equal(list(model.buffers()), list(straight.buffers()))
    for name, value in reference.callback_metrics.items():
        assert trainer.callback_metrics[name] == value, name
    assert "val/noise" in trainer.callback_metrics
    assert set(model.log_of_modes) == {(True, True, False), (False, False, False)}, (
        "what the user has frozen stays in evaluation mode"
    )
    assert not model.frozen.training and model.net[2].training


def test_sanity_check_shows_nothing() -> None:
    seen = []

    class Sees(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append((trainer.sanity_checking, "val/loss" in trainer.callback_metrics))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            assert not trainer.callback_metrics and not trainer.logged_metrics and not trainer.sanity_checking

    trainer = quiet(
        num_sanity_val_steps=1,
        callbacks=[Sees(), EarlyStopping("val/loss"), ModelCheckpoint(monitor="val/loss")],
        enable_checkpointing=True,
    )
    trainer.fit(Net(), loader(16), loader(32))
    assert seen == [(True, True), (False, True)]
    assert trainer.checkpoint_callback.best_model_score == trainer.callback_metrics["val/loss"]


def test_modes_of_a_module_are_as_they_were() -> None:
    model = net()
    model.net[0].eval()
    quiet().validate(model, loader(8), verbose=False)
    assert [child.training for child in (model, model.net, model.net[0], model.net[3])] == [True, True, False, True]
    model.eval()
    quiet().validate(model, loader(8), verbose=False)
    assert not any(child.training for child in model.modules())
    model.train()
    quiet().fit(model, loader(8))
    assert all(child.training for child in model.modules())


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"val_check_interval": 3}, [3, 6, 11, 14]),  # 8 batches an epoch
        ({"val_check_interval": 0.5}, [4, 8, 12, 16]),
        ({"val_check_interval": 1.0}, [8, 16]),
        ({"val_check_interval": 8}, [8, 16]),
        ({"val_check_interval": 5, "check_val_every_n_epoch": None}, [5, 10, 15]),
        ({"val_check_interval": 12, "check_val_every_n_epoch": None}, [12]),
        ({"check_val_every_n_epoch": 2}, [16]),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, [12, 16]),
        ({"limit_val_batches": 0}, []),
        ({}, [8, 16]),
    ],
    ids=str,
)
def test_when_validation_runs(options: dict[str, Any], at: list[int]) -> None:
    steps = []

    class Notes(Net):
        def on_validation_start(self) -> None:
            steps.append(self.global_step)

    quiet(max_epochs=2, **options).fit(Notes(), loader(32, 4), loader(4))
    assert steps == at


def test_a_run_that_is_stopped_before_its_first_step_validates() -> None:
    class Stopped(Net):
        def on_train_epoch_start(self) -> None:
            self.trainer.should_stop = True

    trainer = quiet(max_epochs=2)
    trainer.fit(Stopped(), loader(8), loader(8))
    assert trainer.global_step == 0 and "val/loss" in trainer.callback_metrics


def test_a_run_that_ends_within_an_epoch_ends_with_a_validation() -> None:
    trainer = quiet(max_epochs=None, max_steps=3)
    trainer.fit(Net(), loader(40, 4), loader(8))
    assert "val/loss" in trainer.callback_metrics and "train/loss_epoch" in trainer.callback_metrics
    assert (trainer.global_step, trainer.current_epoch) == (3, 0)


def test_overfit_batches_trains_and_validates_on_the_same() -> None:
    trainer = quiet(overfit_batches=2, max_epochs=3)
    trainer.fit(Ids(), numbered(16, 2, shuffle=True), numbered(50, 2))
    assert trainer.callback_metrics["train/seen"] == trainer.callback_metrics["val/seen"] == 2**4 - 1
    assert trainer.num_training_batches == 2 and trainer.num_val_batches == [2]
    trainer = quiet(overfit_batches=0.5)
    trainer.fit(Ids(), numbered(16, 2))
    assert trainer.callback_metrics["train/seen"] == trainer.callback_metrics["val/seen"] == 2**8 - 1


@pytest.mark.parametrize("batches", [True, 3])
def test_fast_dev_run_touches_everything_and_writes_nothing(batches: Any, tmp_path: Path) -> None:
    class Everything(Net):
        def on_train_start(self) -> None:
            self.logger.experiment.add_scalar("x", 1.0, 0)  # as user code does without asking
            self.logger.log_metrics({"x": 1.0})
            assert self.trainer.log_dir is None

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    trainer = Trainer(
        fast_dev_run=batches,
        max_epochs=7,
        max_steps=100,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(monitor="val/loss"), EarlyStopping("val/loss"), LearningRateMonitor()],
    )
    trainer.fit(Everything(), loader(64), loader(64))
    n = int(batches)
    assert (trainer.global_step, trainer.current_epoch, trainer.num_val_batches) == (n, 1, [n])
    assert "val/loss" in trainer.callback_metrics
    trainer.test(Everything(), loader(64), verbose=False)
    assert len(trainer.predict(Everything(), loader(64))) == n
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_max_time_ends_a_run_of_any_length() -> None:
    trainer = quiet(max_epochs=None, max_time={"seconds": 0.3}, devices=2)
    trainer.fit(Net(), loader(16), loader(8))
    assert trainer.global_step > 0 and "val/loss" in trainer.callback_metrics
    trainer = quiet(max_epochs=3, max_time="00:01:00:00")
    trainer.fit(Net(), loader(16))
    assert trainer.current_epoch == 3


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_min_epochs_hold_an_early_stop_back(devices: int) -> None:
    class Stuck(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/stuck", 1.0)

    trainer = quiet(devices=devices, min_epochs=4, max_epochs=10, callbacks=EarlyStopping("val/stuck", patience=1))
    trainer.fit(Stuck(), loader(16), loader(8))
    assert trainer.current_epoch == 4 and trainer.should_stop
    trainer = quiet(devices=devices, max_epochs=10, callbacks=EarlyStopping("val/stuck", patience=1))
    trainer.fit(Stuck(), loader(16), loader(8))
    assert trainer.current_epoch == 2


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_should_stop_on_any_rank_ends_training_on_all(devices: int) -> None:
    class Stops(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3 and self.global_rank == devices - 1:
                self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    trainer = quiet(devices=devices, max_epochs=5)
    trainer.fit(Stops(), loader(40, 2), loader(8))
    assert trainer.global_step == 4 and trainer.current_epoch == 0


# ---- weights from a checkpoint, returns -----------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_evaluation_of_a_checkpoint(tmp_path: Path, devices: int) -> None:
    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.validation_step(batch, batch_idx)

    model = Tested()
    trainer = quiet(
        max_epochs=2, callbacks=ModelCheckpoint(dirpath=tmp_path / "kept"), enable_checkpointing=True, devices=devices
    )
    trainer.fit(model, loader(32), loader(16))
    path = trainer.checkpoint_callback.best_model_path
    (expected,) = quiet().validate(model, loader(16), verbose=False)
    for fresh in (trainer, quiet(devices=devices)):
        other = Tested(lr=0.5)
        assert fresh.validate(other, loader(16), ckpt_path=path, verbose=False) == [pytest.approx(expected, rel=1e-6)]
        assert equal(weights(other), weights(model)), "the module holds what was evaluated"
    assert trainer.test(Tested(), loader(16), ckpt_path="best", verbose=False) == [pytest.approx(expected, rel=1e-6)]
    assert torch.allclose(
        torch.cat(trainer.predict(Tested(), loader(16), ckpt_path=path)), model(data(16).tensors[0]), atol=1e-6
    )


def test_the_best_checkpoint_is_that_of_the_callbacks_before(tmp_path: Path) -> None:
    class Configured(Net):
        test_step = Net.validation_step

        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(tmp_path, "{epoch}", monitor="val/acc", mode="min")]

    trainer, model = quiet(max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path), Configured()
    trainer.fit(model, loader(16), loader(16))
    best = Configured.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    expected = quiet().test(best, loader(16), verbose=False)
    assert trainer.test(model, loader(16), ckpt_path="best", verbose=False) == expected
    trainer = quiet(max_epochs=3, enable_checkpointing=True, default_root_dir=tmp_path / "other")
    trainer.fit(Configured(), loader(16), loader(16))
    assert len(trainer.test(dataloaders=loader(16), verbose=False)) == 1


def test_returned_metrics_are_printed_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, model = quiet(), net()
    trainer.fit(model, loader(16))
    assert "train/loss" in trainer.callback_metrics
    (returned,) = trainer.validate(model, loader(16))
    assert set(returned) == {"val/loss", "val/acc"} and all(type(value) is float for value in returned.values())
    assert (
        capsys.readouterr().out == f"validate: val/acc={returned['val/acc']:.6g}, val/loss={returned['val/loss']:.6g}\n"
    )
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == returned
    assert trainer.global_step == 2, "an evaluation does not count"
    assert math.isfinite(returned["val/loss"])
    trainer.max_epochs = 2
    trainer.fit(model, loader(16))
    assert "val/loss" not in trainer.callback_metrics, "a fit does not begin with what an evaluation has measured"


def test_evaluation_needs_its_step_and_its_data() -> None:
    with pytest.raises(ValueError, match="test needs Net.test_step; define it"):
        quiet().test(Net(), loader(8))
    with pytest.raises(
        ValueError, match="validate needs data: give dataloaders, or a DataModule or Module with val_dataloader"
    ):
        quiet().validate(Net())
    with pytest.raises(TypeError, match="validate takes a lockstep.Module, but model is Linear"):
        quiet().validate(nn.Linear(1, 1), loader(8))
    with pytest.raises(ValueError, match="a loader for predict is empty"):
        quiet().predict(Net(), DataLoader(TensorDataset(torch.zeros(0, 8))))


class BeginsWhereItIsRead(IterableDataset[Any]):
    """Has a state from `__iter__` on."""

    def __iter__(self) -> Any:
        self.i = 0
        while self.i < 8:
            self.i += 1
            yield torch.ones(8), torch.tensor(self.i % 2)

    def state_dict(self) -> dict[str, int]:
        return {"i": self.i}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.i = state["i"]


def test_data_that_have_a_state_once_they_are_read_are_read_from_the_beginning() -> None:
    run = quiet(max_epochs=2, num_sanity_val_steps=1)
    run.fit(net(), *(DataLoader(BeginsWhereItIsRead(), 4) for _ in range(2)))
    assert run.global_step == 4
