"""DeepSpeed's configuration: what the user gave, merged with what the run says, or one sentence on where they
contradict each other."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(source: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """DeepSpeed's configuration as it was given."""
    config: Any = source or {}
    if not isinstance(config, Mapping):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"config must be a dict or the path of a JSON file, but config={str(source)!r} cannot be read: {error}"
            ) from None
        if not isinstance(config, dict):
            raise ValueError(
                f"DeepSpeed's config must be a JSON object, but {str(source)!r} holds {type(config).__name__}"
            )

    def known(section: Mapping[str, Any]) -> dict[str, Any]:
        """A copy without "auto", by which files for other trainers leave a value open."""
        return {
            key: known(value) if isinstance(value, Mapping) else copy.deepcopy(value)
            for key, value in section.items()
            if value != "auto"
        }

    return known(config)


def agreed(
    config: dict[str, Any], stage: int | None, offload_optimizer: bool, offload_parameters: bool, precision: str
) -> dict[str, Any]:
    """DeepSpeed's configuration with the run's settings; raises ValueError where they contradict each other."""
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ValueError(
                f"DeepSpeed's config has the section {section!r}, but configure_optimizers makes it; drop the section"
            )
    theirs = _get(config, "zero_optimization.stage")
    if theirs not in (None, 1, 2, 3):
        raise ValueError(f"DeepSpeed's config has zero_optimization.stage={theirs!r}, but it must be 1, 2 or 3")
    stage = stage or theirs or 2
    _set(config, "zero_optimization.stage", stage, f"stage={stage}", always=True)
    for name, option, offload in (
        ("optimizer", "offload_optimizer", offload_optimizer),
        ("param", "offload_parameters", offload_parameters),
    ):
        key = f"zero_optimization.offload_{name}.device"
        if _get(config, key) == "nvme":
            raise ValueError(f"DeepSpeed's config has {key}='nvme', where checkpoints cannot read it; give 'cpu'")
        if offload:
            _set(config, key, "cpu", f"{option}=True", always=True)
    if _get(config, "zero_optimization.offload_param.device") == "cpu" and stage != 3:
        raise ValueError(f"offload_parameters needs stage 3, where parameters are cut, but stage={stage}")
    for key, wanted in (
        ("bf16", precision == "bf16-true"),
        ("fp16", False),
        ("torch_autocast", precision == "bf16-mixed"),
    ):
        _set(config, f"{key}.enabled", wanted, f"precision={precision!r}", always=wanted)
    if precision == "bf16-mixed":
        _set(config, "torch_autocast.dtype", "bfloat16", f"precision={precision!r}", always=True)
        config["torch_autocast"].setdefault(
            "lower_precision_safe_modules", []
        )  # gradients are all-reduced in float32, as under every strategy
    _set(config, "gradient_allreduce_op", "mean", "gradients that are means")
    _set(config, "managed_gradient_accumulation", True, "windows that it weights itself")
    if stage < 3 and _get(config, "zero_optimization.offload_optimizer.device") != "cpu":
        config["zero_optimization"].setdefault(
            "compute_grad_norm", False
        )  # `clip_gradients` computes it where it is wanted
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", 1_000_000_000)
    return config


def _get(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(config: dict[str, Any], key: str, ours: Any, setting: str, always: bool = False) -> None:
    """Raise ValueError where the configuration says something else than `ours`; with `always` write it where it says
    nothing."""
    theirs = _get(config, key)
    if theirs not in (None, ours):
        raise ValueError(f"DeepSpeed's config has {key}={theirs!r}, but the run has {setting}; drop one of them")
    if always:
        *sections, last = key.split(".")
        for section in sections:
            if not isinstance(config.get(section), dict):
                config[section] = {}
            config = config[section]
        config[last] = ours


def complete(config: dict[str, Any], num_trained: int) -> None:
    """Set in DeepSpeed's config what Lockstep does itself, and sizes that fit a model of `num_trained` elements."""
    config |= {  # windows are weighted and gradients clipped here
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
    # Elements besides those that a rank keeps.
    at_once = min(500_000_000, max(2**23, num_trained // 16))
    for name in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_max_reuse_distance"):
        if not {name, name.removeprefix("stage3_")} & set(config["zero_optimization"]):
            config["zero_optimization"][name] = at_once


def check_batches(given: Mapping[str, int], accumulate: int, batch_size: int | None, data_size: int) -> None:
    """Raise ValueError if the config says other batch sizes (`given`, by its keys) than the run has.

    `batch_size` is the number of samples of all ranks in a step, None if it is unknown.
    """
    ours: dict[str, tuple[str, float | None]] = {
        "gradient_accumulation_steps": ("accumulate_grad_batches", accumulate),
        "train_batch_size": ("samples of all ranks in a step", batch_size),
        "train_micro_batch_size_per_gpu": (
            "samples of a rank in a micro-batch",
            batch_size and batch_size / accumulate / data_size,
        ),
    }
    for key, theirs in given.items():
        what, value = ours[key]
        if value is not None and theirs != value:
            raise ValueError(
                f"DeepSpeed's config has {key}={theirs}, but the run has {what}={value:g}; drop it from the config, or "
                "give the run the same"
            )
