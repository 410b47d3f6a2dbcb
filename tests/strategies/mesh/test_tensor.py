"""Tensor parallelism beyond the contract suite: plans, sequence and loss parallelism, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lockstep import Module, Trainer
from lockstep.callbacks import Guard
from lockstep.strategies import MeshParallel, TensorParallel
from lockstep.strategies.mesh import steps
from tests.strategies.mesh.test_fsdp import fit, seeded
from tests.strategies.odd import Odd, tokens
from tests.trainer.toy import distance, quiet, weights

pytestmark = pytest.mark.ranks


class Text(Module):
    """The GPT example's network; generates in a hook, where sequences do not divide by the ranks."""

    def __init__(self, network: Callable[[], nn.Module] = lambda: GPT(16, 2, 4, 8)) -> None:
        super().__init__()
        self.gpt = network()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        logits = self.gpt(batch[:, :-1])
        self.log("val/loss", F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))
        self.log("val/acc", (logits.argmax(-1) == batch[:, 1:]).double().mean())

    def on_validation_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("odd", float(self.gpt(torch.arange(5)[None]).double().sum()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def text(n: int = 12) -> DataLoader:
    return DataLoader(torch.randint(0, 256, (n, 9), generator=torch.Generator().manual_seed(0)), 4)


def same(
    strategy: Any, make: Callable[[], Module], devices: int | str = 2, tolerance: float = 1e-11, **options: Any
) -> Module:
    """Train on one process and under `strategy`: weights and metrics must agree. Returns the one process's module."""
    one, cut = make(), make()
    kept = fit("single", 1, one, text(), text(6), **{"gradient_clip_val": 0.5} | options)
    found = fit(strategy, devices, cut, text(), text(6), **{"gradient_clip_val": 0.5} | options)
    assert distance(weights(one), weights(cut)) < tolerance
    expected = {name: float(value) for name, value in kept.callback_metrics.items()}
    assert {name: float(value) for name, value in found.callback_metrics.items()} == pytest.approx(
        expected, rel=tolerance
    )
    return cut


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"sequence_parallel": True}, marks=pytest.mark.slow),  # the last has both
        pytest.param({"loss_parallel": True}, marks=pytest.mark.slow),
        {"sequence_parallel": True, "loss_parallel": True, "activation_checkpointing": True},
    ],
    ids=["plain", "sequence", "loss", "all"],
)
def test_gpt_trains_as_on_one_process(options: dict[str, Any]) -> None:
    cut = same(TensorParallel(**options), lambda: seeded(Text))
    assert type(cut.gpt.blocks[0].attention.q.weight) is nn.Parameter


class Tied(GPT):
    def __init__(self) -> None:
        super().__init__(16, 2, 4, 8)
        self.head.weight = self.token.weight


@pytest.mark.long
def test_a_tied_head_is_cut_with_its_embedding() -> None:
    cut = same(TensorParallel(loss_parallel=True), lambda: seeded(Text, network=Tied))
    assert cut.gpt.head.weight is cut.gpt.token.weight


class Counted(nn.Module):
    """Attention of the other usual form: the number of heads is an attribute, and the output is a Sequential's."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Other(nn.Module):
    """A gated perceptron, a sequence with dropout between its linear layers, and attention that counts heads."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 16)
        self.attention = Counted()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 16), nn.Dropout(0.2))
        self.gated = Gated()
        self.head = nn.Linear(16, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        return self.head(self.gated(self.mlp(x + self.attention(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


@pytest.mark.long
def test_other_forms_and_dropout_follow_one_process() -> None:
    """One seed in a group: noise on whole activations is the same on its ranks, on cut ones each has its part of it."""
    cut = same(TensorParallel(), lambda: seeded(Text, network=Other))
    assert cut.gpt.attention.num_heads == 4, "the caller's module counts all heads again"


@pytest.mark.long
def test_ranks_that_share_samples_share_noise_and_others_do_not() -> None:
    class Noisy(Text):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            drawn = self.trainer.strategy.all_gather(torch.rand(1)).flatten().tolist()
            assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and drawn[0] != drawn[2]

    fit(MeshParallel("ddp=2,tensor=2"), "auto", seeded(Noisy, network=Other), text(8), max_epochs=1)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_optimizers_of_one_kernel_take_cut_and_whole_parameters(options: dict[str, Any]) -> None:
    class Fast(Odd):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02, **options)

    one, cut = seeded(Fast, bypass=False), seeded(Fast, bypass=False)
    fit("single", 1, one, tokens(8), max_epochs=1)
    fit("tensor", 2, cut, tokens(8), max_epochs=1)
    assert distance(weights(one), weights(cut)) < 1e-12


PLANS: dict[str, dict[str, Any]] = {
    "dict": {
        "plan": {
            "gpt.blocks.*.up": "column",
            "gpt.blocks.*.down": "row",
            "gpt.head": "gather",
            "gpt.token": "embedding",
        }
    },
    "scattered": {"plan": {"gpt.head": "scatter"}},
}


@pytest.mark.parametrize("options", PLANS.values(), ids=PLANS)
def test_a_plan_is_followed(options: dict[str, Any]) -> None:
    same(TensorParallel(**options), lambda: seeded(Text), max_epochs=1)


class Planned(GPT):
    def __init__(self) -> None:
        super().__init__(16, 2, 4, 8)

    def tensor_plan(self) -> dict[str, Any]:
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": "row"}


class Reports(Text):
    """Tells which of its parameters are cut."""

    def on_fit_start(self) -> None:
        self.trainer.callback_metrics.update(
            {name: torch.tensor(1.0) for name, p in self.named_parameters() if hasattr(p, "placements")}
        )


def test_a_module_brings_its_plan() -> None:
    trainer = fit(TensorParallel(), 2, seeded(Reports, network=Planned), text(), max_epochs=1)
    assert sorted(trainer.callback_metrics)[:4] == [
        "gpt.blocks.0.down.bias",
        "gpt.blocks.0.down.weight",
        "gpt.blocks.0.up.bias",
        "gpt.blocks.0.up.weight",
    ]
    assert not any("attention" in name for name in trainer.callback_metrics)


class Alone(Module):
    """Linear layers without a pair: each is sharded by itself, along its larger side."""

    def __init__(self, sizes: tuple[int, int, int] = (4, 6, 3)) -> None:
        super().__init__()
        first, second, third = sizes
        self.a, self.norm, self.b = nn.Linear(first, second), nn.LayerNorm(second), nn.Linear(second, third)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.b(self.norm(self.a(batch[0]))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_linear_layers_without_a_pair_are_cut_alone() -> None:
    from tests.strategies.mesh.test_fsdp import rows

    one, cut = seeded(Alone), seeded(Alone)
    fit("single", 1, one, rows(8))
    fit(TensorParallel(), 2, cut, rows(8))
    assert distance(weights(one), weights(cut)) < 1e-12


def test_anomalies_are_not_looked_for_in_sharded_gradients() -> None:
    with pytest.raises(ValueError, match="detect_anomaly=True looks for NaN in gradients that are sharded"):
        fit(TensorParallel(), 2, seeded(Alone), [], detect_anomaly=True)


class Softened(nn.Module):
    """Looks like a perceptron, but what stands between its layers needs the whole width."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, 8)
        self.mlp = Soft()
        self.head = nn.Linear(8, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mlp(self.token(x)))


class Soft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).softmax(-1))


class Convolution(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv1d(1, 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0][:, None]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Extra(GPT):
    def __init__(self) -> None:
        super().__init__(16, 2, 4, 8)
        self.blocks[1].gain = nn.Parameter(torch.ones(16))


REFUSED: dict[str, tuple[dict[str, Any], Callable[[], Module], str]] = {
    "width": (
        {},
        lambda: Text(lambda: GPT(15, 1, 5, 8)),
        r"cuts attention by heads, but gpt\.blocks\.0\.attention\.q has out_features=15",
    ),
    "heads": (
        {},
        lambda: Text(lambda: Counted(12, 3)),
        r"cuts attention by heads, but gpt\.num_heads=3 is not divisible by the 2 ranks",
    ),
    "odd": (
        {},
        lambda: Alone((5, 3, 3)),
        r"cuts a by in_features=5, which is not divisible by the 2 ranks of a tensor group",
    ),
    "nothing": ({}, Convolution, r"finds nothing to cut in Convolution"),
    "name": ({"plan": {"gpt.block.*": "row"}}, Text, r"plan names 'gpt\.block\.\*', which is not a submodule"),
    "style": (
        {"plan": {"gpt.head": "colwise"}},
        Text,
        r"plan must say one of column, row, .*'gpt\.head' has 'colwise'",
    ),
    "kind": ({"plan": {"gpt.norm": "row"}}, Text, r"cuts gpt\.norm by 'row', which is for Linear, but it is LayerNorm"),
    "sequence": ({"sequence_parallel": True}, lambda: Text(Extra), r"but gpt\.blocks\.1\.gain is neither"),
    "classes": ({"plan": {"gpt.head": "classes"}}, Text, r"needs loss_parallel=True"),
    "plan": ({"plan": "colwise"}, Text, r"plan must be 'auto' or a dict"),
}


@pytest.mark.parametrize(("options", "make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_cut_is_named(options: dict[str, Any], make: Callable[[], Module], message: str) -> None:
    from lockstep.strategies.mesh.tensor_plan.make import make_plan
    from lockstep.strategies.modules.blocks import find_blocks

    module = make()
    given = {"given" if name == "plan" else name: value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        make_plan(module, find_blocks(module, "auto"), 2, **given)


@pytest.mark.parametrize(
    ("options", "network", "message"),
    [
        (
            {},
            Softened,
            r"the automatic plan cuts gpt\.mlp\.fc1, gpt\.mlp\.fc2, but gpt\.mlp then computes something else",
        ),
        ({"plan": {"gpt.head": "gather"}}, Tied, r"gpt\.token\.weight and gpt\.head\.weight are one parameter"),
    ],
)
def test_what_ranks_find_wrong_is_named(options: dict[str, Any], network: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(TensorParallel(**options), 2, Text(network), text(), max_epochs=1)


def test_a_cut_layer_is_not_called_without_its_module() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"core\.blocks\.1\.up was called without core\.blocks\.1, but strategy tensor has cut its outputs",
    ):
        fit(TensorParallel(), 2, seeded(Odd), tokens(8), max_epochs=1)


class Reversed(GPT):
    def __init__(self) -> None:
        super().__init__(16, 2, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(x)


class Checkpointed(GPT):
    def __init__(self) -> None:
        super().__init__(16, 2, 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Reversed, "needs the blocks of a list to run in their order"),
        (Checkpointed, "cannot follow a model that calls torch.utils.checkpoint"),
    ],
)
def test_blocks_that_run_otherwise_are_refused_with_cut_sequences(network: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fit(TensorParallel(sequence_parallel=True), 2, seeded(Text, network=network), text(), max_epochs=1)


class Reads(Module):
    """Reads what the layers return through its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/numpy", float(self.net(batch[0]).numpy().sum()))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])


def test_what_a_layer_returns_in_evaluation_is_a_plain_tensor() -> None:
    results = []
    for options in ({"strategy": "single", "devices": 1}, {"strategy": "tensor", "devices": 2}):
        trainer, module = Trainer(accelerator="cpu", enable_progress_bar=False, logger=False, **options), seeded(Reads)
        data = DataLoader(TensorDataset(torch.linspace(-1, 1, 48).reshape(6, 8)), 3)
        results.append((torch.cat(trainer.predict(module, data)), trainer.validate(module, data)[0]["val/numpy"]))
    (predicted, total), (other, same) = results
    assert type(other) is Tensor and (predicted - other).abs().max() < 1e-6 and total == pytest.approx(same, abs=1e-5)


class Wobble(torch.autograd.Function):
    """Gives each rank another gradient in the last bits, as kernels of a GPU do that add in an order that varies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 1e-6 * dist.get_rank())


class Wobbling(Module):
    def __init__(self, as_on_a_gpu: bool) -> None:
        super().__init__()
        self.as_on_a_gpu = as_on_a_gpu
        self.scale = nn.Parameter(torch.ones(8))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def on_fit_start(self) -> None:
        if self.as_on_a_gpu:
            steps.VARYING = ("cpu",)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scale = Wobble.apply(self.scale)  # type: ignore[no-untyped-call]
        output = Wobble.apply(self.net(batch * scale))  # type: ignore[no-untyped-call]
        return output.square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("strategy", "devices"), [("tensor", 2), pytest.param("fsdp=2,tensor=2", 4, marks=pytest.mark.long)]
)
def test_what_ranks_hold_whole_stays_equal_where_kernels_vary(strategy: str, devices: int) -> None:
    data = DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), 4)
    options: dict[str, Any] = {
        "max_epochs": 3,
        "split_batches": True,
        "callbacks": [Guard(check_replicas_every_n_steps=4)],
    }
    with pytest.raises(RuntimeError, match="replicas have drifted apart"):
        quiet(strategy=strategy, devices=devices, **options).fit(Wobbling(as_on_a_gpu=False), data)
    torch.manual_seed(0)
    module = Wobbling(as_on_a_gpu=True)
    quiet(strategy=strategy, devices=devices, **options).fit(module, data)
    assert not torch.equal(module.scale, torch.ones(8))


class UsedOnShards(Module):
    """A layer that stays whole, between layers of which a rank has some outputs: each has a part of its gradient."""

    def __init__(self, as_on_a_gpu: bool) -> None:
        super().__init__()
        self.as_on_a_gpu = as_on_a_gpu
        self.up, self.between, self.down = nn.Linear(8, 16), nn.Linear(1, 1), nn.Linear(16, 4)

    def on_fit_start(self) -> None:
        if self.as_on_a_gpu:
            steps.VARYING = ("cpu",)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.between(self.up(batch).unsqueeze(-1)).squeeze(-1)
        return self.down(hidden.tanh()).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_a_layer_that_is_used_on_shards_is_named_before_it_is_stepped(as_on_a_gpu: bool) -> None:
    data = DataLoader(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), 4)
    strategy = TensorParallel(plan={"up": "column", "down": "row"})
    with pytest.raises(RuntimeError, match="the gradient of between.weight, between.bias is not the same on the ranks"):
        quiet(strategy=strategy, devices=2).fit(UsedOnShards(as_on_a_gpu), data)
