"""Nothing trains on in silence: numbers that are not finite, parameters that nobody steps, steps that move nothing,
replicas that drift."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.callbacks import Callback, Guard, ModelCheckpoint
from lockstep.strategies import (
    DDP,
    FSDP,
    DataParallel,
    DeepSpeed,
    ModelParallel,
    Pipeline,
    SingleDevice,
    Strategy,
    TensorParallel,
)
from tests.strategies.contract import Body
from tests.strategies.sync.test_counts_on_device import Replicas, Shards, Single
from tests.trainer.toy import Net, equal, loader, quiet, weights

STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "single": (SingleDevice, 1),
    "dp": (DataParallel, 2),
    "model": (ModelParallel, 2),
    "ddp": (DDP, 2),
    "fsdp": (FSDP, 2),
    "tensor": (TensorParallel, 2),
    "pipeline": (Pipeline, 2),
    "deepspeed 2": (DeepSpeed, 2),
    "deepspeed 3": (lambda: DeepSpeed(stage=3), 2),
    "fsdp=2,pipeline=2": (lambda: Pipeline(mesh="fsdp=2,pipeline=2"), 4),
}

VARIANTS = ("model", "deepspeed 3", "fsdp=2,pipeline=2")

NUM_WINDOWS, BATCH = 7, 4


class Brittle(Module):
    """Its loss is finite always, its gradient is not where a sample is marked; one rank sees that sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = brittle_loss(self.body, batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def brittle_loss(body: torch.nn.Module, batch: Any) -> torch.Tensor:
    x, y, marked = batch
    out = body(x)
    loss = F.cross_entropy(out, y)
    return (
        loss + (out * 0).sum().sqrt() if marked.any() else loss
    )  # the derivative of sqrt at 0 is infinite, and 0 times that is NaN


def marked_data(*windows: int) -> DataLoader:
    """Windows of BATCH samples, over all ranks; the last sample of the given ones is marked."""
    generator = torch.Generator().manual_seed(1)
    n = NUM_WINDOWS * BATCH
    marks = torch.zeros(n)
    for window in windows:
        marks[window * BATCH + BATCH - 1] = 1
    x = torch.randn(n, 6, generator=generator, dtype=torch.float32)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (n,), generator=generator), marks), BATCH)


def by_hand(bad: set[int], precision: str, back_to: int | None = None) -> tuple[list[torch.Tensor], list[float]]:
    """Weights and losses of the run that skips the windows in `bad`; `back_to`: step whose state it then goes back
    to."""
    dtype = torch.float64 if precision == "64-true" else torch.float32
    torch.manual_seed(0)
    body = Body().to(dtype)
    optimizer = torch.optim.AdamW(body.parameters(), lr=0.02)
    losses: list[float] = []
    states = []
    for i, (x, y, _) in enumerate(marked_data()):
        states.append((copy.deepcopy(body.state_dict()), copy.deepcopy(optimizer.state_dict())))
        if i in bad:
            if back_to is not None:
                body.load_state_dict(states[back_to][0])
                optimizer.load_state_dict(states[back_to][1])
            continue
        loss = F.cross_entropy(body(x.to(dtype)), y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in body.parameters()], losses


def far(module: Module, expected: list[torch.Tensor]) -> float:
    return max(
        ((p - e).abs().max() / e.abs().max().clamp(min=1e-3)).item()
        for p, e in zip(module.parameters(), expected, strict=True)
    )


class Untouched(Callback):
    """Writes whether the failing step left this rank's parameters as they were."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.before = [self._local(p) for p in module.parameters()]

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        same = all(torch.equal(a, self._local(b)) for a, b in zip(self.before, module.parameters(), strict=True))
        Path(f"rank{trainer.global_rank}").write_text(f"{same} {trainer.global_step} {type(exception).__name__}")

    @staticmethod
    def _local(parameter: Any) -> torch.Tensor:
        return getattr(parameter, "_local_tensor", parameter).detach().clone()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["single", "dp", "ddp", "fsdp", "pipeline", "deepspeed 2"])
def test_a_gradient_that_is_not_finite_ends_the_run_on_all_ranks_with_parameters_untouched(name: str) -> None:
    make, devices = STRATEGIES[name]
    precision = "32-true" if "deepspeed" in name else "64-true"
    run = quiet(strategy=make(), devices=devices, split_batches=True, precision=precision, callbacks=[Untouched()])
    named = "a gradient" if "deepspeed" in name else "the gradient of body"
    with pytest.raises(
        FloatingPointError, match=f"{named}.* is NaN or infinite in step 3 of epoch 0; no parameter was changed by it"
    ):
        run.fit(Brittle(), marked_data(3))
    ranks = 1 if name in ("dp", "model") else devices
    assert [Path(f"rank{i}").read_text() for i in range(ranks)] == ["True 3 FloatingPointError"] * ranks


@pytest.mark.ranks
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in STRATEGIES]
)
def test_a_window_that_is_not_finite_can_be_skipped(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, devices = STRATEGIES[name]
    precision = "32-true" if "deepspeed" in name else "64-true"
    guard = Guard(non_finite="skip", check_replicas_every_n_steps=2)
    run = quiet(strategy=make(), devices=devices, split_batches=True, precision=precision, callbacks=[guard])
    module = Brittle()
    run.fit(module, marked_data(3, 4))
    assert (
        "is NaN or infinite in step 3 of epoch 0: this step is skipped (2 in a row, at most 10)"
        in capfd.readouterr().err
    )
    expected, losses = by_hand({3, 4}, precision)
    exact = precision == "64-true"
    assert far(module, expected) < (1e-11 if exact else 1e-5)
    assert run.global_step == NUM_WINDOWS - 2
    assert guard.skipped_steps == 2
    assert guard.in_a_row == 0
    assert float(run.callback_metrics["loss"]) == pytest.approx(sum(losses) / len(losses), rel=1e-12 if exact else 1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize(("make", "devices"), [(Single, 1), (Replicas, 2), (Shards, 2)])
def test_a_window_can_be_skipped_where_the_device_learns_it_first(make: Callable[[], Strategy], devices: int) -> None:
    guard = Guard(non_finite="skip")
    run = quiet(strategy=make(), devices=devices, split_batches=True, precision="64-true", callbacks=[guard])
    module = Brittle()
    run.fit(module, marked_data(3, 4))
    assert far(module, by_hand({3, 4}, "64-true")[0]) < 1e-11
    assert run.global_step == NUM_WINDOWS - 2
    assert guard.skipped_steps == 2


@pytest.mark.ranks
@pytest.mark.parametrize(("make", "devices"), [(SingleDevice, 1), (Single, 1), (DDP, 2), (FSDP, 2)])
def test_a_run_can_go_back_to_its_newest_checkpoint(
    make: Callable[[], Strategy], devices: int, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(non_finite="roll_back")
    saver = ModelCheckpoint(every_n_train_steps=2)
    weights_only = ModelCheckpoint(filename="weights", every_n_train_steps=1, save_weights_only=True)
    run = quiet(
        strategy=make(),
        devices=devices,
        split_batches=True,
        precision="64-true",
        callbacks=[guard, saver, weights_only],
        enable_checkpointing=True,
    )
    module = Brittle()
    run.fit(module, marked_data(3))
    assert "skipped; back to step 2 " in capfd.readouterr().err
    expected, _ = by_hand({3}, "64-true", back_to=2)
    assert far(module, expected) < 1e-11
    assert far(module, by_hand({3}, "64-true")[0]) > 1e-4  # it is not the run that left the window out
    assert run.global_step == 2 + 3
    assert guard.skipped_steps == 1
    quiet(callbacks=[guard]).fit(Brittle(), marked_data())
    assert guard.skipped_steps == 0, "of another run"


def test_a_run_does_not_go_back_to_a_checkpoint_of_another(tmp_path: Path) -> None:
    """Which an earlier run has left in the same folder, at a later step."""

    def trained(folder: str, *marked: int) -> list[torch.Tensor]:
        module, saver = Brittle(), ModelCheckpoint(tmp_path / folder, every_n_train_steps=2)
        callbacks = [Guard(non_finite="roll_back"), saver]
        quiet(enable_checkpointing=True, callbacks=callbacks).fit(module, marked_data(*marked))
        return weights(module)

    trained("shared")
    assert equal(trained("shared", 3), trained("own", 3))


def test_going_back_needs_a_checkpoint() -> None:
    with pytest.raises(FloatingPointError, match="no checkpoint to go back to yet: let ModelCheckpoint save by steps"):
        quiet(callbacks=[Guard(non_finite="roll_back")]).fit(Brittle(), marked_data(1))


def test_too_many_windows_in_a_row_end_the_run() -> None:
    guard = Guard(non_finite="skip", max_in_a_row=2)
    with pytest.raises(FloatingPointError, match="in step 1 of epoch 0; no parameter"):
        quiet(callbacks=[guard]).fit(Brittle(), marked_data(1, 2, 3))
    guard = Guard(non_finite="skip", max_in_a_row=2)
    quiet(callbacks=[guard]).fit(Brittle(), marked_data(1, 2, 4, 5))
    assert guard.skipped_steps == 4


class ByHand(Brittle):
    """The same in manual optimization, where a gradient stays on its rank until the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(brittle_loss(self.body, batch))
        self.optimizers().step()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "tensor"])
def test_manual_optimization_is_guarded_too(name: str) -> None:
    make, devices = STRATEGIES[name]
    run = quiet(strategy=make(), devices=devices, split_batches=True, callbacks=[Untouched()])
    with pytest.raises(
        FloatingPointError, match="a gradient that AdamW is to apply is NaN or infinite; no parameter was changed by it"
    ):
        run.fit(ByHand(), marked_data(3))
    assert [Path(f"rank{i}").read_text() for i in range(devices)] == ["True 3 FloatingPointError"] * devices


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("steps", [NUM_WINDOWS, 4], ids=["in the middle", "last of its epoch"])
def test_on_a_gpu_a_bad_step_is_skipped_and_reported_one_step_later(fused: bool, steps: int) -> None:
    class OnGpu(Brittle):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02, fused=fused)

    module, said = OnGpu(), "a gradient is NaN or infinite in step 3 of epoch 0; no parameter was changed by it"
    run = quiet(accelerator="gpu", devices=1, strategy="single", limit_train_batches=steps, max_epochs=2)
    with pytest.raises(FloatingPointError, match=said):
        run.fit(module, marked_data(3))
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    module = OnGpu()
    with pytest.raises(FloatingPointError):  # the last step of all
        quiet(accelerator="gpu", devices=1, strategy="single").fit(module, marked_data(NUM_WINDOWS - 1))


# ---- who steps what ------------------------------------------------------------------------------


class Forgetful(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


class Stale(Net):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(copy.deepcopy(self.net).parameters(), lr=0.1)

    def configure_optimizers(self) -> Any:
        return self.early


def test_a_parameter_that_no_optimizer_steps() -> None:
    with pytest.raises(
        ValueError,
        match=r"no optimizer steps net.3.weight, net.3.bias, so training would leave them as they are, though they "
        r"get gradients; give them to one, or freeze",
    ):
        quiet().fit(Forgetful(), loader())
    frozen = Forgetful()
    frozen.net[3].requires_grad_(False)
    quiet().fit(frozen, loader())


class Target(Net):
    """A Q-learner: its target network has trainable parameters that are used without gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        with torch.no_grad():
            wanted = 1 + 0.9 * self.target(x).max(1).values
        return (self.net(x).max(1).values - wanted).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.target.load_state_dict(self.net.state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_parameters_without_a_gradient_need_no_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    module = Target()
    with caplog.at_level("INFO", "lockstep"):
        quiet(accelerator="cpu", devices=1).fit(module, loader())
    (said,) = [line for line in caplog.messages if "no optimizer steps" in line]
    assert said == (
        "no optimizer steps target.0.weight, target.0.bias, target.3.weight, target.3.bias, and no gradient reaches "
        "them: training leaves them as they are"
    )


class LaterGradient(Target):
    """A gradient reaches the target in the third step, on the last rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.trainer.global_rank == self.trainer.world_size - 1:
            loss = loss + self.target(batch[0]).square().mean()
        return loss


class GivenLater(LaterGradient):
    """The optimizer gets the target before that."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": [*self.target.parameters()], "lr": 0.05})


def test_a_gradient_that_reaches_such_parameters_in_a_later_step() -> None:
    module = LaterGradient()
    with pytest.raises(ValueError, match=r"no optimizer steps target.0.weight, .*, so training would leave them"):
        quiet(accelerator="cpu", devices=1).fit(module, loader())
    expected = module.net[0].weight.clone()
    module = LaterGradient()
    quiet(accelerator="cpu", devices=1, max_steps=2).fit(module, loader())
    assert torch.equal(module.net[0].weight, expected)
    quiet(accelerator="cpu", devices=1, max_steps=3).fit(GivenLater(), loader())


@pytest.mark.long
@pytest.mark.ranks
def test_a_target_network_under_ddp(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "split_batches": True}
    modules = [Target(), Target(), Target()]
    quiet(devices=1, **options).fit(modules[0], loader())
    quiet(devices=2, strategy="ddp", **options).fit(modules[1], loader())
    saving = ModelCheckpoint(dirpath=str(tmp_path), every_n_train_steps=2)
    quiet(devices=2, strategy="ddp", callbacks=[saving], max_steps=2, enable_checkpointing=True, **options).fit(
        Target(), loader()
    )
    quiet(devices=2, strategy="ddp", **options).fit(modules[2], loader(), ckpt_path=saving.best_model_path)
    for one, other, resumed in zip(*map(weights, modules), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
        assert torch.equal(other, resumed)
    with pytest.raises(ValueError, match=r"no optimizer steps target.0.weight"):
        quiet(devices=2, strategy="ddp", **options).fit(LaterGradient(), loader())


def test_an_optimizer_of_other_parameters() -> None:
    with pytest.raises(
        ValueError,
        match=r"optimizer '0' \(SGD\) steps a tensor that is not a parameter of Stale \(number 0 of group 0, shape "
        r"\[16, 8\]\)",
    ):
        quiet().fit(Stale(), loader())


class Temperature(Module):
    """Steps a tensor by hand that the module does not hold, whose gradient no strategy sums."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_alpha = torch.nn.Linear(8, 3), torch.zeros(1, requires_grad=True)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("a step began")

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD([self.log_alpha], 1.0)]


def test_an_optimizer_of_other_tensors_in_manual_optimization() -> None:
    with pytest.raises(
        ValueError,
        match=r"optimizer '1' \(SGD\) steps a tensor that is not a parameter of Temperature \(number 0 of group 0, "
        r"shape \[1\]\): make it an nn.Parameter in __init__",
    ):
        quiet().fit(Temperature(), loader())


def test_an_optimizer_may_find_its_own_rate() -> None:
    class Relative(torch.optim.SGD):
        """Its groups hold no rate, as those of an Adafactor with relative steps."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.param_groups[0]["lr"] = None

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)

    class Finds(Net):
        def configure_optimizers(self) -> Any:
            return Relative(self.parameters())

    torch.manual_seed(0)
    found, given = Finds(), Net(optimizer="SGD", lr=0.1)
    given.load_state_dict(found.state_dict())
    quiet().fit(found, loader())
    quiet().fit(given, loader())
    assert equal(weights(found), weights(given))


def test_a_resumed_run_whose_rate_has_fallen_continues(tmp_path: Path) -> None:
    class Fading(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            fading = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=1e-30)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": fading, "interval": "step"}}

    torch.manual_seed(0)
    whole = Fading()
    first, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    quiet(max_steps=6).fit(whole, loader())
    trainer = quiet(max_steps=3)
    trainer.fit(first, loader())
    trainer.save_checkpoint(tmp_path / "three")
    with pytest.warns(RuntimeWarning, match="optimizer.step moved no parameter in step 3"):
        quiet(max_steps=6).fit(resumed, loader(), ckpt_path=tmp_path / "three")
    assert equal(weights(whole), weights(resumed))


def test_a_step_that_moves_nothing() -> None:
    class Lost(Net):
        """Rates far below what float32 can add to a weight."""

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-30)

    with pytest.raises(
        RuntimeError,
        match="optimizer.step moved no parameter in step 0, though there is a gradient and the learning rate is 1e-30",
    ):
        quiet().fit(Lost(), loader())


def test_a_rate_that_rises_may_move_nothing_at_first() -> None:
    class Rising(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1e-30 * 1e8**t)
            return [optimizer], [{"scheduler": rate, "interval": "step"}]

    torch.manual_seed(0)
    module = Rising()
    before = [weight.clone() for weight in weights(module)]
    quiet().fit(module, loader())
    assert not equal(before, weights(module))


def test_rates_of_zero_and_gradients_of_zero_are_not_a_fault() -> None:
    class Late(Net):
        """The first step runs at rate 0."""

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(t, 1)),
                    "interval": "step",
                },
            }

    quiet().fit(Late(), loader())

    class Flat(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 0 if batch_idx == 0 else loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.warns(RuntimeWarning, match="every gradient of the first step is zero"):
        quiet().fit(Flat(), loader())


# ---- replicas --------------------------------------------------------------------------------------


class Drift(Callback):
    """Changes one element of one parameter on one rank after step 2."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and trainer.global_rank == self.rank:
            parameter = dict(module.named_parameters())["body.5.bias"]
            with torch.no_grad():
                getattr(parameter, "_local_tensor", parameter).view(-1)[0] += 1e-6


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("make", "devices", "rank", "message"),
    [
        (DDP, 2, 1, "after step 2 body.5.bias on rank 1 is not what it is on rank 0"),
        pytest.param(
            DDP, 3, 2, "after step 2 body.5.bias on rank 2 is not what it is on rank 0", marks=pytest.mark.slow
        ),
        (lambda: FSDP(replicas=2), 4, 2, "after step 2 body.5.bias on rank 2 is not what it is on rank 0"),
        (TensorParallel, 2, 1, "after step 2 body.5.bias on rank 1 is not what it is on rank 0"),
        (
            lambda: Pipeline(mesh="ddp=2,pipeline=2"),
            4,
            3,
            "after step 2 body.5.bias on rank 3 is not what it is on rank 2",
        ),
    ],
)
def test_replicas_that_drift_apart_are_found(
    make: Callable[[], Strategy], devices: int, rank: int, message: str
) -> None:
    run = quiet(
        strategy=make(),
        devices=devices,
        split_batches=True,
        precision="64-true",
        callbacks=[Drift(rank), Guard(check_replicas_every_n_steps=2)],
    )
    with pytest.raises(RuntimeError, match=message):
        run.fit(Brittle(), marked_data())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"non_finite": "ignore"}, "non_finite must be one of 'raise', 'skip', 'roll_back', but non_finite='ignore'"),
        ({"max_in_a_row": 0}, "max_in_a_row must be a whole number of at least 1, but max_in_a_row=0"),
        ({"check_replicas_every_n_steps": 2.5}, "check_replicas_every_n_steps must be a whole number of at least 1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Guard(**options)


def test_the_guard_survives_a_restart() -> None:
    guard, other = Guard(), Guard()
    guard.skipped_steps, guard.in_a_row = 3, 1
    other.load_state_dict(guard.state_dict())
    assert (other.skipped_steps, other.in_a_row) == (3, 1)


class RuinedByItsLastStep(Module):
    """Every loss and every gradient is finite; the last optimizer step is not."""

    def __init__(self, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.by = Body(), by
        self.automatic_optimization = by != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.body(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        if self.global_step == NUM_WINDOWS - 1:
            optimizer.optimizer.param_groups[0]["lr"] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == NUM_WINDOWS - 1 and self.by == "optimizer":
            optimizer.param_groups[0]["lr"] = float("inf")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.by != "rate":
            return optimizer

        def rate(step: int) -> float:
            return float("nan") if step == NUM_WINDOWS - 1 else 1e-3

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "by"),
    [(name, "rate") for name in STRATEGIES if not name.startswith("deepspeed")]
    + [("single", "optimizer"), ("single", "manual"), ("ddp", "manual")],
)
def test_weights_that_the_last_step_ruins_are_an_error_without_a_checkpoint_too(name: str, by: str) -> None:
    make, devices = STRATEGIES[name]
    trainer = quiet(strategy=make(), devices=devices, accelerator="cpu", split_batches=True)
    with pytest.raises(
        FloatingPointError, match=rf"is NaN or infinite at the end of training, after step {NUM_WINDOWS - 1}"
    ):
        trainer.fit(RuinedByItsLastStep(by), marked_data())
