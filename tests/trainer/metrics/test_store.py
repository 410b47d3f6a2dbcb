"""What `self.log` shows: names, exact means, who sees them, what it costs, and what goes wrong."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics.classification import BinaryAccuracy

from lockstep import DataModule, Module, Trainer
from lockstep.callbacks import Callback, CSVLogger, EarlyStopping, TensorBoardLogger
from lockstep.callbacks.base import Logger
from lockstep.strategies.base import Topology
from lockstep.trainer.metrics.store import MetricStore
from tests.trainer.toy import Net, data, equal, loader, net, quiet, weights


class Recorder(Logger):
    """Keeps what a logger is given."""

    name = version = save_dir = None

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.other: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, metrics))

    def log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        self.other.append(("hparams", params))

    def log_text(self, key: str, text: str, step: int | None = None) -> None:
        self.other.append(("text", key, text))

    def log_graph(self, module: Any, example_input: Any) -> None:
        self.other.append(("graph", type(module).__name__, example_input.shape))

    def finalize(self, status: str) -> None:
        self.other.append(("finalize", status))

    def values(self, name: str) -> list[tuple[int, float]]:
        return [(step, row[name]) for step, row in self.rows if name in row]

    def state_dict(self) -> dict[str, Any]:  # brings rank 0's rows home
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


def shown(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


class Value(Net):
    """Logs the first feature of its samples, so that every mean is known."""

    def first(self, batch: Any) -> torch.Tensor:
        return batch[0][:, 0].mean()


def first_feature(n: int) -> torch.Tensor:
    return data(n).tensors[0][:, 0].double()


class Accuracies(Value):
    """Logs the share of right answers by a metric of its own each epoch, or by two in turn."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.num, self.seen = num, 0.0
        self.metrics = nn.ModuleList([BinaryAccuracy() for _ in range(num)])

    def on_train_epoch_start(self) -> None:
        self.metrics[0] = BinaryAccuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metric, right = self.metrics[batch_idx % self.num], (batch[0][:, 0] > 0).long()
        metric(torch.ones_like(right) * (self.current_epoch % 2), right)
        self.log("acc", metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_a_metric_in_the_place_of_another_is_the_one_that_is_shown(devices: int) -> None:
    recorder = Recorder()
    quiet(logger=recorder, max_epochs=3, devices=devices, accelerator="cpu").fit(Accuracies(1), loader(16, 4))
    share = float((first_feature(16) > 0).double().mean())
    assert [value for _, value in recorder.values("acc")] == pytest.approx([1 - share, share, 1 - share], abs=1e-6)


def test_two_metrics_under_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"metrics.0 and metrics.1, are logged as 'acc'; give each a name"):
        quiet(max_epochs=1).fit(Accuracies(2), loader(16, 4))


def test_names_and_flags() -> None:
    class Flags(Value):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = self.first(batch)
            self.log("default", x)
            self.log("step", x, on_step=True, on_epoch=False)
            self.log("whole", x, on_step=False, on_epoch=True)
            self.log("both", x, on_step=True, on_epoch=True, prog_bar=True)
            self.log("bar", x, prog_bar=True, logger=False)
            self.log("weighted", x, on_epoch=True, on_step=False, batch_size=1)
            self.log_dict({"d/a": x, "d/b": 2 * x}, on_epoch=True, on_step=False, sync_dist=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.first(batch))
            self.log("val_both", self.first(batch), on_step=True, on_epoch=True)

    recorder = Recorder()
    trainer = quiet(logger=recorder, log_every_n_steps=2)
    trainer.fit(Flags(), loader(20, 4), loader(6, 4))
    x, means = first_feature(20), first_feature(20).reshape(5, 4).mean(1)
    everything = {
        "default",
        "step",
        "whole",
        "both",
        "both_step",
        "both_epoch",
        "bar",
        "weighted",
        "d/a",
        "d/b",
        "val",
        "val_both",
        "val_both_epoch",
    }
    everything |= {"train/loss", "train/loss_step", "train/loss_epoch"}
    assert set(trainer.callback_metrics) == everything
    assert set(trainer.progress_bar_metrics) == {"both_step", "both_epoch", "bar"}
    assert set(trainer.logged_metrics) == everything - {"both", "val_both", "train/loss", "bar"}
    assert all(value.shape == () and value.device.type == "cpu" for value in trainer.callback_metrics.values())

    pairs = [(2, means[:2].mean()), (4, means[2:4].mean())]
    for name in ("default", "step", "both_step"):
        assert recorder.values(name)[:2] == [(step, pytest.approx(value.item(), rel=1e-6)) for step, value in pairs], (
            name
        )
    assert recorder.values("default")[2:] == [(5, pytest.approx(means[4].item(), rel=1e-6))], (
        "what is left at the end of the epoch"
    )
    for name in ("whole", "both_epoch", "d/a", "weighted"):
        assert recorder.values(name) == [(5, pytest.approx(x.mean().item(), rel=1e-6))], name
    assert recorder.values("val") == [(5, pytest.approx(first_feature(6).mean().item(), rel=1e-6))]
    assert recorder.values("d/b")[0][1] == pytest.approx(2 * x.mean().item(), rel=1e-6)
    assert not recorder.values("bar")
    assert all(row["epoch"] == 0 for _, row in recorder.rows)
    assert recorder.other[-1] == ("finalize", "success")


class Reduced(Value):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0][:, 0]
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("mean", x.mean(), **options)
        self.log("max", x.max(), reduce_fx="max", **options)
        self.log("min", x.min(), reduce_fx=torch.min, **options)
        self.log("sum", x.sum(), reduce_fx=torch.sum, **options)
        self.log("count", len(x), reduce_fx=sum, **options)
        self.log("weighted", (x * x.abs()).sum() / x.abs().sum(), batch_size=float(x.abs().sum()), **options)
        self.log("number", float(x.mean()), **options)
        self.log("numpy", np.float32(x.mean()), **options)
        self.log("negative", -abs(batch_idx) - 1, reduce_fx="max", **options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/mean", batch[0][:, 0].mean())
        self.log("val/max", batch[0][:, 0].max(), reduce_fx="max")


@pytest.mark.ranks
@pytest.mark.parametrize(("devices", "n", "accumulate"), [(1, 50, 1), (2, 50, 1), (2, 50, 3), (2, 5, 1), (2, 1, 1)])
def test_epoch_values_are_exact_over_all_samples(devices: int, n: int, accumulate: int) -> None:
    """Uneven batches and shards, and a rank without a sample."""
    trainer = quiet(devices=devices, precision="64-true", max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(Reduced(), loader(n, 7, shuffle=True), loader(n, 3))
    x = first_feature(n)
    expected = {"mean": x.mean(), "max": x.max(), "min": x.min(), "sum": x.sum(), "count": n, "number": x.mean()}
    expected |= {
        "weighted": (x * x.abs()).sum() / x.abs().sum(),
        "val/mean": x.mean(),
        "val/max": x.max(),
        "negative": -1,
    }
    for name, value in expected.items():
        assert trainer.callback_metrics[name].item() == pytest.approx(float(value), rel=1e-12), name
    assert trainer.callback_metrics["numpy"].item() == pytest.approx(float(x.mean()), rel=1e-6)


MOMENTS = "on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_backward".split()
MOMENTS += "on_after_backward on_before_optimizer_step on_before_zero_grad on_train_batch_end".split()
MOMENTS += "on_validation_start on_validation_epoch_start on_validation_batch_start".split()
MOMENTS += "on_validation_batch_end on_validation_epoch_end on_train_epoch_end".split()
TOO_LATE = ["on_validation_end", "on_train_end", "on_fit_end"]


def logs(moment: str, who: str) -> Any:
    def hook(self: Any, *args: Any) -> None:
        # As many as there are ranks have logged; 1 on rank 0 and 3 on rank 1.
        self.log(
            f"{who}/{moment}",
            1.0
            + 2 * getattr(self, "global_rank", args[0].global_rank if args and hasattr(args[0], "global_rank") else 0),
        )

    return hook


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_log_in_every_hook_of_module_and_callback(devices: int) -> None:
    module = type("Hooked", (Net,), {moment: logs(moment, "module") for moment in MOMENTS})
    callback = type("HookedToo", (Callback,), {moment: logs(moment, "callback") for moment in MOMENTS})
    trainer = quiet(devices=devices, callbacks=callback(), max_epochs=2)
    trainer.fit(module(), loader(8 * devices, 4), loader(8 * devices, 4))
    mean = (devices - 1) + 1.0
    for moment in MOMENTS:
        assert trainer.callback_metrics[f"module/{moment}"] == mean, moment
        assert trainer.callback_metrics[f"callback/{moment}"] == mean, moment


@pytest.mark.parametrize("moment", TOO_LATE)
def test_what_nobody_would_see_is_refused(moment: str) -> None:
    with pytest.raises(RuntimeError, match=f"self.log\\('module/{moment}'\\) came after the metrics were reduced"):
        quiet().fit(type("Late", (Net,), {moment: logs(moment, "module")})(), loader(8), loader(8))
    model = Net()
    quiet().fit(model, loader(8))
    with pytest.raises(RuntimeError, match="self.log\\('x'\\) came after"):
        model.log("x", 1.0)
    with pytest.raises(TypeError, match="self.log_dict takes a dict of values by name, but got list"):
        model.log_dict([("x", 1.0)])  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_logged_after_the_last_batch_weighs_the_samples_of_the_epoch(devices: int) -> None:
    """7 samples on 2 ranks, in batches of 2: rank 0 sees 4, rank 1 sees 3; the last batches hold 2 and 1."""

    class After(Net):
        def on_train_epoch_end(self) -> None:
            self.log("rank", float(self.global_rank))

    trainer = quiet(devices=devices)
    trainer.fit(After(), loader(7, 2))
    assert trainer.callback_metrics["rank"] == (devices - 1) * 3 / 7


def test_callbacks_see_what_the_module_logs_at_the_end_of_the_epoch() -> None:
    seen = []

    class Sees(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.callback_metrics["late"].item())
            self.log_dict({"from/callback": 7.0})

    class Logs(Net):
        def on_train_epoch_end(self) -> None:
            self.log("late", self.current_epoch)

    trainer = quiet(max_epochs=2, callbacks=Sees())
    trainer.fit(Logs(), loader(8))
    assert seen == [0.0, 1.0] and trainer.callback_metrics["from/callback"] == 7.0
    with pytest.raises(RuntimeError, match="Sees.log\\('x'\\) was called outside of a run"):
        Sees().log("x", 1.0)


# ---- several loaders, several ranks ------------------------------------------------------------------------


def test_several_loaders_have_values_of_their_own() -> None:
    class Loaders(Value):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("x", self.first(batch))
            self.log("pooled", self.first(batch), add_dataloader_idx=False)
            self.log(f"own/{dataloader_idx}", self.first(batch), add_dataloader_idx=False)

        def on_validation_epoch_end(self) -> None:
            self.log("whole", 1.0)

    trainer = quiet()
    returned = trainer.validate(Loaders(), [loader(10, 4), loader(20, 8)], verbose=False)
    first, second = first_feature(10).mean().item(), first_feature(20).mean().item()
    both = (10 * first + 20 * second) / 30
    common = {"pooled": both, "own/0": first, "own/1": second, "whole": 1.0}
    assert returned == [
        pytest.approx({"x/dataloader_idx_0": first, **common}, rel=1e-6),
        pytest.approx({"x/dataloader_idx_1": second, **common}, rel=1e-6),
    ]


class Zero(Value):
    """Logs on rank 0 only, in both ways that users write."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("zero", float(self.global_rank + 5), rank_zero_only=True)
        if self.global_rank == 0:
            self.log("alone", 3.0, rank_zero_only=True)
        return super().training_step(batch, batch_idx)


def test_a_batch_size_that_is_a_tensor_can_be_saved(tmp_path: Path) -> None:
    class Counts(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("first", batch[0][:, 0].mean(), batch_size=torch.tensor(len(batch[0])), on_epoch=True)
            self.trainer.save_checkpoint(tmp_path / str(batch_idx))

    trainer = quiet()
    trainer.fit(Counts(), loader(8))
    assert float(trainer.callback_metrics["first"]) == pytest.approx(first_feature(8).mean().item())


@pytest.mark.ranks
def test_rank_zero_only() -> None:
    trainer = quiet(devices=2)
    trainer.fit(Zero(), loader(16, 4))
    assert trainer.callback_metrics["zero"] == 5.0 and trainer.callback_metrics["alone"] == 3.0


class Decides(Net):
    """Stops and lowers the rate by values that each rank logs with `rank_zero_only` and that differ."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/alone", loss, on_epoch=True, rank_zero_only=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        up = self.current_epoch if self.global_rank else -self.current_epoch
        self.log("alone", float(up), rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "alone"}}


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_all_ranks_decide_by_what_rank_zero_has_logged(strategy: str) -> None:
    """Also by what a step has logged that a pipeline runs to its end on another rank."""
    trainer = quiet(strategy=strategy, devices=2, max_epochs=9, callbacks=[EarlyStopping("alone", patience=2)])
    trainer.fit(Decides(), loader(16, 4), loader(8, 4))
    assert trainer.current_epoch == (9 if strategy == "ddp" else 3), "rank 0 counts down, the last stage up"
    assert {"alone", "train/alone_step", "train/alone_epoch"} <= set(trainer.callback_metrics)


class Odd(Net):
    """Rank 1 does in step 2 what the others do not; nobody may step then."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = torch.nn.Parameter(torch.ones(()))  # of the size of the collective: gloo pairs the two
        self.before: list[torch.Tensor] = []
        if what == "skips":
            del self.net

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.before = weights(self)
        odd = self.global_step == 2 and self.global_rank == 1
        if self.what == "names":
            self.log("odd" if odd else "usual", 1.0)
            return super().training_step(batch, batch_idx) + self.weight
        if not odd:
            dist.all_reduce(torch.ones(()))
        return self.weight * batch[0].mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_exception(self, exception: BaseException) -> None:
        unchanged = equal(self.before, weights(self))
        Path(f"rank{self.global_rank}").write_text(f"{self.global_step} {unchanged} {exception}")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("devices", "what", "message"),
    [
        (2, "names", "the ranks disagree on their logged metric names: ranks 0 and 1 did different things"),
        (
            3,
            "names",
            "the ranks disagree on their logged metric names: rank 1 did not do what the others did in step 2",
        ),
        (
            3,
            "skips",
            "the ranks disagree on their collective calls so far .*rank 1 did not do what the others did in step 2",
        ),
    ],
)
def test_ranks_that_differ_are_found_before_a_parameter_changes(devices: int, what: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        quiet(devices=devices).fit(Odd(what), loader(40, 2))
    said = [Path(f"rank{rank}").read_text() for rank in range(devices) if Path(f"rank{rank}").exists()]
    assert all(text.startswith("2 True ") for text in said)
    assert any("the ranks disagree" in text for text in said)


@pytest.mark.ranks
def test_ranks_that_log_other_names_in_evaluation_are_named() -> None:
    class OddEvaluation(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("odd" if self.global_rank == 2 else "usual", 1.0)

    with pytest.raises(RuntimeError, match="rank 2 logged other metric names than the rest"):
        quiet(devices=3).validate(OddEvaluation(), loader(12, 2))


# ---- wrong values, costs, loggers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ("text", {}, "self.log\\('x'\\) takes a number, .* but got str"),
        (None, {}, "but got NoneType"),
        ([1.0], {}, "but got list"),
        (np.zeros(3), {}, "but got ndarray"),
        (torch.zeros(2, 3), {}, "got a tensor of shape \\[2, 3\\]"),
        (
            1.0,
            {"reduce_fx": "median"},
            "reduce_fx of self.log\\('x'\\) must be 'mean', 'sum', 'max' or 'min', but reduce_fx='median'",
        ),
        (1j, {}, "takes a real number, but got a complex one; log its abs"),
        (torch.tensor(1j), {}, "takes a real number, but got a complex one; log its abs"),
        (10**400, {}, "a number that is too large for a float; log its logarithm"),
        *((1.0, {"batch_size": size}, "batch_size of self.log\\('x'\\) must be") for size in ("a", -1, float("nan"))),
        (1.0, {"prog_barr": True}, "unexpected keyword argument 'prog_barr'"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_wrong_values(value: Any, options: dict[str, Any], message: str, later: bool) -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0 and later and not options:
                self.log("x", 1.0)
            else:
                self.log("x", value, **options)
            return super().training_step(batch, batch_idx)

    with pytest.raises((TypeError, ValueError), match=message):
        quiet().fit(Wrong(), loader(16))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, {"reduce_fx": "sum"}, "reduce_fx='sum', but reduce_fx='mean' before"),
        ({}, {"on_step": True}, "on_step=True, but on_step=False before"),
        ({}, {"prog_bar": True}, "prog_bar=True, but prog_bar=False before"),
    ],
)
def test_a_name_that_is_logged_with_other_flags_is_refused(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    store = MetricStore()
    store.log("n", 1.0, **first)
    store.log("n", 1.0, **({"reduce_fx": torch.mean} | first))
    with pytest.raises(ValueError, match=message):
        store.log("n", 2.0, **second)


@pytest.mark.parametrize("metric_first", [True, False])
def test_a_name_for_numbers_and_a_metric_is_refused(metric_first: bool) -> None:
    class Mixed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric.update(1.0)
            self.log("mean", self.metric if metric_first == (batch_idx == 0) else torch.tensor(1.0))
            return super().training_step(batch, batch_idx)

    torchmetrics = pytest.importorskip("torchmetrics")
    with pytest.raises(ValueError, match=r"self.log\('mean'\) was given both numbers and a torchmetrics Metric"):
        quiet().fit(Mixed(), loader(16))


def test_a_number_in_a_tensor_of_one_element_is_taken() -> None:
    class Ones(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("a", torch.full((1, 1), 2.0))
            self.log("b", torch.tensor(True))
            self.log("c", True)
            self.log("d", torch.tensor(3))

    assert quiet().validate(Ones(), loader(8), verbose=False) == [{"a": 2.0, "b": 1.0, "c": 1.0, "d": 3.0}]


@pytest.mark.ranks
def test_logging_neither_grows_nor_reads_the_value() -> None:
    store, value = MetricStore(Net()), torch.tensor(1.5)
    store.in_batch = True

    def log(times: int) -> None:
        for _ in range(times):
            store.log("mean", value)
            store.log("max", value, reduce_fx="max")
            store.log("number", 2.0)

    log(1000)
    gc.collect()
    tracemalloc.start()
    log(100)
    before, _ = tracemalloc.get_traced_memory()
    log(10_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2_000, "bytes"

    assert store.entries["mean"].number == 1.5 * 11_100

    there = torch.ones((), device="meta", requires_grad=True) * 2  # a device that nobody can read from
    for reduction in ("mean", "sum", "max", "min"):
        for _ in range(3):
            store.log(f"unread/{reduction}", there, reduce_fx=reduction)
    totals = [entry.total for name, entry in store.entries.items() if name.startswith("unread")]
    assert len(totals) == 4
    assert all(
        isinstance(total, torch.Tensor) and total.is_meta and total.shape == () and not total.requires_grad
        for total in totals
    )


class Broken(Recorder):
    """A disk that is full from the third write on, or from the start."""

    def __init__(self, method: str, after: int = 0) -> None:
        super().__init__()
        self.method, self.left = method, after

    def fail(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise OSError(28, "No space left on device")

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.fail("setup")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_end")

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        self.fail("log_metrics")

    def log_hyperparams(self, params: dict[str, Any], metrics: dict[str, float] | None = None) -> None:
        self.fail("log_hyperparams")

    def finalize(self, status: str) -> None:
        self.fail("finalize")


@pytest.mark.parametrize("method", ["setup", "on_train_batch_end", "log_metrics", "log_hyperparams", "finalize"])
def test_a_broken_logger_costs_one_warning(method: str) -> None:
    broken, works, model = Broken(method, after=method == "log_metrics"), Recorder(), net()
    trainer = quiet(logger=[broken, works], log_every_n_steps=1, max_epochs=2)
    with pytest.warns(
        RuntimeWarning, match="Broken stops logging, training continues: .*No space left on device"
    ) as caught:
        trainer.fit(model, loader(32))
    assert len(caught) == 1
    assert (len(works.values("train/loss_step")) == 8 and len(broken.rows) < len(works.rows)) or method == "finalize"
    reference = net()
    quiet(max_epochs=2).fit(reference, loader(32))
    assert equal(weights(model), weights(reference))


# ---- what a run says of itself ------------------------------------------------------------------------------


class Described(Net):
    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__(width, lr=lr)
        self.example_input_array = torch.zeros(2, 8)


class Sized(DataModule):
    def __init__(self, size: int = 8, lr: float = 0.5, logged: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters(logger=logged, ignore="logged")

    def train_dataloader(self) -> Any:
        return loader(self.hparams.size)


def test_loggers_get_hyperparameters_config_and_graph() -> None:
    recorder = Recorder()
    trainer = quiet(logger=recorder)
    trainer._run.config = "trainer:\n  max_epochs: 1\n"
    trainer.fit(Described(5), Sized())
    assert recorder.other[:3] == [
        ("hparams", {"width": 5, "dropout": 0.0, "lr": 0.01, "optimizer": "AdamW", "size": 8, "data.lr": 0.5}),
        ("text", "config", "```yaml\ntrainer:\n  max_epochs: 1\n```"),
        ("graph", "Described", (2, 8)),
    ]
    recorder = Recorder()
    quiet(logger=recorder).fit(Net(), Sized(logged=False))
    assert recorder.other == [
        ("hparams", {"width": 16, "dropout": 0.0, "lr": 0.01, "optimizer": "AdamW"}),
        ("finalize", "success"),
    ]

    class Silent(Module):
        training_step, configure_optimizers, forward = Net.training_step, Net.configure_optimizers, Net.forward

        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters({"lr": lr, "optimizer": "SGD"}, logger=False)
            self.net = torch.nn.Linear(8, 3)

    recorder = Recorder()
    quiet(logger=recorder).fit(Silent(), loader(8))
    assert recorder.other == [("finalize", "success")]


def events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(folder)
    accumulator.Reload()
    return accumulator


@pytest.mark.ranks
def test_tensorboard_has_the_run_with_two_ranks() -> None:
    """Scalars at their steps, hyperparameters, config and graph, written by rank 0 alone; a second logger beside it."""
    trainer = Trainer(
        max_epochs=2,
        devices=2,
        log_every_n_steps=1,
        logger=[TensorBoardLogger("logs", name="here", log_graph=True), CSVLogger()],
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer._run.config = "seed: 3\n"
    trainer.fit(Described(), loader(16, 4), loader(8))
    assert trainer.log_dir == "logs/here/version_0" == trainer.logger.log_dir and os.path.exists(
        "runs/Described/version_0/metrics.csv"
    )
    written = events(trainer.log_dir)
    tags = written.Tags()
    assert {"train/loss_step", "train/loss_epoch", "val/loss", "val/acc", "epoch"} <= set(tags["scalars"]) and tags[
        "graph"
    ]
    assert [event.step for event in written.Scalars("train/loss_step")] == [1, 2, 3, 4]
    assert [event.step for event in written.Scalars("val/loss")] == [2, 4]
    assert written.Scalars("val/loss")[-1].value == pytest.approx(trainer.callback_metrics["val/loss"].item())
    assert {"config/text_summary", "hparams/text_summary"} <= set(tags["tensors"])
    assert "_hparams_/session_start_info" in written.summary_metadata
    assert "width: 16" in Path(trainer.log_dir, "hparams.yaml").read_text()
    assert len(list(Path("logs").rglob("events*"))) == 1


@pytest.mark.ranks
def test_values_stay_on_the_trainer_after_a_run_of_two_ranks() -> None:
    recorder = Recorder()
    trainer = quiet(devices=2, logger=recorder, log_every_n_steps=1)
    trainer.fit(Described(), loader(16, 4), loader(8))
    assert set(trainer.logged_metrics) == {"train/loss_step", "train/loss_epoch", "val/loss", "val/acc"}
    assert trainer.callback_metrics["train/loss"] == trainer.callback_metrics["train/loss_epoch"]
    assert [step for step, _ in recorder.values("train/loss_step")] == [1, 2]


@pytest.mark.parametrize(
    ("reduce_fx", "host", "expected"), [("max", 7.0, 7.0), ("min", 0.5, 0.5), ("sum", 7.0, 11.0), ("mean", 5.0, 3.0)]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_numbers_after_values_on_a_device_count_with_them(
    reduce_fx: str, host: Any, expected: float, as_tensor: bool
) -> None:
    found, host = [], torch.tensor(host) if as_tensor else host
    for settles in (False, True):
        store = MetricStore()
        for value in (torch.tensor(1.0).as_subclass(OnDevice), host, torch.tensor(3.0).as_subclass(OnDevice)):
            store.log("value", value, reduce_fx=reduce_fx, on_step=True)
        if settles:
            store.state_dict()
        (reduced,) = store.reduce(SimpleNamespace(topology=Topology()))  # type: ignore[arg-type]
        found.append(reduced.value)
    assert found == [expected, expected]


class Counting:
    """A metric of another package."""

    def update(self, values: torch.Tensor) -> None: ...

    def compute(self) -> float:
        return 1.0

    def reset(self) -> None: ...


class CountingLayer(nn.Module, Counting):
    pass


@pytest.mark.parametrize("make", [Counting, CountingLayer])
@pytest.mark.parametrize("computes", [True, False])
def test_a_metric_that_is_not_of_torchmetrics_is_refused_by_name(make: Any, computes: bool) -> None:
    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.counting = make()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.counting.update(batch[0])
            self.log("count", self.counting.compute() if computes else self.counting)

    if computes:
        assert quiet().validate(Logs(), loader(8), verbose=False) == [{"count": 1.0}]
        return
    message = rf"self.log\('count'\) takes a number, .* but got {make.__name__}; log what its compute\(\) returns, or a"
    with pytest.raises(TypeError, match=message):
        quiet().validate(Logs(), loader(8), verbose=False)


class OnDevice(torch.Tensor):
    """A number of the CPU that says that it is not there."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_exact_sums_of_values_on_a_device_are_read_when_they_are_asked_for(reduce_fx: str) -> None:
    values = torch.randn(2500, generator=torch.Generator().manual_seed(0)).tolist()
    stores = []
    for kind in (torch.Tensor, OnDevice):
        store = MetricStore(exact=True)
        store.in_batch = True
        for i, value in enumerate(values):
            if i == 2000:
                mark = store.mark()
            store.log("value", torch.tensor(value).as_subclass(kind), reduce_fx=reduce_fx, batch_size=i % 3)
        stores.append((store, mark))
    found = [float(store.entries["value"].number) for store, _ in stores]
    assert found[0] == found[1]
    for store, mark in stores:
        store.back_to(mark)
    before = [float(store.entries["value"].number) for store, _ in stores]
    assert before[0] == before[1] and (before != found or reduce_fx in ("min", "max"))
    assert float(stores[0][0].entries["value"].count) == float(stores[1][0].entries["value"].count)


class Norms(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.grad_norm(), on_step=False, on_epoch=True)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_what_hooks_of_a_step_log_is_weighted_by_its_samples(accumulate: int) -> None:
    """The last step has one sample, and micro-batches without any."""
    found = []
    for number in (1, accumulate):
        torch.manual_seed(0)
        run = quiet(max_epochs=1, split_batches=True, accumulate_grad_batches=number, precision="64-true")
        run.fit(Norms(), loader(13, batch_size=4))
        found.append(float(run.callback_metrics["norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
