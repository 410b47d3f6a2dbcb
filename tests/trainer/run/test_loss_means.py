"""A plain loss whose terms are not in proportion to the samples is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Loss, Module, Trainer


def of_all(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0))


def of_not_ignored(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y)


def weighted_by_class(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0), weight=torch.tensor([1.0, 2.0, 3.0]))


def of_two(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": of_all(out, y) + 0.1 * of_not_ignored(out, y), "logged": out.mean()}


def by_index(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out[y >= 0], torch.ones(()).expand(int((y >= 0).sum()), 3))


def by_mask(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")[y >= 0].mean()


def by_division(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum") / (y >= 0).sum()


def with_penalty(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) + PENALIZED.square().mean()


def with_aside(out: Tensor, y: Tensor) -> dict[str, Any]:
    return {"loss": of_all(out, y), "logged": of_not_ignored(out, y)}


def with_count(out: Tensor, y: Tensor) -> Loss:
    return Loss(F.cross_entropy(out, y, reduction="sum"), (y >= 0).sum())


def of_samples(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none").sum() / len(y)


def recomputed(out: Tensor, y: Tensor) -> Tensor:
    return checkpoint(of_not_ignored, out, y, use_reentrant=False)


def weighted_alike(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0), weight=torch.full((3,), 0.1))


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "named"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def of_named_function(out: Tensor, y: Tensor) -> Any:
    return of_all(Named.apply(out), y)


def by_a_complex_number(out: Tensor, y: Tensor) -> Tensor:
    return (out.to(torch.complex64).sum() / (3 + 4j)).abs()


def a_sum(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0), reduction="sum")


def a_scaled_sum(out: Tensor, y: Tensor) -> Tensor:
    return 0.1 * (out - 1).square().sum() + out.mean()


def a_sum_of_means(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean(1).sum()


def a_root(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, torch.zeros_like(out)).sqrt()


def a_norm(out: Tensor, y: Tensor) -> Tensor:
    return (out - 1).norm()


def a_perplexity(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": of_all(out, y).exp()}


def a_tanh(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean().tanh()


def a_worst(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) + F.cross_entropy(out, y.clamp_min(0), reduction="none").max()


def a_median(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean(1).median()


def a_soft_maximum(out: Tensor, y: Tensor) -> Tensor:
    return torch.stack([of_all(out, y), out.square().mean()]).logsumexp(0)


def a_deviation(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) - 0.1 * out.std()


def an_inverse(out: Tensor, y: Tensor) -> Tensor:
    return 1 / (1 + out.square().mean())


def a_product(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) * out.square().mean()


def with_functions_of_samples(out: Tensor, y: Tensor) -> Tensor:
    worst, spread = out.max(1).values.mean(), out.std(1).mean() + out.logsumexp(1).mean()
    return worst + spread + out.sigmoid().mean() + (out.tanh() * out).mean() + PENALIZED.max() * of_all(out, y)


def of_steps(out: Tensor, y: Tensor) -> Tensor:
    by_step = (torch.ones(4 * len(out), 1) * out[:, :1].T).square()  # time before samples
    return by_step.mean(1).sum() + by_step.mean(-1).sum()


def by_task(out: Tensor, y: Tensor) -> Tensor:
    of_task = 0.1 * PENALIZED.repeat(5, 1)
    weight, scale = F.embedding(torch.tensor(1), of_task).mean(), F.linear(torch.ones(1, 5), of_task, PENALIZED).mean()
    return of_all(out, y) * weight.exp() * scale.exp() + scale.exp()


def with_penalties(out: Tensor, y: Tensor) -> Tensor:
    weight = 4 * PENALIZED.outer(PENALIZED)[:4, :4]  # as many rows as samples
    return of_all(out, y) + 0.1 * weight.square().sum() + weight.square().sum().sqrt() + PENALIZED.norm()


def of_classes(out: Tensor, y: Tensor) -> Tensor:
    return out.square().sum(1).mean() + out.square().mean(0).sum() + (out.square() + 1).sqrt().mean()


def of_a_divergence(out: Tensor, y: Tensor) -> Tensor:
    even = torch.full_like(out, 1 / 3)
    return F.kl_div(out.log_softmax(1), even, reduction="batchmean") + out.logsumexp(1).mean()


def stacked(out: Tensor, y: Tensor) -> Tensor:
    return torch.stack([of_all(out, y), out.square().mean(), out.mean(), 0.5 * out.abs().mean()]).sum()


def stacked_with_weights(out: Tensor, y: Tensor) -> Tensor:
    losses = torch.stack([of_all(out, y), out.square().mean(), out.mean(), 0.5 * out.abs().mean()])
    return (losses * torch.exp(-PENALIZED[:4]) + PENALIZED[:4]).sum()


def by_factor(out: Tensor, y: Tensor) -> Tensor:
    return out.square().sum() * (1 / len(y)) + (out.square() / len(y)).sum() - (out.square().sum() / out.numel())


def by_weights(out: Tensor, y: Tensor) -> Tensor:
    return (out.square().mean(1) * torch.arange(1.0, len(y) + 1).softmax(0)).sum()


def by_uncertainty(out: Tensor, y: Tensor) -> Tensor:
    scale = PENALIZED[0]
    return (-scale).exp() * of_all(out, y) + scale + 2 * of_all(out, y)


def contrastive(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(y)))


def of_two_views(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(torch.cat([out, out + 0.1]), dim=1)
    return F.cross_entropy(torch.einsum("nd,md->nm", z, z), torch.arange(2 * len(y)))


def of_distances(out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": of_all(out, y) + (torch.cdist(out, out) - 1).relu().mean()}


def of_triplets(out: Tensor, y: Tensor) -> Tensor:
    apart = (out[:, None] - out[None]).square().sum(-1)
    return (apart.max(1).values - apart.min(1).values + 1).relu().mean()


def of_spread(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) + (1 - (out.var(0) + 1e-4).sqrt()).relu().mean()


def of_deviations(out: Tensor, y: Tensor) -> Tensor:
    return of_all(out, y) - 0.1 * out.std(0).mean()


def of_hard_samples(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0), reduction="none").topk(len(y) // 2).values.mean()


def of_sorted_samples(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y.clamp_min(0), reduction="none").sort(descending=True).values[: len(y) // 2].mean()


def of_a_center(out: Tensor, y: Tensor) -> Tensor:
    return (out.mean(0) - 1).square().mean()


def of_even_classes(out: Tensor, y: Tensor) -> Tensor:
    shares = out.softmax(1).mean(0)
    return of_all(out, y) + (shares * shares.log()).sum()


def of_redundancy(out: Tensor, y: Tensor) -> Tensor:
    z = (out - out.mean(0)) / out.std(0)
    return ((z.T @ (z + 0.1) / len(y) - torch.eye(3)).square()).sum()


def over_samples(out: Tensor, y: Tensor) -> Tensor:
    return -out.log_softmax(0).diagonal().mean()


def of_attention(out: Tensor, y: Tensor) -> Tensor:
    tokens = out[:, :, None] * torch.ones(1, 1, 4)
    weights = (tokens @ tokens.transpose(1, 2)).softmax(-1)
    apart = tokens[:, :, None] - tokens[:, None]
    return of_all((weights @ tokens).mean(2), y) + apart.square().mean() + torch.cdist(tokens, tokens).mean()


def of_prototypes(out: Tensor, y: Tensor) -> Tensor:
    prototypes = PENALIZED[:3].expand(len(y), 3)  # as many as samples
    known = torch.randn(len(y), 3)
    return F.cross_entropy(out @ prototypes.T + out @ known.T, y.clamp(0, 1)) + torch.cdist(out, prototypes).mean()


def of_anchors(out: Tensor, y: Tensor) -> Tensor:
    anchors = ANCHORS(torch.arange(5))  # of every batch, and not of its samples
    return (out.unsqueeze(1) - anchors.unsqueeze(0)).square().sum(-1).min(1).values.mean()


def of_tokens_and_ranks(out: Tensor, y: Tensor) -> Tensor:
    tokens = out.repeat(3, 1)[:, :, None] * torch.ones(1, 1, len(y))  # of as many classes as there are samples
    flat = tokens.reshape(-1, len(y))
    best = out.topk(2, dim=1).values.mean() + out.sort(1).values[:, 0].mean() + (out.var(1) + 1).sqrt().mean()
    return best + F.cross_entropy(flat, torch.zeros(len(flat), dtype=torch.long)) + flat.std(1).mean()


def of_normalized_samples(out: Tensor, y: Tensor) -> Tensor:
    normal = (out - out.mean(1, keepdim=True)) / out.std(1, keepdim=True)
    return of_all(F.batch_norm(normal, None, None, training=True), y)


PENALIZED = nn.Parameter(torch.ones(5))
ANCHORS = nn.Embedding(5, 3)


class Model(Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        self.loss = loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        return self.loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def warned(
    caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any], batch_size: int = 4, **options: Any
) -> list[str]:
    x, y = torch.randn(18, 4), torch.arange(18) % 3
    y[::3] = -100  # 2, 1, 1, 2 and 0 of 2, after 4 that are of 4
    with caplog.at_level(logging.WARNING, "lockstep"):
        Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
            **options,
        ).fit(Model(loss), DataLoader(TensorDataset(x, y), batch_size=batch_size))
    return [record.message for record in caplog.records if "training_step returns a" in record.message]


UNEVEN = of_not_ignored, weighted_by_class, of_two, by_index, by_mask, by_division
EVEN = of_all, with_penalty, with_aside, with_count, of_samples, recomputed
SUMS = a_sum, a_scaled_sum, a_sum_of_means
FUNCTIONS = a_root, a_norm, a_perplexity, a_tanh, a_worst, a_median, a_soft_maximum, a_deviation, an_inverse
MEANS = with_penalties, of_classes, of_a_divergence, stacked, stacked_with_weights, by_factor, by_weights
MEANS += by_uncertainty, with_functions_of_samples, of_steps, by_task
READ = of_named_function, by_a_complex_number
MEANS += of_attention, of_prototypes, of_anchors, of_tokens_and_ranks, of_normalized_samples
PAIRS = contrastive, of_two_views, of_distances, of_triplets
OVER = of_spread, of_deviations, of_hard_samples, of_sorted_samples, of_a_center, of_even_classes, over_samples
OVER += (of_redundancy,)


@pytest.mark.parametrize("loss", UNEVEN)
def test_a_mean_over_what_batches_have_different_numbers_of_is_named(
    caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]
) -> None:
    (line,) = warned(caplog, loss, accumulate_grad_batches=2)
    assert "for 4 samples, and of " in line and "in batch 1, " in line and "return Loss(total, count)" in line
    if loss is of_not_ignored:
        assert "a mean of 2 terms for 4 samples, and of 3 for 4 in batch 1" in line


@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_over_samples_is_named(caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]) -> None:
    (line,) = warned(caplog, loss, accumulate_grad_batches=2)
    assert "training_step returns a sum over samples, but" in line and "return Loss(total, count)" in line


@pytest.mark.parametrize("loss", FUNCTIONS)
def test_a_function_of_a_mean_is_named(caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]) -> None:
    (line,) = warned(caplog, loss, accumulate_grad_batches=2)
    assert "training_step returns a function (" in line and "or a mean of what each sample gives" in line


def test_a_product_of_means_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = warned(caplog, a_product, accumulate_grad_batches=2)
    assert "training_step returns a product of what its samples add up to, but" in line


@pytest.mark.parametrize("loss", PAIRS)
def test_a_loss_of_pairs_of_samples_is_named(
    caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]
) -> None:
    (line,) = warned(caplog, loss, accumulate_grad_batches=2)
    assert "training_step returns a function of all pairs of its samples, but sees the samples of one micro" in line


@pytest.mark.parametrize("loss", OVER)
def test_a_function_over_samples_is_named(
    caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]
) -> None:
    (line,) = warned(caplog, loss, accumulate_grad_batches=2)
    assert "training_step returns a function (" in line and ") over its samples, but sees the samples of one" in line


@pytest.mark.parametrize("loss", EVEN + READ + MEANS)
def test_a_mean_over_samples_is_not(caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Any]) -> None:
    assert warned(caplog, loss, accumulate_grad_batches=2) == []


def test_nor_are_equal_weights_whose_sums_are_rounded(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, weighted_alike, accumulate_grad_batches=2, batch_size=8) == []


def test_nor_where_a_batch_is_a_step(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, of_not_ignored) == []


def test_a_part_of_a_batch_has_samples_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, of_all, strategy="dp", devices=2) == []
    (line,) = warned(caplog, of_not_ignored, strategy="dp", devices=2)
    assert "a mean of 1 terms for 2 samples, and of 2 for 2 in batch 1" in line


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_ranks_name_it_once(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, strategy: str) -> None:
    warned(caplog, of_all, strategy=strategy, devices=2)
    assert "a mean of" not in capfd.readouterr().err
    warned(caplog, of_not_ignored, strategy=strategy, devices=2)
    assert capfd.readouterr().err.count("a mean of") == 1
    warned(caplog, a_scaled_sum, batch_size=8, strategy=strategy, devices=2)
    assert capfd.readouterr().err.count("a sum over samples") == 1
