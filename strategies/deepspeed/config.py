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
