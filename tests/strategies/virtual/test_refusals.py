"""What would depend on the number of ranks is refused by name, before a parameter has changed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lockstep import CheckpointError, Module, Trainer
from lockstep.strategies import DDP, FSDP, Pipeline


class Toy(Module):
    """What `step` does besides computing a loss is up to the test."""

    def __init__(self, step: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.step, self.count, self.center = step, 0, torch.zeros(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        if self.step is not None:
            self.step(self, x)
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Halving(DDP):
    """A strategy of the user's, with a rule of its own for gradients."""

    def finish_gradients(self, wrapped: nn.Module) -> None:
        super().finish_gradients(wrapped)
        for parameter in wrapped.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def fit(module: Module, loader: Any = None, **options: Any) -> Trainer:
    settings = {"strategy": "single", "devices": 1, "virtual_ranks": 2, "max_epochs": 1, "logger": False} | options
    trainer = Trainer(**settings, enable_progress_bar=False, enable_checkpointing=False, accelerator="cpu")
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(8, 3)), 2) if loader is None else loader)
    return trainer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 6}, "virtual_ranks must be a power of two.* use 4 or 8"),
        ({"virtual_ranks": 0}, "virtual_ranks must be a whole number of at least 1"),
        ({"strategy": "ddp", "devices": 3, "virtual_ranks": 4}, "does not spread over 3 ranks; use 1, 2 or 4"),
        ({"strategy": "tensor", "devices": 2}, "cannot be used with the axis tensor"),
        ({"strategy": "fsdp=2,tensor=2", "devices": 4}, "cannot be used with the axis tensor"),
        ({"strategy": "ddp=4,pipeline=2", "devices": 8}, "does not spread over 4 pipelines; use 1 or 2"),
        ({"strategy": Pipeline(schedule="looped_bfs"), "devices": 2}, "schedule='looped_bfs' is not; use '1f1b'"),
        ({"strategy": Pipeline(num_micro_batches=2), "devices": 2}, "are the shares, but num_micro_batches=2"),
        ({"strategy": "fsdp=2,pipeline=2", "devices": 4}, "the axis fsdp of a pipeline"),
        ({"strategy": "pipeline", "devices": 2, "compile": True}, "compile=True builds a graph for each layer"),
        ({"strategy": "deepspeed", "devices": 2}, "DeepSpeed cannot"),
        ({"strategy": "dp", "devices": 2}, "DataParallel cannot"),
        ({"strategy": "model", "devices": 2}, "cannot"),
        ({"strategy": DDP(broadcast_buffers=False), "devices": 2}, "cannot be used with broadcast_buffers=False"),
        ({"strategy": FSDP(find_unused_parameters=True), "devices": 2}, "find_unused_parameters=True"),
        ({"strategy": FSDP(sync_every_micro_batch=True), "devices": 2}, "sync_every_micro_batch=True"),
        ({"devices": 2, "strategy": "single"}, "strategy='single' runs on one device, but devices=2"),
        ({"strategy": Halving(), "devices": 2}, "without what Halving adds to it; give strategy=DDP"),
        ({"precision": "16-mixed"}, "precision='16-mixed' scales losses"),
        ({"strategy": "fsdp", "devices": 2, "compile": True}, "compile=True"),
    ],
)
def test_layouts_and_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(**({"devices": 1, "virtual_ranks": 2, "accelerator": "cpu"} | options))


def count(module: Any, x: torch.Tensor) -> None:
    module.count += 1


def center(module: Any, x: torch.Tensor) -> None:
    module.center = 0.9 * module.center + 0.1 * x.mean()


def move(module: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.layer.weight.mul_(0.9)


def write(module: Any, x: torch.Tensor) -> None:
    module.layer.weight.detach().numpy()[...] *= 0.9


def meet(module: Any, x: torch.Tensor) -> None:
    module.all_gather(x)


def wait(module: Any, x: torch.Tensor) -> None:
    module.trainer.strategy.barrier()


def freeze(module: Any, x: torch.Tensor) -> None:
    module.layer.bias.requires_grad_(False)


def set_mode(module: Any, x: torch.Tensor) -> None:
    module.layer.eval()


def widen(module: Any, x: torch.Tensor) -> None:
    module.layer.out_features += 1


def rename(module: Any, x: torch.Tensor) -> None:
    module.layer.note = f"{x.mean()}"


def step_back(module: Any, x: torch.Tensor) -> None:
    module.layer(x).sum().backward()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (freeze, "training_step changed the parameters layer.bias or their requires_grad"),
        (set_mode, "training_step changed layer.training"),
        (widen, "training_step changed layer.out_features"),
        (rename, "training_step changed layer.note"),
        (step_back, "backward"),
        (count, "training_step changed count"),
        (center, "training_step changed center"),
        (move, "training_step changed the parameters layer.weight"),
        (write, "training_step changed the parameters layer.weight"),
        (meet, "all_gather was called within a share of virtual_ranks=2"),
        (wait, "barrier was called within a share of virtual_ranks=2"),
    ],
)
def test_steps_that_depend_on_the_shares_of_a_rank(step: Any, message: str) -> None:
    module = Toy(step)
    before = module.layer.bias.detach().clone()
    with pytest.raises(RuntimeError, match=message):
        fit(module)
    assert torch.equal(module.layer.bias, before)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def measure(module: Any, x: torch.Tensor) -> None:
    module.kept["mean"].update(x.mean())


def read(module: Any, x: torch.Tensor) -> None:
    next(module.kept)


def count_in_slots(module: Any, x: torch.Tensor) -> None:
    module.kept.count += 1


def note_on_trainer(module: Any, x: torch.Tensor) -> None:
    module.trainer.mine = getattr(module.trainer, "mine", 0) + 1


def note_on_optimizer(module: Any, x: torch.Tensor) -> None:
    module.optimizers().mine = getattr(module.optimizers(), "mine", 0) + 1


def set_buffer(module: Any, x: torch.Tensor) -> None:
    module.register_buffer("mean", x.mean())


def fill_cache(module: Any, x: torch.Tensor) -> None:
    if not hasattr(module, "mask"):
        module.register_buffer("mask", torch.ones(1), persistent=False)


@pytest.mark.parametrize(
    ("kept", "step", "message"),
    [
        (lambda: {"mean": torchmetrics.MeanMetric()}, measure, "training_step changed kept"),
        (itertools.count, read, "training_step changed kept"),
        (lambda: iter(range(99)), read, "training_step changed kept"),
        (lambda: (number for number in range(99)), read, "training_step changed kept"),
        (lambda: iter(DataLoader(TensorDataset(torch.ones(99)))), read, "training_step changed kept"),
        (Slots, count_in_slots, "training_step changed kept"),
        (lambda: None, note_on_trainer, "training_step changed Trainer.mine"),
        (lambda: None, note_on_optimizer, "training_step changed AutomaticOptimizer.mine"),
        (lambda: None, set_buffer, "training_step set the buffer mean, which there was not"),
    ],
)
def test_steps_that_keep_what_the_shares_of_a_rank_have_in_common(kept: Any, step: Any, message: str) -> None:
    module = Toy(step)
    module.kept = kept()
    with pytest.raises(RuntimeError, match=message):
        fit(module)


def test_a_cache_may_be_filled() -> None:
    fit(Toy(fill_cache))


class Damps(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for state in self.optimizers().state.values():
            state["momentum_buffer"].mul_(0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_optimizer_state_that_a_hook_of_each_share_would_change_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a hook of a batch changed the state of an optimizer"):
        fit(Damps())


class CountsInAHook(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count = batch_idx + 1


def test_what_a_hook_of_a_batch_sets_is_not_put_down_to_the_step_alone() -> None:
    with pytest.raises(RuntimeError, match="changed count, which would .* a rank runs, or a hook of a batch did; use"):
        fit(CountsInAHook())


class SetsALayerAtTheEnd(Toy):
    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act(self, batch[0])


@pytest.mark.parametrize(("act", "name"), [(set_mode, "training"), (widen, "out_features")])
def test_what_the_end_of_a_batch_sets_of_a_layer_is_refused(act: Any, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"on_train_batch_end changed layer.{name}"):
        fit(SetsALayerAtTheEnd(act))


class SavesInAHook(Toy):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / f"{self.global_step}")


@pytest.mark.ranks
def test_a_save_in_a_hook_of_a_batch_changes_nothing(tmp_path: Path) -> None:
    fit(SavesInAHook(), strategy="ddp", devices=2, virtual_ranks=4, default_root_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_manual_optimization() -> None:
    module = Toy()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="virtual_ranks adds the gradients of shares itself"):
        fit(module)


class Embedded(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(self.table(batch[0][:, 0].long())).mean()


def test_sparse_gradients() -> None:
    with pytest.raises(ValueError, match="add dense gradients"):
        fit(Embedded())


class Closing(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def test_optimizers_that_call_their_closure() -> None:
    with pytest.raises(ValueError, match="an optimizer that calls its closure again is refused"):
        fit(Closing())


class Sharded(IterableDataset):
    shards_itself = True

    def __iter__(self) -> Any:
        return iter(torch.ones(8, 3))


def test_loaders_whose_samples_depend_on_the_ranks() -> None:
    with pytest.raises(ValueError, match="Sharded, which shards itself"):
        fit(Toy(), DataLoader(Sharded(), 2))
    both = [DataLoader(torch.ones(8, 3), 2), DataLoader(torch.ones(8, 3), 2)]
    with pytest.raises(ValueError, match="several loaders"):
        fit(Toy(), both)


def test_a_run_cannot_change_its_virtual_ranks(tmp_path: Any) -> None:
    trainer = fit(Toy())
    trainer.save_checkpoint(tmp_path / "saved")
    for other, wanted in ((4, "give virtual_ranks=2"), (None, "give virtual_ranks=2")):
        again = Trainer(virtual_ranks=other, max_epochs=2, logger=False, devices=1, accelerator="cpu")
        with pytest.raises(CheckpointError, match=wanted):
            again.fit(Toy(), DataLoader(TensorDataset(torch.ones(8, 3)), 2), ckpt_path=tmp_path / "saved")


def test_the_number_of_threads_follows_the_shares_and_comes_back() -> None:
    """The order of a sum on CPU follows the number of threads, which is another on each number of ranks."""

    def log(module: Any, x: torch.Tensor) -> None:
        module.log("threads", float(torch.get_num_threads()))

    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        seen = [fit(Toy(log), virtual_ranks=n).callback_metrics["threads"] for n in (1, 4)]
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    cores = os.cpu_count() or 1
    assert seen == [cores, max(1, cores // 4)]


def reduce(module: Any, x: torch.Tensor) -> None:
    torch.distributed.all_reduce(x.clone())


class Moving(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.layer.weight.add_(0.1 * torch.randn(1, 3))


@pytest.mark.ranks
def test_what_only_several_ranks_can_do() -> None:
    with pytest.raises(RuntimeError, match=r"changed the parameters layer\.weight"):
        fit(Moving(), strategy="ddp", devices=2)
    with pytest.raises(RuntimeError, match=r"training_step called a collective of torch\.distributed"):
        fit(Toy(reduce), strategy="ddp", devices=2)


def test_batch_norms_over_ranks() -> None:
    module = Toy()
    module.norm = nn.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="norm is a SyncBatchNorm"):
        fit(module)


class CountsCalls(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x * self.calls)


class Counted(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(nn.Sequential(CountsCalls(3, 3), nn.ReLU()) for _ in range(2)))


@pytest.mark.ranks
def test_a_layer_that_counts_in_a_block_is_refused_where_fsdp_has_changed_its_class() -> None:
    with pytest.raises(RuntimeError, match=r"changed layer\.0\.0\.calls, layer\.1\.0\.calls, which would depend"):
        fit(Counted(), strategy=FSDP(wrap=CountsCalls), devices=2, virtual_ranks=4)


def adding(hook: str, **options: Any) -> Toy:
    """Logs a sum in a hook."""

    def add(self: Module, *_: Any) -> None:
        self.log("sum", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, **options)

    return type("Adds", (Toy,), {hook: add})()


@pytest.mark.parametrize(
    "hook", ["on_after_backward", "on_before_optimizer_step", "on_before_zero_grad", "on_train_epoch_end"]
)
def test_a_sum_to_which_each_rank_would_add_is_refused(hook: str) -> None:
    with pytest.raises(ValueError, match=r"self\.log\('sum', reduce_fx='sum'\) was called where a rank has all"):
        fit(adding(hook))


@pytest.mark.parametrize(
    ("hook", "options", "expected"),
    [
        ("on_train_batch_start", {}, 4),
        ("on_train_batch_end", {}, 4),
        ("on_train_epoch_end", {"rank_zero_only": True}, 1),
    ],
)
def test_a_sum_over_shares_or_on_one_rank_does_not_count_ranks(
    hook: str, options: dict[str, Any], expected: int
) -> None:
    assert fit(adding(hook, **options)).callback_metrics["sum"] == expected


@pytest.mark.parametrize(
    "bank",
    [{i: torch.ones(1) for i in range(100)}, [torch.ones(1) for _ in range(100)], {i: {"n": 1.0} for i in range(100)}],
    ids=["tensors in a dict", "tensors in a list", "dicts in a dict"],
)
def test_what_a_large_container_holds_is_read(bank: Any) -> None:
    def add(module: Any, x: torch.Tensor) -> None:
        if isinstance(module.bank[10], dict):
            module.bank[10]["n"] += 1
        else:
            held = module.bank[70]
            held += 1

    toy = Toy(add)
    toy.bank = bank
    with pytest.raises(RuntimeError, match=r"training_step changed bank, which would depend"):
        fit(toy)


class Ratio(torchmetrics.Metric):
    """Counts beside its states."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.n = 0

    def update(self, x: torch.Tensor) -> None:
        self.total += x.sum()
        self.n += len(x)

    def compute(self) -> Any:
        return self.total / self.n


def test_a_metric_that_counts_beside_its_states_is_refused() -> None:
    toy = Toy(lambda module, x: module.ratio.update(x))
    toy.ratio = Ratio()
    with pytest.raises(ValueError, match=r"ratio \(Ratio\) counts in n, which is not one of its states"):
        fit(toy)


def add_up(module: Any, x: torch.Tensor) -> None:
    module.collection(x)
    module.log_dict(module.collection, on_step=False, on_epoch=True)


def test_what_the_model_and_libraries_hold_is_not_the_users(tmp_path: Path) -> None:
    """Its own tensors in a long list, a method without a module, and what a collection of metrics notes."""
    toy = Toy(add_up)
    toy.layer = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(40)), nn.Linear(3, 1))
    toy.own = [*toy.layer.parameters(), *toy.layer.buffers()]
    toy.traced = torch.fx.symbolic_trace(nn.Linear(3, 1)).forward
    toy.collection = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "max": torchmetrics.MaxMetric()})
    fit(toy)
    assert toy.layer[0].num_batches_tracked
