"""Local SGD and DiLoCo: their limit cases, the papers' algorithms in plain Python, and the same bits on any ranks."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module, Trainer
from lockstep.callbacks import Callback, GradientNorm, Guard, ModelCheckpoint, WeightAveraging
from lockstep.strategies import DiLoCo, LocalSGD, Strategy
from lockstep.strategies.methods.averaging import add_up, subtrees
from lockstep.strategies.methods.diloco import NESTEROV
from lockstep.strategies.methods.options import assign
from lockstep.strategies.sync.compression.compressor import Compressor, Encoding
from tests.strategies.methods.toys import (
    Fading,
    Regression,
    Strange,
    data,
    difference,
    simulate,
    simulate_error_reset,
    train,
)
from tests.strategies.optimizers.test_probe import Rule
from tests.strategies.virtual import runs

MOMENTUM = partial(SGD, lr=0.05, momentum=0.9, nesterov=True)
PLAIN = partial(SGD, lr=0.05)
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local_sgd": lambda: LocalSGD(learners=4, period=2),
    "post-local": lambda: LocalSGD(learners=4, period=2, start=3),
    "diloco": lambda: DiLoCo(learners=4, period=3),
    "streaming": lambda: DiLoCo(learners=4, period=4, fragments=2, delay=1),
    "compressed": lambda: DiLoCo(learners=4, period=4, fragments=2, delay=1, compress="topk=0.1"),
    "int8": lambda: DiLoCo(learners=4, period=2, compress="int8"),
    "reset": lambda: LocalSGD(learners=4, period=1, start=1, compress="topk=0.1"),
    "reset later": lambda: LocalSGD(learners=4, period=3, compress="topk=0.1"),
    "started": lambda: DiLoCo(learners=4, period=4, start=1, fragments=2, delay=1, compress="int8"),
}


@pytest.mark.unit
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}],
    ids=["plain", "accumulated", "clipped"],
)
@pytest.mark.parametrize("make", [PLAIN, MOMENTUM], ids=["sgd", "momentum"])
def test_a_period_of_one_is_synchronous_training(make: Any, options: dict[str, Any]) -> None:
    expected = train("single", make, max_steps=50, **options)
    found = train(LocalSGD(learners=4, period=1), make, max_steps=50, **options)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


@pytest.mark.unit
def test_an_outer_step_of_one_after_each_step_is_synchronous_training() -> None:
    strategy = DiLoCo(learners=4, period=1, outer=partial(SGD, lr=1.0))
    expected = train("single", PLAIN, max_steps=50, accumulate_grad_batches=2)
    found = train(strategy, PLAIN, max_steps=50, accumulate_grad_batches=2)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


class Own(Compressor):
    def encode(self, tensor: Tensor, encoding: Encoding) -> Sequence[Tensor]:
        return (tensor,)

    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0]


class Dividing(Own):
    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0] / payload[0].sum() * 0 / 0 if encoding.name.endswith("bias") else payload[0]


class ByRank(Own):
    def decode(self, payload: Sequence[Tensor], encoding: Encoding) -> Tensor:
        return payload[0] * (1 + dist.get_rank())


@pytest.mark.unit
def test_a_compressor_that_makes_nan_is_named() -> None:
    train(LocalSGD(learners=2, period=2, compress=Own()), PLAIN, max_steps=2)
    with pytest.raises(FloatingPointError, match=r"Dividing has made NaN or .* learners have moved \S*bias, which was"):
        train(LocalSGD(learners=2, period=2, compress=Dividing()), PLAIN, max_steps=2)


@pytest.mark.ranks
def test_a_compressor_that_decodes_otherwise_on_some_ranks_is_refused() -> None:
    with pytest.raises(RuntimeError, match="ByRank.decode has given .* other values on some ranks"):
        train(LocalSGD(period=2, compress=ByRank()), PLAIN, max_steps=2, devices=2)


@pytest.mark.unit
def test_a_compressor_that_sends_everything_changes_nothing() -> None:
    expected, found = (
        train(DiLoCo(learners=4, period=3, fragments=2, compress=name), MOMENTUM) for name in (None, "topk=1.0")
    )
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12
    less = train(DiLoCo(learners=4, period=3, fragments=2, compress="topk=0.2"), MOMENTUM)
    assert difference([*less.parameters()], [*expected.parameters()]) > 1e-6


@pytest.mark.long
@pytest.mark.unit
def test_error_reset_is_local_sgd_if_everything_is_sent() -> None:
    for period, make, whole in ((3, MOMENTUM, LocalSGD(learners=4, period=3)), (1, PLAIN, "single")):
        strategy = LocalSGD(learners=4, period=period, compress="topk=1.0")
        found, expected = train(strategy, make, max_steps=50), train(whole, make, max_steps=50)
        assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12
    less = train(LocalSGD(learners=4, period=1, compress="topk=0.2"), PLAIN, max_steps=50)
    assert difference([*less.parameters()], [*expected.parameters()]) > 1e-6


@pytest.mark.unit
@pytest.mark.parametrize("period", [1, 2, 4])
def test_what_is_not_sent_stays_in_the_learners_weights(period: int) -> None:
    make = partial(AdamW, lr=1e-2)
    strategy = LocalSGD(learners=2, period=period, compress="topk=0.2")
    module = train(strategy, make, max_steps=21, val_check_interval=7, check_val_every_n_epoch=None)
    expected = simulate_error_reset(module.seen, 2, make, period, 0.2, ends=[6, 7, 12, 14, 18, 21])
    for validated, common in zip(module.at_steps, [expected[i] for i in (1, 3, 5)], strict=True):
        assert difference(validated, common) <= 1e-12


@pytest.mark.unit
@pytest.mark.parametrize(
    "strategy",
    [LocalSGD(period=4, learners=1), DiLoCo(period=4, learners=1, outer=partial(SGD, lr=1.0))],
    ids=["local_sgd", "diloco"],
)
def test_one_learner_is_one_process(strategy: Strategy) -> None:
    make = partial(AdamW, lr=1e-2)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_steps": 30}
    found, expected = train(strategy, make, **options), train("single", make, **options)
    assert difference([*found.parameters()], [*expected.parameters()]) <= 1e-12


@pytest.mark.unit
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (LocalSGD(learners=3, period=3), {"outer": partial(SGD, lr=1.0), "period": 3}),
        (DiLoCo(learners=2, period=4), {"period": 4}),
        (DiLoCo(learners=2, period=4, fragments=3), {"period": 4, "fragments": 3}),
        (
            DiLoCo(learners=2, period=4, fragments=2, delay=3),
            {"period": 4, "fragments": 2, "delay": 3, "mixing": 0.5},
        ),
        (DiLoCo(learners=2, period=4, start=5), {"period": 4, "start": 5}),
        (LocalSGD(learners=2, period=2, start=9), {"outer": partial(SGD, lr=1.0), "period": 2, "start": 9}),
    ],
    ids=["local_sgd", "diloco", "fragments", "delay", "started", "post-local"],
)
def test_each_round_is_that_of_the_papers_algorithm(strategy: Strategy, options: dict[str, Any]) -> None:
    make = partial(AdamW, lr=1e-2)
    module = train(strategy, make, max_steps=21, val_check_interval=7, check_val_every_n_epoch=None)
    outer = options.pop("outer", partial(SGD, lr=0.7, momentum=0.9, nesterov=True))
    learners = strategy.learners  # type: ignore[attr-defined]
    expected = simulate(module.seen, learners, make, outer, ends=[6, 7, 12, 14, 18, 21], **options)
    for validated, common in zip(module.at_steps, [expected[i] for i in (1, 3, 5)], strict=True):
        assert difference(validated, common) <= 1e-12


@functools.cache
def on_one_rank(name: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        return runs.train(STRATEGIES[name](), 1, Path(folder), virtual_ranks=None)  # type: ignore[arg-type]


def counts_from_none(params: list[Any], group: dict[str, Any]) -> None:
    """The first step makes the number, and moves nothing."""
    group["steps"] = group.get("steps", 0) + 1
    for p in params if group["steps"] > 1 else ():
        p -= 0.1 / group["steps"] * p.grad


@pytest.mark.ranks
def test_learners_of_a_rank_count_by_themselves() -> None:
    one, two = (
        train(DiLoCo(learners_per_rank=counts, period=4), lambda p: Rule(p, counts_from_none), devices=len(counts))
        for counts in ((2,), (1, 1))
    )
    assert difference([*one.parameters()], [*two.parameters()]) == 0


@pytest.mark.ranks
def test_weights_are_those_of_one_rank_to_the_bit() -> None:
    one, two = (
        train(DiLoCo(learners_per_rank=per_rank, period=4, fragments=2, delay=1), MOMENTUM, devices=len(per_rank))
        for per_rank in ((4,), (3, 1))
    )
    assert difference([*one.parameters()], [*two.parameters()]) == 0


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_every_bit_is_that_of_one_rank(name: str, devices: int, tmp_path: Path) -> None:
    found = runs.train(STRATEGIES[name](), devices, tmp_path, virtual_ranks=None)  # type: ignore[arg-type]
    assert found == on_one_rank(name)


@pytest.mark.slow
@pytest.mark.ranks
def test_learners_spread_unevenly_change_no_bit(tmp_path: Path) -> None:
    strategy: Any = DiLoCo(learners_per_rank=(3, 1), period=3)
    assert runs.train(strategy, 2, tmp_path, virtual_ranks=None) == on_one_rank("diloco")


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", list(STRATEGIES))
@pytest.mark.parametrize(("first", "then"), [(2, 1), (2, 4), (4, 2)], ids=str)
def test_a_killed_run_is_resumed_on_other_ranks_to_the_bit(
    name: str, first: int, then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank={first - 1},step=3,point=backward,action=sigkill")
    with pytest.raises(Exception, match="SIGKILL"):
        runs.train(STRATEGIES[name](), first, tmp_path / "killed", virtual_ranks=None)  # type: ignore[arg-type]
    monkeypatch.delenv("LOCKSTEP_FAULTS")
    (saved,) = (tmp_path / "killed").rglob("*step=2*")
    strategy: Any = STRATEGIES[name]()
    resumed = runs.train(strategy, then, tmp_path / "resumed", resume=str(saved), virtual_ranks=None)
    expected = on_one_rank(name)
    assert {kind: resumed[kind] for kind in resumed} == {kind: expected[kind] for kind in resumed}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "make",
    [
        lambda: DiLoCo(learners=2, period=3, fragments=3, delay=1, compress="topk=0.3"),
        lambda: LocalSGD(learners=2, period=1, start=7, compress="topk=0.3"),
    ],
    ids=["streaming", "reset"],
)
def test_twenty_five_kills_change_no_bit(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(1)

    def run(folder: Path, resume: str | None) -> list[torch.Tensor]:
        module, saver = Regression(partial(AdamW, lr=1e-2)), ModelCheckpoint(folder / "saved", every_n_train_steps=2)
        trainer = Trainer(
            strategy=make(), devices=2, max_steps=80, logger=False, seed=1, accelerator="cpu", precision="64-true",
            enable_progress_bar=False, default_root_dir=folder, callbacks=[saver],
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), 4, shuffle=True), ckpt_path=resume)
        return [p.detach() for p in module.parameters()]

    expected, kills, step = run(tmp_path / "whole", None), 0, 0
    while kills < 25:
        step += drawn.randint(1, 3)
        where = drawn.choice(["forward", "backward", "before_step", "after_step", "callback"])
        monkeypatch.setenv("LOCKSTEP_FAULTS", f"rank={drawn.randint(0, 1)},step={step},point={where},action=sigkill")
        with pytest.raises(Exception, match="SIGKILL"):
            run(tmp_path / "killed", "auto")
        kills += 1
    monkeypatch.delenv("LOCKSTEP_FAULTS")
    assert difference(run(tmp_path / "killed", "auto"), expected) == 0


@pytest.mark.slow
@pytest.mark.ranks
def test_an_island_that_is_killed_costs_the_round_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path, **options: Any) -> Trainer:
        saver = ModelCheckpoint(folder / "saved", every_n_train_steps=4)
        trainer = Trainer(
            strategy=DiLoCo(period=4), devices=2, max_steps=12, logger=False, seed=1, accelerator="cpu",
            enable_progress_bar=False, default_root_dir=folder, callbacks=[saver], **options,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer.fit(Logs(), DataLoader(TensorDataset(torch.ones(64, 3)), 2))
        return trainer

    expected = run(tmp_path / "whole")
    plan = f"rank=1,step=6,point=backward,action=sigkill,file={tmp_path / 'happened'}"
    monkeypatch.setenv("LOCKSTEP_FAULTS", plan)
    killed = run(tmp_path / "killed", max_restarts=1)
    assert killed.global_step == 12
    assert killed._run.executed[0] <= 12 + 4
    assert torch.equal(*(t._run.module.net.weight.detach() for t in (killed, expected)))  # type: ignore[union-attr]


class CountsCalls(Callback):
    """Fails if a collective was called within a round of `period` steps."""

    def __init__(self, period: int) -> None:
        self.period, self.calls, self.rounds = period, 0, 0

    def on_train_batch_end(self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        calls = torch.distributed.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        step = trainer.global_step
        if step % self.period > 1:
            assert calls == self.calls, f"{calls - self.calls} collectives in step {step}"
            assert not trainer.strategy.ranks_meet
        elif step % self.period == 0:
            assert calls > self.calls and trainer.strategy.ranks_meet
            self.rounds += 1
        self.calls = calls

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        assert self.rounds == 2


class Logs(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return SGD(self.parameters(), lr=0.1)


def fit(strategy: Strategy, module: Module | None = None, loader: Any = None, **options: Any) -> Trainer:
    settings = {"devices": 1, "max_steps": 8, "logger": False, "enable_progress_bar": False} | options
    loader = loader or DataLoader(TensorDataset(torch.ones(64, 3)), 2)
    trainer = Trainer(strategy=strategy, **settings, enable_checkpointing=False, accelerator="cpu", seed=1)
    trainer.fit(Logs() if module is None else module, loader)
    return trainer


@pytest.mark.long
@pytest.mark.ranks
def test_no_rank_waits_for_another_within_a_round() -> None:
    fit(DiLoCo(period=4), devices=2, callbacks=[CountsCalls(4)], log_every_n_steps=1)


@pytest.mark.ranks
def test_a_value_of_each_rank_is_refused_in_words_of_learners() -> None:
    with pytest.raises(
        RuntimeError, match="'rank' was logged .* another value on each rank, so that its mean would dep"
    ):
        fit(LocalSGD(period=2), LogsItsOwn(), devices=2, max_steps=None, max_epochs=1)


class Scheduled(Logs):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.unit
@pytest.mark.parametrize("strategy", [LocalSGD(learners=2, period=2), DiLoCo(learners=3, period=2)])
def test_a_schedule_moves_with_steps_for_which_the_last_learner_has_no_samples(strategy: Strategy) -> None:
    module = Scheduled()
    trainer = fit(strategy, module, loader=DataLoader(TensorDataset(torch.ones(1, 3)), 1), max_steps=3)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 1 / 8
    assert float(trainer.callback_metrics["loss"]) > 0


class CallsInStep(Logs):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.all_gather(torch.ones(1))


class LogsItsOwn(Logs):
    def on_train_epoch_end(self) -> None:
        self.log("rank", float(self.global_rank))


class GathersInStep(Logs):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.all_gather(torch.ones(1))


class Manual(Logs):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Edits(Logs):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.net.weight.clamp_(-0.1, 0.1)


class Plateau(Logs):
    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", "interval": "step"}}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: LocalSGD(period=0), {}, "period must be a whole number of at least 1"),
        (lambda: LocalSGD(learners=3, start=2), {}, "learners must be a power of two"),
        (lambda: DiLoCo(learners=3, start=2), {}, "learners must be a power of two"),
        (lambda: DiLoCo(start=-1), {}, "start must be a whole number of at least 0, but start=-1"),
        (lambda: DiLoCo(period=4, delay=4), {}, "delay=4 must be less than period=4"),
        (lambda: DiLoCo(period=4, fragments=5), {}, "fragments=5 are sent in turn"),
        (lambda: DiLoCo(learners=4, learners_per_rank=(2, 1)), {}, "must add up to learners=4"),
        (lambda: DiLoCo(learners_per_rank=(2, 1)), {}, "must have a number for each of 1 ranks"),
        (partial(DiLoCo, learners_per_rank="auto"), {}, "must be a number of learners for each rank"),
        (lambda: LocalSGD(compress="topk=0.1,momentum=0.5"), {}, "has that of their own optimizers"),
        (lambda: DiLoCo(compress="int9"), {}, "did you mean 'int8'"),
        (lambda: DiLoCo(outer=0.7), {}, "outer makes an optimizer"),
        (lambda: DiLoCo(outer=lambda p: None), {}, "outer must return a torch.optim.Optimizer, but returned NoneType"),
        (lambda: DiLoCo(outer=torch.optim.LBFGS), {}, "outer makes a LBFGS, which needs a closure"),
        (lambda: DiLoCo(outer=lambda p: SGD(p[:1])), {}, "exactly the 2 parameters that it gets, but SGD steps 1"),
        (lambda: DiLoCo(delay=1, mixing="half"), {}, "mixing must be in"),
        (lambda: DiLoCo(mixing=0.5), {}, "mixing=0.5 is what a learner keeps after a delay, but delay=0"),
        (lambda: DiLoCo(timeout_s=-1), {}, "timeout_s must be a number of seconds above 0"),
        (DiLoCo, {"callbacks": [Guard(non_finite="skip")]}, r"Guard\(non_finite='skip'\) needs ranks that agree"),
        (DiLoCo, {"callbacks": [GradientNorm()]}, "shows one gradient of all ranks"),
        (DiLoCo, {"callbacks": [WeightAveraging()]}, "keeps state beside the parameters"),
        (DiLoCo, {"module": Manual()}, "automatic_optimization = False .* each learner has its own; use automatic"),
        (DiLoCo, {"module": Plateau()}, "monitors 'loss' in each step"),
        (DiLoCo, {"virtual_ranks": 2}, "which DiLoCo cannot"),
        (DiLoCo, {"module": CallsInStep()}, "all_gather was called within a learner's step"),
        (
            lambda: LocalSGD(learners=2, start=4),
            {"module": GathersInStep()},
            "within a share of learners=2,.*without le",
        ),
        (
            lambda: DiLoCo(learners=2),
            {"module": Edits()},
            "on_train_batch_end changed net.weight, but this rank calls it once for each of its",
        ),
    ],
    ids=range(27),
)
def test_what_would_differ_between_learners_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        fit(make(), **options)


@pytest.mark.unit
def test_checkpoints_go_from_and_to_other_strategies(tmp_path: Path) -> None:
    def run(strategy: Any, name: str, start: str | None = None) -> Regression:
        module = Regression(partial(AdamW, lr=1e-2))
        trainer = Trainer(
            strategy=strategy, devices=1, max_steps=4 if start is None else 8, logger=False, seed=1, accelerator="cpu",
            enable_progress_bar=False, enable_checkpointing=False, precision="64-true",
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), 4), ckpt_path=start)
        trainer.save_checkpoint(tmp_path / name)
        return module

    single = run("single", "single")
    loaded = run(LocalSGD(learners=1, period=3), "local", str(tmp_path / "single"))
    assert difference([*loaded.parameters()], [*run("single", "more", str(tmp_path / "single")).parameters()]) <= 1e-12
    learners = run(DiLoCo(learners=2, period=3), "two")
    assert difference([*learners.parameters()], [*single.parameters()]) > 1e-6
    run("single", "after", str(tmp_path / "two"))


@pytest.mark.unit
@pytest.mark.parametrize(("learners", "outer"), [(1, NESTEROV), (2, NESTEROV), (2, Fading)])
def test_the_outer_optimizer_is_resumed(learners: int, outer: Any, tmp_path: Path) -> None:
    def run(resume: Path | None) -> Regression:
        module = Regression(partial(AdamW, lr=1e-2))
        trainer = Trainer(
            strategy=DiLoCo(learners=learners, period=3, outer=outer), devices=1, max_steps=12, logger=False, seed=1,
            accelerator="cpu", precision="64-true", enable_progress_bar=False,
            callbacks=[ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)],
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), 4), ckpt_path=resume)
        return module

    whole = run(None)
    (half,) = tmp_path.rglob("*step=6*")
    assert difference([*run(half).parameters()], [*whole.parameters()]) == 0


class Unfreezing(Regression):
    """Has its optimizer step the first layer too from the second epoch on."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(make)
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.net[0].parameters()]})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.net[2].parameters())


@pytest.mark.unit
@pytest.mark.parametrize("learners", [1, 2])
def test_the_outer_momentum_of_an_added_group_is_resumed(learners: int, tmp_path: Path) -> None:
    def run(resume: Path | None) -> Unfreezing:
        module, saver = (
            Unfreezing(partial(AdamW, lr=1e-2)),
            ModelCheckpoint(tmp_path, every_n_train_steps=9, save_top_k=-1),
        )
        trainer = Trainer(
            strategy=DiLoCo(learners=learners, period=3), devices=1, max_steps=12, logger=False, seed=1,
            accelerator="cpu", precision="64-true", enable_progress_bar=False, callbacks=[saver],
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), 48 // learners // 3), ckpt_path=resume)
        return module

    whole = run(None)
    (saved,) = tmp_path.rglob("*step=9*")
    assert difference([*run(saved).parameters()], [*whole.parameters()]) == 0


@pytest.mark.unit
def test_state_of_the_outer_optimizer_without_a_parameter_is_refused(tmp_path: Path) -> None:
    trainer = fit(DiLoCo(learners=2, period=2, outer=Strange))
    with pytest.raises(ValueError, match="Strange, which the strategy steps, keeps 'all' in its state, which"):
        trainer.save_checkpoint(tmp_path / "all")


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [LocalSGD(learners=2, period=1), LocalSGD(learners=2, period=2, start=9)])
def test_learners_that_step_together_resume_with_one_optimizer_state(strategy: Strategy, tmp_path: Path) -> None:
    def run(strategy: Strategy, devices: int, steps: int, resume: Path | None = None) -> Regression:
        module = Regression(partial(AdamW, lr=1e-2))
        trainer = Trainer(
            strategy=strategy, devices=devices, max_steps=steps, logger=False, seed=1, accelerator="cpu",
            precision="64-true", enable_progress_bar=False, enable_checkpointing=False, split_batches=True,
        )  # fmt: skip
        trainer.fit(module, DataLoader(data(), 8), ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(tmp_path / "apart")
        return module

    run(DiLoCo(learners=2, period=3), 1, 4)
    one, two = (run(strategy, devices, 8, tmp_path / "apart") for devices in (1, 2))
    assert difference([*one.parameters()], [*two.parameters()]) == 0


@pytest.mark.unit
@pytest.mark.parametrize("learners", range(1, 9))
def test_learners_are_added_in_one_tree_on_any_ranks(learners: int) -> None:
    values = [torch.randn(7) for _ in range(learners)]
    ((_, expected),) = add_up({(0, i): value.clone() for i, value in enumerate(values)}, learners).items()
    for ranks in range(1, learners + 1):
        parts = {}
        for own in assign(learners, None, ranks):
            mine = add_up({(0, i): values[i].clone() for i in own}, learners)
            assert sorted(mine) == subtrees(own, learners)
            parts |= mine
        ((_, found),) = add_up(parts, learners).items()
        assert torch.equal(found, expected)


class Measuring(SGD):
    """Keeps a tensor and a list in attributes."""

    def __init__(self, parameters: Any, what: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.what, self.norm, self.norms = what, torch.zeros((), dtype=torch.float64), list[float]()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for group in self.param_groups for p in group["params"]]).norm()
        if self.what == "norm":
            self.norm.lerp_(norm, 0.1)
        else:
            self.norms.append(float(norm))
        super().step()


class LooksAhead(SGD):
    """Steps another optimizer, which has its own momentum."""

    def __init__(self, parameters: Any) -> None:
        self.inner = SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "name"),
    [(partial(Measuring, what="norm"), "norm"), (partial(Measuring, what="norms"), "norms"), (LooksAhead, "inner")],
)
def test_what_an_optimizer_keeps_elsewhere_is_refused_if_learners_share_it(make: Any, name: str) -> None:
    train(LocalSGD(learners=1, period=2), make, max_steps=4)
    with pytest.raises(RuntimeError, match=f"changes its attribute '{name}' in a step, which the learners of a rank"):
        train(LocalSGD(learners=2, period=2), make, max_steps=4)


@pytest.mark.unit
def test_a_second_fit_continues_after_the_synchronous_start() -> None:
    def trainer(epochs: int) -> Trainer:
        return Trainer(
            strategy=LocalSGD(learners=2, period=3, start=6), devices=1, max_epochs=epochs, logger=False, seed=1,
            enable_checkpointing=False, accelerator="cpu", precision="64-true", enable_progress_bar=False,
            split_batches=True,
        )  # fmt: skip

    whole, parts = Regression(PLAIN), Regression(PLAIN)
    trainer(2).fit(whole, DataLoader(data(), 8))
    run = trainer(1)
    run.fit(parts, DataLoader(data(), 8))
    run.max_epochs = 2
    run.fit(parts, DataLoader(data(), 8))
    assert difference([*parts.parameters()], [*whole.parameters()]) <= 1e-12


class Estimates(SGD):
    """Keeps a number in its groups that its steps change."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["far"] = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["far"] = 0.9 * group["far"] + float(group["params"][0].grad.norm())
        group["lr"] = 0.1 / group["far"]
        super().step()


@pytest.mark.ranks
def test_learners_that_a_checkpoint_lacks_begin_with_the_numbers_of_the_first(tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "seed": 1}
    quiet |= {"accelerator": "cpu", "precision": "64-true", "split_batches": True}
    saved = Trainer(strategy=LocalSGD(learners=2, period=2), devices=1, max_epochs=1, **quiet)
    saved.fit(Regression(Estimates), DataLoader(data(), 8))
    saved.save_checkpoint(tmp_path / "saved")
    alone, ranks = Regression(Estimates), Regression(Estimates)
    for module, devices in ((alone, 1), (ranks, 2)):
        resumed = Trainer(strategy=LocalSGD(learners=4, period=2), devices=devices, max_epochs=2, **quiet)
        resumed.fit(module, DataLoader(data(), 8), ckpt_path=tmp_path / "saved")
    assert difference([*alone.parameters()], [*ranks.parameters()]) <= 1e-12


class StepsItself(Regression):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        assert optimizer_closure().isfinite()
        optimizer.step()


class LosesOne(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).total * (float("nan") if self.global_rank else 1.0)


@pytest.mark.ranks
def test_learners_call_closures_and_are_named_by_their_rank() -> None:
    plain, own = train(LocalSGD(period=3), PLAIN, devices=2), StepsItself(PLAIN)
    trainer = Trainer(
        strategy=LocalSGD(period=3), devices=2, max_steps=12, logger=False, enable_checkpointing=False, seed=1,
        split_batches=True, precision="64-true", accelerator="cpu", enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(own, DataLoader(data(), 8, shuffle=True))
    assert difference([*own.parameters()], [*plain.parameters()]) == 0
    trainer.max_steps = 24
    with pytest.raises(FloatingPointError, match="the loss of rank 1 is NaN"):
        trainer.fit(LosesOne(PLAIN), DataLoader(data(), 8, shuffle=True))


@pytest.mark.unit
def test_a_round_that_ends_before_the_outer_optimizer_steps_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    train(LocalSGD(learners=2, period=50), PLAIN)
    train(DiLoCo(learners=2, period=6), PLAIN)
    assert "outer optimizer" not in caplog.text
    train(DiLoCo(learners=2, period=50), PLAIN)
    assert caplog.text.count("has ended a round of period=50 after 6 steps, where the outer optimizer of DiLoCo") == 1
