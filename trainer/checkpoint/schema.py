"""What the JSON of a fit's checkpoint must look like to be resumed: kinds, ranges, and what must agree with what.

Checksums find damage; a file that was edited and signed again passes them. So nothing is used of `state.json` and
`rank-*.json` before its shape was checked here, at the one place where it enters the program. What only an optimizer, a
scheduler, a callback or user code knows is compared with its state in this run, where it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.trainer.checkpoint.reader import Checkpoint
from lockstep.trainer.metrics.entry import COMBINE
from lockstep.trainer.progress import Progress

_MOST = 1 << 53
"""No count of a run is higher."""
_MOST_RANKS = 1 << 20
_NUMPY_WORDS = 624
"""Length of the state of numpy's Mersenne Twister, and the highest position in it."""

Check = Callable[[Any], bool]


def fault(checkpoint: Checkpoint) -> str | None:
    """The key of the first part of a fit's checkpoint that is not as a fit saves it, with what is wrong; None if all
    is."""
    state = checkpoint.state
    if (key := _wrong(state, _STATE)) is not None:
        return f"state.json has no valid {key}"
    progress, windows = state["progress"], state["windows"]
    if (key := _wrong(windows, _WINDOWS)) is not None:
        return f"state.json has no valid windows.{key}"
    try:
        Progress().load_state_dict(progress)
    except ValueError as error:
        return str(error)
    if progress["global_step"] != checkpoint.global_step:
        return f"progress.global_step is {progress['global_step']}, but {checkpoint.global_step} in the manifest"
    if (key := _wrong(state, {}, _STATE_IF_THERE)) is not None:
        return f"state.json has no valid {key}"
    for part, whole in (
        ("batches_seen", "total_batches"),
        ("samples_seen", "total_samples"),
        ("validations", "total_batches"),
    ):
        if not progress[part] <= progress[whole] < _MOST:
            return f"progress.{part} is {progress[part]}, but progress.{whole} is {progress[whole]}"
    if progress["current_epoch"] >= _MOST or progress["global_step"] >= _MOST:
        return f"progress counts more than {_MOST} epochs or steps"
    return _strategy_fault(state["strategy"]) or _reference_fault(checkpoint) or _rank_faults(checkpoint)


def _wrong(held: dict[str, Any], needed: dict[str, Check], if_there: dict[str, Check] | None = None) -> str | None:
    """The first key that is missing or whose value is not valid."""
    for key, check in {**needed, **(if_there or {})}.items():
        if not check(held[key]) if key in held else key in needed:
            return key
    return None


def _rank_faults(checkpoint: Checkpoint) -> str | None:
    expected = {f"rank-{rank:05d}.json" for rank in range(min(checkpoint.world_size, _MOST_RANKS))}
    found = {name for name, *_ in checkpoint.files() if name.startswith("rank-")}
    if checkpoint.world_size != len(found) or expected != found:
        return f"world_size is {checkpoint.world_size}, but there are {len(found)} rank files"
    for rank in range(checkpoint.world_size):
        state = checkpoint.rank_state(rank) or {}
        if (key := _wrong(state, _RANK, _RANK_IF_THERE)) is not None:
            return f"rank-{rank:05d}.json has no valid {key}"
        if (misordered := _misordered(checkpoint, dict(references(state)))) is not None:
            return f"rank-{rank:05d}.json has no valid order of the dimensions of the tensor {misordered!r}"
        if not 0 <= state["data_rank"] < state["data_size"] <= checkpoint.world_size:
            return f"rank-{rank:05d}.json has data_rank={state['data_rank']} and data_size={state['data_size']}"
        if (name := _misnamed(state["sums"], state["torchmetrics"])) is not None:
            return f"rank-{rank:05d}.json has different metrics in sums and torchmetrics for the name {name!r}"
    return None


def _misnamed(sums: dict[str, Any], torchmetrics: dict[str, Any]) -> str | None:
    """A name that is logged of another torchmetrics object by its sum than by the object's entry."""
    if any("names" not in entry for entry in torchmetrics.values()):
        return None  # saved by an older version
    by_sum = {(name, entry[6]) for name, entry in sums.items() if entry[6] in torchmetrics}
    by_entry = {(name, path) for path, entry in torchmetrics.items() for name in entry["names"]}
    return next((name for name, _ in sorted(by_sum ^ by_entry)), None)


def _strategy_fault(meta: dict[str, Any]) -> str | None:
    """What is wrong with what a strategy saved beside its tensors, as far as all strategies save it alike."""
    if not isinstance(meta.get("model"), dict):
        return "state.json has no valid strategy.model"
    if not _is_dict(meta.get("frozen", {}), lambda number: type(number) is int):
        return "state.json has no valid strategy.frozen"
    if not isinstance(meta.get("optimizers"), dict):
        return "state.json has no valid strategy.optimizers"
    for name, entry in meta["optimizers"].items():
        groups, states = (entry.get("param_groups"), entry.get("state")) if isinstance(entry, dict) else (None, None)
        if not _is_list(groups, lambda group: isinstance(group, dict) and _is_list(group.get("params"), _is_str)):
            return f"state.json has no valid strategy.optimizers.{name}.param_groups"
        if not _is_dict(states, lambda value: isinstance(value, dict)):
            return f"state.json has no valid strategy.optimizers.{name}.state"
        if not isinstance(entry.get("others", {}), dict):
            return f"state.json has no valid strategy.optimizers.{name}.others"
    return None


def _reference_fault(checkpoint: Checkpoint) -> str | None:
    """JSON that refers to a tensor that is not there, or no longer to one that is."""
    names, orders = set(checkpoint.names()), dict(references(checkpoint.state))
    missing = next(iter(sorted(orders.keys() - names)), None)
    if missing is not None:
        return f"state.json refers to the tensor {missing!r}, which is missing"
    if (misordered := _misordered(checkpoint, orders)) is not None:
        return f"state.json has no valid order of the dimensions of the tensor {misordered!r}"
    lost = next((name for name in checkpoint.names("optimizer/") if name not in orders), None)
    return None if lost is None else f"state.json has no reference to the tensor {lost!r}"


def _misordered(checkpoint: Checkpoint, orders: dict[str, Any]) -> str | None:
    """The first tensor of these that is there, with what cannot be an order of its dimensions."""
    given = {name: order for name, order in orders.items() if order is not None}
    there = sorted(given.keys() & set(checkpoint.names())) if given else []
    return next((name for name in there if not _is_order(given[name], len(checkpoint.shape(name)))), None)


def references(value: Any) -> Iterator[tuple[str, Any]]:
    """Names of the tensors that packed JSON data refers to, each with the order of its dimensions in memory."""
    if isinstance(value, dict):
        if "$tensor" in value:
            yield str(value["$tensor"]), value.get("order")
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


# ---- kinds -----------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """An int or a float, NaN and infinities among them; no bool."""
    return type(value) in (int, float) and (type(value) is float or abs(value) < 1 << 1023)


def is_count(value: Any) -> bool:
    """A whole number from 0."""
    return type(value) is int and 0 <= value < _MOST


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_weight(value: Any) -> bool:
    return is_number(value) and 0 <= value < math.inf


def _is_dict(value: Any, check: Check) -> bool:
    return isinstance(value, dict) and all(map(check, value.values()))


def _is_list(value: Any, check: Check) -> bool:
    return isinstance(value, list) and all(map(check, value))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_between(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _is_sum(value: Any) -> bool:
    """A running sum as `MetricStore.state_dict` gives it."""
    if not isinstance(value, list) or len(value) not in (11, 12) or value[0] not in COMBINE:
        return False
    flags, metric, (number, count, epoch_value, epoch_count) = [*value[1:6], *value[11:]], value[6], value[7:11]
    return (
        all(map(_is_flag, flags))
        and (metric is None or _is_str(metric))
        and (is_number(number) or _is_list(number, is_number))
        and (_is_weight(count) or _is_list(count, is_number))
        and is_number(epoch_value)
        and _is_weight(epoch_count)
    )


def _is_rng(value: Any) -> bool:
    if not isinstance(value, dict) or not {"torch", "python", "numpy", "streams"} <= value.keys():
        return False
    numpy = value["numpy"]
    return (
        _is_tensor(value["torch"])
        and isinstance(numpy, list)
        and len(numpy) == 5
        and numpy[0] == "MT19937"
        and _is_tensor(numpy[1])
        and _is_between(0, _NUMPY_WORDS)(numpy[2])
        and _is_between(0, 1)(numpy[3])
        and is_number(numpy[4])
        and _is_dict(value["streams"], lambda item: isinstance(item, list) and len(item) == 2 and _is_tensor(item[1]))
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and _is_str(value.get("$tensor"))


def _is_order(value: Any, count: int) -> bool:
    return _is_list(value, _is_between(0, count - 1)) and sorted(value) == [*range(count)]


def _is_torchmetric(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and is_count(value.get("count"))
        and _is_list(value.get("names", []), _is_str)
    )


def _are_changes(value: Any) -> bool:
    return value == {} or (
        isinstance(value, dict)
        and _is_dict(value.get("values"), _is_object)
        and _is_list(value.get("lost"), _is_str)
        and _is_list(value.get("on_device"), _is_str)
        and _is_dict(value.get("begun", {}), _is_object)
        and all(_is_list(value.get(name, []), _is_str) for name in ("replaced", "left", "caches", "elsewhere"))
        and _is_list(value.get("shared", []), lambda group: _is_list(group, _is_name))
        and _is_list(value.get("gone", []), _is_name)
    )


_SEEN = {"made_for", "global_step", "metrics", "attributes", "buffers", "same", "moved_on", "lengths", "weights"}
_SEEN |= {"numbers"}


def _are_all_numbers(value: Any) -> bool:
    return _is_object(value) and all(_are_numbers(value.get(key)) for key in ("configured", "begun", "now"))


def _are_numbers(value: Any) -> bool:
    """Of the Trainer; a limit may be None."""
    return _is_dict(value, lambda number: number is None or type(number) is int) and (
        _WINDOWS["accumulate"](value.get("accumulate_grad_batches", 1))
    )


def _is_reload(value: Any) -> bool:
    return value == {} or (
        isinstance(value, dict)
        and value.keys() | {"numbers"} == _SEEN  # older versions saved none
        and is_count(value["made_for"])
        and is_count(value["global_step"])
        and _is_dict(value["metrics"], lambda shown: _is_dict(shown, is_number))
        and _are_changes(value["attributes"])
        and _is_dict(value["buffers"], _is_tensor)
        and all(_is_list(value[name], _is_str) for name in ("same", "moved_on"))
        and _are_numbers(value.get("numbers", {}))
        and isinstance(value["lengths"], list)
        and type(value["weights"]) is bool
    )


def _are_measured(value: Any) -> bool:
    return _is_dict(value, is_number)


def _is_name(value: Any) -> bool:
    return _is_list(value, _is_str) and len(value) == 2


def _are_start_hooks(value: Any) -> bool:
    return isinstance(value, dict) and _is_list(
        value.get("left", []), lambda item: isinstance(item, list) and len(item) == 2 and _is_list(item[0], _is_str)
    )


def _are_attributes(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("values"), dict)
        and _is_list(value.get("on_device"), _is_str)
        and _is_dict(value.get("lost"), _is_str)
    )


_STATE: dict[str, Check] = {
    "seed": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "progress": _is_object,
    "strategy": _is_object,
    "schedulers": lambda value: _is_list(value, _is_object),
    "callbacks": _is_object,
    "metrics": _are_measured,
    "windows": _is_object,
    "datamodule": lambda value: True,
    "module": _is_object,
}

_STATE_IF_THERE: dict[str, Check] = {  # older versions did not save these
    "accumulation": lambda value: (
        _is_object(value) and all(_WINDOWS["accumulate"](value.get(key)) for key in ("at_start", "now"))
    ),
    "numbers": _are_all_numbers,
    "rng_at_setup": _is_rng,
    "measured_at": _are_measured,
    "logged_metrics": _are_measured,
    "progress_bar_metrics": _are_measured,
    "optimizer_attributes": lambda value: _is_dict(value, _are_attributes),
}

_WINDOWS: dict[str, Check] = {
    "ranks": _is_between(1, _MOST_RANKS),
    "accumulate": _is_between(1, _MOST_RANKS),
    "batch_size": lambda value: value is None or _is_between(1, 1 << 40)(value),
    "split": _is_flag,
}

_RANK: dict[str, Check] = {
    "data_rank": is_count,
    "data_size": is_count,
    "reports": _is_flag,
    "rng": _is_rng,
    "sums": lambda value: _is_dict(value, _is_sum),
    "loader": lambda value: True,
    "torchmetrics": lambda value: _is_dict(value, _is_torchmetric),
}

_RANK_IF_THERE: dict[str, Check] = {  # older versions did not save these
    "samples": is_count,
    "kept": lambda value: _is_dict(value, lambda metric: _is_dict(metric, _is_tensor)),
    "attributes": _are_changes,
    "reload": _is_reload,
    "start_hooks": _are_start_hooks,
    "shares": lambda value: _is_dict(value, lambda metric: _is_dict(metric, _is_torchmetric)),
}
