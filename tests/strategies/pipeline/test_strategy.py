"""Pipeline: any module in stages, the user's step unchanged, the numbers of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lockstep import Module, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import Pipeline, SingleDevice
from lockstep.strategies.base import StepHooks
from lockstep.strategies.pipeline.partition import balance, cut, measure, stages
from lockstep.strategies.pipeline.schedules import SCHEDULES, schedule
from lockstep.strategies.pipeline.timeline import plan
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.cli.main import main
from tests.strategies import contract
from tests.strategies.contract import Plan, difference, reference, saved_weights
from tests.trainer.toy import distance, loader, net, quiet, weights

pytestmark = pytest.mark.ranks

WIDTH, LENGTH, TOKENS = 8, 6, 11


class Block(nn.Module):
    """Takes what goes from layer to layer, what all layers share, and what follows from the inputs alone."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.film = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 16),
            nn.Linear(16, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, c: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * mask[..., None] + self.film(c)


class Net1(nn.Module):
    """All that a forward of its own may do: parameters beside layers, values that every block shares, a dict as
    output."""

    def __init__(self, blocks: int = 5, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.position, self.shift = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH))
        self.token, self.condition = nn.Embedding(TOKENS, WIDTH), nn.Linear(3, WIDTH)
        self.register_buffer("window", torch.tril(torch.ones(LENGTH, LENGTH)))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, *, condition: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.token(tokens)
        x += self.position[: tokens.shape[1]]
        _, _, width = x.shape
        assert width == WIDTH and x.device == tokens.device
        c = self.condition(condition)[:, None] + self.shift
        mask = mask @ self.window.T / LENGTH
        for block in self.blocks:
            x = checkpoint(block, x, c, mask, use_reentrant=False) if self.checkpointed else block(x, c, mask)
            x = x * 0.9
        return {"logits": self.head(F.relu(self.norm(x))), "size": x.pow(2).mean()}


class Model(Module):
    """Batches are dicts of lists of dicts; layers are named in `configure_optimizers`; a frozen layer and a buffer lie
    outside."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"net": Net1(**options)})
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def run(self, batch: Any) -> Any:
        assert len(batch["names"]) == len(batch["tokens"])
        return self.inner["net"](batch["tokens"], condition=batch["nested"][0], mask=batch["nested"][1]["mask"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("before", float(len(batch["tokens"])), reduce_fx="sum", on_epoch=True, on_step=False)
        output = self.run(batch)
        loss = F.cross_entropy(output["logits"].flatten(0, 1), batch["tokens"].flatten()) + 0.01 * output["size"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch["names"])), reduce_fx="sum", on_epoch=True, on_step=False)
        return {"loss": loss, "logits": output["logits"]}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert (outputs is None) == (not self.trainer.strategy.topology.is_reporting_rank)
        if outputs is not None:
            assert outputs["logits"].shape == (len(batch["tokens"]), LENGTH, TOKENS) and outputs["loss"].dim() == 0
        self.log("hook", float(batch_idx))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.run(batch)["logits"].pow(2).mean())

    def on_validation_epoch_end(self) -> None:
        batch = self.trainer.strategy.to_device(next(iter(data())))
        self.log("outside of a step", self.run(batch)["logits"][0].sum())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run(batch)["logits"]

    def configure_optimizers(self) -> Any:
        net = self.inner["net"]
        rest = [p for name, p in net.named_parameters() if not name.startswith("head")]
        groups = [
            {"params": [p for p in rest if p.dim() > 1]},
            {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
            {"params": net.head.parameters(), "lr": 1e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
        }


class Items(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, TOKENS, (22, LENGTH), generator=generator)
        self.conditions, self.masks = (
            torch.randn(22, 3, generator=generator),
            (torch.rand(22, LENGTH, generator=generator) > 0.2).float(),
        )

    def __len__(self) -> int:
        return 22

    def __getitem__(self, i: int) -> Any:
        return {"tokens": self.tokens[i], "nested": [self.conditions[i], {"mask": self.masks[i]}], "names": f"item {i}"}


def data(shuffle: bool = False) -> DataLoader:
    return DataLoader(Items(), 8, shuffle=shuffle)


def train(
    strategy: Any,
    devices: int,
    ckpt_path: Path | None = None,
    save_to: Path | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Model, Trainer]:
    """Two epochs of three windows, the last of 6 samples."""
    torch.manual_seed(0)
    module = Model(**(model or {}))
    trainer = quiet(
        **{
            "strategy": strategy,
            "devices": devices,
            "max_epochs": 2,
            "log_every_n_steps": 1,
            "precision": "64-true",
            "seed": 1,
            "gradient_clip_val": 1.0,
        }
        | options
    )
    if save_to is not None:
        module.on_train_end = SaveAtEnd(save_to, module)  # type: ignore[method-assign,assignment]
    trainer.fit(module, data(shuffle=True), data(), ckpt_path=ckpt_path)
    return module, trainer


class SaveAtEnd:
    """A hook that travels to the ranks."""

    def __init__(self, path: Path, module: Module) -> None:
        self.path, self.module = path, module

    def __call__(self) -> None:
        self.module.trainer.save_checkpoint(self.path)


# ---- the numbers of one process ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "dualpipev"])
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


@pytest.fixture(scope="module")
def alone() -> tuple[Model, dict[str, float], torch.Tensor]:
    """Module, metrics and predictions of one process."""
    module, trainer = train("single", 1)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module, metrics, torch.cat(trainer.predict(module, data()))


@pytest.mark.parametrize(
    ("make", "devices", "model"),
    [
        (Pipeline, 2, {"checkpointed": True}),
        (lambda: Pipeline(schedule="gpipe", num_micro_batches=3, split=["blocks.1"]), 2, {}),
        (lambda: Pipeline(schedule="zbv"), 2, {}),
        (lambda: Pipeline(schedule="interleaved_1f1b", module="inner.net"), 2, {"checkpointed": True}),
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


# ---- noise ----------------------------------------------------------------------------------------------


class Noisy(Module):
    """The step draws before it calls the net and uses that afterwards, as diffusion models do; layers draw as well."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 8, bias=False), nn.Dropout(0.5), nn.Linear(8, 8, bias=False), nn.Dropout(0.5)
        )
        self.given = [torch.zeros(0)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch[0])
        self.given[0] = noise  # on each stage
        return (self.net(batch[0] + noise) - noise).pow(2).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        given = self.all_gather(self.given[0])
        assert (given == given[0]).all(), "all stages draw the same before the net"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_noise_is_one_over_stages_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    def fit(
        max_epochs: int, ckpt_path: Path | None = None, save_to: Path | None = None, seed: int = 1
    ) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Noisy()
        if save_to is not None:
            module.on_train_end = SaveAtEnd(save_to, module)  # type: ignore[method-assign,assignment]
        quiet(strategy="pipeline", devices=2, max_epochs=max_epochs, seed=seed).fit(
            module, loader(), ckpt_path=ckpt_path
        )
        return weights(module)

    whole = fit(2)
    fit(1, save_to=tmp_path / "half")
    resumed = fit(2, ckpt_path=tmp_path / "half")
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert not torch.equal(whole[0], fit(2, seed=2)[0])


def dropped(rank_count: int) -> list[list[bool]]:
    """What the dropout layers of both stages drop for two parts."""
    strategy = Pipeline()
    strategy.configure(devices=rank_count, accelerator="cpu")
    strategy.setup()
    try:
        model = nn.Sequential(
            nn.Linear(64, 64, bias=False), nn.Dropout(0.5), nn.Linear(64, 64, bias=False), nn.Dropout(0.5)
        )
        for layer in model[::2]:
            nn.init.ones_(layer.weight)
        holder = nn.ModuleDict({"net": model})
        seen: list[torch.Tensor] = []
        for layer in model[1::2]:
            layer.register_forward_hook(
                lambda _, args, output: seen.append(output == 0) if type(output) is torch.Tensor else None
            )
        wrapped = strategy.setup_module(holder)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(holder.parameters(), lr=0.1)})
        window = next(strategy.shard_loader(DataLoader(torch.ones(2, 64), 2), seed=5).windows(0))
        strategy.forward_backward(wrapped, lambda batch, _: model(batch).mean(), window)
        assert len(seen) == 2
        return strategy.all_gather(torch.stack(seen)).flatten(0, 2).tolist()
    finally:
        strategy.teardown()


def test_dropout_differs_by_stage_and_part(run_ranks: Callable[..., Any]) -> None:
    masks = [tuple(mask) for mask in run_ranks(dropped, 2, 2)]
    assert len(set(masks)) == len(masks) == 4 and all(10 < sum(mask) < 54 for mask in masks)


class Slow(nn.Linear):
    """Takes its time where it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return super().forward(x)


BEGAN: list[float] = []


class Noting(nn.Module):
    """Notes when its own code begins, before it calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Slow(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        BEGAN.append(time.monotonic())
        return self.second(self.first(x))


def began(num_ranks: int) -> float:
    """Seconds that the second stage begins with the user's code later than the first, in a step whose shapes are
    known."""
    strategy = Pipeline()
    strategy.configure(devices=num_ranks, accelerator="cpu")
    strategy.setup()
    try:
        model = nn.ModuleDict({"net": Noting()})
        wrapped = strategy.setup_module(model)
        strategy.setup_optimizers(wrapped, {"main": torch.optim.SGD(model.parameters(), lr=0.1)})
        for window in strategy.shard_loader(DataLoader(torch.ones(4, 4), 2), seed=5).windows(0):
            BEGAN.clear()
            strategy.forward_backward(wrapped, lambda batch, _: model["net"](batch).mean(), window)
        first, second = strategy.all_gather(torch.tensor(BEGAN[0], dtype=torch.float64)).tolist()
        return second - first
    finally:
        strategy.teardown()


def test_a_stage_runs_the_users_code_before_its_input_is_there(run_ranks: Callable[..., Any]) -> None:
    assert abs(run_ranks(began, 2, 2)) < 0.25


# ---- cutting ------------------------------------------------------------------------------------------


def test_layers_are_found_and_balanced() -> None:
    parts = cut(Model())
    assert parts.name == "inner.net"
    names = [layer.name.removeprefix("inner.net.") for layer in parts.layers]
    assert names == ["token", "condition", *(f"blocks.{i}" for i in range(5)), "norm", "head"]
    assert stages(parts, 3) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert stages(parts, 2, split=["blocks.3"]) == [0] * 5 + [1] * 4
    assert stages(parts, 2, costs=[0, 0, 1, 1, 1, 9, 1, 0, 5]) == [0] * 6 + [1] * 3
    assert balance([5, 1, 1, 1, 5], 3) == [0, 1, 4]
    root = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Flatten())
    assert cut(root).name == "" and [layer.name for layer in cut(root).layers] == ["0", "1.1"]


def test_layers_are_balanced_by_seconds_where_a_sample_is_given() -> None:
    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = x + 1e-9
            return super().forward(x)

    sample = torch.randn(4, 64)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.BatchNorm1d(64), Slow(64, 2), nn.Linear(2, 2))
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in net.state_dict().items()}
    costs = measure(cut(nn.ModuleDict({"net": net})), sample, torch.device("cpu"))
    assert costs[2] > 5 * max(costs[0], costs[1], costs[3])
    assert torch.equal(before, torch.get_rng_state()) and all(
        torch.equal(state[name], value) for name, value in net.state_dict().items()
    )
    assert stages(cut(nn.ModuleDict({"net": net})), 2) == [0, 1, 1, 1] and stages(
        cut(nn.ModuleDict({"net": net})), 2, costs=costs
    ) in (
        [0, 0, 1, 1],
        [0, 0, 0, 1],
    )


def test_what_cannot_be_cut_is_named_before_anything_runs() -> None:
    tied = Model()
    tied.inner["net"].head.weight = tied.inner["net"].token.weight
    with pytest.raises(ValueError, match=r"inner.net.head.weight on stage 1 is inner.net.token.weight on stage 0"):
        stages(cut(tied), 2)
    outside = Model()
    outside.frozen.requires_grad_(True)
    with pytest.raises(ValueError, match=r"frozen.weight is outside of 'inner.net'"):
        cut(outside, "inner.net")
    scattered = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"they are in one, two of ModuleDict, which has no forward"):
        cut(scattered)
    with pytest.raises(
        ValueError, match=r"module must name a submodule of Model, but module='net'; it has inner, frozen"
    ):
        cut(Model(), "net")
    with pytest.raises(
        ValueError, match=r"a pipeline of 3 stages needs as many layers, but net has 2 with parameters \(net.0, net.3\)"
    ):
        stages(cut(net()), 3)
    for split, message in (
        (["block"], "'block' is not among them; the layers are"),
        (["blocks.3", "blocks.1"], "in order, but split="),
        (["blocks.1", "blocks.2"], "stages 1 to 1 begin"),
    ):
        with pytest.raises(ValueError, match=message):
            stages(cut(Model()), 3 if len(split) == 2 and split[0] == "blocks.3" else 2, split=split)
    for options, message in (
        ({"schedule": "pipedream"}, "schedule must be one of gpipe, 1f1b, "),
        ({"num_micro_batches": 0}, "num_micro_batches must be a whole number of at least 1"),
        ({"stages_per_rank": 2}, "schedule='1f1b' has 1 stages a rank"),
        (
            {"schedule": "looped_bfs", "stages_per_rank": 1},
            "stages_per_rank of schedule='looped_bfs' must be a whole number of at least 2",
        ),
        ({"split": ["a"], "sample": torch.ones(1)}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            Pipeline(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use 'bf16-mixed'"):
        Pipeline().configure(devices=2, accelerator="cpu", precision="16-mixed")


# ---- what a step must not do ----------------------------------------------------------------------------


class Wrong(Module):
    """A step that breaks one rule of pipelines."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.net = Wronged(how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        if self.how == "never":
            return x.sum()
        if self.how == "layer by itself":
            return self.net.last(self.net.first(x)).mean()
        if self.how == "twice":
            return (self.net(x) + self.net(x)).mean()
        return self.net(x).mean()

    def configure_optimizers(self) -> Any:
        if self.how == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Wronged(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm = nn.LayerNorm(8) if how == "order" else nn.Identity()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.first(x)
        for block in self.blocks:
            x = block(x + first.sum() if self.how == "skip" else x)
        return self.last(self.norm(x)) + (first.mean() if self.how == "skip to the end" else 0)


def refused(hows: list[str]) -> dict[str, str]:
    """What each wrong step is told, on ranks that continue with the next."""
    found = {}
    for how in hows:
        strategy = Pipeline()
        strategy.configure(devices=2, accelerator="cpu")
        strategy.setup()
        module = Wrong(how)
        try:
            wrapped = strategy.setup_module(module)
            strategy.setup_optimizers(wrapped, {"main": module.configure_optimizers()})
            batch = [object()] if how == "batch" else torch.ones(4, 8)
            window = next(strategy.shard_loader([(batch,)], seed=0).windows(0))
            window.micro_batches[0].num_samples = window.num_samples = 4
            strategy.forward_backward(wrapped, module.training_step, window, StepHooks(automatic=how != "manual"))
        except Exception as error:
            found[how] = f"{type(error).__name__}: {error}"
        finally:
            strategy.teardown()
    return found


def test_wrong_steps_are_told_what_is_wrong(run_ranks: Callable[..., Any]) -> None:
    expected = {
        "never": (
            "ValueError: a pipelined module is called once a step, but the step returned a loss without calling net"
        ),
        "layer by itself": "RuntimeError: net.first is on another rank of the pipeline",
        "order": "ValueError: net.norm is called after layers of stage 1, but is on stage 0",
        "lbfgs": "ValueError: optimizer 'main' (LBFGS) cannot be stepped in a pipeline",
        "manual": "ValueError: a pipeline runs backward by its schedule",
        "batch": (
            "ValueError: a pipeline cuts batches along the first dimension of their tensors, but none in this tuple "
            "has the batch's 4 samples there"
        ),
    }
    found = run_ranks(refused, 2, [*expected])
    for how, message in expected.items():
        if how == "layer by itself":  # the first layer is on rank 0
            assert "net.last is on another rank" in found[how]
        else:
            assert found[how].startswith(message), found[how]


@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf")  # torch says it first
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("twice", "the step calls net a second time"),
        (
            "skip",
            "takes a value that layers of an earlier stage have computed and that is not handed from layer to layer",
        ),
        ("skip to the end", "net returns a value that layers of an earlier stage have computed"),
    ],
)
def test_steps_that_go_wrong_on_the_last_stage(how: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        quiet(strategy="pipeline", devices=2).fit(Wrong(how), loader())


# ---- schedules ------------------------------------------------------------------------------------------


def test_timelines_hold_all_work_in_order_and_their_bubbles_agree_with_the_formulas() -> None:
    for name, found in SCHEDULES.items():
        for num_ranks, num_parts in ((2, 4), (4, 8)):
            lines = found.timeline(num_ranks, num_parts)
            work = [step[2:] for line in lines for step in line]
            assert len(set(work)) == len(work)
            assert sum(kind == "F" for kind, *_ in work) == num_ranks * num_parts * found.stages_per_rank
            assert all(a[1] <= b[0] for line in lines for a, b in pairwise(line))
            if formula := found.formula(num_ranks, num_parts):
                assert f"{found.bubble(num_ranks, num_parts):.1%}" in formula, name
    assert SCHEDULES["zbv"].bubble(4, 8) < SCHEDULES["interleaved_1f1b"].bubble(4, 8) < SCHEDULES["1f1b"].bubble(4, 8)
    assert schedule("interleaved_1f1b", 4).bubble(2, 4) == pytest.approx(1 / 17)


def test_the_picture_shows_who_works_when() -> None:
    assert SCHEDULES["1f1b"].picture(2, 3).splitlines() == [
        "rank 0  F0 F1 ·· ·· B0 B~ F2 B1 B~ ·· B2 B~",
        "rank 1  ·· F0 B0 B~ F1 B1 B~ F2 B2 B~ ·· ··",
    ]


def test_parts_that_fit_no_schedule_are_named_with_the_next_number_that_does() -> None:
    with pytest.raises(
        ValueError,
        match=r"schedule='1f1b' on 4 ranks does not take num_micro_batches=3; the next number that it takes is 4",
    ):
        schedule("1f1b").check(4, 3)
    with pytest.raises(ValueError, match="the next number that it takes is 8"):
        schedule("dualpipev").check(4, 5)
    assert schedule("dualpipev").fitting(4, 5).name == "zbv" and schedule("1f1b").fitting(4, 3).name == "gpipe"
    assert schedule("interleaved_1f1b", 3).fitting(2, 5).stages_per_rank == 3


def test_the_plan_names_stages_layers_and_the_bubble(
    capsys: pytest.CaptureFixture[str], repo_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo_root)
    assert main(["plan", "examples/gpt.yaml", "strategy=pipeline", "devices=2"]) == 0
    shown = capsys.readouterr().out
    assert "gpt in 2 stages on 2 ranks, schedule 1f1b, 2 parts a micro-batch" in shown
    assert "stage 1  rank 1  gpt.blocks.2 … gpt.head (4)" in shown and SCHEDULES["1f1b"].picture(2, 2) in shown
    assert "Bubble: 33.3% of the ranks' time, (P - 1) / (M + P - 1) = 33.3%" in shown
    strategy = Pipeline(schedule="zbv", num_micro_batches=8, sample=torch.zeros(4, 8), module="net")
    strategy.configure(devices=2, accelerator="cpu")
    shown = plan(strategy, nn.ModuleDict({"net": nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])}))
    assert "net in 4 stages on 2 ranks, schedule zbv, 8 parts" in shown and "ms" in shown
    assert "every rank runs every layer" in plan(SingleDevice(), nn.Linear(1, 1))


# ---- what it costs ----------------------------------------------------------------------------------------


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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_two_gpus_agree_with_the_cpu(name: str, alone: tuple[Model, dict[str, float], torch.Tensor]) -> None:
    module, _ = train(Pipeline(schedule=name), 2, accelerator="gpu")
    assert distance([weight.cpu() for weight in weights(module)], weights(alone[0])) < 1e-9
