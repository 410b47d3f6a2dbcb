"""Learners that are sharded over islands of ranks: the numbers of learners on one rank, and no message between them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lockstep import Loss, Module, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.strategies import DDP, FSDP, DiLoCo, LocalSGD, Strategy
from lockstep.strategies.methods import outer
from lockstep.strategies.registry import as_class, build
from tests.strategies.methods.test_local_updates import CallsInStep, CountsCalls, Logs, fit
from tests.strategies.methods.toys import Regression, data, difference, train
from tests.strategies.optimizers.test_probe import Rule, by_distance

ADAMW = partial(AdamW, lr=1e-2)
MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, nesterov=True)
EIGHT: dict[str, Any] = {"learners": 2, "period": 8, "fragments": 8, "delay": 2}
RESET: dict[str, Any] = {"learners": 2, "period": 2}
HARD = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "batch_size": 11, "max_steps": 11}
"""Accumulation, clipping, and tails that learners and ranks share unevenly."""


@pytest.mark.ranks
def test_an_island_is_a_learner_of_one_rank() -> None:
    options: dict[str, Any] = {"period": 4, "fragments": 2, "delay": 1, "learners": 2}
    expected = train(DiLoCo(**options), ADAMW, **HARD)
    found = train(DiLoCo(**options, inner="fsdp=2"), ADAMW, devices=4, **HARD)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "alone"),
    [
        ("local_sgd=2,fsdp=2", LocalSGD(learners=2)),
        ("fsdp=2,diloco=2", DiLoCo(learners=2)),
        (DiLoCo(learners=2, period=4, inner="ddp=2"), DiLoCo(learners=2, period=4)),
        (DiLoCo(learners=2, period=4, inner=FSDP(cpu_offload=True)), DiLoCo(learners=2, period=4)),
        (DiLoCo(**EIGHT, compress="topk=1.0", inner="fsdp"), DiLoCo(**EIGHT)),  # the last has one weight, on one rank
        (LocalSGD(learners=2, period=2, start=3, inner="fsdp"), LocalSGD(learners=2, period=2, start=3)),
        (LocalSGD(**RESET, compress="topk=1.0", inner="fsdp"), LocalSGD(**RESET)),
        (LocalSGD(**RESET, compress="topk=0.2", inner="ddp"), LocalSGD(**RESET, compress="topk=0.2")),
        (DiLoCo(learners=1, period=4, inner="fsdp"), DiLoCo(learners=1, period=4)),
        (DiLoCo(period=4, learners=4, inner="fsdp"), DiLoCo(learners=4, period=4)),
    ],
    ids=["local_sgd", "diloco", "ddp", "offload", "compressed", "post-local", "reset", "unsent", "one", "of one rank"],
)
def test_every_kind_of_island_is_a_learner_of_one_rank(strategy: Any, alone: Strategy) -> None:
    expected, found = train(alone, ADAMW, **HARD), train(strategy, ADAMW, devices=4, **HARD)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "make", "options"),
    [
        (LocalSGD(learners=2, period=1, inner="fsdp=2"), MOMENTUM, HARD | {"max_steps": 50}),
        (
            DiLoCo(learners=2, period=1, outer=partial(SGD, lr=1.0), inner="fsdp=2"),
            partial(SGD, lr=0.05),
            {"accumulate_grad_batches": 2, "max_steps": 50},
        ),
    ],
    ids=["local_sgd", "diloco"],
)
def test_a_period_of_one_is_synchronous_training(strategy: Strategy, make: Any, options: dict[str, Any]) -> None:
    expected, found = train("ddp", make, devices=1, **options), train(strategy, make, devices=4, **options)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


class Measured(Regression):
    """Its losses use the statistics that BatchNorm keeps, and a mean that its steps write."""

    def __init__(self, norm: bool) -> None:
        super().__init__(ADAMW)
        self.norm = nn.BatchNorm1d(4).double()
        self.register_buffer("center", torch.zeros(4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weight = batch
        self.center.lerp_(x.mean(0), 0.1)
        far = (self.norm(x) * self.norm.running_mean.clone() - self.center).square().mean()
        return ((self.net(x) - y).square() * weight).mean() + far

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.norm(batch[0]).square().mean())


@pytest.mark.ranks
def test_buffers_of_islands_are_their_own_within_a_round(tmp_path: Path) -> None:
    options: dict[str, Any] = {"learners": 2, "period": 4}
    strategies = DiLoCo(**options), DiLoCo(**options, inner=FSDP(cpu_offload=True))
    alone, islands = (run(each, 2, tmp_path / str(i), make=Measured)[0] for i, each in enumerate(strategies))
    assert difference(islands, alone) <= 1e-12


class Wide(Regression):
    """Layers that a tensor axis can shard, frozen weights, and a learner whose losses count nothing in some steps."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__(ADAMW)
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        self.net[2].requires_grad_(False)
        self.norm = nn.BatchNorm1d(4).double() if norm else nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, weight = batch
        if self.trainer.strategy.topology.rank >= self.trainer.world_size // 2 and batch_idx % 3 == 1:
            weight = weight * 0
        loss = Loss(((self.net(self.norm(x)) - y).square() * weight).sum(), weight.sum())
        self.log("loss", loss.total)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.net(self.norm(batch[0])) - batch[1]).square().mean())


def run(strategy: Any, shares: int, folder: Path, start: Path | None = None, **options: Any) -> tuple[Any, ...]:
    """State of the model and the last validation loss of a run, which validates in mid-round."""
    devices, norm, make = options.pop("devices", shares), options.pop("norm", False), options.pop("make", Wide)
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=7, save_top_k=-1)
    trainer = Trainer(
        strategy=strategy, devices=devices, logger=False, seed=1, accelerator="cpu", precision="64-true",
        enable_progress_bar=False, num_sanity_val_steps=0, default_root_dir=folder, callbacks=[saver],
        val_check_interval=5, check_val_every_n_epoch=None, gradient_clip_val=0.5, **{"max_steps": 14} | options,
    )  # fmt: skip
    module, loader = make(norm), DataLoader(data(), 16 // shares, shuffle=True)
    trainer.fit(module, loader, DataLoader(data(10), 5), ckpt_path=start)
    return [*module.state_dict().values()], trainer.callback_metrics["val_loss"]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("inner", ["fsdp=2", "tensor=2", "ddp=2"])
def test_validation_frozen_layers_and_a_learner_that_counts_nothing(inner: str, tmp_path: Path) -> None:
    expected, loss = run(DiLoCo(learners=2, period=4), 2, tmp_path / "alone")
    shares = 2 if inner == "tensor=2" else 4
    found, theirs = run(DiLoCo(learners=2, period=4, inner=inner), shares, tmp_path / "islands", devices=4)
    assert difference(found, expected) <= 1e-12 and abs(loss - theirs) <= 1e-12


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("compress", [None, "int8", "topk=0.2"], ids=["plain", "int8", "reset"])
@pytest.mark.parametrize("devices", [4, 2], ids=["same", "other"])
def test_a_killed_run_is_resumed_on_islands_or_without(
    compress: Any, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compress and devices == 2:
        pytest.skip("compressors encode what a rank holds")
    make: Any = partial(DiLoCo, learners=2, period=4, fragments=2, delay=1, compress=compress)
    if compress == "topk=0.2":
        make = partial(LocalSGD, **RESET, compress=compress)
    islands = make(inner="fsdp")
    expected, loss = run(islands, 4, tmp_path / "whole", norm=devices == 4)
    monkeypatch.setenv("LOCKSTEP_FAULTS", "rank=3,step=9,point=backward,action=sigkill")
    with pytest.raises(Exception, match="SIGKILL"):
        run(islands, 4, tmp_path / "killed", norm=devices == 4)
    monkeypatch.delenv("LOCKSTEP_FAULTS")
    (saved,) = (tmp_path / "killed").rglob("*step=7*")
    strategy = islands if devices == 4 else make()
    found, theirs = run(strategy, devices, tmp_path / "resumed", saved, norm=devices == 4)
    assert difference(found, expected) <= (0 if devices == 4 else 1e-12)
    assert abs(loss - theirs) <= (0 if devices == 4 else 1e-12)


class OfMatrices(Wide):
    """An optimizer of whole matrices with a scheduler, and one that remembers a number of its own gradients."""

    def configure_optimizers(self) -> Any:
        muon = Muon([p for p in self.parameters() if p.dim() == 2 and p.requires_grad], lr=0.02)
        rest = Rule([p for p in self.parameters() if p.dim() != 2 and p.requires_grad], by_distance)
        schedule = {"scheduler": StepLR(muon, 3, 0.7), "interval": "step"}
        return [{"optimizer": muon, "lr_scheduler": schedule}, {"optimizer": rest}]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """An edit that the owners are to see."""
        with torch.no_grad():
            self.net[0].weight.mul_(0.99)


class Counted(Muon):
    matrices = 0

    def step(self, closure: Any = None) -> Any:
        self.matrices += sum(p.grad is not None for group in self.param_groups for p in group["params"])
        return super().step(closure)


class CountsMatrices(Regression):
    def __init__(self) -> None:
        super().__init__(ADAMW)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 1)).double()

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        return [Counted(matrices, lr=0.02), AdamW([p for p in self.parameters() if p.dim() != 2])]

    def on_train_end(self) -> None:
        mine = torch.tensor(self.trainer.optimizers[0].matrices)
        ranks = self.trainer.strategy.all_gather(mine.reshape(1)).view(2, 2)  # by island
        assert ranks.sum(1).tolist() == [5 * self.trainer.global_step] * 2 and int(ranks.min()) > 0


@pytest.mark.ranks
def test_each_matrix_is_stepped_once_on_each_island() -> None:
    fit(LocalSGD(learners=2, period=3, inner="fsdp=2"), CountsMatrices(), DataLoader(data(), 2), devices=4,
        precision="64-true")  # fmt: skip


OF_MATRICES: list[Any] = [
    ("fsdp=2", {"delay": 1, "fragments": 2}),
    pytest.param("ddp=2", {"start": 3}, marks=pytest.mark.slow),
    pytest.param("tensor=2", {}, marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("inner", "options"), OF_MATRICES)
def test_an_island_steps_whole_matrices(inner: str, options: dict[str, Any], tmp_path: Path) -> None:
    options, accumulated = {"learners": 2, "period": 4} | options, {"make": OfMatrices, "accumulate_grad_batches": 2}
    expected, _ = run(DiLoCo(**options), 2, tmp_path / "alone", **accumulated)
    shares = 2 if inner == "tensor=2" else 4
    found, _ = run(DiLoCo(**options, inner=inner), shares, tmp_path / "islands", devices=4, **accumulated)
    assert difference(found, expected) <= 1e-12
    for folder, strategy, devices in (("islands", DiLoCo(**options), 2), ("alone", DiLoCo(**options, inner=inner), 4)):
        (saved,) = (tmp_path / folder).rglob("*step=7*")
        sizes = {"devices": devices} | accumulated
        found, _ = run(strategy, shares if devices == 4 else 2, tmp_path / f"after {folder}", saved, **sizes)
        assert difference(found, expected) <= 1e-12


@pytest.mark.slow
@pytest.mark.ranks
def test_the_synchronous_steps_of_a_run_are_not_repeated_without_islands(tmp_path: Path) -> None:
    options: dict[str, Any] = {"learners": 2, "period": 4, "start": 5}
    expected, _ = run(LocalSGD(**options), 2, tmp_path / "whole")
    run(LocalSGD(**options, inner="fsdp"), 4, tmp_path / "islands")
    (saved,) = (tmp_path / "islands").rglob("*step=7*")
    found, _ = run(LocalSGD(**options), 2, tmp_path / "resumed", saved)
    assert difference(found, expected) <= 1e-12


class CountsMessages(CountsCalls):
    """Fails if a message went to another island within a round."""

    def __init__(self, period: int) -> None:
        super().__init__(period)
        self.said: tuple[int, int] | None = None
        self.sent = 0

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        gather = outer.gather_numbers

        def counting(*arguments: Any) -> list[float]:
            self.sent += 1
            return gather(*arguments)

        outer.gather_numbers = counting  # in a process of its own

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        super().on_train_batch_end(trainer, *arguments)
        strategy: Any = trainer.strategy
        said = self.sent, strategy._agreement._step
        assert (said == self.said) == (trainer.global_step % self.period > 0 and self.said is not None)
        self.said = said


@pytest.mark.ranks
def test_no_island_waits_for_another_within_a_round() -> None:
    fit(DiLoCo(learners=2, period=4, inner="fsdp=2"), devices=4, callbacks=[CountsMessages(4)], log_every_n_steps=1)


@pytest.mark.unit
def test_a_mesh_of_learners_has_a_name() -> None:
    assert as_class("fsdp=2, local_sgd=3") == {"class": "LocalSGD", "learners": 3, "inner": "fsdp=2"}
    assert as_class("diloco,fsdp=2,tensor=2") == {"class": "DiLoCo", "learners": None, "inner": "fsdp=2,tensor=2"}
    chosen: Any = build("diloco=2,fsdp=2", accelerator="cpu")[0]
    assert chosen.num_devices == 4 and not chosen.capabilities.exact and not chosen.capabilities.synchronous
    one: Any = build("diloco=2,fsdp=1", accelerator="cpu", devices=2)[0]
    assert type(one) is DiLoCo and one.learners == 2


@pytest.mark.unit
@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (lambda: DiLoCo(learners=2, inner=DDP()), {}, "cannot be a learner; give a mesh such as"),
        (lambda: "diloco=2,pipeline=2", {}, "inner='pipeline=2' has the axis pipeline"),
        (lambda: DiLoCo(learners=2, inner="fdsp=2"), {}, "did you mean 'fsdp'"),
        (lambda: DiLoCo(learners=2, inner=FSDP(replicas=2, compress="int8")), {}, "give compress to DiLoCo"),
        (lambda: DiLoCo(inner="fsdp"), {}, "give learners=2"),
        (lambda: LocalSGD(learners_per_rank=(2, 2), inner="fsdp=2"), {}, "several ranks run one"),
        (lambda: "diloco=2,fsdp=2", {"devices": 6}, "the mesh diloco=2 × fsdp=2 = 4 ranks is not the number of ranks"),
        (lambda: "diloco=2,diloco=2", {}, "names 'diloco'"),
        (lambda: DiLoCo(learners=2, inner="fsdp=2"), {"precision": "16-mixed"}, "use 'bf16-mixed'"),
        (lambda: "diloco=2,fsdp=2", {"virtual_ranks": 4}, "which DiLoCo cannot"),
    ],
    ids=range(10),
)
def test_what_cannot_be_a_learner_is_refused(strategy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build(strategy(), **{"accelerator": "cpu", "devices": 4} | options)


class Whole(SGD):
    """Divides by the norm of a whole matrix."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (1 + parameter.grad.norm()), alpha=group["lr"])


class Gathers(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.distributed.all_reduce(torch.ones(1))
        return super().training_step(batch, batch_idx)


class Diverges(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.trainer.global_rank == 3 and batch_idx == 1 else loss


class Freezes(Logs):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net.bias.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("module", "common", "message"),
    [
        (Logs(), partial(Whole, lr=0.7), "outer=Whole needs whole parameters"),
        (Gathers(), None, "called a collective of torch.distributed over all ranks"),
        (CallsInStep(), None, "all_gather was called within a learner's step"),
        (Diverges(), None, "rank 3"),
        (Freezes(), None, "requires_grad was changed while learners are apart"),
    ],
    ids=["outer", "collective", "hook", "nan", "freeze"],
)
def test_what_islands_cannot_do_is_refused(module: Module, common: Any, message: str) -> None:
    options = {} if common is None else {"outer": common}
    with pytest.raises((ValueError, RuntimeError, FloatingPointError), match=message):
        fit(DiLoCo(learners=2, period=4, inner="fsdp=2", **options), module, devices=4)


def test_islands_refuse_what_their_meshes_do() -> None:
    strategy = DiLoCo(learners=2, period=4, inner="tensor=2").configure(devices=4, accelerator="cpu")
    assert "detect_anomaly" in strategy.capabilities.refuses
