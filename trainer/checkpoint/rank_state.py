"""What each rank of a run holds for itself: random streams, running sums of metrics, the position in its data; and the
gradients that manual optimization keeps from batch to batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.callbacks._support.parameter_state import ParameterState
from lockstep.strategies.checkpoint_state import TensorShard, pack, unpack
from lockstep.strategies.data.batch_slices import move
from lockstep.strategies.modules.blocks import holds_states, join_states
from lockstep.trainer.checkpoint.manifest import refused
from lockstep.trainer.kept.agreed import alike, completed
from lockstep.trainer.kept.owners import in_modes
from lockstep.trainer.metrics.beside import counted_beside, take_beside
from lockstep.trainer.metrics.entry import COMBINE
from lockstep.trainer.metrics.updates import as_sent, growing, joined, leader_of, put_first, put_rows, rows_of
from lockstep.trainer.seeding import derive, has, rng_state, seed_everything, set_rng_state
from lockstep.trainer.setup import resume

if TYPE_CHECKING:
    from lockstep.strategies import Strategy
    from lockstep.trainer.checkpoint.store import Checkpoint
    from lockstep.trainer.kept.changes import Changes
    from lockstep.trainer.module import Module
    from lockstep.trainer.run.state import RunState
    from lockstep.trainer.setup.reload import Reload

_log = logging.getLogger("lockstep")


def save(run: RunState, module: Module, tensors: dict[str, TensorShard]) -> dict[str, Any]:
    """What each rank holds for itself, as JSON; its tensors go to `tensors`."""
    aside = None if run.start_hooks is None else run.start_hooks.aside
    streams, metrics, order = run.paused or (rng_state(run.streams) if aside is None else aside, run.metrics, None)
    if order is None or not run.metrics.in_batch:  # else the validation reads, perhaps what training reads
        order = run.train_dataloader.state_dict()
    topology, sums = run.strategy.topology, metrics.state_dict()
    folder = f"ranks/{topology.rank}"
    kept = pack(kept_tensors(module), f"{folder}/kept", tensors)
    of_validation = {str(entry[6]) for entry in run.metrics.state_dict().values()} if run.paused else set()
    parts_too = tuple(f"{name}." for name in of_validation)
    return {
        "data_rank": topology.data_rank,
        "data_size": topology.data_size,
        "reports": topology.is_reporting_rank,
        "trainability": {
            name: trained
            for name, trained in resume.trainability(module).items()
            if trained != run.trainable_at_start.get(name, trained)
        },
        **({} if run.start_hooks is None else {"start_hooks": run.start_hooks.state_dict(run, module)}),
        "rng": pack(streams, f"{folder}/rng", tensors),
        "sums": sums,
        "samples": metrics.samples,
        "loader": pack(order, f"{folder}/loader", tensors),
        **({} if run.attributes is None else _attributes(run.attributes, f"{folder}/attributes", tensors)),
        **({} if run.reload is None else {"reload": pack(run.reload.state_dict(), f"{folder}/reload", tensors)}),
        **({"kept": kept} if kept else {}),
        **({"stop": True} if run.stop_is_pending else {}),
        **({} if run.shares is None else {"shares": run.shares.save(folder, tensors, of_validation)}),
        "torchmetrics": {}
        if run.shares is not None
        else {
            name: _packed(metric, module, f"{folder}/metrics/{name}", tensors)
            | {"names": [logged for logged, entry in sums.items() if entry[6] == name]}
            for name, metric in filter(lambda item: holds_states(item[1]), torchmetrics_of(module).items())
            if name not in of_validation and not name.startswith(parts_too)  # which the resumed run repeats
        }
        | {
            name: _packed(metric, part, f"{folder}/beside/{number}", tensors)
            for number, (name, (metric, part)) in enumerate(_beside(run).items())
            if holds_states(metric)
        },
    }


def _packed(metric: Any, module: nn.Module, name: str, tensors: dict[str, TensorShard]) -> dict[str, Any]:
    state = {
        "state": metric.metric_state,
        "count": metric._update_count,
        "added": rows_of(leader_of(metric, module)),
        "beside": counted_beside(metric),
    }
    packed: dict[str, Any] = pack(state, name, tensors)
    return packed


_BESIDE = "beside "


def _beside(run: RunState) -> dict[str, tuple[Any, nn.Module]]:
    """The torchmetrics objects in lists and dicts of the module, and in callbacks, each with what is held there."""
    found = {} if run.attributes is None else run.attributes.metrics()
    return {f"{_BESIDE}{name}": each for name, each in found.items()}


def _metrics(run: RunState, module: Module) -> dict[str, Any]:
    return torchmetrics_of(module) | {name: metric for name, (metric, _) in _beside(run).items()}


def restore_reload(run: RunState, reload: Reload, checkpoint: Checkpoint) -> None:
    """Give it what this rank had saved of the loaders, or all ranks of another number of them. Every rank calls it,
    before loaders are made."""
    with refused(checkpoint.path):
        saved = [_saved_by(checkpoint, rank, "reload") for rank in _own_ranks(run, checkpoint)]
        reload.load_state_dicts(saved, checkpoint.state["progress"]["current_epoch"])


def restore_trainability(run: RunState, module: Module, checkpoint: Checkpoint) -> None:
    """Freeze and unfreeze what the saved run had frozen and unfrozen since it began. Every rank calls it."""
    with refused(checkpoint.path):
        changed: dict[str, bool] = {}
        for rank in range(checkpoint.world_size):
            changed |= (checkpoint.rank_state(rank) or {}).get("trainability", {})
    if changed:
        resume.restore_trainability(module, changed)
        run.strategy.adopt_changes(run.wrapped)


def restore(run: RunState, module: Module, checkpoint: Checkpoint) -> None:
    """Continue with what this rank had saved; on another layout, with its share of what all ranks had."""
    strategy, read = run.strategy, checkpoint.read
    saved = [checkpoint.rank_state(rank) or {} for rank in range(checkpoint.world_size)]
    run.asked_to_stop = any(rank_state.get("stop") is True for rank_state in saved)
    mine = saved[strategy.topology.rank] if strategy.topology.rank < len(saved) else {}
    _restore_attributes(run, checkpoint)
    if run.start_hooks is not None:
        run.start_hooks.resume(run, [rank_state.get("start_hooks", {}) for rank_state in saved])
    put_tensors(module, unpack((mine or saved[0]).get("kept", {}), read))
    if run.shares is not None:
        counted = [rank_state for rank_state in saved if rank_state["reports"]]
        _share_sums(run, counted)
        run.shares.restore([rank_state.get("shares", {}) for rank_state in saved], checkpoint)
        set_rng_state(unpack(saved[0]["rng"], read), run.streams)
        run.train_dataloader.load_state_dict(unpack(saved[0]["loader"], read))
        return
    if checkpoint.world_size == strategy.topology.world_size and _place(mine) == (
        strategy.topology.data_rank,
        strategy.topology.data_size,
        strategy.topology.is_reporting_rank,
    ):
        run.train_dataloader.load_state_dict(unpack(mine["loader"], read))
        run.metrics.load_state_dict(mine["sums"])
        run.metrics.samples = mine.get("samples", 0)
        _restore_torchmetrics(run, module, [mine], read)
        set_rng_state(unpack(mine["rng"], read), run.streams)
    else:
        counted = [rank_state for rank_state in saved if rank_state["reports"]]
        _share_sums(run, counted)
        place = strategy.topology
        _restore_torchmetrics(run, module, counted[place.data_rank :: place.data_size], read)
        if len(counted) != place.data_size:
            _restore_rows(run, module, counted, place.data_rank == 0, read)
        _restore_streams(run, counted, read)
        own = strategy.topology.data_rank if len(counted) == strategy.topology.data_size else 0  # else all read alike
        run.train_dataloader.load_state_dict(unpack(counted[own]["loader"], read), len(counted))


def _attributes(changes: Changes, name: str, tensors: dict[str, TensorShard]) -> dict[str, Any]:
    changes.saved_modes |= bool(changes.modes)
    with in_modes(changes.modes):
        state = changes.state_dict()
    return {"attributes": pack(state, name, tensors)} if state else {}


def _restore_attributes(run: RunState, checkpoint: Checkpoint) -> None:
    assert run.attributes is not None
    state = attributes(run, checkpoint)
    objects = ((), ()) if run.reload is None else run.reload.objects
    run.attributes.load_state_dict(state, run.strategy.topology.device, *objects)
    within = (run.progress.epoch_begun and not run.progress.epoch_closed) or run.reload is not None
    # between epochs a hook may make again what is another object than it was
    lost = run.attributes.lost(state, "lost" if within or checkpoint.world_size != run.world_size else "in_place")
    others = f" and {len(lost) - 10} others" if len(lost) > 10 else ""
    if lost and run.is_global_zero:
        _log.warning(
            "the checkpoint does not hold these attributes of the module, callbacks or DataModule, or variables of the "
            f"program, which hooks or steps had changed: {', '.join(sorted(lost)[:10])}{others}; they begin as they "
            f"are built{', and on_train_epoch_start is not called within an epoch' * within}: save them in "
            "on_save_checkpoint and take them up in on_load_checkpoint if they matter"
        )


def attributes(run: RunState, checkpoint: Checkpoint) -> dict[str, Any]:
    """The attributes that this rank had saved; on another number of ranks, those in which all had the same."""
    saved = [_saved_by(checkpoint, rank, "attributes") for rank in _own_ranks(run, checkpoint)]
    if checkpoint.world_size != run.world_size:
        return alike(saved)
    if not saved[0].get("elsewhere"):
        return saved[0]
    return completed(saved[0], [_saved_by(checkpoint, rank, "attributes") for rank in range(checkpoint.world_size)])


def _own_ranks(run: RunState, checkpoint: Checkpoint) -> Sequence[int]:
    """Whose state this rank continues with: its own, or on another number of ranks that of all."""
    ranks = range(checkpoint.world_size)
    return ranks if len(ranks) != run.world_size else [run.strategy.topology.rank]


def _saved_by(checkpoint: Checkpoint, rank: int, key: str) -> dict[str, Any]:
    return unpack((checkpoint.rank_state(rank) or {}).get(key, {}), checkpoint.read)


def torchmetrics_of(module: nn.Module) -> dict[str, Any]:
    """The torchmetrics objects of a module by name; their sums are state of one rank."""
    return {
        name: child
        for name, child in module.named_modules()
        if hasattr(child, "metric_state") and hasattr(child, "_update_count")
    }


def kept_tensors(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """What torchmetrics objects keep beside their states and over resets, equal on all ranks: the extremes of a
    MinMaxMetric."""

    def kept(metric: Any) -> dict[str, Tensor]:
        known = {*metric._defaults, "_computed", "_forward_cache"}
        return {key: value for key, value in vars(metric).items() if type(value) is Tensor and key not in known}

    return {name: tensors for name, metric in torchmetrics_of(module).items() if (tensors := kept(metric))}


def put_tensors(module: nn.Module, kept: dict[str, dict[str, Tensor]]) -> None:
    """Give torchmetrics objects what `kept_tensors` found, if they still have the like of it."""
    metrics = torchmetrics_of(module) if kept else {}
    for name, own in kept_tensors(module).items() if kept else ():
        for key in own.keys() & kept.get(name, {}).keys():
            setattr(metrics[name], key, kept[name][key].to(own[key].device))


def on_device_of(metric: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state that was read from a checkpoint, where `metric` keeps its own."""
    lists = torch.device("cpu") if metric.compute_on_cpu else metric.device
    return {key: move(value, lists if isinstance(value, list) else metric.device, None) for key, value in state.items()}


def _place(rank_state: dict[str, Any]) -> tuple[Any, ...]:
    return rank_state.get("data_rank"), rank_state.get("data_size"), rank_state.get("reports")


def _share_sums(run: RunState, saved: list[dict[str, Any]]) -> None:
    """Continue with this rank's part of what ranks that reported had logged."""
    place = run.strategy.topology
    run.metrics.load_state_dict(_shared_sums([rank_state["sums"] for rank_state in saved], run.strategy))
    run.metrics.samples = sum(state.get("samples", 0) for state in saved[place.data_rank :: place.data_size])


def _shared_sums(saved: list[dict[str, Any]], strategy: Strategy) -> dict[str, Any]:
    """What this rank continues with of the running sums of other ranks: over all ranks nothing is lost or counted
    twice."""
    sums: dict[str, Any] = {}
    for rank, state in enumerate(saved):
        for name, entry in state.items():
            own = sums.setdefault(name, [*entry[:7], None, 0.0, *entry[9:]])
            reduce_fx, rank_zero_only, number, count = entry[0], entry[5], entry[7], entry[8]
            if rank == 0 if rank_zero_only else rank % strategy.topology.data_size == strategy.topology.data_rank:
                both = number if own[7] is None else own[7] + number if isinstance(number, list) else None
                own[7] = COMBINE[reduce_fx]([own[7], number]) if both is None else both
                apart = isinstance(own[8], list) or isinstance(count, list)
                own[8] = [*_listed(own[8]), *_listed(count)] if apart else own[8] + count
    return sums


def _listed(count: Any) -> list[float]:
    return count if isinstance(count, list) else [count]


def _restore_torchmetrics(
    run: RunState, module: Module, saved: list[dict[str, Any]], read: Callable[[str], Tensor]
) -> None:
    """Give this rank the sums of saved ranks, which no other rank takes."""
    for name, metric in _metrics(run, module).items():
        if not holds_states(metric) or (
            name.startswith(_BESIDE) and all(name not in each["torchmetrics"] for each in saved)
        ):
            continue
        metric.reset()
        added: list[list[int]] = []
        for rank_state in saved:
            if name not in rank_state["torchmetrics"]:
                continue
            entry = unpack(rank_state["torchmetrics"][name], read)
            if not entry["count"]:
                continue
            own, held = metric.metric_state, entry["state"]
            if held.keys() != own.keys() or not all(isinstance(held[key], (Tensor, list)) for key in own):
                raise ValueError(
                    f"torchmetric {name} has the state {sorted(own)}, tensors and lists, but the checkpoint has "
                    "different state"
                )
            state = on_device_of(metric, held)
            if metric._update_count:
                join_states(metric, state, "resume on as many ranks, or a checkpoint of the end of an epoch")
            else:
                for key, value in state.items():
                    setattr(metric, key, value)
                take_beside(metric, entry.get("beside", {}))
            added += entry.get("added", ())
            metric._update_count += entry["count"]
            metric._computed = None
        put_rows(metric, added)


def _restore_rows(
    run: RunState, module: Module, saved: list[dict[str, Any]], is_first: bool, read: Callable[[str], Tensor]
) -> None:
    """Give the first rank what the lists of all saved ranks hold, in the order of one process, and the others none of
    it. Each has as many updates, so that those to come follow in turn."""
    for name, metric in _metrics(run, module).items():
        names = growing(metric) if holds_states(metric) else []
        packed = [entry for state in saved if (entry := state["torchmetrics"].get(name, {})).get("count")]
        if not names or not packed:
            continue
        found: list[dict[str, Any]] = [unpack(entry, read) for entry in packed] if is_first else []
        states = [{key: each["state"][key] for key in names} for each in found]
        parts = [as_sent(metric, s, e["count"], e.get("added") or []) for s, e in zip(states, found, strict=True)]
        put_first(metric, on_device_of(metric, joined(parts)), max(entry["count"] for entry in packed))


def _restore_streams(run: RunState, saved: list[dict[str, Any]], read: Callable[[str], Tensor]) -> None:
    """Continue with the random streams of the rank that saw the same samples; where samples are shared out again, with
    streams that nobody drew from."""
    strategy = run.strategy
    if len(saved) == strategy.topology.data_size:
        state = next(rank_state for rank_state in saved if rank_state["data_rank"] == strategy.topology.data_rank)
        set_rng_state(unpack(state["rng"], read), run.streams)
        return
    seed = derive(run.seed, "noise", strategy.topology.data_rank, "resumed", run.progress.global_step)
    seed_everything(seed)
    for key, (device, _) in saved[0]["rng"]["streams"].items():
        if has(device):
            run.streams[key] = torch.Generator(device).manual_seed(derive(seed, key))


GRADIENTS = "module.gradients"
"""The name under which a checkpoint holds `KeptGradients`, beside those of optimizers."""


class KeptGradients(ParameterState):
    """Gradients of manual optimization between two batches. The next one may add to them or step with them, so all
    that exist are saved: whether its first act is to drop them, nobody knows before.

    `scale`: what those of a checkpoint are multiplied by.
    """

    def __init__(self, parameters: Iterable[Tensor], scale: float = 1.0) -> None:
        super().__init__(parameters)
        self._scale = scale

    def tensors(self) -> dict[Tensor, dict[str, Any]]:
        return {p: _saved(p.grad) for p in self.parameters() if p.grad is not None}

    def take(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        if "gradient" in saved:
            parameter.grad = saved["gradient"].to(parameter.device) * self._scale
            return
        of_sparse = {"check_invariants": True, "is_coalesced": saved["coalesced"], "device": parameter.device}
        values = saved["values"] * self._scale
        parameter.grad = torch.sparse_coo_tensor(saved["indices"], values, parameter.shape, **of_sparse)


def kept_gradients(module: Module) -> dict[str, ParameterState]:
    """What a checkpoint of now is to hold of gradients, by name; nothing if there are none."""
    kept = [] if module.automatic_optimization else [p for p in module.parameters() if p.grad is not None]
    return {GRADIENTS: KeptGradients(kept)} if kept else {}


def drop_gradients(module: Module, strategy: Strategy, saved: Mapping[str, Any]) -> dict[str, ParameterState]:
    """Drop the gradients of now, for a checkpoint that holds the strategy's state `saved`; what is to take over its
    own, with the scale of this run's losses."""
    if module.automatic_optimization:
        return {}
    for parameter in module.parameters():
        parameter.grad = None
    if GRADIENTS not in saved["optimizers"]:
        return {}
    named, scaler, before = dict(module.named_parameters()), strategy.precision.scaler, saved.get("scaler")
    scale = 1.0 if before is None else 1 / before["scale"]
    if scaler is not None:  # which takes over the saved one
        scale = scaler.get_scale() if before is None else 1.0
    names = saved["optimizers"][GRADIENTS]["param_groups"][0]["params"]
    return {GRADIENTS: KeptGradients((named[name] for name in names), scale)}


def _saved(gradient: Tensor) -> dict[str, Any]:
    if gradient.layout != torch.sparse_coo:
        return {"gradient": gradient}
    kept = {"indices": gradient._indices(), "values": gradient._values()}  # as they are: adding them up rounds
    return kept | {"coalesced": gradient.is_coalesced()}
