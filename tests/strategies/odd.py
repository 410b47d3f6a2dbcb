"""Modules with what makes sharding hard, shared by the tests of the sharded strategies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Module


class Layer(nn.Module):
    """A residual layer that a tensor-parallel plan may split."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Core(nn.Module):
    """A body of blocks; tied embedding and head, and a 0-dim parameter."""

    def __init__(self, width: int = 8, classes: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, classes, bias=False)
        self.head.weight = self.token.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": "of core", "numbers": [1, 2]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state == {"note": "of core", "numbers": [1, 2]}

    def features(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.token(tokens))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(tokens)) * self.temperature


class Odd(Module):
    """Calls submodules past their parents, uses parameters directly, keeps metrics and lists."""

    def __init__(self, bypass: bool = True) -> None:
        super().__init__()
        self.bypass = bypass
        self.core = Core()
        self.bias = nn.Parameter(torch.zeros(6))
        self.accuracy = MulticlassAccuracy(num_classes=6, average="micro")
        self.batches: list[int] = []
        self.losses: list[float] = []
        self.validated: list[int] = []
        self.hooked: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, y = batch
        features = self.core.features(tokens)  # not through the forward of core
        extra = (
            (self.core.blocks[1].up if self.bypass else self.core.blocks[1])(features).square().mean()
        )  # nor of the block
        loss = (
            F.cross_entropy(
                (F.linear(features, self.core.token.weight) * self.core.temperature + self.bias).flatten(0, 1),
                y.flatten(),
            )
            + 0.01 * extra
        )
        self.batches.append(batch_idx)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        self.log("train/sum", float(len(y)), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():  # a hook may compute too
            x = torch.ones(1, 3, 8, dtype=self.dtype)
            self.hooked.append(
                float(
                    self.core(torch.arange(4)[None]).double().sum()
                    + self.core.blocks[0].norm(x).sum()
                    + self.core.blocks[2](x).sum()
                )
            )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, y = batch
        logits = self.core(tokens)
        self.accuracy.update(logits.flatten(0, 1), y.flatten())
        self.validated.append(len(y))
        self.log("val/loss", F.cross_entropy(logits.flatten(0, 1), y.flatten()))
        self.log("val/acc", self.accuracy)
        self.log("val/most", float(y.max()), reduce_fx="max")
        self.log("val/count", float(len(y)), reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        self.core.seen += self.sum_over_ranks(float(sum(self.validated))).long()
        self.validated.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.core(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)


class Adversaries(Module):
    """Two networks that step against each other, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        judge, maker = self.optimizers()
        self.toggle_optimizer(judge)
        loss = (self.judge(x) - 1).square().mean() + self.judge(
            self.maker(x).detach() * self.scale.detach()
        ).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(judge, 0.5)
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.toggle_optimizer(maker)
        loss = (self.judge(self.maker(x) * self.scale) - 1).square().mean()
        self.manual_backward(loss)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.log("loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.judge.parameters(), lr=0.1),
            torch.optim.AdamW([*self.maker.parameters(), self.scale], lr=0.05),
        ]


class TwoLosses(Module):
    """A dict of losses, each of which moves the parameters of its own optimizer only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        hidden = self.first(batch[0])
        out = self.second(hidden)
        return {"a": (hidden - batch[0]).square().mean() + 0.3 * out.square().mean(), "b": (out - 1).square().mean()}

    def configure_optimizers(self) -> Any:
        return {
            "a": torch.optim.AdamW(self.first.parameters(), lr=0.02),
            "b": torch.optim.SGD(self.second.parameters(), lr=0.1),
        }


def tokens(n: int, batch_size: int = 4, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(n)
    x, y = (torch.randint(0, 6, (n, 5), generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=shuffle)
