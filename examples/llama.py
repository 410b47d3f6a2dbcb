"""A plain Llama 3 (RoPE, grouped-query attention, SwiGLU, RMSNorm) on bytes of real text, small or planned large.

    lockstep fit examples/llama.yaml                                    # "debug": 0.8 million parameters
    lockstep fit examples/llama.yaml strategy=fsdp devices=2
    lockstep plan examples/llama.yaml module.size=70B module.context=8192 strategy=fsdp=32,tensor=8 \\
        --devices 256 --gpu h100-80                                     # what the published sizes need, on this machine

The sizes 8B, 70B and 405B have the shapes of Llama 3.1, its vocabulary included; bytes are its first 256 tokens.
Expect the loss of "debug" to fall to about 2.4 nats a byte within 60 steps.
"""

import sys
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep import Module


class Size(NamedTuple):
    width: int
    depth: int
    heads: int
    kv_heads: int
    inner: int
    """Width inside of the SwiGLU perceptron."""
    vocabulary: int = 128_256


SIZES = {
    "debug": Size(128, 4, 16, 8, 384, 256),
    "8B": Size(4096, 32, 32, 8, 14_336),
    "70B": Size(8192, 80, 64, 8, 28_672),
    "405B": Size(16_384, 126, 128, 8, 53_248),
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle: `[B, H, T, D]` with `[T, D / 2]`."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).type_as(x)


def widened(x: Tensor) -> Tensor:
    """`x` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.RMSNorm):
    """Computes in float32 at least, returns what it got."""

    def forward(self, x: Tensor) -> Tensor:
        y = widened(x)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which several heads of queries share one of keys and values.

    The number of heads follows from the projections, so they may be sharded by heads."""

    def __init__(self, size: Size):
        super().__init__()
        self.head_dim = size.width // size.heads
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, size.kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = self.rotated(q, k, cos, sin)
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, cos, sin), rotate(k, cos, sin)


class FeedForward(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm1, self.attention = RMSNorm(size.width, eps=1e-5), Attention(size)
        self.norm2, self.feed_forward = RMSNorm(size.width, eps=1e-5), FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed_forward(self.norm2(x))


class Head(nn.Module):
    """Logits `[B, T, V]`, or with targets `[B, T]` the loss of each token `[B, T]`.

    With `chunks` above 1 the loss is computed chunk by chunk of the sequence, whose logits are recomputed in the
    backward, so that only one chunk's exist at a time."""

    def __init__(self, size: Size, chunks: int):
        super().__init__()
        self.chunks, self.out = chunks, nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return self.out(x)
        if self.chunks == 1:
            return self.losses(x, targets)
        pairs = zip(x.chunk(self.chunks, 1), targets.chunk(self.chunks, 1), strict=True)
        return torch.cat([checkpoint(self.losses, *pair, use_reentrant=False) for pair in pairs], 1)

    def losses(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.out(x).flatten(0, 1)
        return F.cross_entropy(widened(logits), targets.flatten(), reduction="none").view_as(targets)


class Llama(nn.Module):
    """`[B, T]` int64 -> logits of the next token `[B, T, V]`, or with targets the loss of each token `[B, T]`."""

    def __init__(self, size: Size, theta: float = 500_000.0, chunks: int = 1):
        super().__init__()
        self.head_dim, self.theta = size.width // size.heads, theta
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm, self.head = RMSNorm(size.width, eps=1e-5), Head(size, chunks)

    def tensor_plan(self) -> dict[str, str]:
        """How tensor parallelism shards the layers; the automatic plan would find all but the first and the last."""
        columns = ("attention.q", "attention.k", "attention.v", "feed_forward.w1", "feed_forward.w3")
        block = dict.fromkeys(columns, "column") | dict.fromkeys(("attention.o", "feed_forward.w2"), "row")
        block |= dict.fromkeys(("norm1", "norm2"), "position")
        return {"token": "embedding", **{f"blocks.*.{name}": how for name, how in block.items()}, "head.out": "gather"}

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        steps = torch.arange(0, self.head_dim, 2, device=tokens.device, dtype=torch.float32) / self.head_dim
        angles = torch.arange(tokens.shape[1], device=tokens.device).outer(self.theta**-steps)
        cos, sin = angles.cos(), angles.sin()
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x), targets)


class LlamaModel(Module):
    """`size` is a name of `SIZES`; `depth` replaces its number of blocks; `loss_chunks` as in `Head`."""

    def __init__(
        self, size: str = "debug", context: int = 128, lr: float = 2e-3, loss_chunks: int = 1, depth: int | None = None
    ):
        super().__init__()
        if size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
        self.save_hyperparameters()

    def configure_model(self) -> None:
        with torch.device("meta"):  # values come from reset_parameters of the layers, on the ranks that hold them
            size = SIZES[self.hparams.size]
            self.llama = Llama(size._replace(depth=self.hparams.depth or size.depth), chunks=self.hparams.loss_chunks)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.llama(tokens)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # [B, context + 1] int64
        loss = self.llama(batch[:, :-1], batch[:, 1:]).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.llama(batch[:, :-1], batch[:, 1:]).mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.95), weight_decay=0.1)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/llama.yaml", *sys.argv[1:]]))
