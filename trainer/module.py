"""Module: the user's side of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.trainer.exporting import Exporting
from lockstep.trainer.facts import ModuleFacts
from lockstep.trainer.hparams import HyperParameters
from lockstep.trainer.run.manual import manual_backward
from lockstep.trainer.seeding import named_stream

if TYPE_CHECKING:
    from typing_extensions import Self  # of Python 3.11

    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.trainer import Trainer

M = TypeVar("M", bound="Module")


class Module(ModuleFacts, HyperParameters, Exporting, nn.Module):
    """An nn.Module with the steps of its training.

    Override `training_step` and `configure_optimizers`, and of the rest what you need. The hooks are
    those of `lockstep.callbacks.Callback` without the `trainer` and `module` arguments, at the same moments.
    """

    automatic_optimization = True
    """If False, `training_step` runs backward and steps itself (`optimizers`, `manual_backward`, `clip_gradients`)."""
    prepare_data_per_node = True
    """Whether `prepare_data` runs on one rank of each node; False: on one rank of the run."""
    example_input_array: Any = None
    """Input of `forward` from which the summary derives sizes and FLOPs, and loggers the graph."""

    hooks_get_dicts = False
    """Whether `on_train_batch_end` gets {"loss": loss} for a `training_step` that returns a tensor, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_trainer"] = None

    # ---- steps: override -------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean loss of `batch`, a 0-dim tensor with gradient.

        Or a dict with "loss", `Loss(total, count)`, a dict of mean losses by optimizer name, or None for no weight.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Log what you measure on `(batch, batch_idx)` or `(batch, batch_idx, dataloader_idx)`; gradients are off."""
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Log what you measure, as in `validation_step`."""
        raise NotImplementedError

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for `batch`: by default what `forward` returns for its first element."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def configure_model(self) -> None:
        """Build large layers here, not in `__init__`, so that a strategy that shards creates them without memory. Every
        rank calls it; it may be called on a module that is built already."""

    def configure_optimizers(self) -> Any:
        """Return an optimizer; a list of them; (optimizers, schedulers); a dict with "optimizer" and "lr_scheduler"; or
        a dict of these by name."""
        raise NotImplementedError

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return callbacks for the runs of this module; each replaces those of its class that the Trainer has."""
        return []

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip before a step. The default clips by the Trainer's arguments."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step `optimizer`, whose gradients are ready; the closure returns the loss and computes nothing."""
        optimizer.step(optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step `scheduler`; `metric` is the value that it monitors, or None."""
        scheduler.step() if metric is None else scheduler.step(metric)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch; the default is the strategy's `to_device`."""
        return self._running().strategy.to_device(batch)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step, such as one augmented on the device."""
        return batch

    # ---- loaders and hooks: override -------------------------------------------------------------

    def prepare_data(self) -> None: ...
    def setup(self, stage: str) -> None: ...
    def teardown(self, stage: str) -> None: ...

    def train_dataloader(self) -> Any:
        return None

    def val_dataloader(self) -> Any:
        return None

    def test_dataloader(self) -> Any:
        return None

    def predict_dataloader(self) -> Any:
        return None

    def on_exception(self, exception: BaseException) -> None: ...
    def on_fit_start(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def on_sanity_check_start(self) -> None: ...
    def on_sanity_check_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...
    def on_before_backward(self, loss: Tensor) -> None: ...
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward from what `training_step` returned, in automatic optimization."""
        loss.backward(*args, **kwargs)

    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...
    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_validation_epoch_start(self) -> None: ...
    def on_validation_epoch_end(self) -> None: ...
    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_validation_model_eval(self) -> None:
        """Put the model into evaluation mode; afterwards every submodule has the mode that it had."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Set other modes than those before the validation, which every submodule has again."""

    def on_test_model_eval(self) -> None:
        self.eval()

    def on_test_model_train(self) -> None: ...
    def on_predict_model_eval(self) -> None:
        self.eval()

    def on_predict_model_train(self) -> None: ...
    def on_test_start(self) -> None: ...
    def on_test_end(self) -> None: ...
    def on_test_epoch_start(self) -> None: ...
    def on_test_epoch_end(self) -> None: ...
    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_start(self) -> None: ...
    def on_predict_end(self) -> None: ...
    def on_predict_epoch_start(self) -> None: ...
    def on_predict_epoch_end(self) -> None: ...
    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    # ---- what a step uses: call --------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log `value` (a number, a tensor of one element, or a torchmetrics Metric) under `name`.

        In a training batch the default is `on_step` (the mean since the last logging interval), elsewhere
        `on_epoch` (the mean over the epoch); with both the names are `name_step` and `name_epoch`. Means are weighted
        by the samples of the batch, or by `batch_size`, and always span all ranks. Every rank logs the same names,
        unless `rank_zero_only`. What a name's first call says of it holds. With `add_dataloader_idx` False a name that
        several loaders log is one value over all of them. Costs one addition on the value's device; synchronizes
        nothing. `enable_graph`, `sync_dist`, `sync_dist_group`, `metric_attribute` and None for `logger` are accepted
        for Lightning's sake and change nothing.
        """
        if self._trainer is None:
            raise RuntimeError(f"self.log({name!r}) was called outside of a run; call it in a step or hook")
        shown = logger is None or logger
        self._trainer._run.metrics.log(
            name, value, prog_bar, shown, on_step, on_epoch, reduce_fx, batch_size, add_dataloader_idx, rank_zero_only
        )

    def log_dict(self, dictionary: Mapping[str, Any], *flags: Any, **options: Any) -> None:
        """`log` for each entry of a dict or MetricCollection; the other arguments are those of `log`."""
        if not hasattr(dictionary, "items"):
            raise TypeError(f"self.log_dict takes a dict of values by name, but got {type(dictionary).__name__}")
        for name, value in dictionary.items():
            self.log(name, value, *flags, **options)

    def print(self, *values: Any, **options: Any) -> None:
        """`print` on rank 0, above the progress bar."""
        self.trainer.print(*values, **options)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The optimizer, or a list of several, as objects whose `step` and `zero_grad` keep ranks together."""
        optimizers = self._running().user_optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """The scheduler, a list of several, or None."""
        schedulers = [config.scheduler for config in self._running().schedulers]
        return (schedulers[0] if len(schedulers) == 1 else schedulers) if schedulers else None

    def manual_backward(self, loss: Tensor, retain_graph: bool = False, **options: Any) -> None:
        """Run backward from `loss`, the mean over this batch; for `automatic_optimization = False`. `retain_graph`
        keeps the graph for another backward; strategies that shard parameters refuse it. No other option is taken."""
        manual_backward(self._running(), loss, retain_graph, options)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> Tensor | None:
        """Clip what `optimizer` will apply; return the norm of the global gradient, or None for "value". What is None
        is the Trainer's; a value of 0, or none of the Trainer's either, clips nothing."""
        if gradient_clip_algorithm not in (None, "norm", "value"):
            raise ValueError(f"gradient_clip_algorithm must be 'norm' or 'value', got {gradient_clip_algorithm!r}")
        run = self._running()
        algorithm = gradient_clip_algorithm or run.arguments.gradient_clip_algorithm
        limit = run.arguments.gradient_clip_val if gradient_clip_val is None else gradient_clip_val
        if limit is not None and not limit >= 0:
            raise ValueError(f"gradient_clip_val must be a number above 0, or 0 for no clipping, got {limit!r}")
        if not limit:
            return None
        return run.strategy.clip_gradients(run.wrapped, getattr(optimizer, "optimizer", optimizer), limit, algorithm)

    def grad_norm(self) -> Tensor:
        """The 2-norm of the gradient that the optimizers are to apply, over all parameters and ranks (0-dim); every
        rank calls it.

        Call it in `on_before_optimizer_step` or, in manual optimization, before `step`. The same under every strategy.
        Raises RuntimeError on several ranks between the micro-batches of a window.
        """
        from lockstep.strategies.launch.phase import AFTER_BACKWARD

        run = self._running()
        run.refuse_within_window("grad_norm()", but_in=AFTER_BACKWARD)
        norms = [run.strategy.clip_gradients(run.wrapped, item, math.inf) for item in run.optimizers.values()]
        return torch.stack([norm for norm in norms if norm is not None]).square().sum().sqrt()

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let gradients flow into the parameters of `optimizer` only, until `untoggle_optimizer`."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        saved = self.__dict__.setdefault("_toggled", {})
        for other in self._running().optimizers.values():
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in own and id(parameter) not in saved:
                        saved[id(parameter)] = (parameter, parameter.requires_grad)
                        parameter.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, requires_grad in self.__dict__.pop("_toggled", {}).values():
            parameter.requires_grad_(requires_grad)

    def freeze(self) -> Self:
        """Stop training: no parameter gets a gradient, and every submodule is in evaluation mode."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Train every parameter, in training mode."""
        return self.requires_grad_(True).train(True)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Stack each tensor of `data` over ranks: shape `[data_size, …]`. Every rank calls it; no gradient flows.

        Of ranks that share samples one counts. Raises RuntimeError where a rank has no samples, as in an uneven epoch.
        """
        from lockstep.trainer import collectives

        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True) is not offered: a loss over gathered outputs weighs ranks differently; "
                "compute the loss on each rank's batch"
            )
        return collectives.all_gather(self._running(), data)

    def sum_over_ranks(self, value: Tensor | float) -> Tensor:
        """The sum of `value` over the samples of all ranks, where it is a sum over this rank's samples.

        Ranks that share samples count once, a rank without samples counts zeros, and one process returns `value`: so
        statistics in buffers are those of one process. Every rank calls it, with the same shape; no gradient flows.
        Raises RuntimeError in a step of a strategy that runs its parts apart.
        """
        from lockstep.trainer import collectives

        return collectives.sum_over_ranks(self._running(), value)

    def random_stream(self, name: str, device: str | torch.device = "cpu") -> torch.Generator:
        """This run's random stream `name`: a generator apart from all others, for `torch.rand(…, generator=…)` and the
        like.

        Seeded from the run's seed, the name and the data rank when it is first asked for: ranks that see other
        samples draw other numbers, ranks that share samples the same. It is in every checkpoint; validation
        leaves it where it was. `device` is where it draws. Raises ValueError for a name that is not letters,
        digits, "_", "." and "-", RuntimeError outside of a run, and in a step of a strategy that runs its parts
        apart ("pipeline", "dp").
        """
        run = self._running()
        if run.metrics.in_batch and not run.strategy.capabilities.runs_step_once:
            raise RuntimeError(
                f"random_stream({name!r}) was called in a step, but {run.strategy.name} runs the parts of a "
                "step apart; "
                "draw from torch's own stream there, which begins alike for each part on all ranks"
            )
        place = (run.strategy.topology.data_rank,) if run.shares is None else run.shares.place
        return named_stream(run.streams, name, device, run.seed, *place)

    # ---- facts -------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module. Raises RuntimeError where none does."""
        return self._running().trainer

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if self._trainer is not None and self._trainer._run.active:
            return self._trainer.strategy.topology.device
        return next((t.device for t in [*self.parameters(), *self.buffers()]), torch.device("cpu"))

    @classmethod
    def load_from_checkpoint(
        cls: type[M],
        checkpoint_path: str | Path | BinaryIO,
        map_location: Any = None,
        strict: bool | None = True,
        weights_only: bool | None = None,
        **overrides: Any,
    ) -> M:
        """Build the module from the hyperparameters in a checkpoint and load its weights.

        `checkpoint_path` is a checkpoint folder, or a file in Lightning's layout: its path, or the open file. Such a
        file is read without running what it may hold; `weights_only=False` unpickles it, for files that you trust.
        `overrides` replace or complete the saved hyperparameters. `map_location` is what torch.load takes. Raises
        CheckpointError for a folder that is not a valid checkpoint, TypeError where `__init__` needs more.
        """
        from lockstep.trainer.loading import load_module  # here, as loading.py builds on this file

        return load_module(cls, checkpoint_path, map_location, strict, overrides, trusts=weights_only is False)

    # ---- helpers -----------------------------------------------------------------------------------

    def _running(self) -> RunState:
        trainer = self.__dict__.get("_trainer")
        if trainer is None:
            raise RuntimeError(
                f"this {type(self).__name__} is not attached to a Trainer; it is while fit, validate, test or predict "
                "runs"
            )
        return trainer._run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trainer": None}


def attach(module: nn.Module, trainer: Trainer) -> None:
    """Let a module and those within it know the Trainer that runs them."""
    for child in module.modules():
        if isinstance(child, Module):
            child.__dict__["_trainer"] = trainer
