"""Tensor parallelism by the plan that a model declares, and the checks of plans that are found by names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Module
from lockstep.strategies.mesh.tensor_plan.declared import declared_styles
from lockstep.strategies.mesh.tensor_plan.first_call import FirstCall, kind_of
from tests.trainer.toy import quiet

PLAN = {
    "layers.*.attention.query_weight": "colwise",
    "layers.*.attention.key_weight": "colwise",
    "layers.*.attention.value_weight": "colwise",
    "layers.*.attention.mixed": "rowwise",
}


class Attention(nn.Module):
    """Attention over two tensors, with names that no list of names has."""

    def __init__(
        self, scaled: bool = False, names: tuple[str, ...] = tuple(name.split(".")[-1] for name in PLAN)
    ) -> None:
        super().__init__()
        self.head_dim, self.names = 4, names
        for name in names:
            setattr(self, name, nn.Linear(16, 16))
        self.scale = nn.Parameter(torch.ones(())) if scaled else 1.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        *projections, last = (getattr(self, name) for name in self.names)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in projections)
        mixed = F.scaled_dot_product_attention(q * self.scale, k, v, attn_mask=mask)
        return last(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(**options)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, mask)


class Scaled(nn.Embedding):
    """An embedding with a buffer, as Gemma's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class Base(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = Scaled(12, 16)
        self.register_buffer("shift", torch.tensor(1.0))
        self.layers = nn.ModuleList([Block(**options) for _ in range(2)])
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril())
        return self.norm(x)


class LanguageModel(nn.Module):
    """As transformers' models are: a base model, a head whose weight may be the embedding's, and a config."""

    base_model_prefix = "base"

    def __init__(self, plan: dict[str, str] | None = PLAN, tied: bool = True, **options: Any) -> None:
        super().__init__()
        self.base = Base(**options)
        self.head = nn.Linear(16, 12, bias=False)
        if tied:
            self.head.weight = self.base.embedding.weight
        self.config = SimpleNamespace(base_model_tp_plan=plan)
        self._tp_plan = {} if plan is None else {"head": "colwise_rep"}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.base(tokens[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Trains(Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.model = LanguageModel(**options)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: str, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module = Trains(**options)
    tokens = torch.randint(0, 12, (16, 6), generator=torch.Generator().manual_seed(0))
    trainer = quiet(strategy=strategy, devices=1 if strategy == "single" else 2, precision="64-true")
    trainer.fit(module, DataLoader(TensorDataset(tokens), 4))
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_styles_are_those_that_the_model_declares() -> None:
    styles = declared_styles(Trains(tied=False), 2)
    assert styles is not None
    assert styles["model.base.layers.1.attention.query_weight"] == "column"
    assert styles["model.base.layers.0.attention.mixed"] == "row"
    assert styles["model.head"] == "gather"
    assert len(styles) == 9


def test_a_head_that_shares_the_weight_of_a_whole_embedding_stays_whole() -> None:
    assert "model.head" not in (declared_styles(Trains(), 2) or {})


def test_a_model_that_declares_nothing_has_no_styles() -> None:
    assert declared_styles(Trains(plan=None), 2) is None


@pytest.mark.parametrize(
    ("plan", "size", "message"),
    [
        ({"layers.*.attention.mixed": "packed_colwise"}, 2, "says 'packed_colwise' of model.base.layers.0.attention"),
        (PLAN, 8, "out_features=16, which is not a whole number of heads of 4 on each of the 8"),
    ],
)
def test_what_cannot_be_followed_is_named(plan: dict[str, str], size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declared_styles(Trains(plan=plan), size)


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [True, False])
def test_a_declared_plan_is_exact(tied: bool) -> None:
    one, two = train("single", tied=tied), train("tensor", tied=tied)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks
def test_a_parameter_that_is_used_on_shards_is_refused_before_it_changes() -> None:
    with pytest.raises(RuntimeError, match=r"gradient of model\.base\.layers\.0\.attention\.scale.* is not the same"):
        train("tensor", scaled=True)


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_with_a_buffer_is_sharded(tied: bool) -> None:
    plan = {**PLAN, "embedding": "embedding_rowwise"}
    one, two = train("single", plan=plan, tied=tied), train("tensor", plan=plan, tied=tied)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.ranks
def test_a_norm_that_sees_whole_activations_is_refused_as_one_of_heads() -> None:
    plan = {**PLAN, "embedding": "embedding_rowwise", "norm": "replicated_with_grad_allreduce"}
    with pytest.raises(ValueError, match="says 'replicated' of a LayerNorm.*all ranks gave it the same input"):
        train("tensor", plan=plan, tied=False)


USUAL = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.ranks
def test_modules_of_several_inputs_are_found_by_names_and_are_exact() -> None:
    one, two = train("single", plan=None, names=USUAL), train("tensor", plan=None, names=USUAL)
    for name, expected in one.items():
        torch.testing.assert_close(two[name], expected, rtol=1e-12, atol=1e-14)


class Swapped(Attention):
    """Has the usual names, but mixes the heads, so that shards of them compute something else."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x)
        return super().forward(x + q.mean(-1, keepdim=True), mask)


@pytest.mark.ranks
def test_the_first_call_finds_a_module_that_its_names_misdescribe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.strategies.mesh.test_tensor_declared.Attention", Swapped)
    with pytest.raises(ValueError, match=r"q_proj.*attention then computes something else"):
        train("tensor", plan=None, names=USUAL)


class Continues(Trains):
    """Numbers and weights that are others at the first call than when layers were sharded."""

    def on_train_start(self) -> None:
        for layer in self.model.base.layers:
            layer.attention.scale = 0.5
        if self.trainer.global_step:
            with self.trainer.whole(self), torch.no_grad():
                self.model.base.layers[0].attention.v_proj.weight.mul_(-1)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "devices"), [("tensor", 2), pytest.param("fsdp=2,tensor=2", 4, marks=pytest.mark.long)]
)
def test_the_first_call_of_a_resumed_run_is_compared_with_what_was_loaded(
    strategy: str, devices: int, tmp_path: Path
) -> None:
    tokens = torch.randint(0, 12, (16, 6), generator=torch.Generator().manual_seed(0))

    def weights(strategy: str, devices: int, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        module = Continues(plan=None, names=USUAL)
        trainer = quiet(
            strategy=strategy, devices=devices, precision="64-true", split_batches=True, accelerator="cpu", **options
        )
        trainer.fit(module, DataLoader(TensorDataset(tokens), 4), ckpt_path=path if path.exists() else None)
        if not path.exists():
            trainer.save_checkpoint(path)
        return {name: parameter.detach() for name, parameter in module.named_parameters()}

    path = tmp_path / "saved"
    weights("single", 1, max_epochs=1)
    alone, sharded = (weights(*layout, max_epochs=2) for layout in (("single", 1), (strategy, devices)))
    assert all(float((sharded[name] - value).abs().max()) < 1e-12 for name, value in alone.items())


def test_the_first_call_follows_a_buffer_of_two_layers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            scale = torch.ones(1)
            for layer in (self.one, self.two):
                layer.register_buffer("scale", scale)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x) * self.one.scale) * self.two.scale  # type: ignore[no-any-return]

    module = Scaled()
    FirstCall(module, "scaled", ["one"]).watch(module)
    module.one.scale.mul_(3)
    module(torch.ones(3, 2))


def test_the_check_leaves_inputs_modes_and_random_streams_alone() -> None:
    class Caches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout()

        def forward(self, x: torch.Tensor, cache: list[Any]) -> torch.Tensor:
            cache.append(len(cache))
            return self.dropout(self.linear(x))

    module = Caches()
    FirstCall(module, "caches", ["linear"]).watch(module)
    state, cache = torch.get_rng_state(), []
    expected = module.dropout(torch.zeros(0, 2))  # draws nothing
    assert expected.numel() == 0
    module(torch.ones(3, 2), cache)
    assert cache == [0] and module.training
    torch.set_rng_state(state)
    again = module(torch.ones(3, 2), [])
    torch.set_rng_state(state)
    assert torch.equal(again, module(torch.ones(3, 2), []))


def test_modules_of_one_kind_are_checked_once() -> None:
    one, other = Attention(), Attention()
    assert kind_of(one, ["a.mixed"]) == kind_of(other, ["b.mixed"])
    assert kind_of(one, ["a.mixed"]) != kind_of(Attention(scaled=True), ["a.mixed"])
