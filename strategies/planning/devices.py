"""The devices that a plan may be for: memory, peaks and links, from `devices.json` or from numbers."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

NUMBERS = ("memory", "flops", "bandwidth", "link", "network", "host", "host_memory", "node")
"""What `--gpu` takes as numbers: bytes (below 10,000: GiB), FLOP/s, bytes/s five times, and devices of a node."""


@dataclass(frozen=True)
class Device:
    """One device, by its data sheet."""

    name: str
    memory: float
    """Bytes."""
    flops: Mapping[str, float]
    """Dense FLOP/s by dtype; "tf32" is what float32 products reach in TensorFloat-32."""
    bandwidth: float
    """Bytes/s of device memory."""
    link: float
    """Bytes/s that a device sends to the others of its node."""
    network: float | None
    """Bytes/s that a device sends to other nodes."""
    node: int
    """Devices of a node."""
    host: float = math.inf
    """Bytes/s that a device copies to the memory of its host, or from there."""
    host_memory: float | None = math.inf
    """Bytes/s of the host's memory, a device's share."""
    source: str = field(default="given", compare=False)

    def peak(self, dtype: str, *, tf32: bool = False) -> float:
        """FLOP/s in `dtype`; what has no units of its own runs in those of the next wider dtype."""
        if tf32 and dtype == "float32" and "tf32" in self.flops:
            return self.flops["tf32"]
        order = ("float8", "bfloat16", "float32", "float64")
        known = dtype if dtype in self.flops else "float8" if dtype.startswith("float8") else dtype
        if known in self.flops:
            return self.flops[known]
        if known in order:
            wider = [name for name in order[order.index(known) + 1 :] if name in self.flops]
            narrower = [name for name in order[: order.index(known)] if name in self.flops]
            return self.flops[(wider or [*reversed(narrower), *self.flops])[0]]
        return self.flops.get("float32", min(self.flops.values()))


def known_devices() -> dict[str, Device]:
    """Every device of the data file by name."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "devices.json").read_text())["devices"]
    return {
        name: Device(
            name,
            memory=entry["memory"] * 2.0**30,
            flops={dtype: value * 1e12 for dtype, value in entry["flops"].items()},
            bandwidth=entry["bandwidth"] * 1e9,
            link=entry["link"] * 1e9,
            network=None if entry["network"] is None else entry["network"] * 1e9,
            node=entry["node"],
            host=entry["host"] * 1e9,
            host_memory=None if entry["host_memory"] is None else entry["host_memory"] * 1e9,
            source=entry["source"],
        )
        for name, entry in content.items()
    }


def find_device(text: str) -> Device:
    """The device that `text` names, such as "h100-80", "h100-80,node=4" or "memory=80,flops=989e12,bandwidth=3.35e12".

    Raises ValueError in one sentence for a name that is not known (with the nearest ones), a number that is not
    understood, and for numbers alone that lack memory.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    names = [word for word in words if "=" not in word]
    if len(names) > 1 or not words:
        raise ValueError(f"a device is one name, or numbers such as memory=80,flops=989e12, got {text!r}")
    numbers = dict(_number(word, text) for word in words if "=" in word)
    if names:
        device = _named(names[0])
    elif "memory" not in numbers:
        raise ValueError(f"a device in numbers needs its memory, such as memory=80,flops=989e12, got {text!r}")
    else:
        device = Device("custom", memory=0.0, flops={}, bandwidth=math.inf, link=math.inf, network=None, node=8)
    changed: dict[str, Any] = {name: value for name, value in numbers.items() if name not in ("flops", "node")}
    if "flops" in numbers:
        changed["flops"] = {"float32": numbers["flops"]}
    if "node" in numbers:
        changed["node"] = int(numbers["node"])
    if changed:
        changed["name"] = text if names else "custom"
    return replace(device, **changed)


def _named(name: str) -> Device:
    known = known_devices()
    plain = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    for wanted in (plain, plain.removesuffix("gb"), plain.replace("rtx", "rtx-").replace("--", "-")):
        if wanted in known:
            return known[wanted]
    near = [other for other in known if other.startswith(plain)] or difflib.get_close_matches(plain, known, 3, 0.3)
    raise ValueError(
        f"--gpu must be one of {', '.join(known)}, or numbers such as memory=80,flops=989e12, got {name!r}"
        + (f"; did you mean {' or '.join(near)}?" if near else "")
    )


def _number(word: str, text: str) -> tuple[str, float]:
    name, _, value = (part.strip() for part in word.partition("="))
    if name not in NUMBERS:
        near = difflib.get_close_matches(name, NUMBERS, 1)
        raise ValueError(
            f"a device has {', '.join(NUMBERS)}, but --gpu {text} gives {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf or (name == "node" and number != int(number)):
        raise ValueError(f"{name} of a device must be a positive number, but --gpu {text} gives {value!r}")
    return name, number * 2.0**30 if name == "memory" and number < 10_000 else number
