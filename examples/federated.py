"""Federated averaging: 20 clients with two kinds of digits each, which no client shows to another.

    lockstep fit examples/federated.yaml
    lockstep fit examples/federated.yaml strategy.server=fedavg
    lockstep fit examples/federated.yaml strategy.server=fedprox=0.01 strategy.fraction=0.25
    lockstep fit examples/federated.yaml devices=2                     # the same bits from two processes

In each round clients train apart on their own digits, and the server averages their weights. TensorBoard shows the
accuracy over all validation digits, and over those of each client: quantiles, and the worst tenth. Expect 95 % within
20 rounds. docs/methods/federated.md has the method.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from examples.digits import DigitsData
from lockstep import Module


class Client(Module):
    """A perceptron with hidden layers of one width, which measures each sample for `ClientMetrics`."""

    def __init__(self, width: int = 128, lr: float = 0.2, layers: int = 1):
        super().__init__()
        self.save_hyperparameters()
        sizes = [64, *[width] * layers]
        hidden = [(nn.Linear(before, after), nn.ReLU()) for before, after in itertools.pairwise(sizes)]
        self.net = nn.Sequential(nn.Flatten(), *itertools.chain(*hidden), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels, _ = batch
        logits = self.net(images)
        right = (logits.argmax(1) == labels).float()
        self.log_dict({"val/loss": F.cross_entropy(logits, labels), "val/acc": right.mean()}, prog_bar=True)
        return {"acc": right}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def owners(labels: Tensor, clients: int) -> Tensor:
    """A client for each sample, `[N]`: client k has k's last digit, and the one that follows by 1, 2, 3, ... for each
    ten clients."""
    owner = torch.empty_like(labels)
    kinds = [{k % 10, (k % 10 + k // 10 + 1) % 10} for k in range(clients)]
    for digit in range(10):
        mine = (labels == digit).nonzero()[:, 0]
        having = [k for k in range(clients) if digit in kinds[k]]
        owner[mine] = torch.tensor(having)[torch.arange(len(mine)) % len(having)]
    return owner


class ClientData(DigitsData):
    """The digits with a third item: whose it is."""

    def __init__(self, batch_size: int = 4, split_seed: int = 0, clients: int = 20):
        super().__init__(batch_size, split_seed)
        self.save_hyperparameters()

    def setup(self, stage):
        super().setup(stage)
        self.train, self.val = self.owned(self.train), self.owned(self.val)

    def owned(self, samples: Dataset) -> TensorDataset:
        images, labels = map(torch.stack, zip(*samples, strict=True))
        return TensorDataset(images, labels, owners(labels, self.hparams.clients))

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/federated.yaml", *sys.argv[1:]]))
