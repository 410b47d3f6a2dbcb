"""Small models of many kinds: each maps 8 numbers a sample to 4 logits, and is trained under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

MODELS: dict[str, Callable[[], nn.Module]] = {}


def model(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[make.__name__.replace("_", " ")] = make
    return make


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.inner = norm or nn.Identity(), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [act()] if i else []
        layers.append(nn.Linear(a, b))
    return nn.Sequential(*layers)


def tokens(x: Tensor) -> Tensor:
    return (x[:, :6] * 2).long().clamp(-3, 3) + 3


@model
def perceptron() -> nn.Module:
    return mlp(8, 16, 16, 4)


@model
def seven_layers() -> nn.Module:
    return mlp(8, 12, 12, 12, 12, 12, 12, 4, act=nn.GELU)


@model
def without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


@model
def residual_blocks() -> nn.Module:
    blocks = [Residual(mlp(8, 16, 8), nn.LayerNorm(8)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 4))


@model
def one_dimensional_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 4)
    )


@model
def two_dimensional_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


@model
def grouped_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 2)), nn.Conv1d(4, 8, 2, groups=4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4)
    )


@model
def transposed_convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 2)), nn.ConvTranspose1d(4, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(2, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if options.get("bidirectional") else 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(1, (4, 2)))[0][:, -1])


@model
def gated_recurrent_unit() -> nn.Module:
    return Recurrent(nn.GRU)


@model
def long_short_term_memory() -> nn.Module:
    return Recurrent(nn.LSTM)


@model
def two_layers_of_bidirectional_gru() -> nn.Module:
    return Recurrent(nn.GRU, num_layers=2, bidirectional=True)


class Cell(nn.Module):
    """A recurrence written by hand: the same layers called once a step of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.within, self.head = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 6)
        for part in x.unflatten(1, (4, 2)).unbind(1):
            h = torch.tanh(self.inward(part) + self.within(h))
        return self.head(h)


@model
def recurrence_by_hand() -> nn.Module:
    return Cell()


@model
def transformer_encoder_layer() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 2)),
        nn.Linear(2, 8),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@model
def attention_by_hand() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 2)),
        nn.Linear(2, 8),
        Residual(Attention(), nn.LayerNorm(8)),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


@model
def multihead_attention() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    return nn.Sequential(nn.Unflatten(1, (4, 2)), nn.Linear(2, 8), Own(), nn.Flatten(), nn.Linear(32, 4))


@model
def embedding() -> nn.Module:
    return nn.Sequential(Apply(tokens), nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 4))


@model
def embedding_with_padding() -> nn.Module:
    return nn.Sequential(Apply(tokens), nn.Embedding(7, 4, padding_idx=3), nn.Flatten(), nn.Linear(24, 4))


@model
def bag_of_embeddings() -> nn.Module:
    return nn.Sequential(Apply(tokens), nn.EmbeddingBag(7, 8, mode="mean"), nn.Tanh(), nn.Linear(8, 4))


@model
def embedding_with_max_norm() -> nn.Module:
    return nn.Sequential(Apply(tokens), nn.Embedding(7, 4, max_norm=0.5), nn.Flatten(), nn.Linear(24, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mix, self.decode = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(torch.tanh(self.mix(self.encode(x))))[:, :4]


@model
def tied_weights() -> nn.Module:
    return Tied()


@model
def one_layer_called_twice() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 4))


class Experts(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.sparse, self.gate = sparse, nn.Linear(8, 3)
        self.experts = nn.ModuleList(mlp(8, 6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        if not self.sparse:
            return sum(w[:, None] * e(x) for w, e in zip(weights.unbind(1), self.experts, strict=True))
        chosen, y = weights.argmax(1), x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y = y.index_put((rows,), expert(x[rows]) * weights[rows, i, None], accumulate=True)
        return y


@model
def dense_mixture_of_experts() -> nn.Module:
    return Experts(sparse=False)


@model
def sparse_mixture_of_experts() -> nn.Module:
    return Experts(sparse=True)


@model
def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


@model
def group_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 4))


@model
def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.InstanceNorm1d(2, affine=True),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
    )


@model
def rms_norm_and_gated_units() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16), nn.Linear(16, 16), nn.GLU(), nn.Linear(8, 4))


@model
def weight_norm() -> nn.Module:
    net = perceptron()
    parametrizations.weight_norm(net[0])  # type: ignore[index]
    return net


@model
def spectral_norm() -> nn.Module:
    net = perceptron()
    parametrizations.spectral_norm(net[2])  # type: ignore[index]
    return net


@model
def orthogonal_weights() -> nn.Module:
    net = mlp(8, 8, 8, 4)
    parametrizations.orthogonal(net[2])
    return net


@model
def pruned_weights() -> nn.Module:
    net = perceptron()
    prune.l1_unstructured(net[0], "weight", 0.5)  # type: ignore[index]
    return net


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@model
def low_rank_adapters() -> nn.Module:
    return nn.Sequential(LowRank(nn.Linear(8, 16)), nn.Tanh(), LowRank(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4))


@model
def frozen_backbone() -> nn.Module:
    net = mlp(8, 16, 16, 4)
    net[0].requires_grad_(False)
    return net


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


@model
def single_numbers_as_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Scaled(), nn.PReLU(), nn.Linear(16, 4))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8).to(x.dtype)


@model
def complex_parameters() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Spectrum(), nn.Tanh(), nn.Linear(8, 4))


@model
def bilinear() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Bilinear(4, 4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.both(*x.chunk(2, 1))

    return nn.Sequential(Own(), nn.Tanh(), nn.Linear(8, 4))


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(2))
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(8, 4) * 0.3)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.named["out"]


@model
def lists_of_parameters() -> nn.Module:
    return Lists()


class Hyper(nn.Module):
    """A layer whose weight another layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make, self.head = nn.Parameter(torch.randn(3)), nn.Linear(3, 64), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(x, self.make(self.code).view(8, 8))))


@model
def weights_made_by_a_layer() -> nn.Module:
    return Hyper()


@model
def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))


@model
def a_layer_that_is_never_used() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = mlp(8, 8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    return Own()


@model
def checkpointed_block() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = mlp(8, 16, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    return Own()


@model
def counting_buffer() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(8, 8, 4)
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.table

    return Own()


@model
def activations_changed_in_place() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)
    )


@model
def maxout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), Apply(lambda x: x.unflatten(1, (16, 2)).amax(2)), nn.Linear(16, 4))
