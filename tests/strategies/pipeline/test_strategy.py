"""Pipeline: any module in stages, the user's step unchanged, the numbers of one process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import Pipeline, SingleDevice, Strategy
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.strategies import contract, gpus
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.strategies.pipeline.models import Model, data, train
from tests.trainer.toy import Net, distance, loader, net, quiet, weights

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def alone() -> tuple[Model, dict[str, float], torch.Tensor]:
    """Module, metrics and predictions of one process."""
    module, trainer = train("single", 1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module, metrics, torch.cat(trainer.predict(module, data()))


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("looped_bfs", "interleaved_1f1b")),
        "interleaved_zero_bubble",
        "dualpipev",
    ],
)
def test_every_schedule_gives_the_gradients_of_one_process(name: str, tmp_path: Path) -> None:
    """gpipe, 1f1b and zbv run in the contract suite; here batches of 5 and 3 samples make parts of two sizes, too few
    for some schedules."""
    plan = Plan(num_samples=26, global_batch=10, accumulate=2, clip=0.1)
    found = contract.run(Pipeline(schedule=name), 2, plan, tmp_path / "end")
    model, expected = reference(plan)
    assert difference(saved_weights(tmp_path / "end"), model) < 1e-11
    assert found["counts"] == pytest.approx(expected["counts"]) and found["norms"] == pytest.approx(
        expected["norms"], rel=1e-9
    )


def test_steps_without_loss_have_no_weight(tmp_path: Path) -> None:
    plan = Plan(step="sometimes_step", accumulate=3, global_batch=12, num_samples=36, epochs=1)
    contract.run(Pipeline(), 2, plan, tmp_path / "pipeline")
    contract.run(SingleDevice(), 1, plan, tmp_path / "single")
    one, other = saved_weights(tmp_path / "pipeline"), saved_weights(tmp_path / "single")
    assert max((one[name] - other[name]).abs().max().item() for name in other) < 1e-11


@pytest.mark.parametrize(
    ("make", "devices", "model"),
    [
        pytest.param(Pipeline, 2, {"checkpointed": True}, marks=pytest.mark.slow),
        pytest.param(
            lambda: Pipeline(schedule="gpipe", num_micro_batches=3, split=["blocks.1"]), 2, {}, marks=pytest.mark.slow
        ),
        pytest.param(lambda: Pipeline(schedule="zbv"), 2, {}, marks=pytest.mark.slow),
        pytest.param(
            lambda: Pipeline(schedule="interleaved_1f1b", module="inner.net"),
            2,
            {"checkpointed": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1f1b", "gpipe", "zbv", "interleaved"],
)
def test_a_module_with_a_forward_of_its_own(
    make: Callable[[], Pipeline],
    devices: int,
    model: dict[str, Any],
    alone: tuple[Model, dict[str, float], torch.Tensor],
) -> None:
    module, trainer = train(make(), devices, model=model)
    expected, metrics, predictions = alone
    assert distance(weights(module), weights(expected)) < 1e-12
    assert (
        trainer.callback_metrics.keys()
        == metrics.keys()
        >= {"before", "loss_step", "loss_epoch", "samples", "hook", "val", "outside of a step"}
    )
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == pytest.approx(metrics, rel=1e-11)
    assert float(trainer.callback_metrics["samples"]) == float(trainer.callback_metrics["before"]) == 22.0
    assert module.calls == expected.calls == 6, "a buffer outside of the pipelined module, changed in a hook"
    assert set(vars(module.inner["net"])) == set(vars(expected.inner["net"])), "the module is plain again"
    assert torch.cat(trainer.predict(module, data())).allclose(predictions, rtol=1e-11)


@pytest.mark.long
def test_checkpoints_go_to_one_process_and_back(tmp_path: Path) -> None:
    """With several parameter groups, a scheduler, and layers that `configure_optimizers` names."""
    expected = weights(train("single", 1)[0])
    train(
        Pipeline(), 2, save_to=tmp_path / "pipeline", max_epochs=1, log_every_n_steps=50
    )  # ranks have logged different names for long
    train("single", 1, save_to=tmp_path / "single", max_epochs=1)
    assert distance(weights(train("single", 1, ckpt_path=tmp_path / "pipeline")[0]), expected) < 1e-12
    assert distance(weights(train(Pipeline(schedule="zbv"), 2, ckpt_path=tmp_path / "single")[0]), expected) < 1e-12
    one, other = (Checkpoint.open(tmp_path / name) for name in ("pipeline", "single"))
    assert one.names("model/") == other.names("model/") and one.names("optimizer/") == other.names("optimizer/")
    assert one.meta["optimizers"]["0"]["param_groups"] == other.meta["optimizers"]["0"]["param_groups"]


def test_a_checkpointed_block_is_recomputed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a schedule computes gradients of inputs and of weights apart, each would recompute it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.run, x, use_reentrant=False)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, FakeTensor):  # the shapes of stages are inferred
                calls.append(x)
            return self.layers(x)

    def trained(strategy: Strategy | str) -> nn.Module:
        torch.manual_seed(1)
        calls.clear()
        module = Net()
        module.net = nn.Sequential(nn.Linear(8, 8), Block(), Block(), Block(), nn.Linear(8, 3))
        quiet(strategy=strategy, devices=1, accelerator="cpu", precision="64-true").fit(module, loader(32, 8))
        return module

    calls: list[torch.Tensor] = []
    monkeypatch.setenv("LOCKSTEP_FORCE_MESH", "1")
    expected = trained("single")
    found = trained(Pipeline(schedule="zbv", num_micro_batches=2))
    assert distance(weights(found), weights(expected)) < 1e-12
    assert len(calls) == 3 * 4 * 2 * 2, "blocks, steps, micro-batches, forward and backward"


def test_single_precision_agrees_at_every_step() -> None:
    one, other = Losses(), Losses()
    for strategy, devices, losses in (("single", 1, one), ("pipeline", 2, other)):
        quiet(strategy=strategy, devices=devices, max_epochs=2, log_every_n_steps=1, seed=1, callbacks=losses).fit(
            net(), loader(shuffle=True)
        )
    assert len(one.seen) == 14 and other.seen == pytest.approx(one.seen, rel=1e-5)


class Losses(Callback):
    """The loss of every step, as rank 0 shows it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(trainer.callback_metrics["train/loss_step"]))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def held(options: dict[str, Any]) -> list[list[float]]:
    """Of each rank, after two steps: elements of parameters, gradients and optimizer state, and bytes sent on in a
    step."""
    strategy = Pipeline(**options)
    strategy.configure(devices=2, accelerator="cpu")
    strategy.setup()
    try:
        model = contract.build()
        wrapped = strategy.setup_module(model)
        (optimizer,) = strategy.setup_optimizers(wrapped, {"main": torch.optim.AdamW(model.parameters())}).values()
        for window in list(strategy.shard_loader(DataLoader(contract.dataset(32), 16), seed=0).windows(0)):
            strategy.forward_backward(wrapped, model.step, window)
            strategy.optimizer_step(wrapped, optimizer)
        parameters = sum(p.numel() for p in wrapped.parameters())
        gradients = sum(p.grad.numel() for p in wrapped.parameters() if p.grad is not None)
        entries = optimizer.state.held.values()  # type: ignore[attr-defined]
        state = sum(value.numel() for entry in entries for value in entry.values() if value.dim())
        (layout,) = wrapped.inference.known.values()  # type: ignore[union-attr,operator]
        sent = sum(message.num_bytes for message in layout.messages) * strategy.num_parts
        return strategy.all_gather(torch.tensor([parameters, gradients, state, sent])).tolist()
    finally:
        strategy.teardown()


def test_a_rank_holds_its_layers_and_sends_activations(run_ranks: Callable[..., Any]) -> None:
    whole = sum(p.numel() for p in contract.build().parameters())
    rows = run_ranks(held, 2, {"num_micro_batches": 4})
    for parameters, gradients, state, sent in rows:
        assert parameters == gradients == state / 2 < 0.6 * whole
        assert sent == 16 * 8 * 4, (
            "the batch's samples x width x bytes of a float at one cut, however many parts it is cut into"
        )
    assert sum(row[0] for row in rows) == whole


COMPUTED: list[weakref.ref[torch.Tensor]] = []
"""On a rank, what forwards of `Local` have computed."""


class Local(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        COMPUTED.append(weakref.ref(hidden))
        return self.second(hidden)


class Frees(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = Local()

    def on_train_start(self) -> None:
        gc.disable()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        alive = [ref for ref in COMPUTED if ref() is not None]
        assert COMPUTED and not alive, f"{len(alive)} activations are held by garbage"


def test_what_the_forward_computed_is_freed_without_the_collector() -> None:
    """A stage leaves the user's forward by an exception, whose traceback holds its frames."""
    quiet(strategy="pipeline", devices=2, max_steps=3).fit(Frees(), loader())


@pytest.mark.long
def test_a_mesh_by_name_trains_like_one_process(alone: tuple[Model, dict[str, float], torch.Tensor]) -> None:
    """Uneven shares, parameters beside layers, and weights that are whole again in the end."""
    module, trainer = train("fsdp=2,pipeline=2", 4, split_batches=True, model={"checkpointed": True})
    expected, metrics, _ = alone
    assert distance(weights(module), weights(expected)) < 1e-12
    assert all(type(p) is nn.Parameter for p in module.parameters())
    for name in ("loss_epoch", "samples", "val", "outside of a step"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(metrics[name], rel=1e-11), name


def test_a_mesh_that_has_no_pipeline_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the mesh of a pipeline has the axes pipeline, ddp and fsdp, but mesh='ddp=2,tensor=2'"
    ):
        Pipeline(mesh="ddp=2,tensor=2")
    with pytest.raises(ValueError, match="3"):
        Pipeline(mesh="ddp=2,pipeline=2").configure(devices=3, accelerator="cpu")


@pytest.fixture
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with gpus.shared_by(2, monkeypatch):
        yield


@pytest.mark.gpu
@pytest.mark.timeout(150, func_only=True)
@pytest.mark.usefixtures("_two_gpus")
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_two_gpus_agree_with_the_cpu(name: str, alone: tuple[Model, dict[str, float], torch.Tensor]) -> None:
    module, _ = train(Pipeline(schedule=name), 2, accelerator="gpu")
    assert distance([weight.cpu() for weight in weights(module)], weights(alone[0])) < 1e-9
