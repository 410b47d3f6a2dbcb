"""A vision transformer of timm on handwritten digits: the data of examples/digits.py.

    pip install "lockstep-trainer[timm,examples]"
    lockstep fit examples/vit.yaml
    lockstep fit examples/vit.yaml strategy=fsdp devices=2        # the same numbers from two processes

Expect a validation accuracy of about 90 % within a minute on two cores. Nothing is downloaded.
"""

import sys

import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lockstep import Module


class ViT(Module):
    """`model` is any vision transformer of timm; its size is set by what follows."""

    def __init__(
        self,
        model: str = "vit_tiny_patch16_224",
        width: int = 64,
        depth: int = 4,
        num_heads: int = 4,
        patch_size: int = 2,
        lr: float = 2e-3,
    ):
        super().__init__()
        self.save_hyperparameters()
        size = {"embed_dim": width, "depth": depth, "num_heads": num_heads, "patch_size": patch_size}
        self.vit = timm.create_model(model, img_size=8, in_chans=1, num_classes=10, **size)
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images)  # [B, 1, 8, 8] -> [B, 10]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log_dict({"val/loss": F.cross_entropy(logits, batch[1]), "val/acc": self.accuracy}, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.05)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/vit.yaml", *sys.argv[1:]]))
