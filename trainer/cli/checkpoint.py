"""`lockstep checkpoint show|verify|diff|export|import`: inspect checkpoints, export and import weights."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.callbacks._support.tables import columns, human_size
from lockstep.strategies.sync.contents import bytes_of
from lockstep.trainer.checkpoint import convert
from lockstep.trainer.checkpoint.store import Checkpoint
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import page

USAGE = "lockstep checkpoint show|verify|diff|export|import PATH... [options]"

EXAMPLES = """
examples:
  lockstep checkpoint show runs/digits/version_0/checkpoints/last
  lockstep checkpoint diff one/checkpoints/last other/checkpoints/last
  lockstep checkpoint export runs/digits/version_0/checkpoints/last digits.safetensors
  lockstep checkpoint export runs/digits/version_0/checkpoints/last digits.ckpt
  lockstep checkpoint import digits.safetensors imported
  lockstep checkpoint import --trust-pickle epoch=3.ckpt imported

Exit codes: 0; 1 if a checkpoint is damaged, differs or cannot be written; 2 for a wrong command or path.
"""

_SHOWN = 20
"""Differences that `diff` prints of each kind, the largest first."""


def main(words: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises CheckpointError and ConfigError."""
    given = parse(words)
    for path in (vars(given).get(name) for name in ("path", "one", "other", "source")):
        if path is not None and not path.exists():  # as for ckpt_path, a mistake in the command
            raise ConfigError(f"there is no checkpoint at {path}: pass the path of an existing one")
    if given.command == "show":
        print("\n".join(show(Checkpoint.open(given.path, verify=False))))
    elif given.command == "verify":
        print(verify(given.path))
    elif given.command == "diff":
        found = differences(Checkpoint.open(given.one), Checkpoint.open(given.other), given.tolerance)
        print("\n".join(found) if found else "no difference")
        return 1 if found else 0
    elif given.command == "export":
        checkpoint = Checkpoint.open(given.path)
        lightning = Path(given.target).suffix == ".ckpt"
        target = (convert.export_lightning if lightning else convert.export_weights)(checkpoint, given.target)
        print(f"{target}: {len(checkpoint.names('model/'))} tensors, {human_size(target.stat().st_size)}")
    else:
        weights = convert.import_weights(given.source, given.target, trust_pickle=given.trust_pickle)
        print(
            f"{given.target.absolute()}: {len(weights.values)} tensors, step {weights.global_step}, "
            f"{len(weights.hyperparameters)} hyperparameters"
        )
        if weights.skipped:
            print(f"skipped: {', '.join(weights.skipped)}", file=sys.stderr)
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments. Raises ConfigError for a wrong one."""
    parser = page(USAGE, __doc__, EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    show_parser = commands.add_parser("show", usage="lockstep checkpoint show PATH", help="what a checkpoint holds")
    verify_parser = commands.add_parser(
        "verify", usage="lockstep checkpoint verify PATH", help="compare every byte with its checksum"
    )
    diff_parser = commands.add_parser(
        "diff",
        usage="lockstep checkpoint diff ONE OTHER [--tolerance T]",
        help="which tensors and state differ between two checkpoints; exit code 1 if any do",
    )
    export_parser = commands.add_parser(
        "export",
        usage="lockstep checkpoint export PATH [TARGET]",
        help="write the weights as one safetensors file, or all of it in Lightning's layout if TARGET ends with .ckpt",
    )
    import_parser = commands.add_parser(
        "import",
        usage="lockstep checkpoint import [--trust-pickle] SOURCE TARGET",
        help="create a checkpoint from weights",
    )
    for each in (show_parser, verify_parser, export_parser):
        each.add_argument("path", type=Path, help="a checkpoint")
    diff_parser.add_argument("one", type=Path, help="a checkpoint")
    diff_parser.add_argument("other", type=Path, help="a checkpoint")
    diff_parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="difference of a tensor, relative to its largest element, to allow (default: 0)",
    )
    export_parser.add_argument(
        "target", type=Path, nargs="?", default=Path("model.safetensors"), help="the file (default: model.safetensors)"
    )
    import_parser.add_argument(
        "source", type=Path, help="a safetensors file, a Lightning checkpoint or a state dict of torch"
    )
    import_parser.add_argument("target", type=Path, help="the checkpoint to make")
    import_parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="unpickle the source, which may run any code that its maker put there",
    )
    return parser.parse_args(words)


def show(checkpoint: Checkpoint) -> list[str]:
    """What a checkpoint holds, as lines: where it comes from, its state, tensors and files. Reads no tensor."""
    state = checkpoint.state
    progress = state["progress"] if isinstance(state.get("progress"), dict) else {}
    facts = {
        "path": checkpoint.path,
        "step": checkpoint.global_step,
        "epoch": progress.get("current_epoch", "-"),
        "strategy": state.get("strategy_name", "-"),
        "ranks": checkpoint.world_size,
        "versions": ", ".join(f"{name} {version}" for name, version in checkpoint.versions.items()),
        "imported from": state.get("imported_from"),
        "state": ", ".join(sorted(state)),
    }
    lines = columns([(name, str(value)) for name, value in facts.items() if value is not None])
    rows = [("tensor", "dtype", "shape", "bytes")]
    total = 0
    for name in checkpoint.names():
        dtype, shape = checkpoint.dtype(name), checkpoint.shape(name)
        size = math.prod(shape) * dtype.itemsize
        total += size
        rows.append((name, str(dtype).removeprefix("torch."), str(list(shape)), str(size)))
    rows.append((f"{len(rows) - 1} tensors", "", "", str(total)))
    files = [("file", "bytes", "crc32"), *((name, str(size), crc32) for name, size, crc32 in checkpoint.files())]
    return [*lines, "", *columns(rows), "", *columns(files)]


def verify(path: Path) -> str:
    """Read every byte; raise CheckpointError with the first file that is wrong."""
    checkpoint = Checkpoint.open(path)
    for rank in range(checkpoint.world_size):
        checkpoint.rank_state(rank)
    files = checkpoint.files()
    return (
        f"{checkpoint.path}: {len(files)} files, {human_size(sum(size for _, size, _ in files))}, all checksums match"
    )


def differences(one: Checkpoint, other: Checkpoint, tolerance: float = 0.0) -> list[str]:
    """Lines that say which tensors and which state differ, the largest difference first; none where nothing does.

    A tensor is in tolerance where no element differs by more than `tolerance` times its largest finite one. Holds one
    tensor of each in memory.
    """
    lines = [
        f"tensor {name}: only in {here.path}"
        for here, there in ((one, other), (other, one))
        for name in sorted(set(here.names()) - set(there.names()))
    ]
    far: list[tuple[float, str]] = []
    for name in sorted(set(one.names()) & set(other.names())):
        if (one.dtype(name), one.shape(name)) != (other.dtype(name), other.shape(name)):
            shapes = " and ".join(f"{str(each.dtype(name))[6:]} {list(each.shape(name))}" for each in (one, other))
            lines.append(f"tensor {name}: {shapes}")
            continue
        largest, relative, count = _distance(one.read(name), other.read(name))
        if count and not relative <= tolerance:
            text = (
                f"tensor {name}: {count} of {math.prod(one.shape(name))} elements differ, by up to {largest:.6g} "
                f"({relative:.3g} of the largest)"
            )
            far.append((math.inf if math.isnan(relative) else relative, text))
    lines += _cut([text for _, text in sorted(far, key=lambda pair: (-pair[0], pair[1]))], "tensors")
    changed = list(_tree_differences("", {"state": one.state}, {"state": other.state}))
    if one.world_size == other.world_size:
        for rank in range(one.world_size):
            changed += _tree_differences(
                "", {f"rank {rank}": one.rank_state(rank)}, {f"rank {rank}": other.rank_state(rank)}
            )
    else:
        lines.append(f"ranks: {one.world_size} and {other.world_size}")
    return lines + _cut(changed, "places of the state")


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float, int]:
    """Largest difference, the same relative to the largest finite element, and the number of elements whose bits
    differ."""
    count = int((bytes_of(one) != bytes_of(other)).any(1).sum())
    if not count:
        return 0.0, 0.0, 0
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    largest = float(torch.where(same, 0.0, (a - b).abs()).max())
    scale = float(torch.where(a.isfinite(), a.abs(), 0.0).max())
    return largest, largest / scale if scale else (0.0 if largest == 0 else math.inf), count


def _tree_differences(where: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(set(one) | set(other)):
            place = f"{where}.{key}" if where else key
            if key not in one or key not in other:
                yield f"{place}: only in the {'second' if key not in one else 'first'}"
            else:
                yield from _tree_differences(place, one[key], other[key])
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _tree_differences(f"{where}[{i}]", a, b)
    elif json.dumps(one) != json.dumps(other):
        yield f"{where}: {_short(one)} and {_short(other)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _cut(lines: list[str], what: str) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} other {what}"]
