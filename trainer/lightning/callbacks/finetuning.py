"""BaseFinetuning and BackboneFinetuning with Lightning's arguments and helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep import callbacks
from lockstep.callbacks.training.finetuning import BATCH_NORMS, warn_of_held

if TYPE_CHECKING:
    from lockstep.trainer.module import Module
    from lockstep.trainer.trainer import Trainer

Modules = nn.Module | Iterable[Any]


class BaseFinetuning(callbacks.BaseFinetuning):
    """`lockstep.callbacks.BaseFinetuning` with Lightning's helpers; modules may be in nested lists.

    Layers of BatchNorm that are frozen with `train_bn` False keep their running statistics.
    """

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """The modules that have parameters of their own or no children."""
        if not isinstance(modules, nn.Module):
            return [layer for item in modules for layer in BaseFinetuning.flatten_modules(item)]
        return [
            layer for layer in modules.modules() if not list(layer.children()) or list(layer.parameters(recurse=False))
        ]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[Parameter]:
        """The parameters that are trained or not, as asked; without BatchNorm's with `train_bn` False."""
        for layer in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(layer, BATCH_NORMS):
                yield from (p for p in layer.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Parameter]) -> list[Parameter]:
        """Those of `params` that the optimizer does not hold."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [parameter for parameter in params if id(parameter) not in held]

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze one module."""
        _set(module, False)

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters, but for those of BatchNorm layers with `train_bn`."""
        for layer in BaseFinetuning.flatten_modules(modules):
            _set(layer, train_bn and isinstance(layer, BATCH_NORMS))

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters."""
        for layer in BaseFinetuning.flatten_modules(modules):
            _set(layer, True)

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """As in `lockstep.callbacks.BaseFinetuning`; BatchNorm's parameters are not added with `train_bn` False."""
        warn_of_held(BaseFinetuning.flatten_modules(modules), optimizer)
        BaseFinetuning.make_trainable(modules)
        added = BaseFinetuning.filter_on_optimizer(optimizer, BaseFinetuning.filter_params(modules, train_bn))
        if added:
            first = float(optimizer.param_groups[0]["lr"])
            optimizer.add_param_group({"params": added, "lr": first / initial_denom_lr if lr is None else lr})


class BackboneFinetuning(callbacks.BackboneFinetuning, BaseFinetuning):
    """`lockstep.callbacks.BackboneFinetuning`; the backbone is the submodule `backbone`.

    Its rate is that of the epoch before times `lambda_func(epoch + 1)`, whatever a scheduler makes of it.
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = lambda epoch: 2.0,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__(
            unfreeze_backbone_at_epoch,
            lambda_func,
            backbone_initial_ratio_lr,
            backbone_initial_lr,
            should_align,
            train_bn,
        )
        self.initial_denom_lr, self.verbose, self.rounding = initial_denom_lr, verbose, rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        if stage == "fit":
            self.previous_backbone_lr = None
        super().setup(trainer, module, stage)

    def finetune_function(self, module: Module, epoch: int, optimizer: Optimizer) -> None:
        joined = self._group is not None
        super().finetune_function(module, epoch, optimizer)
        if not self._is_of_backbone(module, optimizer):
            return
        if joined and epoch > self.unfreeze_backbone_at_epoch and self.previous_backbone_lr is not None:
            first, last = optimizer.param_groups[0], optimizer.param_groups[-1]
            raised = self.lambda_func(epoch + 1) * self.previous_backbone_lr  # whatever a scheduler made of it
            last["lr"] = min(raised, float(first["lr"])) if self.should_align else raised
        self.previous_backbone_lr = float(optimizer.param_groups[-1]["lr"])

    def _unfreeze(self, modules: nn.Module, optimizer: Optimizer, lr: float) -> None:
        self.unfreeze_and_add_param_group(modules, optimizer, lr, train_bn=self.train_bn)


def _set(layer: nn.Module, trains: bool) -> None:
    if isinstance(layer, BATCH_NORMS):
        layer.track_running_stats = trains
    for parameter in layer.parameters(recurse=False):
        parameter.requires_grad = trains
