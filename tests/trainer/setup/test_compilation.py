"""`compile=`: which parts are compiled, that numbers and names stay, and what is refused. The backends here compile
fast or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from examples.gpt import GPT, VOCABULARY
from lockstep import Module
from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    MeshParallel,
    ModelParallel,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from lockstep.trainer.setup.compilation import Compiled
from tests.trainer.run.test_guards import Brittle, far, marked_data
from tests.trainer.toy import loader, net, quiet

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # torch warns of itself while it compiles, and fails where that is an error

STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "single": (SingleDevice, 1),
    "single, recomputed": (lambda: SingleDevice(activation_checkpointing=True), 1),
    "dp": (DataParallel, 2),
    "model": (ModelParallel, 2),
    "ddp": (DDP, 2),
    "fsdp": (FSDP, 2),
    "fsdp, recomputed": (lambda: FSDP(activation_checkpointing=True), 2),
    "tensor": (TensorParallel, 2),
    "tensor, recomputed": (lambda: TensorParallel(activation_checkpointing=True), 2),
    "fsdp=2,tensor=2": (lambda: MeshParallel("fsdp=2,tensor=2"), 4),
    "pipeline": (Pipeline, 2),
    "deepspeed 2": (DeepSpeed, 2),
}
FAST = ("single", "single, recomputed", "dp", "model", "ddp", "pipeline")  # a test below compiles blocks under tensor

graphs: list[Any] = []


def counting(graph: Any, inputs: Any) -> Any:
    """A backend of torch.compile that notes what it gets and runs it as it is."""
    graphs.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def forget() -> Any:
    graphs.clear()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(make: Callable[[], Strategy], devices: int, precision: str, **options: Any) -> Brittle:
    module = Brittle()
    quiet(strategy=make(), devices=devices, split_batches=True, precision=precision, **options).fit(
        module, marked_data()
    )
    return module


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in STRATEGIES]
)
def test_numbers_and_names_are_those_of_the_plain_module(name: str) -> None:
    make, devices = STRATEGIES[name]
    precision = "32-true" if "deepspeed" in name else "64-true"
    plain = trained(make, devices, precision)
    compiled = trained(make, devices, precision, compile={"backend": "aot_eager"})
    assert far(compiled, [p.detach() for p in plain.parameters()]) < (1e-11 if precision == "64-true" else 1e-5)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in compiled.modules()] == [
        type(m) for m in Brittle().modules()
    ]  # it is the caller's plain module again


def test_repeated_blocks_share_one_compilation() -> None:
    trained(SingleDevice, 1, "32-true", compile={"backend": counting})
    assert len(graphs) == 1  # four blocks of one class
    trained(lambda: SingleDevice(activation_checkpointing=True), 1, "32-true", compile={"backend": counting})
    assert len(graphs) == 2  # what is recomputed is compiled, too


class Counted(Brittle):
    """Logs how many graphs torch has taken on rank 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("graphs", float(len(graphs)), reduce_fx="max")
        return loss


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("make", [FSDP, pytest.param(TensorParallel, marks=pytest.mark.slow)])
def test_repeated_blocks_share_one_compilation_where_layers_are_cut(make: Callable[[], Strategy]) -> None:
    trainer = quiet(strategy=make(), devices=2, split_batches=True, compile={"backend": counting})
    trainer.fit(Counted(), marked_data())
    assert trainer.callback_metrics["graphs"] == 1


class Text(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(width=64, depth=2, head_width=16, context=32)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.slow
@pytest.mark.ranks
def test_batches_of_several_sizes_where_layers_are_cut() -> None:
    """On torch 2.13 a graph for all sizes ends in a RecursionError there."""
    tokens: Any = torch.randint(VOCABULARY, (30, 33), generator=torch.Generator().manual_seed(0))

    def trained_on(**options: Any) -> Text:
        module = Text()
        strategy = TensorParallel(loss_parallel=True)
        quiet(strategy=strategy, devices=2, precision="64-true", **options).fit(
            module, DataLoader(tokens, 8), DataLoader(tokens, 7)
        )
        return module

    plain = trained_on()
    assert far(trained_on(compile={"backend": "aot_eager"}), [p.detach() for p in plain.parameters()]) < 1e-11


def test_a_second_fit_takes_what_the_first_has_compiled() -> None:
    for _ in range(10):  # torch would give up after eight
        trained(SingleDevice, 1, "32-true", compile={"backend": counting})
        assert len(graphs) == 1


class Widths(nn.Module):
    """Blocks of one class and eleven shapes, trained and evaluated: more than the eight graphs that torch makes of a
    piece of code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1)) for width in range(3, 14)
        )


@pytest.mark.long
def test_blocks_of_many_shapes_are_all_compiled() -> None:
    runs = 0

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal runs
            runs += 1
            return graph.forward(*args)

        return run

    module = Widths()
    compiled = Compiled(module, {"backend": backend})
    for train in (False, True, True):
        module.train(train)
        with torch.set_grad_enabled(train):
            for width, block in enumerate(module.blocks, 3):
                block(torch.ones(2, width))
    assert runs == 3 * 11
    compiled.undo()
    assert {type(block) for block in module.blocks} == {nn.Sequential}


def test_a_module_without_blocks_is_compiled_by_its_children() -> None:
    module = net()
    compiled = Compiled(module, {"backend": counting})
    assert compiled.regions == [module.net]
    module(torch.zeros(2, 8))
    assert len(graphs) == 1
    compiled.undo()
    module(torch.zeros(3, 8))
    assert len(graphs) == 1


def test_items_of_lists_are_compiled_and_not_the_list() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
            self.loss = nn.MSELoss()

    module = Two()
    assert Compiled(module, {"backend": counting}).regions == list(module.towers.values())


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("make", "devices"), [(SingleDevice, 1), (FSDP, 2), (TensorParallel, 2)])
def test_the_default_backend_compiles(make: Callable[[], Strategy], devices: int) -> None:
    plain, compiled = trained(make, devices, "32-true"), trained(make, devices, "32-true", compile=True)
    assert far(compiled, [p.detach() for p in plain.parameters()]) < 1e-4


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"compile": "yes"},
            TypeError,
            "compile must be True, False or a dict of arguments of torch.compile, but compile='yes'",
        ),
        (
            {"compile": {"speed": "max"}},
            ValueError,
            "compile takes backend, dynamic, fullgraph, mode, options, as torch.compile does, but compile has speed",
        ),
        (
            {"compile": {"dynamic": True}, "strategy": "ddp=2,tensor=2", "devices": 4},
            ValueError,
            "compile must not set dynamic under strategy MeshParallel, but compile={'dynamic': True}",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet(**given)


def test_a_failed_fit_leaves_a_plain_module() -> None:
    module = net()
    with pytest.raises(RuntimeError):
        quiet(compile={"backend": counting}).fit(
            module, loader(8, collate_fn=lambda samples: (torch.zeros(2, 99), torch.zeros(2, dtype=torch.long)))
        )
    assert type(module.net) is nn.Sequential
