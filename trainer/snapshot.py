"""Everything stateful of a run, gathered for a checkpoint and put back: one list for both directions.

tensors   model/<fqn>, optimizer/<name>/<fqn>/<key>, callbacks/…, module/…, datamodule/…, ranks/<rank>/…
state     progress, seed, strategy meta, schedulers, callbacks, metrics, hyperparameters, versions
rank      random streams, running sums of metrics, data position of one rank
"""

from __future__ import annotations

import inspect
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from strategies.state import Shard, pack, restore_model, unpack
from trainer import checkpoint as files
from trainer.checkpoint import Checkpoint, CheckpointError
from trainer.seeding import rng_state, set_rng_state

if TYPE_CHECKING:
    from trainer.module import Module
    from trainer.trainer import Trainer


def save(trainer: Trainer, module: Module, path: str | Path) -> Path:
    """Write a checkpoint of the run at `path`. Every rank calls it, at the same place."""
    strategy = trainer.strategy
    gathered = strategy.state_dict(trainer.placed, trainer.named_optimizers)
    tensors, mine = gathered.tensors, strategy.rank == 0
    kept: dict[str, Shard] = tensors if mine else {}  # what all ranks hold alike, rank 0 writes
    extra: dict[str, Any] = {}
    for hook in trainer.hooks.on_save_checkpoint:
        hook(extra)
    metrics = torchmetrics_of(module)
    with _refused(path):
        state = {
            "progress": trainer.progress.state_dict(),
            "seed": trainer.run_seed,
            "strategy_name": type(strategy).__name__,
            "strategy": gathered.meta,
            "schedulers": [pack(config.scheduler.state_dict(), f"schedulers/{i}", kept) for i, config in enumerate(trainer.lr_scheduler_configs)],
            "callbacks": {callback.state_key: pack(callback.state_dict(), f"callbacks/{callback.state_key}", kept) for callback in trainer.callbacks},
            "datamodule": pack(trainer.datamodule.state_dict(), "datamodule/state", kept) if trainer.datamodule is not None else {},
            "module": pack(extra, "module/extra", kept),
            "hyperparameters": pack(dict(module.hparams), "module/hparams", kept),
            "hyperparameters_name": module.hparams_name,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "world_size": strategy.world_size,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        rank_state = {
            "rng": pack(rng_state(), f"ranks/{strategy.rank}/rng", tensors),
            "sums": trainer.metrics.state_dict(),
            "loader": pack(trainer.train_dataloader.state_dict(), f"ranks/{strategy.rank}/loader", tensors),
            "torchmetrics": {
                name: pack({"state": metric.metric_state, "count": metric._update_count}, f"ranks/{strategy.rank}/metrics/{name}", tensors)
                for name, metric in metrics.items()
            },
        }
    return files.save(
        path,
        rank=strategy.rank,
        world_size=strategy.world_size,
        tensors=tensors,
        state=state,
        rank_state=rank_state,
        barrier=strategy.barrier,
        broadcast=strategy.broadcast,
    )


def restore(trainer: Trainer, module: Module, checkpoint: Checkpoint) -> None:
    """Put a run back to where `checkpoint` was saved. Every rank calls it, after everything is built."""
    strategy, state, read = trainer.strategy, checkpoint.state, checkpoint.read
    with _refused(checkpoint.path):
        strategy.load_state_dict(trainer.placed, trainer.named_optimizers, checkpoint)
        if len(state["schedulers"]) != len(trainer.lr_scheduler_configs):
            raise ValueError(f"it holds {len(state['schedulers'])} schedulers, but this run has {len(trainer.lr_scheduler_configs)}")
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(unpack(saved, read))
        trainer.progress.load_state_dict(state["progress"])
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(unpack(state["callbacks"][callback.state_key], read))
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(unpack(state["datamodule"], read))
        extra = unpack(state["module"], read)
        for hook in trainer.hooks.on_load_checkpoint:
            hook(extra)
        trainer.show({name: torch.tensor(value, dtype=torch.float64) for name, value in state["metrics"].items()})

        same = checkpoint.world_size == strategy.world_size
        mine = checkpoint.rank_state(strategy.rank) if strategy.rank < checkpoint.world_size else None
        if mine is not None:
            trainer.metrics.load_state_dict(mine["sums"], same_rank=same)
            if same:
                trainer.train_dataloader.load_state_dict(unpack(mine["loader"], read))
        _restore_torchmetrics(trainer, module, checkpoint)
        if same and mine is not None:
            set_rng_state(unpack(mine["rng"], read))


def check_resumable(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError where a checkpoint is not one of a fit."""
    state = checkpoint.state
    if "seed" not in state:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} holds weights alone, so there is nothing to resume: load them with load_from_checkpoint, and fit without ckpt_path"
        )
    kinds = {"seed": int, "progress": dict, "strategy": dict, "schedulers": list, "callbacks": dict, "metrics": dict}
    wrong = [name for name, kind in kinds.items() if type(state.get(name)) is not kind]
    if wrong or not 0 <= state["seed"] < 2**63:
        raise CheckpointError(f"checkpoint {checkpoint.path} cannot be resumed: state.json has no valid {(wrong or ['seed'])[0]}; load another one")


def load_module(cls: Any, path: str | Path, map_location: Any, strict: bool, overrides: dict[str, Any]) -> Any:
    """`Module.load_from_checkpoint`."""
    checkpoint = Checkpoint.open(path)
    hparams, name = unpack(checkpoint.state.get("hyperparameters", {}), checkpoint.read), checkpoint.state.get("hyperparameters_name")
    saved = {name: hparams} if name is not None else hparams
    takes = inspect.signature(cls).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):  # a base class may have been given more
        saved = {key: value for key, value in saved.items() if key in takes}
    module = cls(**saved | overrides)
    module.configure_model()
    with _refused(path):
        restore_model(module, checkpoint, strict)
    return module if map_location is None else module.to(map_location)


def torchmetrics_of(module: nn.Module) -> dict[str, Any]:
    """The torchmetrics objects of a module by name; their sums are state of one rank."""
    return {name: child for name, child in module.named_modules() if hasattr(child, "metric_state") and hasattr(child, "_update_count")}


def _restore_torchmetrics(trainer: Trainer, module: Module, checkpoint: Checkpoint) -> None:
    """Give this rank the sums of the saved ranks r, r + N, r + 2N, … so that over all ranks nothing is lost."""
    strategy = trainer.strategy
    for name, metric in torchmetrics_of(module).items():
        metric.reset()
        for rank in range(strategy.rank, checkpoint.world_size, strategy.world_size):
            saved = (checkpoint.rank_state(rank) or {}).get("torchmetrics", {}).get(name)
            if saved is None:
                continue
            entry = unpack(saved, checkpoint.read)
            if not entry["count"]:
                continue
            if metric._update_count:
                metric.merge_state(entry["state"])
            else:
                for key, value in entry["state"].items():
                    setattr(metric, key, value)
            metric._update_count += entry["count"]
            metric._computed = None


class _refused:
    """Turns what state and checkpoint disagree on into CheckpointError with the path."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (KeyError, ValueError, TypeError)):
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            raise CheckpointError(f"checkpoint {self._path}: {text}") from error
