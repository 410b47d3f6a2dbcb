"""State that a step keeps in the model is that of one process, or is refused by name."""

from __future__ import annotations

import copy
import functools
import re
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.pipeline.classifiers import Base, exact, fit, samples
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


class Counting(Base):
    """Numbers and a buffer that each step changes and uses before and after it calls the net, and a cache that it fills
    once."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {"weight": 1.0}
        self.register_buffer("number", torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.number = self.number + 1
        self.seen["weight"] *= 0.9
        self.scale = 1.0 / self.calls
        for layer in (self.net[0], self.net[4]):  # on two stages
            layer.weight.seen = getattr(layer.weight, "seen", 0) + 1
        output = self.net(batch[0])
        return F.cross_entropy(output, batch[1]) * self.seen["weight"] + self.scale * output.square().mean()

    def on_train_epoch_end(self) -> None:
        assert self.calls == self.trainer.global_step * 2 and self.scale == 1 / self.calls
        assert self.net[0].weight.seen == self.net[4].weight.seen == self.calls


def test_numbers_that_a_step_counts_are_those_of_one_process() -> None:
    exact(Counting, {"pipeline": 2, "ddp=2,pipeline=2": 4}, n=32, accumulate_grad_batches=2, max_epochs=1)


class Annealing(Base):
    """Lowers the slope of a layer of torch's class in each step, and changes in hooks what other layers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1], self.net[3] = nn.LeakyReLU(0.5), nn.LeakyReLU(0.5)
        self.net[4].register_buffer("scale", torch.ones(4, dtype=torch.complex128), persistent=False)
        self.late = False

    def on_train_epoch_end(self) -> None:
        self.net[4].scale.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[1].negative_slope *= 0.9
        self.net[3].negative_slope -= 0.01
        output = self.net(batch[0])
        if self.late:
            self.net[1].negative_slope *= 0.9
        return F.cross_entropy(output, batch[1])


def test_numbers_of_torchs_layers_are_those_of_one_process() -> None:
    made: list[Annealing] = []

    def make() -> Annealing:
        made.append(Annealing())
        return made[-1]

    exact(make, {"pipeline": 2}, n=32, accumulate_grad_batches=2, max_epochs=1)
    slopes = [[module.net[i].negative_slope for i in (1, 3)] for module in made]
    assert slopes[0] == slopes[1] and slopes[0][0] < 0.5
    assert torch.equal(made[0].net[4].scale, made[1].net[4].scale) and made[1].net[4].scale[0] == 0.5


def test_numbers_of_torchs_layers_that_change_after_the_call_are_refused() -> None:
    module = Annealing()
    module.late = True
    with pytest.raises(RuntimeError, match="net.1.negative_slope after it has called the pipelined module"):
        fit(module, "pipeline", 2, n=16, max_epochs=1)


class Keeping(Base):
    """Keeps something that cannot be followed through the parts of a micro-batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.total, self.losses = how, 0.0, []
        self.register_buffer("steps", torch.zeros(()))
        self.slow = copy.deepcopy(self.net[4]).requires_grad_(False)
        if how.endswith("layer"):
            self.net[3] = CountingLayer(how)
        if how == "spectral norm":
            self.net[2] = nn.utils.parametrizations.spectral_norm(self.net[2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "samples":
            self.total += float(batch[0][0, 0])
        if self.how == "number of samples":
            self.total += len(batch[0])
        if self.how == "attribute of a parameter":
            self.net[0].weight.total = getattr(self.net[0].weight, "total", 0) + len(batch[0])
        if self.how == "buffer":
            self.steps += 1
        if self.how == "slow copy":
            with torch.no_grad():
                self.slow.weight.mul_(0.9)
        output = self.net(batch[0])
        loss = F.cross_entropy(output, batch[1])
        if self.how == "after the call":
            self.total += 1
        if self.how == "list":
            self.losses.append(loss.detach())
        return loss

    def on_before_backward(self, loss: Tensor) -> None:
        if self.how == "hook":
            self.total += 1
        if self.how == "buffer in hook":
            self.steps = self.steps + 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.net(batch[0]).mean())


class CountingLayer(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(16, 16, dtype=torch.float64)
        self.how, self.calls, self.seen = how, 0, [0]
        self.register_buffer("number", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counting layer":
            self.calls += 1
        elif self.how == "listing layer":
            self.seen.append(0)
        elif self.how == "buffering layer":
            self.number = self.number + 1
        return super().forward(x) / (self.calls + len(self.seen) + self.number)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("samples", "training_step leaves another total for each part of a micro-batch, but"),
        ("number of samples", "training_step counts the samples of a part in total"),
        ("attribute of a parameter", "training_step counts the samples of a part in net.0.weight.total"),
        (
            "buffer",
            "training_step changes steps in place, but a pipeline runs it for each part of a micro-batch; change it in",
        ),
        ("slow copy", "training_step changes slow.weight in place"),
        ("after the call", "training_step changes total after it has called the pipelined module"),
        ("list", "training_step adds to the list losses"),
        ("evaluation", "an evaluation step adds to the list losses"),
        ("counting layer", "training_step calls a layer that counts in net.3.calls"),
        ("listing layer", "training_step calls a layer that counts in net.3.seen"),
        ("buffering layer", "training_step calls a layer that counts in net.3.number"),
        ("hook", "on_before_backward changes total, but a pipeline calls it for each part of a micro-batch"),
        ("buffer in hook", "on_before_backward changes steps, but a pipeline calls it for each part"),
        ("spectral norm", "training_step changes net.2.parametrizations.weight.0._u in place"),
    ],
)
def test_what_a_step_keeps_that_cannot_be_followed_is_refused_by_name(how: str, message: str) -> None:
    module = Keeping(how)
    trainer = quiet(strategy="pipeline", devices=2, max_epochs=1, precision="64-true")
    loader = DataLoader(samples(16), 8)
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught:
        trainer.fit(module, loader, loader if how == "evaluation" else None)
    assert how == "evaluation" or "step 0, " in str(caught.value.__cause__), "no parameter has changed"


class Hooked(Base):
    """A hook of a layer counts."""

    def __init__(self, how: str) -> None:
        super().__init__()
        number, held, tensor = 0, [0], torch.zeros(())

        def enclosed(*_: Any) -> None:
            nonlocal number
            number += 1

        def in_list(*_: Any) -> None:
            held[0] += 1

        def in_tensor(*_: Any) -> None:
            tensor.add_(1)

        def in_layer(layer: Any, *_: Any) -> None:
            layer.number = getattr(layer, "number", 0) + 1

        hooks = {"number": enclosed, "held[0]": in_list, "tensor": in_tensor, "net.0.number": in_layer}
        if how == "backward":
            self.net[2].register_full_backward_hook(in_list)
        else:
            self.net[0].register_forward_hook(hooks[how])


@pytest.mark.parametrize("how", ["number", "held[0]", "tensor", "net.0.number", "backward"])
def test_what_hooks_of_layers_count_is_refused_by_name(how: str) -> None:
    name = re.escape("held[0]" if how == "backward" else how)
    with pytest.raises(RuntimeError, match=f"training_step calls a (hook|layer) that counts in {name}, but"):
        fit(Hooked(how), "pipeline", 2, max_epochs=1)


class Timed(Base):
    def __init__(self) -> None:
        super().__init__()
        starts: dict[str, float] = {}
        for layer in self.net:
            layer.register_forward_hook(lambda *_: starts.update(last=time.perf_counter()))


def test_times_that_hooks_of_layers_note_are_not_counts() -> None:
    exact(Timed, {"pipeline": 2}, max_epochs=1)


class Measuring(Base):
    """Is itself the pipelined module, and holds a metric beside its layers."""

    def __init__(self) -> None:
        super().__init__()
        layers, self.net = self.net, None
        self.encoder, self.decoder = layers[:4], layers[4]
        self.accuracy = pytest.importorskip("torchmetrics").Accuracy("multiclass", num_classes=4)
        self.register_buffer("measured", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self(batch[0])
        self.accuracy(output, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return F.cross_entropy(output, batch[1])

    def on_train_end(self) -> None:
        self.measured.copy_(self.trainer.callback_metrics["accuracy"])


def test_a_metric_in_the_pipelined_module_may_change_after_its_call() -> None:
    exact(Measuring, {"pipeline": 2}, max_epochs=1)


class HookedParameter(Base):
    """A hook of a parameter counts."""

    calls = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        seen: list[float] = []
        self.norms: dict[str, float] = {}
        if how == "clamps":
            for p in self.parameters():
                p.register_hook(self.clamps)
        elif how == "enclosed":
            self.net[0].weight.register_hook(lambda gradient: seen.append(0.0))
        elif how == "module":
            self.net[4].weight.register_post_accumulate_grad_hook(self.counts)
        else:
            self.net[4].bias.register_hook(lambda gradient: self.norms.update(bias=float(gradient.norm())))

    def clamps(self, gradient: Tensor) -> Tensor:
        if not hasattr(self, "bound"):
            self.bound, self.clamped = 0.01, True
        return gradient.clamp(-self.bound, self.bound)

    def counts(self, parameter: Tensor) -> None:
        self.calls += 1


def test_hooks_of_parameters_that_keep_a_number_once_are_exact() -> None:
    exact(lambda: HookedParameter("clamps"), {"pipeline": 2}, max_epochs=1)


@pytest.mark.parametrize(
    ("how", "name"), [("enclosed", r"seen\['length'\]"), ("module", "calls"), ("norm", r"norms\['bias'\]")]
)
def test_what_hooks_of_parameters_count_is_refused_by_name(how: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"a hook of a parameter counts in {name}, but in a pipeline only the rank"):
        fit(HookedParameter(how), "pipeline", 2, max_epochs=1)


class Exchanging(Base):
    """Exchanges layers of the same stage, each step or in one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        linear = [nn.Linear(16, 16) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *linear, nn.Linear(16, 4)).double()
        self.other, self.how = nn.Tanh(), how
        self.net[1].scale = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "in each step" or (self.how == "in one step" and self.global_step == 4):
            self.net[3], self.net[4] = self.net[4], self.net[3]
        if self.how == "beside layers":
            self.net[1], self.other = self.other, self.net[1]
        output = self.net(batch[0])
        if self.how == "after the call":
            self.net[3], self.net[4] = self.net[4], self.net[3]
        return F.cross_entropy(output, batch[1])


@pytest.mark.parametrize("how", ["in each step", "in one step", "beside layers"])
def test_layers_that_a_step_exchanges_are_those_of_one_process(how: str) -> None:
    made: list[Exchanging] = []

    def make() -> Exchanging:
        made.append(Exchanging(how))
        return made[-1]

    exact(make, {"pipeline": 2, "ddp=2,pipeline=2": 4}, n=24, max_epochs=3)
    assert len({hasattr(module.other, "scale") for module in made}) == 1
    one, two, _ = ([layer.weight for layer in module.net[2:]] for module in made)
    assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(one, two, strict=True))


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16, dtype=torch.float64), nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.a, self.b = self.b, self.a
        return self.a(x)


def test_layers_exchanged_where_not_all_ranks_do_it_are_refused() -> None:
    module = Exchanging("in a layer")
    module.net[2] = Alternating()
    with pytest.raises(RuntimeError, match=r"training_step calls a layer that exchanges net\.2\.a, but a pipeline"):
        fit(module, "pipeline", 2, max_epochs=1)
    with pytest.raises(RuntimeError, match=r"changes net\.3 after it has called the pipelined module"):
        fit(Exchanging("after the call"), "pipeline", 2, max_epochs=1)


CALLS = {"scale": 1.0}


def decayed() -> float:
    CALLS["scale"] *= 0.9
    return CALLS["scale"]


class Schedule:
    def now(self) -> float:
        return decayed()


class Scheduled(Base):
    """Multiplies the loss by what a function in an attribute makes of a global."""

    def __init__(self, how: str) -> None:
        super().__init__()
        kinds = {"function": decayed, "item": [decayed], "partial": functools.partial(decayed), "object": Schedule()}
        self.scale: Any = kinds[how]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = self.scale[0] if isinstance(self.scale, list) else getattr(self.scale, "now", self.scale)
        return super().training_step(batch, batch_idx) * scale()


@pytest.mark.parametrize("how", ["function", "item", "partial", "object"])
def test_globals_that_functions_in_attributes_change_are_refused_by_name(how: str) -> None:
    with pytest.raises(RuntimeError, match=r"training_step changes the global CALLS\['scale'\]"):
        fit(Scheduled(how), "pipeline", 2, max_epochs=1)
