"""A stream of tasks, what a net forgets of the earlier ones, and two remedies: replay and EWC.

    lockstep fit examples/continual.yaml                              # forgets
    lockstep fit examples/continual.yaml module.ewc=1000              # elastic weight consolidation
    lockstep fit examples/continual.yaml data.replay=50               # keeps 50 samples of each task
    lockstep fit examples/continual.yaml module.ewc=1000 strategy=fsdp devices=2

Each task is the digits with their pixels in another order. Row i of the matrix that TensorBoard shows (under Images and
Text) has the accuracies on all tasks after task i. docs/methods/continual.md has what to expect.
"""

import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn.utils import parameters_to_vector
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lockstep import DataModule, Module
from lockstep.callbacks import TensorBoardLogger

TASKS = 5


def perceptron(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def fisher(net: nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> dict[str, Tensor]:
    """The diagonal of the Fisher information of `net` with `weights`, mean over `inputs` `[N, 64]`.

    Of each sample the sum over classes of p(class) (d log p(class) / d weight)^2, so labels are not needed.
    """

    def log_probabilities(weights, sample):
        return functional_call(net, weights, (sample[None],))[0].log_softmax(-1)

    def of_sample(sample):
        p = log_probabilities(weights, sample).exp()
        slopes = jacrev(log_probabilities)(weights, sample)
        return {name: torch.einsum("c,c...->...", p, slope.square()) for name, slope in slopes.items()}

    return {name: values.mean(0) for name, values in vmap(of_sample, chunk_size=8)(inputs).items()}


class Learner(Module):
    """`ewc` is the weight of the penalty, 0 for none; `fisher_samples` of a task say which weights it needs."""

    def __init__(self, width: int = 512, lr: float = 0.1, ewc: float = 0.0, fisher_samples: int = 200):
        super().__init__()
        self.save_hyperparameters()
        self.net = perceptron(width)
        # The penalty, the sum over tasks of ewc / 2 * fisher * (weight - weight after the task)^2, has the gradient
        # ewc * (importance * weight - pull). Buffers are in checkpoints, so a run can be resumed in any task.
        size = sum(parameter.numel() for parameter in self.net.parameters())
        self.register_buffer("importance", torch.zeros(size))
        self.register_buffer("pull", torch.zeros(size))
        self.register_buffer("matrix", torch.zeros(TASKS, TASKS))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def on_before_zero_grad(self, optimizer):
        """After each step: a step on the penalty, exact (proximal) and so stable; the same under every strategy."""
        if self.hparams.ewc and self.trainer.datamodule.task:
            step = self.hparams.lr * self.hparams.ewc
            with self.trainer.whole(self), torch.no_grad():
                sizes = [weight.numel() for weight in self.net.parameters()]
                terms = zip(self.net.parameters(), self.importance.split(sizes), self.pull.split(sizes), strict=True)
                for weight, importance, pull in terms:
                    weight += step * pull.view_as(weight)
                    weight /= 1 + step * importance.view_as(weight)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val/acc", (self.net(batch[0]).argmax(1) == batch[1]).to(self.dtype).mean())

    def on_train_epoch_end(self):
        data = self.trainer.datamodule
        if (self.trainer.current_epoch + 1) % data.hparams.epochs == 0:
            self.measure(data.task)
            if self.hparams.ewc:
                self.consolidate(data.train[data.task][: self.hparams.fisher_samples][0])

    def consolidate(self, inputs):
        """Adds a task to the penalty; each rank computes the same from the whole weights."""
        with self.trainer.whole(self):
            weights = {name: weight.detach().clone() for name, weight in self.net.named_parameters()}
        found = fisher(perceptron(self.hparams.width), weights, inputs.to(self.device, self.dtype))
        importance = parameters_to_vector([found[name] for name in weights])
        self.importance += importance
        self.pull += importance * parameters_to_vector(weights.values())

    def measure(self, task):
        """A row of the matrix: what is known of each task after `task`."""
        accuracies = [self.trainer.callback_metrics[f"val/acc/dataloader_idx_{i}"] for i in range(TASKS)]
        self.matrix[task] = torch.stack(accuracies)
        past = self.matrix[: task + 1, : task + 1]
        self.log("continual/accuracy", past[-1].mean())
        self.log("continual/forgetting", (past.max(0).values - past[-1])[:-1].mean() if task else 0.0)
        rows = [f"| after {i} | " + " | ".join(f"{x:.1%}" for x in row) + " |" for i, row in enumerate(past.tolist())]
        head = [f"| | {' | '.join(f'task {i}' for i in range(task + 1))} |", "|---" * (task + 2) + "|"]
        if task == TASKS - 1:
            self.print("\n".join([*head, *rows]))
        if isinstance(self.logger, TensorBoardLogger):
            self.logger.log_text("accuracy of each task", "\n".join([*head, *rows]))
            image = self.matrix.repeat_interleave(32, 0).repeat_interleave(32, 1)[None]
            self.logger.experiment.add_image("accuracy of each task", image, self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Stream(DataModule):
    """TASKS tasks of `epochs` epochs each, with `replay` samples of each earlier task among those of the task."""

    def __init__(self, epochs: int = 5, replay: int = 0, batch_size: int = 32):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train, self.val = [], []
        for task in range(TASKS):
            order = torch.randperm(64, generator=torch.Generator().manual_seed(task)) if task else torch.arange(64)
            dataset = TensorDataset(images[shuffled][:, order].float() / 16, labels[shuffled])
            self.train.append(TensorDataset(*dataset[:1437]))
            self.val.append(TensorDataset(*dataset[1437:]))

    @property
    def task(self):
        return min(self.trainer.current_epoch // self.hparams.epochs, TASKS - 1)

    def train_dataloader(self):
        earlier = [Subset(dataset, range(self.hparams.replay)) for dataset in self.train[: self.task]]
        return DataLoader(ConcatDataset([self.train[self.task], *earlier]), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return [DataLoader(dataset, 360) for dataset in self.val]


if __name__ == "__main__":
    from lockstep.trainer.cli.main import main

    sys.exit(main(["fit", "examples/continual.yaml", *sys.argv[1:]]))
