"""torchmetrics objects over ranks: what one process would compute."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP, RetrievalNormalizedDCG

from lockstep.callbacks import Callback, ModelCheckpoint
from tests.trainer.metrics.test_store import Recorder, shown
from tests.trainer.toy import Net, data, loader, quiet


class Measured(Net):
    """Metrics with sums, with lists of samples, in collections with shared state, computed with and without forward."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.train_acc = MulticlassAccuracy(3)
        self.group = MetricCollection(
            {"f1": MulticlassF1Score(3), "precision": MulticlassPrecision(3)}, prefix="train/"
        )
        self.auroc = MulticlassAUROC(3, thresholds=None)
        self.total = SumMetric()
        self.at_end = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        self.train_acc(logits, y)
        self.log("train/acc", self.train_acc, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict(self.group, on_step=False, on_epoch=True)
        self.group.update(logits, y)
        self.at_end.update(x[:, 0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("train/at_end", self.at_end)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.auroc.update(self(batch[0]), batch[1])
        self.log("val/auroc", self.auroc)
        self.total(batch[1])
        self.log("val/total", self.total, prog_bar=True)


METRICS = ["train/acc_epoch", "train/f1", "train/precision", "train/at_end", "val/auroc", "val/total", "val/loss"]


@pytest.mark.ranks
@pytest.mark.parametrize("n", [50, pytest.param(5, marks=pytest.mark.slow), 1])
def test_torchmetrics_are_those_of_one_process(n: int) -> None:
    """1 sample on 2 ranks included: a rank that has measured nothing computes with the other."""

    def fit(devices: int) -> dict[str, float]:
        torch.manual_seed(0)
        trainer = quiet(
            devices=devices,
            precision="64-true",
            split_batches=True,
            max_epochs=2,
            logger=(recorder := Recorder()),
            log_every_n_steps=1,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No (positive|negative) samples in targets")
            warnings.filterwarnings("ignore", "Average precision score")
            warnings.filterwarnings("ignore", "Some classes had")
            trainer.fit(Measured(), loader(n, 8), loader(n, 8))
        assert len(recorder.values("train/acc_epoch")) == 2 and len(recorder.values("train/acc_step")) == 2 * -(-n // 8)
        assert "val/total" in trainer.progress_bar_metrics
        return shown(trainer.callback_metrics)

    one, two = fit(1), fit(2)
    for name in METRICS:
        assert two[name] == pytest.approx(one[name], rel=1e-12), name
    x, y = data(n).tensors
    assert one["val/total"] == y.sum() and one["train/at_end"] == pytest.approx(x[:, 0].double().mean().item())


class CountsEverywhere(Net):
    """Metrics that count in the step and in hooks of the batch, which ranks without samples call on padding."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.hooks = SumMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        self.step(float(len(batch[1])))
        self.log("step", self.step, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks.update(float(len(batch[1])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks.update(float(len(batch[1])))

    def on_train_epoch_end(self) -> None:
        self.log("hooks", self.hooks.compute())


@pytest.mark.ranks
@pytest.mark.parametrize(("automatic", "strategy"), [(True, "ddp"), (False, "ddp"), (False, "fsdp")])
def test_padding_does_not_count(automatic: bool, strategy: str) -> None:
    module = CountsEverywhere()
    module.automatic_optimization = automatic
    trainer = quiet(strategy=strategy, devices=2, accelerator="cpu", split_batches=True)
    trainer.fit(module, loader(5, 4))
    assert trainer.callback_metrics["step"] == 5 and trainer.callback_metrics["hooks"] == 10


class Ranked(Net):
    """Regression metrics, one of which merges means and variances, retrieval metrics, which keep every sample, and both
    in a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.regression = MetricCollection(
            [MeanSquaredError(), PearsonCorrCoef(), SpearmanCorrCoef(), R2Score()], prefix="val/"
        )
        self.average_precision, self.gain = RetrievalMAP(), RetrievalNormalizedDCG()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self(x)[:, 0].contiguous()
        self.regression.update(scores, x[:, 0])
        self.log_dict(self.regression)
        queries = (x[:, 1] > 0).long() + 2 * (x[:, 2] > 0).long()
        self.average_precision.update(scores, y > 0, indexes=queries)
        self.gain.update(scores, y, indexes=queries)
        self.log("val/map", self.average_precision)
        self.log("val/ndcg", self.gain)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
@pytest.mark.parametrize(
    ("strategy", "devices", "n"),
    [
        ("ddp", 2, 41),
        ("ddp", 3, 5),
        pytest.param("fsdp", 2, 41, marks=pytest.mark.slow),
        pytest.param("tensor", 2, 41, marks=pytest.mark.slow),
        ("pipeline", 2, 41),
    ],
)
def test_regression_and_retrieval_metrics_are_those_of_one_process(strategy: str, devices: int, n: int) -> None:
    def validate(devices: int, **options: Any) -> dict[str, float]:
        torch.manual_seed(0)
        return quiet(devices=devices, precision="64-true", **options).validate(Ranked(), loader(n, 6), verbose=False)[0]

    one, several = validate(1), validate(devices, strategy=strategy)
    assert several == pytest.approx(one, rel=1e-5), "metrics keep their sums in float32"
    assert len(one) == 6


class Matched(Metric):
    """Keeps tensors and sizes of each sample, as metrics of detection do with boxes and masks; some are empty."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("found", "true", "sizes"):
            self.add_state(name, default=[], dist_reduce_fx=None)

    def update(self, found: list[Tensor], true: list[Tensor]) -> None:
        self.found += found
        self.true += true
        self.sizes += [((len(tensor), 1), bytes(len(tensor))) for tensor in found]

    def compute(self) -> Tensor:
        triples = zip(self.found, self.true, self.sizes, strict=True)
        return torch.stack([f.sum() * t.sum() + s[0][0] * f.sum() + len(s[1]) * t.sum() for f, t, s in triples]).sum()


class Weighted(Metric):
    """Scores come a batch at a time, their weights one by one, and it needs lists to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("weights", [], dist_reduce_fx="cat")

    def update(self, scores: Tensor, weights: Tensor) -> None:
        self.scores += [scores]
        self.weights += [weight[None] for weight in weights]

    def compute(self) -> Tensor:
        weights = torch.cat(self.weights)
        return (torch.cat(self.scores) * weights * torch.arange(len(weights))).sum()


class Pairs(Metric):
    """Rows in a tensor that grows, of which two that follow each other belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", torch.zeros(0, 2), dist_reduce_fx="cat")

    def update(self, rows: Tensor) -> None:
        self.rows = torch.cat([self.rows, rows[:, :2], rows[:1, :2]])  # an odd number in most updates

    def compute(self) -> Tensor:
        even = self.rows[: len(self.rows) // 2 * 2]
        return even.reshape(-1, 2, 2).amax(1).sum()


class Mean(Pairs):
    def compute(self) -> Tensor:
        return super().compute() / len(self.rows)


class Collects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.matched, self.rows, self.numbers, self.weighted = Matched(), CatMetric(), CatMetric(), Weighted()
        self.pairs = Pairs()
        self.both = MetricCollection({"sum": Pairs(), "mean": Mean()})  # which updates the first for both

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.matched.update([row[:n] for row, n in zip(x, y.tolist(), strict=True)], [*x[:, :2]])
        self.log("matched", self.matched)
        self.rows.update(x[:, 0])
        self.numbers.update(float(y[0]))
        self.weighted.update(x[:, 0], x[:, 1])
        self.log("weighted", self.weighted)
        self.pairs(x)  # forward, which joins states by itself
        self.log("pairs", self.pairs)
        self.both.update(x)
        self.log_dict(self.both)

    def on_validation_epoch_end(self) -> None:
        rows, numbers = self.rows.compute(), self.numbers.compute()
        self.log("rows", (rows * torch.arange(len(rows))).sum())
        self.log("numbers", (numbers * torch.arange(len(numbers))).sum())


class Refers(Callback):
    """To a metric of the module, which is gathered once."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric

    @property
    def state_key(self) -> str:
        return f"Refers to a {type(self.metric).__name__}"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices", "batch_size", "n"),
    [("ddp", 2, 2, 15), ("ddp", 3, 1, 16), ("pipeline", 2, 2, 15)],
)
def test_lists_hold_what_they_hold_on_one_process(strategy: str, devices: int, batch_size: int, n: int) -> None:
    """Also tensors without elements, and in the same order."""

    def validate(devices: int, **options: Any) -> dict[str, float]:
        torch.manual_seed(0)
        module = Collects()
        callbacks = [Refers([module.rows]), Refers(module.rows)]
        trainer = quiet(devices=devices, accelerator="cpu", precision="64-true", callbacks=callbacks, **options)
        return trainer.validate(module, loader(n, batch_size), verbose=False)[0]

    found = validate(devices, strategy=strategy)
    assert found == pytest.approx(validate(1), rel=1e-6)
    if (strategy, devices) == ("ddp", 2):
        assert validate(1, virtual_ranks=2) == validate(2, strategy="ddp", virtual_ranks=2) == pytest.approx(found)


class Ordered(Net):
    """Metrics of training and of validation, of which a share has states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.validated = Pairs(), Pairs()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.update(batch[0])
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated(batch[0])
        self.log("validated", self.validated)


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"strategy": "ddp", "devices": 2}, {"virtual_ranks": 2}])
def test_what_updates_add_is_kept_over_epochs_and_a_resume(options: dict[str, Any], tmp_path: Path) -> None:
    def fit(path: Path | None = None, **more: Any) -> dict[str, float]:
        torch.manual_seed(0)
        trainer = quiet(accelerator="cpu", max_epochs=2, precision="64-true", **more)
        trainer.fit(Ordered(), loader(24, 3), loader(8, 2), ckpt_path=path)
        return {name: float(trainer.callback_metrics[name]) for name in ("trained", "validated")}

    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    whole = fit(**options, callbacks=[saver], enable_checkpointing=True)
    assert whole == pytest.approx(fit(), rel=1e-6)
    assert fit(tmp_path / "step=2", **options) == whole


class Places(Metric):
    """Weighs each sample by its place, in a list and in a tensor of rows, beside a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("first", [], dist_reduce_fx="cat")
        self.add_state("rows", torch.zeros(0, 2), dist_reduce_fx="cat")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.first.append(x[:, 0])
        self.rows = torch.cat([self.rows, x[:, 1:3]])
        self.number += len(x)

    def compute(self) -> Tensor:
        places = torch.arange(int(self.number), dtype=torch.float64)
        return (torch.cat(self.first) * places).sum() + (self.rows.sum(1) * places.square()).sum()


class Placed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.places = Places()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.places.update(batch[0])
        self.log("places", self.places, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.ranks
@pytest.mark.parametrize(("began", "devices"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_lists_are_in_the_order_of_one_process_after_a_resume_on_other_ranks(
    began: int, devices: int, tmp_path: Path
) -> None:
    """Of the middle of an epoch, saved and resumed twice."""

    def fit(devices: int, path: Path | None = None) -> float:
        torch.manual_seed(0)
        saver = ModelCheckpoint(tmp_path / str(devices), "{step}", every_n_train_steps=1, save_top_k=-1)
        trainer = quiet(
            accelerator="cpu",
            strategy="single" if devices == 1 else "ddp",
            devices=devices,
            max_epochs=1,
            precision="64-true",
            split_batches=True,
            callbacks=[saver],
            enable_checkpointing=True,
        )
        trainer.fit(Placed(), loader(40, 6), ckpt_path=path)
        return float(trainer.callback_metrics["places"])

    expected = fit(began)
    assert fit(devices, tmp_path / str(began) / "step=2") == pytest.approx(expected, rel=1e-12)
    assert fit(began, tmp_path / str(devices) / "step=4") == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks
def test_a_rank_without_samples_does_not_change_the_order() -> None:
    def validate(devices: int, batch_size: int) -> dict[str, float]:
        trainer = quiet(strategy="ddp", devices=devices, accelerator="cpu", precision="64-true")
        return trainer.validate(Ordered(), loader(2, batch_size), verbose=False)[0]

    assert validate(3, 2) == validate(1, 1)  # a sample each, and none


class Spectrum(Metric):
    """Its states are complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("wide", torch.tensor(0j, dtype=torch.complex128), dist_reduce_fx="sum")
        self.add_state("narrow", torch.zeros(3, dtype=torch.complex64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        wave = torch.complex(values[:, 0], values[:, 1])
        self.wide += wave.sum()
        self.narrow += wave.sum()

    def compute(self) -> Tensor:
        return self.wide.abs() + self.narrow.abs().sum()


@pytest.mark.ranks
def test_complex_states_meet() -> None:
    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum = Spectrum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.spectrum.update(batch[0])
            self.log("spectrum", self.spectrum)

    found = [
        quiet(devices=devices, accelerator="cpu").validate(Logs(), loader(15), verbose=False)[0]["spectrum"]
        for devices in (1, 2)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class Averaged(Metric):
    """Its average over ranks is not the sum that one process has."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total


class Validates(Net):
    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.metric = metric

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric.update(*[batch[0]] * (1 if isinstance(self.metric, Averaged) else 2))
        self.log("metric", self.metric)


@pytest.mark.ranks
def test_a_mean_over_ranks_is_refused_unless_they_agree() -> None:
    def validate(metric: Metric, **options: Any) -> float:
        trainer = quiet(accelerator="cpu", **options)
        return trainer.validate(Validates(metric), loader(15), verbose=False)[0]["metric"]

    for options in ({"devices": 2}, {"virtual_ranks": 2}):
        with pytest.raises(ValueError, match="Averaged keeps total with dist_reduce_fx='mean', and ranks or shares"):
            validate(Averaged(), **options)
        assert validate(PeakSignalNoiseRatio(data_range=(0, 1)), **options) == float("inf"), "the range is the same"
    assert validate(Averaged()) == pytest.approx(data(15).tensors[0].sum().item())


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")  # of the rank without a sample
@pytest.mark.parametrize(("devices", "n"), [(1, 20), (2, 1)])
def test_collections_that_the_module_computes_and_resets(devices: int, n: int) -> None:
    class Collected(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection([MulticlassF1Score(3), MulticlassAccuracy(3)], prefix="val/")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.scores.update(self(batch[0]), batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log_dict(self.scores.compute())  # on 2 ranks one has seen no sample
            assert isinstance(copy.deepcopy(self.scores), MetricCollection)
            self.scores.reset()
            self.log("val/kept", float(self.scores["MulticlassAccuracy"].tp.sum()))

    trainer = quiet(max_epochs=2, devices=devices)
    trainer.fit(Collected(), loader(16), loader(n))
    assert {"val/MulticlassF1Score", "val/MulticlassAccuracy"} <= set(trainer.callback_metrics)
    assert trainer.callback_metrics["val/kept"] == 0.0


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")  # of the rank without a sample
@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_metrics_that_are_not_reset_between_epochs(strategy: str) -> None:
    """A rank without a sample since the last `compute` still takes part in the next."""

    class Kept(Net):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.of_class = SumMetric(), MulticlassAccuracy(3, average=None)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            self.total.update(logits.square().sum())
            self.of_class.update(logits, batch[1])

        def on_validation_epoch_end(self) -> None:
            self.log("total", self.total.compute())
            self.log("again", 2.0 * self.total.compute())
            self.log_dict({f"of_{i}": value for i, value in enumerate(self.of_class.compute())})
            self.of_class.reset()

    def values(**options: Any) -> Any:
        torch.manual_seed(0)
        trainer = quiet(max_epochs=3, precision="64-true", split_batches=True, **options)
        trainer.fit(Kept(), loader(16), loader(9))
        return dict(trainer.callback_metrics)

    one = values()
    several = values(strategy=strategy, devices=2)
    assert {name: float(value) for name, value in several.items()} == pytest.approx(
        {name: float(value) for name, value in one.items()}, rel=1e-5
    ), "metrics keep their sums in float32"


def test_metrics_that_cannot_be_shown_are_named() -> None:
    class Matrix(Net):
        def __init__(self) -> None:
            super().__init__()
            self.matrix, self.loose = MulticlassConfusionMatrix(3), [MeanMetric()]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.matrix(self(batch[0]), batch[1])
            self.log("val/matrix", self.matrix)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loose", self.loose[0])

    with pytest.raises(ValueError, match="the metric logged as 'val/matrix' computes a tensor of shape \\[3, 3\\]"):
        quiet().validate(Matrix(), loader(8))
    with pytest.raises(ValueError, match="the metric logged as 'loose' is not an attribute of Matrix"):
        quiet().test(Matrix(), loader(8))


@pytest.mark.parametrize(
    ("computed", "said"),
    [
        ((torch.ones(()), torch.ones(())), "tuple"),
        ({"all": torch.ones(2)}, r"tensor of shape \[2\]"),
        ({"worst": None}, "NoneType"),
    ],
)
def test_values_of_a_metric_without_a_number_are_named(computed: Any, said: str) -> None:
    class Odd(MeanMetric):
        def compute(self) -> Any:
            return computed

    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.odd.update(batch[0])
            self.log("odd", self.odd)

    with pytest.raises(ValueError, match=f"the metric logged as 'odd' computes a {said}; log its elements under names"):
        quiet().validate(Logs(), loader(8))


def test_one_metric_under_two_names_has_one_value() -> None:
    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.mean(batch[0][:, 0])
            self.log("a", self.mean)
            self.log("b", self.mean)

    (returned,) = quiet().validate(Twice(), loader(20), verbose=False)
    assert returned["a"] == returned["b"] == pytest.approx(data(20).tensors[0][:, 0].mean().item())
    with pytest.raises(
        ValueError,
        match="'a/dataloader_idx_1' is logged as 'a/dataloader_idx_0' too and would be computed over both loaders",
    ):
        quiet().validate(Twice(), [loader(8), loader(8)])


class Ratio(Metric):
    """Counts samples beside its states, in an attribute of the kind of `number`."""

    total: Tensor

    def __init__(self, number: Any = 0) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")
        self.number = number
        self.n = copy.copy(number)

    def update(self, x: Tensor) -> None:
        self.total += x.double().sum()
        if isinstance(self.n, list):
            self.n.append(len(x))
        elif isinstance(self.n, dict):
            self.n["seen"] = self.n.get("seen", 0) + len(x)
        else:
            self.n = self.n + len(x) if self.n is not None else len(x)

    def compute(self) -> Tensor:
        n = self.n
        return self.total / (sum(n) if isinstance(n, list) else n["seen"] if isinstance(n, dict) else n)

    def reset(self) -> None:
        super().reset()
        self.n = copy.copy(self.number)


class Finding(Ratio):
    """Keeps in attributes what each update finds alike, and what `compute` does not read."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros((), dtype=torch.float64), "sum")
        self.width, self.is_used, self.sizes, self.calls, self.scale = 0, False, None, 0, torch.zeros(())

    def update(self, x: Tensor) -> None:
        self.total += x.double().sum()
        self.seen += len(x)
        self.width, self.is_used, self.sizes, self.scale = x.shape[1], True, [x.shape[1]], torch.ones(())
        self.calls += 1

    def compute(self) -> Tensor:
        return self.total / self.seen * self.width * self.is_used * sum(self.sizes or []) * self.scale


class OfMetric(Net):
    def __init__(self, metric: Metric) -> None:
        super().__init__()
        self.ratio = metric

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ratio.update(batch[0])
        self.log("ratio", self.ratio, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


NUMBERS = [0, torch.zeros(()), [], {}, None]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.ranks), "dp"])
def test_a_metric_that_counts_beside_its_states_is_refused_over_ranks(strategy: str, number: Any) -> None:
    trainer = quiet(max_epochs=1, strategy=strategy, devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match=r"ratio \(Ratio\) counts in n, .*add_state\('n', torch.tensor\(0\)"):
        trainer.fit(OfMetric(Ratio(number)), loader(48, batch_size=4))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.ranks), "dp"])
def test_what_a_metric_finds_alike_in_each_update_is_not_refused(strategy: str) -> None:
    values = []
    for options in ({}, {"strategy": strategy, "devices": 2, "split_batches": True}):
        trainer = quiet(max_epochs=2, accelerator="cpu", **options)
        trainer.fit(OfMetric(Finding()), loader(48, batch_size=4))
        values.append(trainer.callback_metrics["ratio"])
    torch.testing.assert_close(*values, rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", [*(partial(Ratio, number) for number in NUMBERS), Finding], ids=range(6))
def test_a_resumed_run_keeps_what_a_metric_counts_beside_its_states(metric: Any, tmp_path: Any) -> None:
    class Saving(OfMetric):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "middle")

    values = []
    for kind, path in ((Saving, None), (OfMetric, tmp_path / "middle")):
        trainer = quiet(max_epochs=1)
        trainer.fit(kind(metric()), loader(48, batch_size=4), ckpt_path=path)
        values.append(trainer.callback_metrics["ratio"])
    assert values[0] == values[1]
