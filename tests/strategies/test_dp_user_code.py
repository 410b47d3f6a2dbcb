"""What a user's steps, hooks and batches may be under 'dp': the effect of one device, or a sentence."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lockstep import CombinedLoader, Module
from lockstep.strategies import Loss
from lockstep.strategies.data.sample_axis import SampleCutter
from lockstep.strategies.modules.absent import Refusing
from tests.trainer.toy import data, distance, loader, quiet, weights


class Plain(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def train(kind: type[Plain], strategy: str, train_loader: Any = None, **options: Any) -> Plain:
    torch.manual_seed(0)
    module = kind()
    devices = 1 if strategy == "single" else 3
    trainer = quiet(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=2, precision="64-true", **options)
    trainer.fit(module, loader(20) if train_loader is None else train_loader)
    return module


def both(kind: type[Plain], **options: Any) -> tuple[Plain, Plain]:
    one, other = train(kind, "single", **options), train(kind, "dp", **options)
    assert distance(weights(other), weights(one)) < 1e-12, kind.__name__
    return one, other


class Watches(Plain):
    """What hooks see of a batch: its loss, its gradient so far and what its step returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return {"loss": losses.mean(), "each": losses.detach()}

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(loss.detach().clone())

    def on_after_backward(self) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(torch.nn.utils.get_total_norm(gradients))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [outputs["loss"], outputs["each"]]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_see_the_whole_batch_once(accumulate: int) -> None:
    one, other = both(Watches, accumulate_grad_batches=accumulate)
    assert len(one.seen) == len(other.seen) > 10
    for expected, found in zip(one.seen, other.seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Edits(Plain):
    """Its hook changes what backward reads: in place past torch's notes, and by other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
        self.weight = torch.ones(3, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]) * self.scale * self.weight, batch[1])

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in self.net.parameters():
            parameter.data.mul_(0.99)
        self.scale.data.mul_(0.9)
        self.weight.data.mul_(1.2)
        self.net[0].weight.data = self.net[0].weight.data * 1.1


def test_backward_reads_what_on_before_backward_has_changed() -> None:
    both(Edits)


class EditsBySamples(Plain):
    def on_fit_start(self) -> None:
        self.net[2].register_full_backward_hook(self.edit)

    def edit(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.net[0].weight.data.add_(outputs[0].abs().max())


def test_a_backward_hook_that_changes_weights_by_its_samples_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"changed the parameter net\.0\.weight by the samples of a slice"):
        train(EditsBySamples, "dp")


class Sums(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Loss(F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs.total), outputs.count))


def test_a_sum_and_its_count_are_those_of_the_whole_batch() -> None:
    one, other = both(Sums)
    assert [count for _, count in other.seen] == [count for _, count in one.seen]
    assert [total for total, _ in other.seen] == pytest.approx([total for total, _ in one.seen], rel=1e-12)


class Counts(Plain):
    """An annealed weight: a counter, a dict of counts and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.kinds = 0, Counter[str]()
        self.table: dict[str, int] = {}
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.table["steps"] = self.table.get("steps", 0) + 1
        self.steps += 1
        logits = self.net(batch[0])
        weight = 0.01 * self.calls + 0.02 * self.table["steps"] + 0.03 * self.steps
        return F.cross_entropy(logits, batch[1]) + weight * logits.square().mean()


class Follows(Plain):
    """A slow copy that the step moves in place, through `.data` too, and whose weights it keeps bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for fast, slow in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            self.net[0].weight.data.mul_(0.99)
        return (self.net(batch[0]) - self.slow(batch[0]) + batch[0][:, :3]).square().mean()


class Keeps(Plain):
    """A forward hook that is a method of the module keeps activations for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        self.net[1].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["hidden"] = output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.features["hidden"].square().mean()


class Hooked(Plain):
    """Hooks on parameters, one registered late, and one on a layer that changes what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.net[0].register_forward_hook(lambda module, args, output: output * 2)

    def on_train_start(self) -> None:
        self.net[2].bias.register_hook(lambda gradient: gradient * 0)


class Unfreezes(Plain):
    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Recurrent(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(2, 6, batch_first=True)  # type: ignore[assignment]
        self.head = nn.Linear(6, 3)
        self.head.weight = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)).parametrizations.weight.original1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, _ = self.net(batch[0].view(-1, 4, 2))
        return F.cross_entropy(self.head(hidden[:, -1]), batch[1])


class Penalized(Plain):
    """The gradient of a gradient, for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].requires_grad_()
        logits = self.net(x)
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, batch[1]) + slope.square().sum(1).mean()


class Forward(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.func.jvp(self.net, (batch[0],), (batch[0],))[1].square().sum(1).mean()


class Dual(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autograd.forward_ad.dual_level():
            return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # which torch.func.jvp runs into
@pytest.mark.parametrize("kind", [Counts, Follows, Keeps, Hooked, Unfreezes, Recurrent, Penalized, Forward, Dual])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_user_code_does_has_the_effect_of_one_device(kind: type[Plain], accumulate: int) -> None:
    both(kind, accumulate_grad_batches=accumulate)


class Collects(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.seen.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        torch.stack(self.seen)


class Remembers(Plain):
    last: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last = 0.9 * self.last + 0.1 * loss.detach()
        return loss + 0 * self.last


class Tracks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return super().training_step((batch[0] - self.mean, batch[1]), batch_idx)


class Closure(Plain):
    def __init__(self) -> None:
        super().__init__()
        kept: list[Tensor] = []
        self.net[1].register_forward_hook(lambda module, args, output: kept.append(output))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Collects, "seen was set by training_step, which strategy 'dp' runs on slices"),
        (Remembers, "last was set by training_step, which strategy 'dp' runs on slices"),
        (Tracks, "training_step changed the buffer mean by the samples of a slice"),
        (Closure, r"net\.1 has a hook, .* that strategy 'dp' would call for each slice"),
    ],
)
def test_what_would_differ_between_slices_is_refused_by_name(kind: type[Plain], message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        train(kind, "dp")


class Scratch(Plain):
    """An attribute that the step sets and reads itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hidden = self.net[:2](batch[0])
        return F.cross_entropy(self.net[2](self.hidden), batch[1])


def test_an_attribute_that_only_the_step_uses_is_allowed() -> None:
    _, other = both(Scratch)
    assert isinstance(copy.deepcopy(other).hidden, Refusing)
    for use in (
        lambda: other.hidden + 1,
        lambda: 1 - other.hidden,
        lambda: torch.add(torch.ones(1), other.hidden),
        lambda: other.hidden.mean(),
    ):
        with pytest.raises(RuntimeError, match="hidden was set by training_step"):
            use()


@dataclass
class Pair:
    x: Tensor
    y: Tensor


def time_first(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x.view(-1, 2, 4).transpose(0, 1).contiguous(), y


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(5, 6, 2), torch.zeros(6)), r"batch\[0\] has shape \[5, 6, 2\] in a batch of 6 samples"),
        ({"x": torch.zeros(6, 2), "y": torch.zeros(4)}, r"batch\['y'\] has shape \[4\]"),
        (
            Pair(torch.zeros(6, 6, 2), torch.zeros(6)),
            r"batch.x has shape \[6, 6, 2\] .* another dimension may be theirs",
        ),
        ([torch.zeros(6, 2)] * 6, "batch is a list of 6 in a batch of 6 samples, which may be either"),
        ((torch.zeros(6, 2), ["a", "b"]), r"batch\[1\] is a list of 2"),
        ((torch.zeros(6, 2), np.zeros(5)), r"batch\[1\] has shape \[5\]"),
        ({"x": object()}, r"batch\['x'\] is of class object"),
    ],
)
def test_a_batch_whose_samples_are_not_certain_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleCutter().cut(batch, 6, 2)


def test_batches_are_split_along_their_samples() -> None:
    cutter = SampleCutter()
    batch = {
        "pair": (torch.arange(12).view(6, 2), torch.arange(6)),
        "names": list("abcdef"),
        "images": [torch.zeros(3, n, n) for n in range(1, 7)],
        "more": [np.arange(6), "train", torch.tensor(2.0), 7, None],
        "own": Pair(torch.arange(6), torch.arange(6)),
    }
    (first, three), (second, _) = cutter.cut(batch, 6, 2)
    assert three == 3 and second["pair"][0].tolist() == [[6, 7], [8, 9], [10, 11]] and second["names"] == list("def")
    assert [len(image[0]) for image in second["images"]] == [4, 5, 6]
    assert first["more"][0].tolist() == [0, 1, 2] and first["more"][1:] == ["train", torch.tensor(2.0), 7, None]
    assert second["own"].y.tolist() == [3, 4, 5]
    # what a first batch has shown holds for one that leaves it open
    images = [torch.zeros(3, 3, 3)] * 3
    (left, _), _ = cutter.cut({"images": images, "pair": (torch.zeros(3, 3), torch.zeros(3))}, 3, 2)
    assert len(left["images"]) == 2 and left["pair"][0].shape == (2, 3)
    # two fields of two samples each, as torch's own collate function makes them
    (left, _), _ = SampleCutter(stacks=True).cut([torch.zeros(2, 2), torch.ones(2, 2)], 2, 2)
    assert left[0].shape == (1, 2) and left[1].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "train_loader",
    [
        lambda: DataLoader(data(20), batch_size=8, collate_fn=time_first),
        lambda: CombinedLoader({"a": loader(12, 4), "b": loader(12, 4)}),
    ],
    ids=["time first", "two loaders"],
)
def test_runs_on_such_batches_stop_before_a_parameter_changes(train_loader: Any) -> None:
    torch.manual_seed(0)
    before = weights(Plain().double())
    torch.manual_seed(0)
    module = Plain()
    with pytest.raises(ValueError, match="along the first dimension, which must be the samples, but batch"):
        quiet(strategy="dp", devices=2, accelerator="cpu", precision="64-true").fit(module, train_loader())
    assert all(torch.equal(a, b.double()) for a, b in zip(before, module.parameters(), strict=True))


def without_large(items: list[Any]) -> Any:
    """Leaves none out of the first eight samples."""
    return default_collate([item for item in items if item[0][0] < 1.6])


def columns(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x.T.contiguous(), y


def test_a_square_batch_is_cut_where_a_batch_of_one_sample_shows_its_samples() -> None:
    states = []
    for strategy, devices in (("single", 1), ("dp", 2)):
        torch.manual_seed(0)
        module = Plain()
        train_loader = DataLoader(data(24), batch_size=8, collate_fn=without_large)
        quiet(strategy=strategy, devices=devices, accelerator="cpu", precision="64-true").fit(module, train_loader)
        states.append(weights(module))
    assert distance(*states) < 1e-12


def test_a_square_batch_with_its_samples_last_is_refused() -> None:
    train_loader = DataLoader(data(24), batch_size=8, collate_fn=columns)
    with pytest.raises(ValueError, match=r"batch\[0\] has shape \[8, 8\] .* another dimension may be theirs"):
        quiet(strategy="dp", devices=2, accelerator="cpu").fit(Plain(), train_loader)


def test_a_step_sees_the_device_of_its_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    class Asks(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            devices.append(self.device)
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            devices.append(self.device)

    import lockstep.strategies.dp.strategy as dp

    monkeypatch.setattr(dp, "nth_device", lambda kind, index: torch.device(kind, index))  # as on two GPUs
    quiet(strategy="dp", devices=2, accelerator="cpu", max_steps=1).fit(Asks(), loader(8))
    assert devices == [torch.device("cpu", 0), torch.device("cpu", 1), torch.device("cpu")]


@pytest.mark.parametrize("way", ["items", "values", "keys", "log_dict"])
def test_a_step_goes_through_a_metric_collection(way: str) -> None:
    class Collects(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection({"accuracy": MulticlassAccuracy(3), "f1": MulticlassF1Score(3)})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = self.net(batch[0])
            if way == "log_dict":
                self.scores.update(output, batch[1])
                self.log_dict(self.scores, on_step=False, on_epoch=True)
            elif way == "keys":
                for name in self.scores:
                    self.count(name, self.scores[name], output, batch[1])
            else:
                for number, each in enumerate(getattr(self.scores, way)()):
                    self.count(str(number), each[1] if way == "items" else each, output, batch[1])
            return F.cross_entropy(output, batch[1])

        def count(self, name: str, metric: Any, output: Tensor, target: Tensor) -> None:
            metric.update(output, target)
            self.log(name, metric, on_step=False, on_epoch=True)

        def on_train_end(self) -> None:
            self.seen = [float(value) for value in self.trainer.callback_metrics.values()]

    one, other = both(Collects)
    assert len(one.seen) >= 2 and one.seen == pytest.approx(other.seen)
