"""Compressed gradients on real ranks: limit cases, the same bits on any number of them, skipped steps, resume."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer
from lockstep.callbacks import Callback, Guard, ModelCheckpoint
from lockstep.strategies import DDP, FSDP, DiLoCo, LocalSGD, Strategy, build
from lockstep.strategies.sync.compression.compression import Compression, Layout
from lockstep.strategies.sync.compression.names import compressor
from lockstep.trainer.checkpoint.store import Checkpoint
from tests.strategies.compression.test_compressors import SHAPES, SPECIFIED, Stepper, gradients

pytestmark = pytest.mark.ranks

SHARES = 4
WARM = "topk=0.1,warmup=6"
"""Sends 1/4 at first; less when the run that these tests save is resumed."""
STARTED = "topk=0.1,start=2,momentum=0.8"
"""Has a velocity and a residual when that run is resumed."""


class Net(Module):
    """Losses that count other than samples, a parameter that is not used in every step, tied weights."""

    def __init__(self, bad: str = "", momentum: float = 0.9) -> None:
        super().__init__()
        self.bad, self.momentum = bad, momentum
        self.net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3))
        self.net[2].weight = nn.Parameter(self.net[2].weight)
        self.again = nn.Linear(9, 9)
        self.again.weight = self.net[2].weight
        self.seldom = nn.Parameter(torch.ones(3))
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.net[4](self.again(self.net[:4](x)))
        if batch_idx % 4 == 0:
            logits = logits * self.seldom
        losses = F.cross_entropy(logits, y, reduction="none")
        if self.bad and self.global_step == 3 and self.global_rank == 1:
            nothing = (self.net[0].weight * 0).sum()
            losses = losses + (nothing.sqrt() if self.bad == "gradient" else nothing.log())
        kept = y < 2
        return Loss(losses[kept].sum(), int(kept.sum())) if batch_idx % 2 else losses.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def train(strategy: Any, devices: int, *, steps: int = 9, resume: Any = None, bad: str = "", **options: Any) -> Trainer:
    torch.manual_seed(0)
    made = torch.Generator().manual_seed(1)
    x, y = torch.randn(101, 6, generator=made, dtype=torch.float64), torch.randint(3, (101,), generator=made)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        accumulate_grad_batches=3,
        seed=3,
        logger=False,
        enable_progress_bar=False,
        **{"callbacks": [], "enable_checkpointing": "callbacks" in options, "gradient_clip_val": 0.3} | options,
    )
    corrects = getattr(strategy, "compressor", None) is not None and strategy.compressor.momentum
    trainer.fit(Net(bad, 0.0 if corrects else 0.9), DataLoader(TensorDataset(x, y), 4, shuffle=True), ckpt_path=resume)
    return trainer


def saved(folder: Path, devices: int, compress: str = WARM, **options: Any) -> Path:
    """The checkpoint after four steps."""
    saver = ModelCheckpoint(every_n_train_steps=4, monitor=None)
    strategy = DDP(compress=compress)
    train(strategy, devices, steps=4, default_root_dir=folder, callbacks=[saver], **options)
    (path,) = folder.rglob("*step=4*")
    return path


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


DAILY = (("powersgd=9",), 2)
RARELY = ("topk=1", "randomk=1", "qsgd=48", "sign,start=50")


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "devices"), [DAILY, *(pytest.param(RARELY, n, marks=pytest.mark.slow) for n in (2, 3))]
)
def test_what_sends_all_is_ddp(names: tuple[str, ...], devices: int) -> None:
    exact = weights(train(DDP(find_unused_parameters=True), devices, steps=50))
    for name in names:
        assert float((weights(train(DDP(compress=name), devices, steps=50)) - exact).abs().max()) <= 1e-12


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_momentum_before_what_sends_all_is_that_of_the_optimizer(devices: int) -> None:
    exact = weights(train(DDP(find_unused_parameters=True), devices, steps=50, gradient_clip_val=None))
    strategy = DDP(compress="topk=1,momentum=0.9")
    found = weights(train(strategy, devices, steps=50, gradient_clip_val=None))
    assert float((found - exact).abs().max()) <= 1e-12


def digests(strategy: Strategy) -> dict[str, str]:
    """Of each compressor what three reductions give and leave: all shares', in order."""
    strategy.setup()
    try:
        own, found = strategy.shares, {}  # type: ignore[attr-defined]
        model = nn.Module()
        for name, shape in SHAPES.items():
            model.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=torch.float64)))
        for name in (*SPECIFIED, WARM):
            compression = Compression(compressor(name), Layout(own, SHARES), seed=11)
            compression.watch(model)
            digest = hashlib.sha256()
            for step in range(3):
                grads = gradients(SHAPES, SHARES, step)
                compression.reduce_into(list(model.parameters()), [[*grads[share]] for share in own], 1 / SHARES)
                compression.commit(Stepper(list(model.parameters())))  # type: ignore[arg-type]
                for parameter in model.parameters():
                    digest.update(parameter.grad.numpy().tobytes())  # type: ignore[union-attr]
            for left in [*compression.residuals.values(), *compression.velocities.values()]:
                if left:
                    mine = torch.stack([left[share] for share in own])
                    digest.update(strategy.all_gather(mine).flatten().numpy().tobytes())
            found[name] = digest.hexdigest()
        return found
    finally:
        strategy.teardown()


@pytest.mark.long
def test_every_bit_is_the_same_on_any_number_of_ranks() -> None:
    found = []
    for devices in (1, 2, 4):
        strategy, _ = build(DDP(compress="sign"), devices=devices, accelerator="cpu", virtual_ranks=SHARES)
        found.append(strategy.launch(digests, strategy))
    assert found[0] == found[1] == found[2] and len(set(found[0].values())) == len(SPECIFIED) + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECIFIED)
def test_trained_weights_are_the_same_on_any_number_of_ranks(name: str) -> None:
    found = [weights(train(DDP(compress=name), devices, virtual_ranks=SHARES)) for devices in (1, 2, 4)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


class Watch(Callback):
    """Residuals and weights before and after the step that is skipped."""

    def _noted(self, trainer: Any) -> list[Tensor]:
        left = trainer.strategy._compression.residuals
        return [*(r.clone() for of_name in left.values() for r in of_name.values()), weights(trainer).clone()]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            self.seen = [*getattr(self, "seen", []), self._noted(trainer)]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        windows = [self.seen[i] for i in range(0, len(self.seen), 3)]
        assert len(windows) >= 2 and len(windows[0]) > 1
        assert all(torch.equal(a, b) for a, b in zip(windows[0], windows[1], strict=True))
        assert trainer.strategy._compression.step > trainer.global_step


class Once(Net):
    """Is bad in one window only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        if self.bad and self.global_step == 3:
            self.calls = getattr(self, "calls", 0) + 1
            self.bad = "" if self.calls == 3 else self.bad
        return output


@pytest.mark.parametrize("bad", ["gradient", pytest.param("loss", marks=pytest.mark.slow)])
def test_a_step_that_is_skipped_leaves_weights_and_residuals(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.compression.test_ranks.Net", Once)
    trainer = train(DDP(compress="topk=0.1"), 2, steps=6, bad=bad, callbacks=[Guard(non_finite="skip"), Watch()])
    assert trainer.global_step == 6


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "then"), [(2, 1), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((2, 2), (1, 4)))]
)
@pytest.mark.parametrize("name", [WARM, pytest.param(STARTED, marks=pytest.mark.slow)])
def test_a_run_is_resumed_on_any_ranks_to_the_bit(name: str, first: int, then: int, tmp_path: Path) -> None:
    half = saved(tmp_path, first, name, virtual_ranks=SHARES)
    resumed = train(DDP(compress=name), then, resume=half, virtual_ranks=SHARES)
    assert torch.equal(weights(resumed), weights(train(DDP(compress=name), 2, virtual_ranks=SHARES)))


@pytest.mark.parametrize("cycled", [True, False])
def test_momentum_that_a_scheduler_sets_later_is_refused(cycled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycled(Net):
        def configure_optimizers(self) -> Any:  # type: ignore[override]
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)
            momentum = {"cycle_momentum": cycled, "max_momentum": 0.0, "base_momentum": 0.5}  # it begins with the first
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20, **momentum)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    monkeypatch.setattr("tests.strategies.compression.test_ranks.Net", Cycled)
    if not cycled:
        train(DDP(compress="topk=0.1,momentum=0.5"), 1)
        return
    with pytest.raises(ValueError, match=r"SGD has momentum=0\.\d+, so that .*cycle_momentum=False"):
        train(DDP(compress="topk=0.1,momentum=0.5"), 1)


def test_what_is_saved_after_fit_has_the_residuals(tmp_path: Path) -> None:
    train(DDP(compress="topk=0.1"), 1, steps=2).save_checkpoint(tmp_path / "last")
    assert Checkpoint.open(tmp_path / "last").names("strategy/compression/residual/")


class SaveAtStart(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


@pytest.mark.long
def test_residuals_are_read_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = saved(tmp_path / "two", 2)
    two = Checkpoint.open(path)
    train(DDP(compress="topk=0.1"), 3, steps=5, resume=path, callbacks=[SaveAtStart(tmp_path / "at_start")])
    three = Checkpoint.open(tmp_path / "at_start")
    names = two.names("strategy/compression/residual/")
    assert names and names == three.names("strategy/compression/residual/")
    for name in names:
        assert (two.shape(name)[0], three.shape(name)[0]) == (2, 3)
        torch.testing.assert_close(two.read(name).mean(0), three.read(name).mean(0), rtol=0, atol=1e-12)


def test_what_learners_have_not_sent_is_never_read_as_a_gradient(tmp_path: Path) -> None:
    train(LocalSGD(compress="topk=0.1"), 1, steps=2).save_checkpoint(tmp_path / "learner")
    assert Checkpoint.open(tmp_path / "learner").names("strategy/compression/residual/")
    at_start = SaveAtStart(tmp_path / "at_start")
    train(DDP(compress="topk=0.1"), 1, steps=3, resume=tmp_path / "learner", callbacks=[at_start])
    assert not Checkpoint.open(tmp_path / "at_start").names("strategy/compression/residual/")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["topk=0.1", STARTED, "powersgd=2"])
def test_replicas_of_shards_resume_to_the_bit(name: str, tmp_path: Path) -> None:
    def strategy() -> Strategy:
        return FSDP(replicas=2, compress=name)

    saver = ModelCheckpoint(every_n_train_steps=4, monitor=None, save_top_k=-1)
    whole = train(strategy(), 4, steps=8, default_root_dir=tmp_path, callbacks=[saver])
    (half,) = tmp_path.rglob("*step=4*")
    for kind in ("residual", "velocity") if name == STARTED else ("residual",):
        assert Checkpoint.open(half).shape(f"strategy/compression/{kind}/net.0.weight") == (2, 9, 6)
    assert torch.equal(weights(train(strategy(), 4, steps=8, resume=half)), weights(whole))
    train(FSDP(replicas=2, compress=name), 2, steps=8, resume=half)  # one shard
    train(DDP(compress=name), 2, steps=8, resume=half)


def test_what_cannot_be_compressed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sparse(Net):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            self.table = nn.Embedding(3, 2, sparse=True)

    class Adam(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), betas=(0.8, 0.9))

    with pytest.raises(ValueError, match="16-mixed"):
        DDP(compress="sign").configure(devices=2, accelerator="cpu", precision="16-mixed")
    with pytest.raises(ValueError, match="along the axis ddp of a mesh of ddp and fsdp, but the axes are fsdp;"):
        FSDP(compress="sign").configure(devices=2, accelerator="cpu")
    with pytest.raises(ValueError, match="compress where parameters are sharded"):
        build(FSDP(replicas=2, compress="sign"), devices=4, accelerator="cpu", virtual_ranks=4)
    with pytest.raises(ValueError, match="static_graph=True concerns torch's reduction"):
        DDP(compress="sign", static_graph=True)
    corrected = DDP(compress="topk=0.1,momentum=0.5")
    for module, what in ((Net(), "SGD has momentum=0.9"), (Adam(), r"Adam has betas=\(0.8, 0.9\)")):
        with pytest.raises(ValueError, match=f"momentum=0.5 and {what}, so that momentum would be added up twice"):
            Trainer(strategy=corrected, devices=1, accelerator="cpu", max_steps=1, logger=False).fit(module, [0])
    with pytest.raises(ValueError, match="has momentum=0.9 in place of an optimizer.s, but what learners"):
        DiLoCo(compress="topk=0.1,momentum=0.9")
    monkeypatch.setattr("tests.strategies.compression.test_ranks.Net", Sparse)
    with pytest.raises(ValueError, match="table has sparse=True, and compress sends dense gradients"):
        train(DDP(compress="sign"), 1)
