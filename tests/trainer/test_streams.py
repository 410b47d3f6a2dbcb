"""Random streams: who draws from which, what moves none, and where they are after a restart."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep import seed_everything
from lockstep.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    LearningRateMonitor,
    LRScaling,
    LRWarmup,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lockstep.strategies import DDP
from lockstep.trainer.checkpoint import rank_state
from lockstep.trainer.seeding import rng_state
from tests.trainer.toy import Net, distance, equal, loader, net, quiet, weights


class Masking(Net):
    """Hides inputs by a stream of its own, and draws from the run's own stream beside it; `drawn` is what rank 0 hid
    last."""

    def __init__(self, validates: bool = False) -> None:
        super().__init__(dropout=0.1)
        self.validates = validates
        self.register_buffer("drawn", torch.zeros(99))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        keep = torch.rand(x.shape, generator=self.random_stream("masking")) > 0.3
        self.drawn[self.trainer._run.progress.total_batches + batch_idx % 2] = keep.sum()
        noise = torch.rand(1, generator=self.random_stream("noise")).to(x)
        return F.cross_entropy(self(x * keep.to(x) + noise), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.validates:
            torch.rand(5), random.random(), np.random.rand()
            (
                torch.rand(5, generator=self.random_stream("masking")),
                torch.rand(5, generator=self.random_stream("validation")),
            )
        super().validation_step(batch, batch_idx)


class Streams(Callback):
    """Notes the state of all streams at the end of training on rank 0, and saves a checkpoint at a step."""

    def __init__(self, save_at: int | None = None) -> None:
        self.save_at = save_at
        self.state: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.save_at and not trainer._run.window_is_open:
            trainer.save_checkpoint("saved")
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, module: Any) -> None:
        state = rng_state(trainer._run.streams)
        self.state = [
            state["torch"].sum().item(),
            list(map(repr, state["python"][1][:5])),
            state["numpy"][1].sum().item(),
            state["numpy"][2],
        ]
        self.state.append({key: value.sum().item() for key, (_, value) in sorted(state["streams"].items())})
        self.state.append(torch.rand(4).tolist())


def fit(
    ranks: int = 1, save_at: int | None = None, validates: bool = False, ckpt_path: str | None = None, **options: Any
) -> tuple[Masking, list[Any]]:
    seed_everything(0)
    model, streams = Masking(validates), Streams(save_at)
    options = {
        "strategy": "single" if ranks == 1 else DDP(broadcast_buffers=True),
        "accumulate_grad_batches": 2,
        "max_epochs": 2,
        "seed": 5,
    } | options
    trainer = quiet(**options | {"devices": ranks, "callbacks": [streams, *options.get("callbacks", [])]})
    validation = loader(8) if options.get("limit_val_batches") != 0 else None
    trainer.fit(model, loader(40, 4, shuffle=True), validation, ckpt_path=ckpt_path)
    return model, streams.state


@pytest.mark.ranks
def test_a_stream_is_a_function_of_seed_name_and_data_rank() -> None:
    class Drawing(Net):
        def on_train_start(self) -> None:
            mine = torch.stack([torch.rand(3, generator=self.random_stream(name)) for name in ("a", "b", "a")])
            self.all = self.all_gather(mine)
            self.log("same", 0.0)

        def on_train_end(self) -> None:
            torch.save(self.all, "all") if self.global_rank == 0 else None

    def drawn(ranks: int, seed: int) -> torch.Tensor:
        quiet(devices=ranks, seed=seed).fit(Drawing(), loader(8))
        return torch.load("all")

    one, two = drawn(1, 5), drawn(2, 5)
    assert torch.equal(two[0], one[0]) and torch.equal(one, drawn(1, 5))
    assert len({tuple(values) for values in [*two.flatten(0, 1).tolist(), *drawn(1, 6)[0].tolist()]}) == 9, "all differ"


def test_names_and_moments_are_checked() -> None:
    class Wrong(Net):
        def on_train_start(self) -> None:
            self.random_stream("a/b")

    with pytest.raises(
        ValueError, match="the name of a random stream must be of letters, digits, '_', '.' and '-', but it is 'a/b'"
    ):
        quiet().fit(Wrong(), loader(8))
    with pytest.raises(RuntimeError, match="not attached to a Trainer"):
        Masking().random_stream("masking")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_streams_resume_in_the_middle_of_an_epoch(ranks: int) -> None:
    expected, streams = fit(ranks)
    fit(ranks, save_at=7 if ranks == 1 else 4)
    resumed, after = fit(ranks, ckpt_path="saved")
    assert equal([*weights(resumed), resumed.drawn], [*weights(expected), expected.drawn])
    assert after == streams and set(after[4]) == {"masking", "noise"}


class Logging(Masking):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"a": loss, "b": loss * 2}, on_step=True, on_epoch=True, prog_bar=True)
        self.log("worst", loss, reduce_fx="max")
        return loss


@pytest.mark.parametrize("what", ["sanity validation", "validation", "log", "callbacks", "checkpoints"])
def test_nothing_else_moves_a_stream(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, streams = fit(limit_val_batches=0)
    every = [
        EarlyStopping("val/loss", patience=9),
        LearningRateMonitor(),
        LRScaling(8),
        LRWarmup(steps=0),
        ModelSummary(),
        ProgressBar(),
        Timer(),
    ]
    options: dict[str, Any] = {
        "sanity validation": {"num_sanity_val_steps": 2, "validates": True},
        "validation": {"val_check_interval": 3, "validates": True},
        "log": {"limit_val_batches": 0, "log_every_n_steps": 1},
        "callbacks": {
            "callbacks": every,
            "logger": [CSVLogger()],
            "enable_progress_bar": True,
            "default_root_dir": str(tmp_path),
        },
        "checkpoints": {
            "callbacks": [ModelCheckpoint(every_n_train_steps=1)],
            "enable_checkpointing": True,
            "default_root_dir": str(tmp_path),
        },
    }[what]
    if what == "log":
        monkeypatch.setattr("tests.trainer.test_streams.Masking", Logging)
    model, after = fit(**options)
    assert after == streams
    assert equal([*weights(model), model.drawn], [*weights(expected), expected.drawn])


class Noisy(Net):
    """Logs what every rank draws for one model, which differs from rank to rank, and how it was initialized, which does
    not."""

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.late(x))

    def on_train_start(self) -> None:
        start = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters()])
        noise = torch.tensor([torch.rand(()).item(), random.random(), float(np.random.rand())])
        torch.save((self.all_gather(start), self.all_gather(noise)), f"noise{self.global_rank}")


@pytest.mark.ranks
def test_ranks_begin_alike_and_draw_different_noise() -> None:
    quiet(devices=3, seed=5).fit(Noisy(), loader(8))
    start, noise = torch.load("noise0")
    assert torch.equal(start[0], start[1]) and torch.equal(start[0], start[2])
    assert all(len(set(column)) == 3 for column in noise.T.tolist()), "torch, random and numpy"


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "ranks"), [("tensor", 2)])
def test_ranks_that_share_samples_share_a_stream(strategy: str, ranks: int) -> None:
    """The same masks as on one process, from the start and after a restart under the strategy."""

    class Plain(Masking):
        def __init__(self) -> None:
            super().__init__()
            self.net[2].p = 0.0

    def train(ranks: int, strategy: str, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Plain()
        callbacks = [Streams(options.pop("save_at", None))]
        ckpt_path = options.pop("ckpt_path", None)
        trainer = quiet(
            strategy=strategy, devices=ranks, precision="64-true", max_epochs=2, seed=5, callbacks=callbacks
        )
        trainer.fit(model, loader(40, 4, shuffle=True), ckpt_path=ckpt_path)
        return weights(model)

    expected = train(1, "single")
    assert distance(train(ranks, strategy), expected) < 1e-12
    train(1, "single", save_at=7)
    assert distance(train(ranks, strategy, ckpt_path="saved"), expected) < 1e-12
    train(ranks, strategy, save_at=7)
    assert distance(train(1, "single", ckpt_path="saved"), expected) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
def test_where_parts_of_a_step_run_apart_only_hooks_have_streams(strategy: str) -> None:
    class Outside(Net):
        def on_train_start(self) -> None:
            torch.rand(3, generator=self.random_stream("a"))

    quiet(strategy=strategy, devices=2, accelerator="cpu").fit(Outside(), loader(8))
    with pytest.raises(
        RuntimeError, match=r"random_stream\('masking'\) was called in a step, but .* runs the parts of a step apart"
    ):
        quiet(strategy=strategy, devices=2, accelerator="cpu").fit(Masking(), loader(8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stream of a GPU is restored there")
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_that_drew_on_a_gpu_is_resumed_without_one(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_one_of_a_gpu(streams: dict[str, torch.Generator]) -> dict[str, Any]:
        state = rng_state(streams)
        state["streams"]["masking@cuda"] = ["cuda", state["streams"]["masking"][1]]
        return state

    with monkeypatch.context() as patch:
        patch.setattr(rank_state, "rng_state", with_one_of_a_gpu)
        fit(1, save_at=4)
    assert "masking@cuda" in Path("saved/rank-00000.json").read_text()
    _, after = fit(ranks, ckpt_path="saved")
    assert set(after[4]) == {"masking", "noise"}


@pytest.mark.ranks
def test_where_samples_are_distributed_differently_streams_are_new() -> None:
    """Neither what was drawn before is drawn again, nor do ranks draw alike."""

    class Dicing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            mine = torch.tensor(
                [torch.rand(()).item(), random.random(), torch.rand((), generator=self.random_stream("a")).item()]
            )
            path = Path(f"noise-{self.trainer.world_size}-{self.global_step}-{self.global_rank}")
            torch.save(mine, path) if not path.exists() else None
            return super().training_step(batch, batch_idx)

    for ranks, ckpt_path in ((2, None), (3, "saved"), (1, "saved")):
        quiet(devices=ranks, max_epochs=1, seed=5, callbacks=[Streams(2 if ckpt_path is None else None)]).fit(
            Dicing(), loader(32, 4), ckpt_path=ckpt_path
        )
    drawn = [
        torch.load(f"noise-{ranks}-{step}-{rank}")
        for ranks, step in ((2, 0), (2, 1), (3, 2), (3, 3))
        for rank in range(ranks)
    ]
    assert all(len(set(column.tolist())) == len(drawn) for column in torch.stack(drawn).T)
    assert torch.equal(torch.load("noise-3-2-0"), torch.load("noise-1-2-0")), (
        "a function of the seed, the data rank and the step"
    )


def test_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    before = dict(os.environ)
    assert seed_everything(42, workers=True, verbose=False) == 42
    first = drawn()
    assert seed_everything(42) == 42 and drawn() == first
    torch.manual_seed(42), random.seed(42), np.random.seed(42)
    assert drawn() == first, "as Lightning seeds them"
    monkeypatch.setenv("PL_GLOBAL_SEED", "9")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert seed_everything() == 0
    monkeypatch.setenv("LOCKSTEP_SEED", "42")
    assert seed_everything() == 42 and drawn() == first
    monkeypatch.setenv("LOCKSTEP_SEED", "4x")
    with pytest.raises(ValueError, match="LOCKSTEP_SEED must be a whole number of at least 0, but LOCKSTEP_SEED='4x'"):
        seed_everything()
    assert {**os.environ, "PL_GLOBAL_SEED": "", "PL_SEED_WORKERS": "", "LOCKSTEP_SEED": ""}.keys() == {
        *before,
        "PL_GLOBAL_SEED",
        "PL_SEED_WORKERS",
        "LOCKSTEP_SEED",
    }


def test_everything_is_seeded_by_the_trainers_seed() -> None:
    """Also numpy and random: two runs with a seed are the same whatever was drawn before."""
    runs = []
    for before in (1, 2):
        seed_everything(before)
        model = net(dropout=0.2)
        trainer = quiet(seed=9, max_epochs=1, callbacks=[streams := Streams()])
        trainer.fit(model, loader(16, 4, shuffle=True))
        runs.append((weights(model), streams.state))
    assert equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]


class Putting(Net):
    """Calls an operation for which torch has no deterministic algorithm."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        assert not torch.backends.cudnn.benchmark
        return super().training_step(batch, batch_idx)


def test_only_deterministic_algorithms_where_asked_for_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            quiet(deterministic=True).fit(Putting(), loader())
        torch.use_deterministic_algorithms(False)
        with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
            quiet(deterministic="warn").fit(Putting(), loader())
        assert not torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        quiet(deterministic=True).fit(net(), loader())
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


class Langevin(torch.optim.Optimizer):
    """Adds noise to each parameter, from the stream of the process."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=1e-2)


class Sampled(Net):
    def configure_optimizers(self) -> Any:
        return Langevin(self.parameters(), 1e-2)


class SampledByHand(Sampled):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Late(Langevin):
    """Adds noise once it has taken more steps than a run watches."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps > 18:
            super().step()
        else:
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-1e-2)


class Hooked(Net):
    """Notes how many steps a hook of the optimizer has seen."""

    def configure_optimizers(self) -> Any:
        self.seen = 0
        optimizer = Late(self.parameters(), 1e-2)
        optimizer.register_step_post_hook(self.see)
        return optimizer

    def see(self, *_: Any) -> None:
        self.seen += 1


@pytest.mark.ranks
def test_hooks_of_steps_are_called_on_ranks_after_a_run_in_the_program() -> None:
    for layout in ({"devices": 1}, {"strategy": "ddp", "devices": 2}):
        quiet(accelerator="cpu", split_batches=True, **layout).fit(module := Hooked(), loader(32, 8))
        assert module.seen == 4


class SampledLate(Sampled):
    def configure_optimizers(self) -> Any:
        return Late(self.parameters(), 1e-2)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", [Sampled, SampledByHand, SampledLate])
def test_an_optimizer_draws_on_ranks_what_it_draws_on_one_process(kind: type[Net]) -> None:
    found = []
    options: dict[str, Any] = {"split_batches": True, "precision": "64-true", "seed": 0, "max_epochs": 5}
    for layout in ({}, {"strategy": "ddp", "devices": 2}):
        module = kind()
        module.load_state_dict(net().state_dict())
        trainer = quiet(**options, **layout)
        trainer.fit(module, loader(32, 8))
        found.append(weights(module))
    assert distance(found[1], found[0]) < 1e-12
