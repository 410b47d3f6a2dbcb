"""Several heads and losses on one trunk: weights of the losses that are learned, and how far their gradients conflict.

    lockstep fit examples/multitask.yaml
    lockstep fit examples/multitask.yaml module.weighting=equal          # the plain sum, to compare with
    lockstep fit examples/multitask.yaml strategy=fsdp devices=2         # the same numbers from two processes

Three tasks for each image of the digits: its class, the ink in its quarters, and its mirror image. TensorBoard shows
the loss and weight of each, and at each epoch the cosines between their gradients. Expect a validation accuracy of 96 %
within a minute on two cores. docs/methods/multitask.md has the method.
"""

import sys
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from lockstep import Module

TASKS = {"class": 10, "ink": 4, "mirror": 64}  # outputs of each head


class Heads(nn.Module):
    """`[B, 1, 8, 8]` -> an output of each task."""

    def __init__(self, width: int):
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(width, outputs) for task, outputs in TASKS.items()})

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        features = self.trunk(images)
        return {task: head(features) for task, head in self.heads.items()}


def losses(outputs: dict[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The mean loss of each task: cross-entropy, or half the squared error."""
    ink, mirror = F.avg_pool2d(images, 4).flatten(1), images.flip(-1).flatten(1)
    return {
        "class": F.cross_entropy(outputs["class"], labels),
        "ink": F.mse_loss(outputs["ink"], ink) / 2,
        "mirror": F.mse_loss(outputs["mirror"], mirror) / 2,
    }


def conflicts(net: Heads, weights: dict[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Cosines between the gradients of each two tasks in the trunk; a negative one is a conflict."""

    def gradient(task: str) -> Tensor:
        found = grad(lambda weights: losses(functional_call(net, weights, images), images, labels)[task])(weights)
        return torch.cat([value.flatten() for name, value in found.items() if name.startswith("trunk.")])

    gradients = {task: gradient(task) for task in TASKS}
    pairs = combinations(TASKS, 2)
    return {f"{one}-{other}": F.cosine_similarity(gradients[one], gradients[other], 0) for one, other in pairs}


class MultiTask(Module):
    """`weighting` is "uncertainty", by a variance that is learned for each task, or "equal"."""

    def __init__(self, width: int = 64, lr: float = 2e-3, weighting: str = "uncertainty"):
        super().__init__()
        if weighting not in ("uncertainty", "equal"):
            raise ValueError(f"weighting must be 'uncertainty' or 'equal', got {weighting!r}")
        self.save_hyperparameters()
        self.net = Heads(width)
        self.log_variances = nn.Parameter(torch.zeros(len(TASKS)), requires_grad=weighting == "uncertainty")

    def training_step(self, batch, batch_idx):
        found = losses(self.net(batch[0]), *batch)
        self.log_dict({f"train/{task}": loss for task, loss in found.items()})
        self.log_dict({f"weight/{task}": w for task, w in zip(TASKS, (-self.log_variances).exp(), strict=True)})
        # Kendall et al., 2018, equation 10: weighted sum and the logarithm of each deviation.
        total = (torch.stack(list(found.values())) * (-self.log_variances).exp() + self.log_variances / 2).sum()
        self.log("train/loss", total, prog_bar=True)
        return total

    def validation_step(self, batch, batch_idx):
        outputs = self.net(batch[0])
        self.log("val/acc", (outputs["class"].argmax(1) == batch[1]).to(self.dtype).mean(), prog_bar=True)
        self.log_dict({f"val/{task}": loss for task, loss in losses(outputs, *batch).items()})

    def on_train_epoch_end(self):
        """Each rank computes the same from the whole weights and the same samples."""
        with self.trainer.whole(self):
            weights = {name: weight.detach().clone() for name, weight in self.net.named_parameters()}
        images, labels = (part.to(self.device) for part in self.trainer.datamodule.val[:])
        found = conflicts(Heads(self.hparams.width), weights, images.to(self.dtype), labels)
        self.log_dict({f"cosine/{pair}": cosine for pair, cosine in found.items()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/multitask.yaml", *sys.argv[1:]]))
