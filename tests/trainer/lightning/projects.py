"""Modules in the manner of public projects, written once for `lightning.pytorch` and `lockstep.lightning.pytorch`.

Each function takes that package as `pl` and returns a `Project`. What is random in them is drawn from generators of
their own, and no loader shuffles, as the two packages draw from torch's stream at different places.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

BARE: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that does nothing but train."""
QUIET = BARE | {"devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}


@dataclass
class Project:
    """A module and how to run it."""

    module: Any
    fit: dict[str, Any] = field(default_factory=dict)
    """Arguments of `fit`."""
    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments of the Trainer."""
    trainer_class: Any = None
    seen: Callable[[], Any] = lambda: None
    """What else to compare afterwards."""
    stages: tuple[str, ...] = ("fit",)


def data(samples: int = 24, width: int = 4, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, x[:, :classes].argmax(1))


def loader(samples: int = 24, batch_size: int = 4, width: int = 4) -> DataLoader:
    return DataLoader(data(samples, width), batch_size)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def net(*widths: int, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pairs = itertools.pairwise(widths)
        layers = [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])


def classifier(pl: Any, **attributes: Any) -> Any:
    """The module that most of the projects derive from."""

    class Classifier(pl.LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net(4, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.hparams.lr)

    return type("Classifier", (Classifier,), attributes)


def plain(pl: Any) -> Project:
    return Project(
        classifier(pl)(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)}, stages=("fit", "validate")
    )


def gan(pl: Any) -> Project:
    class GAN(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.discriminator = net(2, 8, 4), net(4, 8, 1, seed=1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer_g, optimizer_d = self.optimizers()
            real, _ = batch
            z = noise(batch_idx, len(real), 2)
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            self.toggle_optimizer(optimizer_g)
            loss_g = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z)), ones)
            self.log("g_loss", loss_g, prog_bar=True)
            self.manual_backward(loss_g)
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)
            self.toggle_optimizer(optimizer_d)
            real_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
            fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(z).detach()), zeros)
            loss_d = (real_loss + fake_loss) / 2
            self.log("d_loss", loss_d, prog_bar=True)
            self.manual_backward(loss_d)
            optimizer_d.step()
            optimizer_d.zero_grad()
            self.untoggle_optimizer(optimizer_d)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.generator.parameters(), 1e-2, betas=(0.5, 0.999)),
                torch.optim.Adam(self.discriminator.parameters(), 1e-2, betas=(0.5, 0.999)),
            ], []

    return Project(GAN(), {"train_dataloaders": loader()})


class Replay(IterableDataset):
    """Transitions of a toy environment, collected by a policy while it is read."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.buffer: deque[Any] = deque(maxlen=50)

    def __iter__(self) -> Any:
        state = torch.zeros(4)
        for i in range(self.steps):
            action = i % 2
            following = (state + noise(i, 4)).tanh()
            self.buffer.append((state, action, following.sum(), following))
            yield self.buffer[(i * 7) % len(self.buffer)]
            state = following


def dqn(pl: Any) -> Project:
    class DQN(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.target_net = net(4, 8, 2), net(4, 8, 2)
            self.data = Replay(32)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            states, actions, rewards, following = batch
            values = self.net(states).gather(1, actions[:, None]).squeeze(1)
            with torch.no_grad():
                targets = rewards + 0.9 * self.target_net(following).max(1)[0]
            if self.global_step % 4 == 0:
                self.target_net.load_state_dict(self.net.state_dict())
            loss = F.mse_loss(values, targets)
            self.log_dict({"loss": loss, "reward": rewards.mean()})
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, batch_size=4)

    return Project(DQN())


def byol(pl: Any) -> Project:
    class Momentum(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            pairs = zip(pl_module.online.parameters(), pl_module.target.parameters(), strict=True)
            with torch.no_grad():
                for online, target in pairs:
                    target.mul_(0.9).add_(online, alpha=0.1)

    class BYOL(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.predictor = net(4, 8, 4), net(4, 4, seed=1)
            self.target = copy.deepcopy(self.online)
            for parameter in self.target.parameters():
                parameter.requires_grad = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            one, two = (batch[0] + 0.1 * noise(seed + batch_idx, *batch[0].shape) for seed in (0, 100))
            loss = -F.cosine_similarity(self.predictor(self.online(one)), self.target(two).detach()).mean()
            self.log("loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.online.parameters(), *self.predictor.parameters()], 0.1, momentum=0.9)

    return Project(BYOL(), {"train_dataloaders": loader()}, {"callbacks": [Momentum()]})


def ddpm(pl: Any) -> Project:
    class DDPM(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = net(5, 16, 4)
            self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

        def loss(self, x: Tensor, seed: int) -> Tensor:
            t = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(seed))
            alpha, eps = self.alphas[t][:, None], noise(seed, *x.shape)
            noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * eps
            return F.mse_loss(self.model(torch.cat([noisy, t[:, None] / 10], 1)), eps)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch[0], batch_idx)
            self.log("train/loss_simple", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss_simple_ema", self.loss(batch[0], batch_idx))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    average = pl.callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2, update_starting_at_step=3)
    return Project(DDPM(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)}, {"callbacks": [average]})


def vqvae(pl: Any) -> Project:
    class VQVAE(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = net(4, 8, 2), net(2, 8, 4, seed=1)
            self.codebook = nn.Embedding(6, 2)
            self.codebook.weight.data.copy_(noise(3, 6, 2))

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, _ = batch
            z = self.encoder(x)
            q = self.codebook(torch.cdist(z, self.codebook.weight).argmin(1))
            embedding, commitment = F.mse_loss(q, z.detach()), F.mse_loss(z, q.detach())
            reconstruction = F.mse_loss(self.decoder(z + (q - z).detach()), x)
            self.log_dict({"recon": reconstruction, "vq": embedding + 0.25 * commitment}, on_step=False, on_epoch=True)
            return {"loss": reconstruction + embedding + 0.25 * commitment, "recon": reconstruction.detach()}

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Project(VQVAE(), {"train_dataloaders": loader()}, {"gradient_clip_val": 0.5})


def two_validation_loaders(pl: Any) -> Project:
    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
        self.log(f"seen/{dataloader_idx}", float(len(batch[0])), add_dataloader_idx=False, reduce_fx="sum")

    module = classifier(pl, validation_step=validation_step)()
    return Project(module, {"train_dataloaders": loader(), "val_dataloaders": [loader(8), loader(12, width=4)]})


def unfreezing(pl: Any) -> Project:
    class Finetune(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(modules=pl_module.net[0], optimizer=optimizer, train_bn=True)

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.SGD(filter(lambda p: p.requires_grad, self.parameters()), 0.1)

    module = classifier(pl, configure_optimizers=configure_optimizers)()
    return Project(module, {"train_dataloaders": loader()}, {"callbacks": [Finetune()]})


def backbone(pl: Any) -> Project:
    class Transfer(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.net = net(4, 6), nn.Sequential(nn.Tanh(), net(6, 3, seed=2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.backbone(x))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.1)

    callback = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)
    return Project(Transfer(), {"train_dataloaders": loader()}, {"callbacks": [callback], "max_epochs": 3})


def plateau(pl: Any) -> Project:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 2.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    module = classifier(pl, configure_optimizers=configure_optimizers)()
    fit = {"train_dataloaders": loader(), "val_dataloaders": loader(8)}
    return Project(module, fit, {"callbacks": [pl.callbacks.LearningRateMonitor()], "logger": "csv", "max_epochs": 4})


def nested_metrics(pl: Any) -> Project:
    class Metrics(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.metrics = nn.ModuleDict(
                {
                    stage: nn.ModuleDict({"a": torchmetrics.MetricCollection({"acc": torchmetrics.MeanMetric()})})
                    for stage in ("train_", "val_")
                }
            )

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            metric = self.metrics["val_"]["a"]["acc"]
            metric(self(batch[0]).argmax(1) == batch[1])
            self.log("val/acc", metric, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.metrics["train_"]["a"].update(self(batch[0]).argmax(1) == batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            self.log_dict({f"train/{k}": v for k, v in self.metrics["train_"]["a"].compute().items()})
            self.metrics["train_"]["a"].reset()

    return Project(Metrics(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)})


def star_arguments(pl: Any) -> Project:
    class Stars(classifier(pl)):
        def shared_step(self, batch: Any, batch_idx: int, stage: str) -> Tensor:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log(f"{stage}/loss", loss)
            return loss

        def training_step(self, *args: Any) -> Tensor:
            return self.shared_step(*args, stage="train")

        def validation_step(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.shared_step(*args, stage="val", **kwargs)

    return Project(Stars(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)})


def trainer_subclass(pl: Any) -> Project:
    class MyTrainer(pl.Trainer):
        def __init__(self, *args: Any, extra: int = 1, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.extra = extra

        def fit_and_count(self, *args: Any, **kwargs: Any) -> int:
            self.fit(*args, **kwargs)
            return self.global_step * self.extra

    return Project(classifier(pl)(), {"train_dataloaders": loader()}, {"extra": 2}, trainer_class=MyTrainer)


def schedule_in_a_callback(pl: Any) -> Project:
    class Cosine(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 / (1 + trainer.global_step)
            pl_module.log("lr", trainer.optimizers[0].param_groups[0]["lr"])

    return Project(classifier(pl)(), {"train_dataloaders": loader()}, {"callbacks": [Cosine()]})


def delegated_loaders(pl: Any) -> Project:
    class Data(pl.LightningDataModule):
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def setup(self, stage: str | None = None) -> None:
            self.train, self.val = data(), data(8)

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, self.hparams.batch_size)

        def val_dataloader(self) -> Any:
            return DataLoader(self.val, self.hparams.batch_size)

    class Delegates(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.source = Data(6)

        def setup(self, stage: str) -> None:
            self.source.setup(stage)

        def train_dataloader(self) -> Any:
            return self.source.train_dataloader()

        def val_dataloader(self) -> Any:
            return self.source.val_dataloader()

    return Project(Delegates())


def tbptt(pl: Any) -> Project:
    class Recurrent(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                self.rnn, self.head = nn.GRU(1, 6, batch_first=True), nn.Linear(6, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, hidden = self.optimizers(), None
            for part in batch[0][:, :, None].split(2, dim=1):
                out, hidden = self.rnn(part, hidden)
                loss = F.mse_loss(self.head(out), part)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                hidden = hidden.detach()
            self.log("loss", loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return Project(Recurrent(), {"train_dataloaders": loader()})


def maml(pl: Any) -> Project:
    class MAML(classifier(pl)):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x, y), half = batch, len(batch[0]) // 2
            weights = dict(self.net.named_parameters())
            inner = F.cross_entropy(torch.func.functional_call(self.net, weights, (x[:half],)), y[:half])
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
            loss = F.cross_entropy(torch.func.functional_call(self.net, adapted, (x[half:],)), y[half:])
            self.log_dict({"inner": inner, "outer": loss})
            return loss

    return Project(MAML(), {"train_dataloaders": loader()})


def ppo(pl: Any) -> Project:
    class PPO(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.actor, self.critic = net(4, 8, 3), net(4, 8, 1, seed=1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            states, actions = batch
            rewards = states.sum(1)
            with torch.no_grad():
                old = self.actor(states).log_softmax(1).gather(1, actions[:, None])
                advantage = rewards[:, None] - self.critic(states)
            actor, critic = self.optimizers()
            for _ in range(2):
                ratio = (self.actor(states).log_softmax(1).gather(1, actions[:, None]) - old).exp()
                loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                actor.zero_grad()
                self.manual_backward(loss)
                actor.step()
                value = F.mse_loss(self.critic(states), rewards[:, None])
                critic.zero_grad()
                self.manual_backward(value)
                critic.step()
            self.log("actor", loss)
            self.log("critic", value)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.actor.parameters(), 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-2)

    return Project(PPO(), {"train_dataloaders": loader()})


def partials(pl: Any) -> Project:
    class Hydra(classifier(pl)):
        def __init__(self, optimizer: Any, scheduler: Any, layers: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False, ignore=["layers"])
            self.net = layers

        def configure_optimizers(self) -> Any:
            optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    module = Hydra(
        functools.partial(torch.optim.Adam, lr=0.01),
        functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=12),
        net(4, 8, 3),
    )
    return Project(module, {"train_dataloaders": loader()})


def accumulation(pl: Any) -> Project:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    callback = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    return Project(
        classifier(pl, training_step=training_step)(), {"train_dataloaders": loader()}, {"callbacks": [callback]}
    )


def early_stop(pl: Any) -> Project:
    stop = pl.callbacks.EarlyStopping("val_loss", 10.0, 1)
    fit = {"train_dataloaders": loader(), "val_dataloaders": loader(8)}
    return Project(classifier(pl)(), fit, {"callbacks": [stop], "max_epochs": 9}, seen=lambda: stop.stopped_epoch)


def writer(pl: Any) -> Project:
    written: list[Any] = []

    class Writer(pl.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            written.append((torch.cat(predictions).tolist(), batch_indices))

        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, batch: Any, batch_idx: int, loader: int
        ) -> None:
            written.append((batch_idx, loader, list(indices), prediction.tolist()))

    def predict_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    module = classifier(pl, predict_step=predict_step)()
    callbacks = [Writer(write_interval="batch_and_epoch")]
    fit = {"train_dataloaders": loader()}
    return Project(module, fit, {"callbacks": callbacks}, seen=lambda: written, stages=("fit", "predict"))


def lambda_callback(pl: Any) -> Project:
    seen: list[int] = []
    callback = pl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.global_step))
    return Project(
        classifier(pl)(), {"train_dataloaders": loader()}, {"callbacks": [callback]}, seen=lambda: list(seen)
    )


def toggled(pl: Any) -> Project:
    class Alternating(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.a, self.b = net(4, 4), net(4, 4, seed=1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                with self.toggled_optimizer(optimizer):
                    loss = self.b(self.a(batch[0])).square().mean()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
            self.log("loss", loss)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.a.parameters(), 0.1), torch.optim.SGD(self.b.parameters(), 0.1)]

    return Project(Alternating(), {"train_dataloaders": loader()})


def several_training_loaders(pl: Any) -> Project:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        (x, y), (z, _) = batch["labeled"], batch["unlabeled"]
        loss = F.cross_entropy(self(x), y) + 0.1 * self(z).square().mean()
        self.log("loss", loss, batch_size=len(x))
        return loss

    module = classifier(pl, training_step=training_step)()
    loaders = pl.utilities.CombinedLoader({"labeled": loader(16), "unlabeled": loader(24)}, mode="max_size_cycle")
    return Project(module, {"train_dataloaders": loaders})


def simclr(pl: Any) -> Project:
    class SimCLR(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = net(4, 8, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            views = torch.cat([batch[0] + 0.1 * noise(seed + batch_idx, *batch[0].shape) for seed in (0, 100)])
            features = self.encoder(views)
            similar = F.cosine_similarity(features[:, None], features[None], dim=-1) / 0.5
            similar.masked_fill_(torch.eye(len(similar), dtype=torch.bool), -9e15)
            positive = similar.diagonal(len(batch[0]))
            loss = (similar.logsumexp(1).mean() - positive.mean()).mean()
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            self.log("train_positive", positive.mean(), on_step=False, on_epoch=True, prog_bar=True, logger=False)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
            return [optimizer], [{"scheduler": warmup, "interval": "step", "name": "warmup"}]

    return Project(SimCLR(), {"train_dataloaders": loader()}, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2})


def a_callback_that_collects(pl: Any) -> Project:
    seen: list[Any] = []

    class Collects(pl.Callback):
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            seen.append((trainer.current_epoch, batch_idx, dataloader_idx, float(outputs["correct"])))

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(sorted(trainer.callback_metrics))

    def validation_step(self: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        correct = (self(batch[0]).argmax(1) == batch[1]).float()
        self.log(f"acc_{dataloader_idx}", correct.mean(), add_dataloader_idx=False)
        return {"correct": correct.sum()}

    fit = {"train_dataloaders": loader(), "val_dataloaders": [loader(8), loader(12)]}
    trainer = {"callbacks": [Collects()], "val_check_interval": 0.5}
    return Project(classifier(pl, validation_step=validation_step)(), fit, trainer, seen=lambda: seen)


def stopped_by_a_callback(pl: Any) -> Project:
    stop = pl.callbacks.LambdaCallback(
        on_train_epoch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step >= 5)
    )
    trainer = {"callbacks": [stop], "max_epochs": -1, "max_steps": 30, "limit_train_batches": 4, "min_epochs": 1}
    return Project(classifier(pl)(), {"train_dataloaders": loader()}, trainer)


def datasets(pl: Any) -> Project:
    module = pl.LightningDataModule.from_datasets(val_dataset=data(8), test_dataset=data(12), batch_size=5)
    return Project(classifier(pl)(), {"datamodule": module}, stages=("validate", "test"))


def own_logger(pl: Any) -> Project:
    base = importlib.import_module(f"{pl.__name__}.loggers.logger")

    class History(base.Logger):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []
            self.ended = ""

        @property
        def name(self) -> str:
            return "history"

        @property
        def version(self) -> str:
            return "0"

        @property
        @base.rank_zero_experiment
        def experiment(self) -> Any:
            return self

        def log_hyperparams(self, params: Any, *args: Any) -> None:
            self.lr = dict(params)["lr"]

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.steps += [step] if "train_loss_step" in metrics else []

        def finalize(self, status: str) -> None:
            self.ended = status

    history = History()
    return Project(
        classifier(pl)(),
        {"train_dataloaders": loader()},
        {"logger": history},
        seen=lambda: (len(history.steps), history.lr, history.ended),
    )


def closure_by_hand(pl: Any) -> Project:
    class Closure(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()

            def closure() -> Tensor:
                loss = F.cross_entropy(self(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                return loss

            optimizer.step(closure=closure)
            if self.trainer.is_last_batch:
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Project(Closure(), {"train_dataloaders": loader()})


def lists_and_warmup(pl: Any) -> Project:
    class Lists(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            loss = super().training_step(batch, batch_idx)
            self.losses.append(loss.detach())
            return {"loss": loss}

        def on_train_epoch_end(self) -> None:
            self.log("epoch_mean", torch.stack(self.losses).mean())
            self.losses.clear()

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 4)
            optimizer.step(closure=optimizer_closure)

    return Project(Lists(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)})


def wgan_with_penalty(pl: Any) -> Project:
    class WGAN(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.generator, self.critic = net(2, 6, 4), net(4, 6, 1, seed=1)

        def penalty(self, real: Tensor, fake: Tensor) -> Tensor:
            between = (0.3 * real + 0.7 * fake).requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer_g, optimizer_c = self.optimizers(use_pl_optimizer=True)
            real, z = batch[0], noise(batch_idx, len(batch[0]), 2)
            fake = self.generator(z).detach()
            loss_c = self.critic(fake).mean() - self.critic(real).mean() + self.penalty(real, fake)
            optimizer_c.zero_grad()
            self.manual_backward(loss_c)
            optimizer_c.step()
            if batch_idx % 3 == 0:
                loss_g = -self.critic(self.generator(z)).mean()
                optimizer_g.zero_grad(set_to_none=True)
                self.manual_backward(loss_g)
                optimizer_g.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.5, 0.5)
            self.log("critic", loss_c, prog_bar=True)

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self) -> Any:
            optimizers = [torch.optim.RMSprop(part.parameters(), 0.01) for part in (self.generator, self.critic)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]

    return Project(WGAN(), {"train_dataloaders": loader()})


def sharpness_aware(pl: Any) -> Project:
    class SAM(classifier(pl)):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, moves = self.optimizers(), []
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
            with torch.no_grad():
                norm = torch.stack([parameter.grad.norm() for parameter in self.parameters()]).norm()
                for parameter in self.parameters():
                    moves.append(parameter.grad * 0.05 / (norm + 1e-12))
                    parameter.add_(moves[-1])
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            with torch.no_grad():
                for parameter, move in zip(self.parameters(), moves, strict=True):
                    parameter.sub_(move)
            optimizer.step()
            self.log("loss", loss)

    return Project(SAM(), {"train_dataloaders": loader()})


def momentum_contrast(pl: Any) -> Project:
    class MoCo(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.query = net(4, 4)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(noise(1, 16, 4), dim=1))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            query = F.normalize(self.query(batch[0]), dim=1)
            with torch.no_grad():
                for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    slow.data = slow.data * 0.9 + fast.data * 0.1
                key = F.normalize(self.key(batch[0] * 1.1), dim=1)
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.5
            place = int(self.place)
            self.queue[place : place + len(key)] = key
            self.place[0] = (place + len(key)) % 16
            return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.query.parameters(), 0.1, momentum=0.9)

    return Project(MoCo(), {"train_dataloaders": loader()})


def averages_of_a_callback(pl: Any) -> Project:
    class EMA(pl.Callback):
        """Swaps its averages in for validation, as many projects have one."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.averages = {name: value.detach().clone() for name, value in module.state_dict().items()}

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            for name, value in module.state_dict().items():
                self.averages[name].mul_(0.9).add_(value, alpha=0.1)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self.own = {name: value.detach().clone() for name, value in module.state_dict().items()}
            module.load_state_dict(self.averages)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(self.own)

    return Project(
        classifier(pl)(), {"train_dataloaders": loader(), "val_dataloaders": loader(8)}, {"callbacks": [EMA()]}
    )


def learned_weights_of_losses(pl: Any) -> Project:
    class Tasks(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = net(4, 8), nn.ModuleDict({"a": net(8, 3, seed=1), "b": net(8, 1, seed=2)})
            self.variances = nn.Parameter(torch.zeros(2))
            self.norms: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = self.body(batch[0]).relu()
            first = F.cross_entropy(self.heads["a"](hidden), batch[1])
            second = F.mse_loss(self.heads["b"](hidden).squeeze(1), batch[1].float())
            self.log_dict({"a": first, "b": second}, prog_bar=True, on_epoch=True)
            return (torch.exp(-self.variances) * torch.stack([first, second])).sum() + self.variances.sum()

        def on_after_backward(self) -> None:
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))
            self.variances.grad.clamp_(-0.1, 0.1)

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.body.parameters()}, {"params": self.heads.parameters(), "lr": 0.05}]
            groups.append({"params": [self.variances], "lr": 0.01, "momentum": 0.9})
            return torch.optim.SGD(groups, lr=0.02)

    module = Tasks()
    return Project(module, {"train_dataloaders": loader()}, seen=lambda: module.norms)


def pruned(pl: Any) -> Project:
    lottery = pl.callbacks.ModelPruning(
        "l1_unstructured",
        parameter_names=["weight"],
        amount=0.3,
        use_lottery_ticket_hypothesis=lambda epoch: epoch == 1,
    )
    given = {"train_dataloaders": loader(), "val_dataloaders": loader(8)}
    return Project(classifier(pl)(), given, {"callbacks": [lottery], "max_epochs": 4})


def normalized(pl: Any) -> Any:
    module = classifier(pl)()
    module.net = nn.Sequential(module.net, nn.BatchNorm1d(3))
    return module


def averages_of_statistics(pl: Any) -> Project:
    average = pl.callbacks.EMAWeightAveraging(decay=0.8)
    given = {"train_dataloaders": loader(), "val_dataloaders": loader(8)}
    module = normalized(pl)
    del module.net[1].num_batches_tracked  # a whole number, which Lightning averages and rounds
    module.net[1].register_buffer("num_batches_tracked", None)
    return Project(module, given, {"callbacks": [average], "max_epochs": 2})


def stochastic_averages(pl: Any) -> Project:
    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    module = classifier(pl, configure_optimizers=configure_optimizers)()
    average = pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=2)
    given = {"train_dataloaders": loader(), "val_dataloaders": loader(8)}
    return Project(module, given, {"callbacks": [average], "max_epochs": 6})


ALL = [
    plain, gan, dqn, byol, ddpm, vqvae, two_validation_loaders, unfreezing, backbone, plateau, nested_metrics,
    star_arguments, trainer_subclass, schedule_in_a_callback, delegated_loaders, tbptt, maml, ppo, partials,
    accumulation, early_stop, writer, lambda_callback, toggled, several_training_loaders,
    simclr, a_callback_that_collects, stopped_by_a_callback, datasets, own_logger, closure_by_hand, lists_and_warmup,
    wgan_with_penalty, sharpness_aware, momentum_contrast, averages_of_a_callback, learned_weights_of_losses,
    pruned, averages_of_statistics, stochastic_averages,
]  # fmt: skip
