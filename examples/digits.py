"""Handwritten digits with a small convolutional net: the main example.

    lockstep fit examples/digits.yaml
    lockstep fit examples/digits.yaml strategy=ddp devices=2      # the same numbers from two processes

Trains on scikit-learn's 1,797 bundled images. Expect a validation accuracy of 98-99 % within a minute on two cores.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lockstep import DataModule, Module


class Digits(Module):
    def __init__(self, width: int = 32, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * width * 16, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        self.example_input_array = torch.zeros(1, 1, 8, 8)

    def forward(self, images):
        return self.net(images)  # [B, 1, 8, 8] -> [B, 10]

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log_dict({"val/loss": F.cross_entropy(logits, batch[1]), "val/acc": self.accuracy}, prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(dim=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class DigitsData(DataModule):
    def __init__(self, batch_size: int = 32, split_seed: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        dataset = TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels)
        split = torch.Generator().manual_seed(self.hparams.split_seed)
        self.train, self.val = random_split(dataset, [0.8, 0.2], generator=split)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=256)

    predict_dataloader = val_dataloader


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/digits.yaml", *sys.argv[1:]]))
