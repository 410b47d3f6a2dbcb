"""Validation, test and prediction: one loop for all three."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.strategies.base import StepHooks
from lockstep.strategies.checkpoint_state import pack, unpack
from lockstep.strategies.data.sharded_loader import ShardedLoader
from lockstep.strategies.launch.launcher import set_phase
from lockstep.trainer.checkpoint.snapshot import load_extra, restore_weights, torchmetrics_of
from lockstep.trainer.metrics.store import MetricStore
from lockstep.trainer.module import Module
from lockstep.trainer.run import prepare as setup
from lockstep.trainer.run.hooks import overrides, step_function, transfer_of
from lockstep.trainer.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from lockstep.trainer.run.prepare import Sources
    from lockstep.trainer.trainer import Trainer

KINDS = {"validate": ("validation", "val"), "test": ("test", "test"), "predict": ("predict", "predict")}
"""Stage: (name in hooks and steps, kind of loader)."""


def run(trainer: Trainer, module: Module, sources: Sources, stage: str) -> Any:
    """`Trainer.validate`, `test` and `predict` on one rank: metrics by loader, or predictions in dataset order."""
    name, kind = KINDS[stage]
    if stage != "predict" and not overrides(module, f"{name}_step", Module):
        raise ValueError(f"{stage} needs {type(module).__name__}.{name}_step; define it")
    source = sources.get(module, kind)
    if not setup.loaders_of(source):
        raise ValueError(f"{stage} needs data: give dataloaders, or a DataModule or Module with {kind}_dataloader")
    loaders = setup.evaluation_loaders(trainer, source, kind)
    if trainer.resumed is not None:
        load_extra(trainer, trainer.resumed, callbacks=False)
    trainer.wrapped = trainer.strategy.setup_module(module)
    if trainer.resumed is not None:
        restore_weights(trainer, trainer.resumed)
    outputs = evaluate(trainer, module, loaders, stage)
    if stage != "predict":
        shown = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return [
            {key: value for key, value in shown.items() if _belongs(key, i, len(loaders))} for i in range(len(loaders))
        ]
    if not trainer.keeps_predictions:
        return None
    ordered = [in_dataset_order(trainer, part) for part in outputs]
    return ordered[0] if len(ordered) == 1 else ordered


def validate_in_fit(trainer: Trainer, module: Module, loaders: list[ShardedLoader]) -> None:
    """Validate beside the training: its random streams, metrics and modes stay as they are."""
    random_streams, training_metrics = rng_state(trainer.streams), trainer.metrics
    try:
        evaluate(trainer, module, loaders, "validate")
    finally:
        trainer.metrics = training_metrics
        set_rng_state(random_streams, trainer.streams)


def sanity_check(trainer: Trainer, module: Module, loaders: list[ShardedLoader]) -> None:
    """A few batches of validation before training, to find errors early; leaves no trace."""
    limits, shown = (
        trainer.evaluation_limits["val"],
        (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics),
    )
    steps = trainer.arguments.num_sanity_val_steps
    trainer.evaluation_limits["val"] = [
        None if steps < 0 else steps if limit is None else min(limit, steps) for limit in limits
    ]
    trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = {}, {}, {}
    trainer.sanity_checking = True
    for hook in trainer.hooks.on_sanity_check_start:
        hook()
    try:
        validate_in_fit(trainer, module, loaders)
        for metric in torchmetrics_of(module).values():
            metric.reset()
        for hook in trainer.hooks.on_sanity_check_end:
            hook()
    finally:
        trainer.sanity_checking = False
        trainer.evaluation_limits["val"] = limits
        trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics = shown


def evaluate(trainer: Trainer, module: Module, loaders: list[ShardedLoader], stage: str) -> list[list[Any]]:
    """Run the step of `stage` over this rank's share of each loader; return the outputs where they are predictions."""
    name, kind = KINDS[stage]
    hooks, strategy = trainer.hooks, trainer.strategy
    start, end, epoch_start, epoch_end, batch_start, batch_end = (
        getattr(hooks, f"on_{name}_{moment}")
        for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
    )
    several = len(loaders) > 1
    step = step_function(getattr(module, f"{name}_step"), 3 if several else 2)
    metrics = trainer.metrics = MetricStore(module, training=False)
    metrics.noticed = trainer.noticed_names
    limits = trainer.evaluation_limits[kind]
    outputs: list[list[Any]] = [[] for _ in loaders]
    keeps = stage == "predict" and trainer.keeps_predictions
    step_hooks = StepHooks(log_scope=metrics.part)
    own_transfer = transfer_of(module, trainer.datamodule, strategy.to_device, strategy.topology.device)
    with _evaluation_mode(module, name):
        for hook in start:
            hook()
        for hook in epoch_start:
            hook()
        for index, loader in enumerate(loaders):
            metrics.suffix = f"/dataloader_idx_{index}" if several else ""
            for batch_idx, window in enumerate(loader.windows(0, limit=limits[index])):
                (micro_batch,) = window.micro_batches
                set_phase(trainer.global_step, f"{name} batch {batch_idx}")
                batch = micro_batch.batch
                batch = strategy.to_device(batch) if own_transfer is None else own_transfer(batch, index)
                micro_batch.batch = batch
                metrics.weight, metrics.in_batch = micro_batch.num_samples, True
                metrics.samples += micro_batch.num_samples
                metrics.is_ambiguous = micro_batch.is_ambiguous and strategy.topology.data_size > 1
                real = micro_batch.num_samples > 0
                for hook in batch_start if real else ():
                    hook(batch, batch_idx, index)
                output = strategy.evaluate(
                    trainer.wrapped,
                    step,
                    micro_batch,
                    *((batch_idx, index) if several else (batch_idx,)),
                    hooks=step_hooks,
                )
                for hook in batch_end if real else ():
                    hook(output, batch, batch_idx, index)
                metrics.in_batch = False
                if keeps and real:
                    outputs[index].append(on_host(output))
        metrics.suffix, metrics.weight = "", 1.0
        early: dict[str, float] = {}
        if epoch_end:  # which read what the steps have logged, and log more
            early = metrics.reduce(strategy, epoch_end=True, reset=False)
            trainer.show_values(early)
        for hook in epoch_end:
            call_at_epoch_end(trainer, hook, f"on_{name}_epoch_end")
        trainer.publish({**early, **metrics.reduce(strategy, epoch_end=True)})
        metrics.close()
        for hook in end:
            hook()
    return outputs


def call_at_epoch_end(trainer: Trainer, hook: Callable[[], Any], name: str) -> None:
    """Call a hook that sums an epoch up; where it fails on a rank that has seen no sample, say why."""
    try:
        hook()
    except Exception as error:
        if trainer.metrics.samples or trainer.world_size == 1:
            raise
        raise RuntimeError(
            f"{name} failed on rank {trainer.global_rank}, which has seen no sample in this epoch "
            f"({type(error).__name__}: {error}); log in the step, which is exact on any number of ranks, let the hook do without "
            "samples, or use fewer ranks or a smaller batch_size"
        ) from error


def on_host(output: Any) -> Any:
    """A prediction without its graph and on the CPU, so that those of a whole dataset do not fill the device. Waits for the device."""
    if isinstance(output, Tensor):
        output = output.detach()
        return output if output.device.type == "cpu" else output.cpu()
    if isinstance(output, dict):
        return {key: on_host(value) for key, value in output.items()}
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(on_host, output))
    return type(output)(map(on_host, output)) if type(output) in (list, tuple) else output


def in_dataset_order(trainer: Trainer, outputs: list[Any]) -> list[Any]:
    """The predictions of all ranks, a batch of one data rank an item, in the order of the dataset. Every rank calls it."""
    strategy = trainer.strategy
    if strategy.topology.world_size == 1:
        return outputs
    outputs = outputs if strategy.topology.is_reporting_rank else []
    places = strategy.all_gather(torch.tensor(strategy.topology.data_rank)).tolist()
    pieces: dict[str, Any] = {}
    try:
        layout = pack(outputs, "predictions", pieces)
    except TypeError as error:
        raise TypeError(
            f"predict_step on several ranks must return tensors, numbers, strings, or lists, tuples and dicts of them: {error}"
        ) from None
    parts = [json.loads(text) for text in _gather_bytes(strategy, json.dumps(layout).encode())]
    tensors = _gather_tensors(strategy, {name: shard.tensor for name, shard in pieces.items()})
    unpacked = [unpack(part, read.__getitem__) for part, read in zip(parts, tensors, strict=True)]
    ranks = [part for _, part in sorted(zip(places, unpacked, strict=True), key=lambda pair: pair[0]) if part]
    return [rank[i] for i in range(max(map(len, ranks))) for rank in ranks if i < len(rank)]


def _gather_bytes(strategy: Any, data: bytes) -> list[bytes]:
    sizes = strategy.all_gather(torch.tensor([len(data)])).flatten().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [bytes(row[:size].numpy()) for row, size in zip(strategy.all_gather(padded), sizes, strict=True)]


def _gather_tensors(strategy: Any, tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    from safetensors.torch import load, save  # only predictions on several ranks need it

    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return [load(part) for part in _gather_bytes(strategy, data)]


def _belongs(key: str, index: int, count: int) -> bool:
    return count == 1 or "/dataloader_idx_" not in key or key.endswith(f"/dataloader_idx_{index}")


@contextmanager
def _evaluation_mode(module: Module, name: str) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule has the mode that it had."""
    modes = [(child, child.training) for child in module.modules()]
    getattr(module, f"on_{name}_model_eval")()
    try:
        with torch.no_grad():
            yield
    finally:
        if modes[0][1]:
            getattr(
                module, f"on_{name}_model_train"
            )()  # `train` is the module's own, which some override to swap weights
        for child, mode in modes:
            child.training = mode
