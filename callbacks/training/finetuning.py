"""Fine-tuning: layers that are frozen at first and join the training at an epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.callbacks._support.monitored_metric import check_state, is_count, is_count_or_none
from lockstep.callbacks.base import Callback, check_number

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lockstep import Module, Trainer


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BaseFinetuning(Callback):
    """Base of callbacks that freeze layers before training and unfreeze them by epoch.

    Override `freeze_before_training(module)` and `finetune_function(module, epoch, optimizer)`; both may use `freeze`,
    `make_trainable` and `unfreeze_and_add_param_group`. Every rank calls them alike. What is frozen and which groups
    an optimizer has is in checkpoints: a resumed run continues with it. A second `fit` of a Trainer, which has new
    optimizers, freezes again and calls `finetune_function` for each epoch that has begun.
    """

    changes_model = True

    @staticmethod
    def freeze(modules: nn.Module | Iterable[nn.Module], train_bn: bool = True) -> None:
        """Freeze all parameters of `modules`, but for those of BatchNorm layers with `train_bn`."""
        for layer in _leaves(modules):
            trains = train_bn and isinstance(layer, BATCH_NORMS)
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(trains)

    @staticmethod
    def make_trainable(modules: nn.Module | Iterable[nn.Module]) -> None:
        """Unfreeze all parameters of `modules`."""
        for layer in _leaves(modules):
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(True)

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: nn.Module | Iterable[nn.Module],
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
    ) -> None:
        """Unfreeze `modules` and add what `optimizer` does not hold of them as a group of its own.

        The group's learning rate is `lr`, or that of the first group divided by `initial_denom_lr`. Warns if the
        optimizer holds some of them already, as those keep their rate.
        """
        modules = list(_leaves(modules))
        warn_of_held(modules, optimizer)
        BaseFinetuning.make_trainable(modules)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        added = [p for layer in modules for p in layer.parameters(recurse=False) if id(p) not in held]
        if added:
            rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else lr
            optimizer.add_param_group({"params": added, "lr": rate})

    def freeze_before_training(self, module: Module) -> None:
        """Freeze what is not to be trained at first; called before the optimizers are built."""
        raise NotImplementedError

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        """Called at the start of each epoch, for each optimizer; what it does must follow from the epoch."""
        raise NotImplementedError

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self.freeze_before_training(module)

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        run = trainer._run
        if run.resumed is None:  # a second fit may begin anywhere
            for epoch in range(run.progress.current_epoch + bool(run.progress.batches_seen)):
                self._finetune(trainer, module, epoch)

    def on_train_epoch_start(self, trainer: Trainer, module: Module) -> None:
        self._finetune(trainer, module, trainer.current_epoch)

    def _finetune(self, trainer: Trainer, module: Module, epoch: int) -> None:
        for optimizer in trainer.optimizers:
            self.finetune_function(module, epoch, optimizer)


class BackboneFinetuning(BaseFinetuning):
    """Train without the backbone at first, then with it, at a lower learning rate that approaches the rest's.

    Args:
        unfreeze_backbone_at_epoch: Epoch, from 0, from which the backbone is trained.
        backbone: Name of the submodule, such as "backbone" or "net.encoder".
        lambda_func: Takes an epoch and returns the factor by which the backbone's rate is multiplied at its start.
        backbone_initial_ratio_lr: The backbone's first rate as a share of the rate of the first group.
        backbone_initial_lr: The backbone's first rate itself; None takes the ratio.
        should_align: Keep the backbone's rate at most at that of the first group.
        train_bn: Train BatchNorm layers of the backbone from the start.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = lambda epoch: 2.0,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        train_bn: bool = True,
        *,
        backbone: str = "backbone",
    ) -> None:
        check_number("BackboneFinetuning", "unfreeze_backbone_at_epoch", unfreeze_backbone_at_epoch, 0, whole=True)
        check_number("BackboneFinetuning", "backbone_initial_ratio_lr", backbone_initial_ratio_lr)
        if not backbone_initial_ratio_lr > 0:
            raise ValueError(f"backbone_initial_ratio_lr must be above 0, got {backbone_initial_ratio_lr}")
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.train_bn = train_bn
        self.backbone = backbone
        self._group: int | None = None  # index of the backbone's group in its optimizer
        self._optimizer = 0  # index of that optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"group": self._group, "optimizer": self._optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = {"optimizer": 0} | state_dict  # which checkpoints of old do not say
        check_state("BackboneFinetuning", state_dict, {"group": is_count_or_none, "optimizer": is_count})
        self._group, self._optimizer = state_dict["group"], state_dict["optimizer"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self._group = None  # its optimizers are still to come; a checkpoint is loaded later
        super().setup(trainer, module, stage)

    def freeze_before_training(self, module: Module) -> None:
        self.freeze(self._backbone_of(module), train_bn=self.train_bn)

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        if self._group is None:
            rate = float(optimizer.param_groups[0]["lr"])
            given = self.backbone_initial_lr
            first = rate * self.backbone_initial_ratio_lr if given is None else given
            self._group, self._optimizer = len(optimizer.param_groups), module.trainer.optimizers.index(optimizer)
            self._unfreeze(self._backbone_of(module), optimizer, first)
        elif (
            epoch > self.unfreeze_backbone_at_epoch
            and self._is_of_backbone(module, optimizer)
            and self._group < len(optimizer.param_groups)
        ):
            group, rate = optimizer.param_groups[self._group], float(optimizer.param_groups[0]["lr"])
            raised = float(group["lr"]) * self.lambda_func(epoch)
            group["lr"] = min(raised, rate) if self.should_align else raised

    def _is_of_backbone(self, module: Module, optimizer: Optimizer) -> bool:
        """Whether this is the optimizer that the backbone has joined."""
        return self._group is not None and module.trainer.optimizers.index(optimizer) == self._optimizer

    def _unfreeze(self, modules: nn.Module, optimizer: Optimizer, lr: float) -> None:
        self.unfreeze_and_add_param_group(modules, optimizer, lr=lr)

    def _backbone_of(self, module: Module) -> nn.Module:
        try:
            return module.get_submodule(self.backbone)
        except AttributeError:
            names = ", ".join(name for name, _ in module.named_children())
            raise ValueError(
                f"{type(module).__name__} has no submodule {self.backbone!r} to unfreeze; set backbone= to one of its "
                f"submodules, such as {names}"
            ) from None


def warn_of_held(layers: Iterable[nn.Module], optimizer: Optimizer) -> None:
    """Warn if `optimizer` holds frozen parameters of `layers` already, but for those of BatchNorm layers."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = (p for layer in layers if not isinstance(layer, BATCH_NORMS) for p in layer.parameters(recurse=False))
    count = sum(id(parameter) in held and not parameter.requires_grad for parameter in own)
    if count and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        warnings.warn(
            f"{type(optimizer).__name__} already holds {count} of the parameters that are unfrozen now, so they get no "
            "group and rate of their own; give it those that are trained at first, as in "
            f"{type(optimizer).__name__}(p for p in self.parameters() if p.requires_grad)",
            stacklevel=4,
        )


def _leaves(modules: nn.Module | Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Every module within `modules`, each once."""
    seen = set()
    for outer in [modules] if isinstance(modules, nn.Module) else modules:
        for layer in outer.modules():
            if id(layer) not in seen:
                seen.add(id(layer))
                yield layer
