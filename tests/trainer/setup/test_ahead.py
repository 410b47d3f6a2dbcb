"""What the ranks would refuse of a model and its training data is refused before a rank starts, in the same words."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import Module, Trainer
from lockstep.callbacks import BackboneFinetuning, Callback
from lockstep.strategies import DDP, FSDP, LocalSGD, ParameterServer, Pipeline, TensorParallel
from lockstep.strategies.launch import launcher
from lockstep.strategies.modules.model_changes import refuse_shared_memory


class Net(Module):
    def __init__(self, net: nn.Module, **others: nn.Module) -> None:
        super().__init__()
        self.net = net
        for name, module in others.items():
            setattr(self, name, module)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(IterableDataset):
    def __init__(self, shards_itself: bool = False) -> None:
        self.shards_itself = shards_itself

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a sample was read")


class Started(Exception):
    """Ranks would start now."""


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: Any, **options: Any) -> None:
        raise Started

    monkeypatch.setattr(launcher, "launch", start)


def layers(number: int, width: int = 8) -> nn.Sequential:
    widths = [8, *[width] * number]
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(widths)])


def sharing(view: Callable[[torch.Tensor], torch.Tensor]) -> Module:
    """Two layers with weights that are two parameters in the same memory."""
    module = Net(layers(3))
    module.net[1].weight = nn.Parameter(view(module.net[0].weight.data))  # type: ignore[union-attr, index]
    return module


@pytest.mark.parametrize("start", [0, 1, 7, 8])
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_parts_of_one_tensor_may_be_parameters_if_they_have_nothing_in_common(by: str, start: int) -> None:
    whole = torch.randn(16, 16)
    first, second = (
        (whole[:8], whole[start : start + 8]) if by == "rows" else (whole[:, :8], whole[:, start : start + 8])
    )
    model = nn.Module()
    model.a, model.b = nn.Parameter(first), nn.Parameter(second)
    if start == 8:
        refuse_shared_memory(model, "FSDP")
    else:
        with pytest.raises(ValueError, match="b and a are two parameters that share memory, and FSDP moves each by it"):
            refuse_shared_memory(model, "FSDP")
    model.b = model.a  # one parameter
    refuse_shared_memory(model, "FSDP")


def batches(size: int | None = 4, samples: int = 16, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(samples, 8)), batch_size=size, **options)


def trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **{"devices": 2, **options},
    )


SEVERAL = ("ddp", "dp", "fsdp", "tensor", "pipeline")


def scripted() -> Any:
    with warnings.catch_warnings():  # torch deprecates it
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(layers(2))


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))


MODELS: dict[str, tuple[Any, Callable[[], Module], str]] = {
    "stages": ("pipeline", lambda: Net(layers(1)), "a pipeline of 2 stages needs as many layers, but net has 1"),
    "stages of a rank": (
        Pipeline(schedule="interleaved_1f1b"),
        lambda: Net(layers(3)),
        "a pipeline of 4 stages needs as many layers",
    ),
    "stages that are measured": (Pipeline(sample=torch.ones(2, 8)), lambda: Net(layers(1)), "2 stages needs as many"),
    "split": (Pipeline(split=["net.9"]), lambda: Net(layers(3)), "split must name layers .* 'net.9' is not among"),
    "module": (Pipeline(module="nett"), lambda: Net(layers(3)), "module must name a submodule .* it has net"),
    "outside": ("pipeline", lambda: Net(layers(2), other=nn.Linear(8, 8)), "needs one module that holds every"),
    "checkpointing": (
        Pipeline(activation_checkpointing="net.0"),
        lambda: Net(nn.Sequential(layers(2), layers(2))),
        "activation_checkpointing finds net.0, which holds several",
    ),
    "no such block": (DDP(activation_checkpointing="net.7"), lambda: Net(layers(2)), "'?net.7'? is not one of Net"),
    "tensor size": (TensorParallel(plan={"net.0": "column"}), lambda: Net(layers(2, 7)), "out_features=7, .* 2 ranks"),
    "tensor plan": (TensorParallel(plan={"net.9": "column"}), lambda: Net(layers(2)), "plan names 'net.9'"),
    "sequence": (TensorParallel(sequence_parallel=True), lambda: Net(nn.Linear(8, 8)), "sequence_parallel=True"),
    "wrap": (FSDP(wrap=nn.Conv2d), lambda: Net(layers(2)), "wrap must name .* Conv2d is not one of Net"),
    "sparse": ("fsdp", lambda: Net(layers(1), e=nn.Embedding(4, 4, sparse=True)), "e has sparse=True"),
    "frequencies": (
        "ddp",
        lambda: Net(layers(1), e=nn.Embedding(4, 4, scale_grad_by_freq=True)),
        "e has scale_grad_by_freq=True, .* a forward of DDP sees a part of the batch",
    ),
    "frequencies of a micro-batch": (
        "pipeline",
        lambda: Net(nn.Sequential(nn.Embedding(4, 8, scale_grad_by_freq=True), nn.Linear(8, 8))),
        "net.0 has scale_grad_by_freq=True",
    ),
    "max_norm": ("ddp", lambda: Net(layers(1), e=nn.Embedding(4, 4, max_norm=1.0)), "e has max_norm=1.0"),
    **{
        f"memory in common, {name}": (
            strategy,
            lambda: sharing(lambda a: a.t()),
            r"net\.1\.weight and net\.0\.weight are two parameters that share memory",
        )
        for name, strategy in (("fsdp", "fsdp"), ("tensor", "tensor"), ("pipeline", "pipeline"), ("zero", "deepspeed"))
    },
    **{f"scripted, {name}": (name, lambda: Net(scripted()), "net is scripted or traced") for name in SEVERAL},
    **{f"lazy, {name}": (name, lambda: Net(lazy()), "net.1 is a LazyLinear without parameters") for name in SEVERAL},
    "learners": (LocalSGD(learners=2), lambda: Net(nn.Sequential(nn.SyncBatchNorm(8))), "net.0 is a SyncBatchNorm"),
    "island": (
        LocalSGD(learners=2, inner=TensorParallel(plan={"net.0": "column"})),
        lambda: Net(layers(2, 7)),
        "out_features=7, .* 2 ranks",
    ),
}


@pytest.mark.parametrize("stage", ["fit", "validate"])
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_ranks_would_refuse_is_refused_before(case: str, stage: str) -> None:
    strategy, model, message = MODELS[case]
    run = trainer(strategy, devices=4 if case == "island" else 2)
    with pytest.raises(ValueError, match=message):
        getattr(run, stage)(model(), batches())


LOADERS: dict[str, tuple[dict[str, Any], Callable[[], Any], str]] = {
    "ready-made": ({"split_batches": True}, lambda: batches(None), "split_batches needs batches that can be split"),
    "iterable": (
        {"split_batches": True, "accumulate_grad_batches": 3},
        lambda: DataLoader(Numbers(), batch_size=4),
        r"must divide by ranks times micro-batches, but it is 4 and they are 2 \* 3",
    ),
    "several": ({"split_batches": True}, lambda: {"a": batches(), "b": batches()}, "several loaders"),
    "virtual": ({"virtual_ranks": 2}, lambda: {"a": batches(), "b": batches()}, "cannot be used with several loaders"),
    "shards itself": (
        {"virtual_ranks": 2},
        lambda: DataLoader(Numbers(shards_itself=True), batch_size=4),
        "workers of a parameter server cannot be used with Numbers, which shards itself",
    ),
    "dropped": ({}, lambda: batches(16, drop_last=True), "has 16 samples and a full one 32"),
    "interval": ({"val_check_interval": 3}, batches, "val_check_interval=3 is more than the 2 batches of an epoch"),
    "limit": ({"limit_train_batches": 0.3}, batches, "limit_train_batches=0.3 of 2 batches is less than one"),
    "reload": ({"reload_dataloaders_every_n_epochs": 1}, batches, "but loaders were given to fit"),
}


@pytest.mark.parametrize("case", LOADERS)
def test_training_data_that_ranks_would_refuse_is_refused_before(case: str) -> None:
    options, loader, message = LOADERS[case]
    with pytest.raises(ValueError, match=message):
        trainer("ddp", **options).fit(Net(layers(2)), loader(), batches())


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp", "tensor", "pipeline", "ddp=1,pipeline=2", LocalSGD(learners=4), ParameterServer(workers=4)],
)
def test_what_ranks_take_starts_them_and_is_left_as_it_was(strategy: Any) -> None:
    run = trainer(strategy)
    kept, model = dict(vars(run.strategy)), Net(layers(2))
    modules, streams = [*model.modules()], torch.get_rng_state()
    with pytest.raises(Started):
        run.fit(model, batches(shuffle=True), batches())
    with pytest.raises(Started):
        run.fit(model, DataLoader(Numbers(), batch_size=4))
    assert vars(run.strategy) == kept
    assert [*model.modules()] == modules and torch.equal(torch.get_rng_state(), streams)


class BuildsLater(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8)))

    def configure_model(self) -> None:
        self.net.append(nn.Linear(8, 8))


class SetsUp(Net):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(8, 8)))

    def setup(self, stage: str) -> None:
        self.net.append(nn.Linear(8, 8))


class Appends(Callback):
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.net.append(nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("model", "callbacks"),
    [
        (BuildsLater, []),
        (SetsUp, []),
        (lambda: Net(layers(1)), [Appends()]),
        (lambda: Net(layers(2), backbone=nn.Linear(8, 8)), [BackboneFinetuning(backbone="backbone")]),
    ],
    ids=["configure_model", "setup", "a callback's setup", "a callback that freezes"],
)
def test_a_model_that_hooks_will_change_is_left_to_the_ranks(model: Any, callbacks: list[Callback]) -> None:
    with pytest.raises(Started):
        trainer("pipeline", callbacks=callbacks).fit(model(), batches())


def test_data_that_a_method_loads_is_left_to_the_ranks() -> None:
    class Loads(Net):
        def train_dataloader(self) -> Any:
            raise AssertionError("a rank was to call it")

    with pytest.raises(Started):
        trainer("ddp").fit(Loads(layers(1)))
