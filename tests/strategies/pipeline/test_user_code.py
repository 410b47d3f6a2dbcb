"""What user code does to a model under a pipeline has the effect of one process, or is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import re
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module
from lockstep.strategies import Pipeline
from lockstep.strategies.data import batch_slices
from tests.strategies.modules.test_optimizer_probe import (
    CASES,
    Rule,
    at_once,
    by_global_norm,
    by_trust_ratio,
)
from tests.trainer.toy import quiet

pytestmark = pytest.mark.ranks


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
    loader = DataLoader(samples(n), 8, **options.pop("loader", {}))
    quiet(strategy=strategy, devices=devices, **options).fit(module, loader)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# ---- optimizers -----------------------------------------------------------------------------------------


def attached(mesh: str | None, cases: dict[str, Callable[[nn.Module], Optimizer]]) -> dict[str, str]:
    """What each optimizer is told when a pipeline takes it."""
    found = {}
    for name, make in cases.items():
        strategy = Pipeline(mesh=mesh)
        strategy.configure(devices=4 if mesh else 2, accelerator="cpu")
        strategy.setup()
        model = nn.ModuleDict({"net": layers()})
        try:
            strategy.setup_optimizers(strategy.setup_module(model), {"main": make(model)})
            found[name] = ""
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
        finally:
            strategy.teardown()
    return found


def with_a_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def in_groups_by_layer(model: nn.Module) -> Optimizer:
    return Rule([{"params": layer.parameters()} for layer in model["net"] if isinstance(layer, nn.Linear)], at_once)  # type: ignore[index]


def test_optimizers_that_look_at_other_parameters_are_refused_by_name(run_ranks: Callable[..., Any]) -> None:
    cases: dict[str, Callable[[nn.Module], Optimizer]] = {
        "coupled": lambda model: Rule(model.parameters(), by_global_norm),
        "by tensor": lambda model: Rule(model.parameters(), by_trust_ratio),
        "hooked": with_a_hook,
        "empty groups": in_groups_by_layer,
        "adamw": lambda model: torch.optim.AdamW(model.parameters()),
        **{name: CASES[name][0] for name in ("lbfgs", "estimate in a group", "list by place", "noise", "closure")},
    }
    found = run_ranks(attached, 2, None, cases)
    assert [name for name in found if not found[name]] == ["by tensor", "adamw"]
    assert found["coupled"].startswith("optimizer 'main' (Rule) cannot be stepped in a pipeline, where each rank holds")
    assert "depends on the gradients of others; use an optimizer that treats parameters one by one" in found["coupled"]
    assert "optimizer 'main' (SGD) has a step hook" in found["hooked"]
    assert "fails on a parameter group without parameters" in found["empty groups"]


def test_a_mesh_that_shards_refuses_optimizers_that_look_at_whole_tensors(run_ranks: Callable[..., Any]) -> None:
    cases: dict[str, Callable[[nn.Module], Optimizer]] = {
        "by tensor": lambda model: Rule(model.parameters(), by_trust_ratio),
        "adamw": lambda model: torch.optim.AdamW(model.parameters()),
    }
    found = run_ranks(attached, 4, "fsdp=2,pipeline=2", cases)
    assert found["adamw"] == "" and "other elements of its tensor; use an optimizer that treats" in found["by tensor"]


class TrustRatio(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_trust_ratio)


def test_an_optimizer_that_looks_at_whole_tensors_is_exact_in_a_pipeline() -> None:
    expected = fit(TrustRatio(), "single", 1)
    assert difference(fit(TrustRatio(), "pipeline", 2), expected) < 1e-12


class GlobalNorm(Base):
    def configure_optimizers(self) -> Any:
        return Rule(self.parameters(), by_global_norm)


def test_a_refused_optimizer_has_changed_nothing() -> None:
    module = GlobalNorm()
    with pytest.raises(ValueError, match=r"\(Rule\) cannot be stepped in a pipeline"):
        fit(module, "pipeline", 2)
    assert difference(module.state_dict(), GlobalNorm().state_dict()) == 0.0


# ---- layers on other ranks ------------------------------------------------------------------------------


class Clipping(Base):
    """Writes to all weights in a hook, reads none, and freezes and unfreezes layers by the clock."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)
            self.net[0].bias.zero_()
            self.net[4].weight[0] *= 0.5
            self.net[2].weight.data[1:].fill_(0.1)


class InPlace(Base):
    """Starts the layers again in the middle of the run and loads part of a state dict."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            with torch.no_grad():
                for layer in (self.net[0], self.net[4]):
                    layer.weight.normal_(generator=torch.Generator().manual_seed(5))  # type: ignore[operator]
            self.load_state_dict({"net.2.weight": torch.eye(16, dtype=torch.float64)}, strict=False)
            self.zero_grad()


class Facts(Base):
    """What does not depend on values is answered on every rank."""

    def on_train_epoch_end(self) -> None:
        assert sum(p.numel() for p in self.parameters()) == 484 and len(self.state_dict()) == 6
        p = next(self.parameters())
        assert p.device.type == "cpu" and p.dtype == torch.float64 and p.requires_grad and p.is_floating_point()
        assert isinstance(p, nn.Parameter) and p.shape == (16, 8) and p.detach().T.shape == (8, 16) and p.is_leaf
        assert {n: tuple(v.shape) for n, v in self.state_dict().items()}["net.4.weight"] == (4, 16)
        assert torch.zeros_like(self.net[4].weight).sum() == 0 and repr(self.net[0].weight)
        self.to("cpu")


def exact(make: Callable[[], Module], strategies: dict[Any, int], **options: Any) -> None:
    expected = fit(make(), "single", 1, **options)
    for strategy, devices in strategies.items():
        found = fit(make(), strategy() if callable(strategy) else strategy, devices, **options)
        assert difference(found, expected) < 1e-12, strategy


TWO = {"pipeline": 2}
ALL = {"pipeline": 2, "ddp=2,pipeline=2": 4, "fsdp=2,pipeline=2": 4}


@pytest.mark.parametrize("make", [Clipping, InPlace, Facts])
def test_what_writes_to_layers_of_other_ranks_or_asks_for_facts_is_exact(make: type[Module]) -> None:
    exact(make, TWO)


def told(uses: dict[str, Callable[[nn.Module], Any]]) -> dict[str, list[str]]:
    """What each use of the model is told, by rank."""
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


def test_what_needs_values_of_another_rank_is_refused_by_name(run_ranks: Callable[..., Any]) -> None:
    uses: dict[str, Callable[[nn.Module], Any]] = {
        "penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
        "norm": lambda m: torch.nn.utils.get_total_norm(list(m.parameters())),
        "gradients": lambda m: [p.grad for p in m.parameters()],
        "clip": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
        "copy": lambda m: copy.deepcopy(m["net"]),  # type: ignore[index]
        "clone": lambda m: {name: value.clone() for name, value in m.state_dict().items()},
        "save": lambda m: torch.save(m.state_dict(), io.BytesIO()),
        "average": lambda m: [torch.zeros_like(p).lerp_(p.detach(), 0.5) for p in m.parameters()],
        "numpy": lambda m: [p.detach().numpy() for p in m.parameters()],
        "list": lambda m: [p.tolist() for p in m.parameters()],
        "number": lambda m: [p.flatten()[0].item() for p in m.parameters()],
        "compare": lambda m: [torch.equal(p, p) for p in m.parameters()],
        "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()),
        "foreach": lambda m: torch._foreach_norm(list(m.parameters())),
        "histogram": lambda m: [torch.histc(p.detach()) for p in m.parameters()],
        "other dtype": lambda m: m.half(),
        "first layer": lambda m: m["net"][0].weight.sum() + m["net"][4].weight.sum(),  # type: ignore[index]
    }
    found = run_ranks(told, 2, uses)
    for name, (first, second) in found.items():
        assert first.startswith("net.2.weight is on stage 1 of the pipeline") or name == "first layer", (name, first)
        assert second.startswith("net.0.weight is on stage 0 of the pipeline"), (name, second)
        assert "trainer.whole(module)" in first


class Freezing(Base):
    """Layers by the epoch in which they learn; the optimizer holds all of them."""

    plan: dict[int, tuple[int, ...]] = {0: (2, 4), 1: (0, 2, 4), 2: (0,), 3: (4,), 4: (0, 2)}

    def __init__(self) -> None:
        super().__init__()
        self._freeze(0)

    def _freeze(self, epoch: int) -> None:
        for index in (0, 2, 4):
            self.net[index].requires_grad_(index in self.plan[epoch])

    def on_train_epoch_start(self) -> None:
        self._freeze(self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("pipeline", 2),
        ("ddp=2,pipeline=2", 4),
        ("fsdp=2,pipeline=2", 4),
        (lambda: Pipeline(schedule="gpipe", split=["net.4"]), 2),
    ],
)
def test_layers_frozen_and_unfrozen_during_a_run_are_exact(strategy: Any, devices: int) -> None:
    exact(Freezing, {strategy: devices}, max_epochs=5)


class Hooked(Base):
    """Five layers, of which hooks change what runs backward, and a penalty on a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *layers()[:3], nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), *layers()[3:]
        )
        self.net.double()
        for index in (0, 2, 4, 6):
            self.net[index].register_forward_hook(scales_gradient)
        self.net[2].register_full_backward_hook(clamps_gradient)


def scales_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    if type(output) is Tensor and output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3) * 2)


def clamps_gradient(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(None if gradient is None else gradient.clamp(-1e-3, 1e-3) for gradient in inputs)


class FrozenBeginning(Hooked):
    """Nothing of the first stages learns, then everything does."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch == 1)
        self.net[5:].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Base.training_step(self, batch, batch_idx) + 0.1 * self.net[-1].weight.square().sum()  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_zero_bubble"])
def test_hooks_and_frozen_layers_are_exact_where_a_schedule_splits_the_backward(schedule: str) -> None:
    exact(FrozenBeginning, {lambda: Pipeline(schedule=schedule): 2})


# ---- batches and parts that count nothing ---------------------------------------------------------------


class Sometimes(Base):
    """Returns None for what it finds empty: the first part, another part, all parts, all parts on one data rank."""

    level = 0.4
    late = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = batch[0][:, 0] > self.level
        if not chosen.any() and not self.late:
            return None
        losses = F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return Loss((losses * chosen).sum(), chosen.sum()) if chosen.any() else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Seldom(Sometimes):
    level = 1.2


class Late(Seldom):
    """Decides after it has called the net."""

    late = True


@pytest.mark.parametrize("make", [Sometimes, Seldom, Late])
def test_parts_without_a_loss_leave_the_others_alone(make: type[Sometimes]) -> None:
    exact(make, ALL if make is Seldom else TWO, accumulate_grad_batches=2)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    y: Any
    size: int = 0


class Named(NamedTuple):
    pair: Pair
    names: list[str]


class Movable:
    """Neither a mapping nor a dataclass: it moves itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.names = x, {"labels": y}, [f"sample {i}" for i in range(len(x))]

    def to(self, device: Any) -> Movable:
        self.x = self.x.to(device)
        return self


class Encoding(UserDict):  # type: ignore[type-arg]
    """A mapping with attributes, whose constructor asks for more than the data."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        super().__init__(data)
        self.kind = kind

    def to(self, device: Any) -> Encoding:
        return self


def collate(kind: str, items: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(items)
    if kind == "dataclass":
        return Pair(x, [y, {"same": y}])
    if kind == "named tuple":
        return Named(Pair(x, y), [f"sample {i}" for i in range(len(x))])
    if kind == "object":
        return Movable(x, y)
    return Encoding({"x": x, "y": y}, "encoding")


class AnyBatch(Base):
    """Takes each kind of batch; the net takes the object itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Unpacking()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, Named):
            assert len(batch.names) == len(batch.pair.x)
            batch = batch.pair
        if isinstance(batch, Movable):
            assert len(batch.names) == len(batch.x)
            return F.cross_entropy(self.net(batch), batch.y["labels"])
        if isinstance(batch, Encoding):
            assert batch.kind == "encoding"
            return F.cross_entropy(self.net(Pair(batch["x"], None)), batch["y"])
        y = batch.y[0] if isinstance(batch.y, list) else batch.y
        return F.cross_entropy(self.net(batch), y)


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()

    def forward(self, batch: Any) -> Tensor:
        return self.blocks(batch.x)


@pytest.mark.parametrize("kind", ["dataclass", "named tuple", "object", "mapping"])
def test_batches_of_any_container_are_split_by_samples(kind: str) -> None:
    expected = fit(AnyBatch(), "single", 1, loader={"collate_fn": functools.partial(collate, kind)})
    assert (
        difference(fit(AnyBatch(), "pipeline", 2, loader={"collate_fn": functools.partial(collate, kind)}), expected)
        < 1e-12
    )


def test_an_object_whose_tensors_are_not_one_row_a_sample_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"a batch of class Movable cannot be split, as the first dimension of its x \(shape \[3, 8\]\)",
    ):
        batch_slices.cut([Movable(torch.ones(3, 8), torch.ones(4)), torch.ones(4)], 4, 2)
    first, second = (part for part, _ in batch_slices.cut(Movable(torch.ones(4, 8), torch.arange(4)), 4, 2))
    assert (
        first.x.shape == (2, 8) and second.y["labels"].tolist() == [2, 3] and second.names == ["sample 2", "sample 3"]
    )
    assert (
        batch_slices.signature(first)
        == batch_slices.signature(second)
        != batch_slices.signature(Movable(torch.ones(3, 8), torch.ones(3)))
    )


def test_a_second_run_of_a_strategy_draws_from_its_own_seed() -> None:
    strategy = Pipeline()
    for seed in (5, 0):
        strategy.configure(devices=1, accelerator="cpu")
        strategy.setup()
        strategy.shard_loader(DataLoader(samples(), 8), seed=seed)
        strategy.shard_loader(DataLoader(samples(), 8), seed=9)
        assert strategy._seed == seed
        strategy.teardown()


# ---- what a step keeps in the model ---------------------------------------------------------------------


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
        output = self.net(batch[0])
        return F.cross_entropy(output, batch[1]) * self.seen["weight"] + self.scale * output.square().mean()

    def on_train_epoch_end(self) -> None:
        assert self.calls == self.trainer.global_step * 2 and self.scale == 1 / self.calls


def test_numbers_that_a_step_counts_are_those_of_one_process() -> None:
    exact(Counting, {"pipeline": 2, "ddp=2,pipeline=2": 4}, n=32, accumulate_grad_batches=2, max_epochs=1)


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


# ---- the whole model in hooks ---------------------------------------------------------------------------


class Whole(Base):
    """Reads and changes weights and gradients of all layers, moves a slow copy, freezes, and saves a state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("norms", torch.zeros(8, dtype=torch.float64))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        with self.trainer.whole(self):
            held = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [p.grad for p in held if p.grad is not None]
            self.norms[self.global_step] = torch.nn.utils.get_total_norm(gradients)
            assert len(held) == 6 and all(type(p) is nn.Parameter for p in self.parameters())
            for gradient in gradients:
                gradient.mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.trainer.whole(self), torch.no_grad():
            for p, q in zip(self.net.parameters(), self.slow.parameters(), strict=True):
                q.lerp_(p, 0.5)
            self.net[4].bias.add_(0.01 * self.net[0].bias.sum())
            torch.save(self.state_dict(), io.BytesIO())
            with self.trainer.whole(self):
                self.load_state_dict({name: value * 0.99 for name, value in self.state_dict().items()})
        if self.current_epoch == 0:
            with self.trainer.whole(self):
                self.net[2].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return SGD(self.net.parameters(), lr=0.1, momentum=0.9)


def test_hooks_see_and_change_the_whole_model_for_a_while() -> None:
    exact(Whole, ALL)


class WholeInAStep(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.whole(self):
            return super().training_step(batch, batch_idx)


def test_the_whole_model_is_refused_within_a_step() -> None:
    with pytest.raises(RuntimeError, match=r"whole\(\) was called within a step"):
        fit(WholeInAStep(), "pipeline", 2)


# ---- hooks on parameters, gradients within a step -------------------------------------------------------


class HooksOnParameters(Base):
    """Hooks that are not linear, on the gradient of the window; one comes late, one after accumulation."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.net.parameters():
            p.register_hook(clipped_gradient)
        self.net[0].weight.register_post_accumulate_grad_hook(halves_gradient)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[2].weight.register_hook(clipped_gradient)
            self.net[4].bias.register_hook(clipped_gradient)


def clipped_gradient(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.02, 0.02) * 1.5


def halves_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def test_hooks_on_parameters_see_the_gradient_of_one_process() -> None:
    exact(HooksOnParameters, ALL)


class GradientsWithin(Base):
    """Runs backward within the step, through layers of the last stage or to the inputs."""

    to_inputs = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        losses = F.cross_entropy(self.net(x), batch[1], reduction="none")
        of = x if self.to_inputs else self.net[4].weight
        (gradient,) = torch.autograd.grad(losses.sum(), of, create_graph=True)
        return losses.mean() + 0.01 * gradient.sum() / len(losses)


class GradientsToInputs(GradientsWithin):
    to_inputs = True


class DecidesByValues(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Deciding()


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1:](x if x.sum() > 0 else -x)


class ReadsItsStep(Base):
    """Keeps a tensor of the step for a hook, and a cache for itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean = batch[0].mean()
        if not hasattr(self, "cache"):
            self.cache = torch.ones(1)
        return super().training_step(batch, batch_idx) * self.cache

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.cache == 1
        self.log("mean", self.mean)


class Remembers(nn.Tanh):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class ReadsALayersInput(Base):
    """On the rank of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = Remembers()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.net[1].last.mean()


def test_gradients_of_the_last_stages_weights_are_exact_within_a_step() -> None:
    exact(GradientsWithin, TWO)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (GradientsToInputs, "training_step asks for a gradient by torch.autograd.grad"),
        (DecidesByValues, "it reads values that layers have computed"),
        (ReadsItsStep, "training_step has set self.mean"),
        (ReadsALayersInput, "training_step has set self.net.1.last"),
    ],
)
def test_what_a_stage_cannot_see_is_refused_by_name(make: type[Module], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        fit(make(), "pipeline", 2)


# ---- the optimizer's state ------------------------------------------------------------------------------


def momenta(optimizer: Optimizer) -> list[Any]:
    return [entry["momentum_buffer"] for entry in optimizer.state.values()]


READS: dict[str, Callable[[Optimizer], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "values": momenta,
    "by parameter": lambda optimizer: [optimizer.state[p] for p in optimizer.param_groups[0]["params"]],
    "length": lambda optimizer: len(optimizer.state),
    "copy": lambda optimizer: copy.deepcopy(optimizer.state),
}


class ReadsState(Base):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for read in READS.values():
            with pytest.raises(
                RuntimeError, match="the state of SGD is spread over the ranks, and each has only that of"
            ):
                read(self.trainer.optimizers[0])


class ForgetsState(Base):
    """Begins each second batch without momentum, in two ways."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (optimizer,) = self.trainer.optimizers
        if batch_idx == 1:
            optimizer.state.clear()
        if batch_idx == 2:
            optimizer.state = defaultdict(dict)


def test_the_optimizers_state_is_not_read_in_part() -> None:
    fit(ReadsState(), "pipeline", 2, max_epochs=1)
    expected = fit(ForgetsState(), "single", 1)
    assert difference(fit(ForgetsState(), "pipeline", 2), expected) < 1e-14
    assert difference(fit(Base(), "single", 1), expected) > 1e-4
