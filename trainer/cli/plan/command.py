"""The words of `lockstep plan`, and what it prints. Its page of help imports no torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep._lazy import without_collector
from lockstep.callbacks._support.printing import safe_print
from lockstep.trainer.cli.errors import ConfigError
from lockstep.trainer.cli.parser import page

if TYPE_CHECKING:
    from lockstep.strategies.planning.devices import Device
    from lockstep.strategies.planning.plan import Plan
    from lockstep.strategies.planning.timing import Estimate

USAGE = "lockstep plan CONFIG... [key=value...] [options]"

DESCRIPTION = """
Shows what a run will need, by a trial of its set-up and of one optimizer step on fake tensors: on this machine, in one
process, for any number of devices. For a pipeline it also shows the stages, the schedule and its bubble.
"""

EXAMPLES = """
examples:
  lockstep plan examples/gpt.yaml strategy=ddp --devices 2
  lockstep plan examples/llama.yaml module.size=8B module.context=8192 precision=bf16-mixed strategy=fsdp \\
      --devices 8 --gpu h100-80
  lockstep plan examples/llama.yaml module.size=8B module.context=8192 --devices 8 --gpu a100-80 --fit
  lockstep plan examples/gpt.yaml --gpu memory=24,flops=165e12,bandwidth=1e12,link=32e9 --json
"""


def main(words: Sequence[str]) -> int:
    """Print the plan and return the exit code: 1 if `--gpu` is given and the run, or with `--fit` every layout, does
    not fit. Raises ConfigError for words that cannot be planned."""
    given = parse(words)
    with without_collector():
        from lockstep.strategies.planning import timing
        from lockstep.strategies.planning.devices import find_device
        from lockstep.trainer.cli.plan import report, trial

    try:
        device = None if given.gpu is None else find_device(given.gpu)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    files, overrides = split(given.words)
    if given.fit or given.options:
        assert device is not None  # parse asks for it
        return _search(given, files, overrides, device)
    resolved = trial.resolve(files, overrides, given.devices)
    plan, picture = trial.try_config(resolved, picture=not given.json)
    estimate = None if device is None or not device.flops else trial.timed(plan, device)
    steps = trial.num_steps(resolved)
    if given.json:
        print(json.dumps(to_dict(plan, device, estimate, steps, given.price), indent=1))
    else:
        page = report.text(plan, device, estimate, steps=steps, price=given.price)
        safe_print(f"{picture}\n\n{page}" if picture else page)
    if given.plot or given.logdir:
        from lockstep.trainer.cli.plan import figure

        figure.save(plan, device, estimate, given.plot, given.logdir)
    return 0 if device is None or timing.fits(plan, device) else 1


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments. Raises ConfigError for a wrong one."""
    parser = page(USAGE, DESCRIPTION, EXAMPLES)
    parser.add_argument("words", nargs="+", metavar="CONFIG | key=value", help="a YAML file, or an override of one key")
    parser.add_argument("--devices", type=int, metavar="N", help="devices of the whole run, on all nodes together")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="the device: a name such as h100-80, numbers such as memory=80,flops=989e12,bandwidth=3.35e12,link=450e9,"
        "network=50e9,node=8 (memory in GiB, the others in units a second), or a name and numbers that differ",
    )
    parser.add_argument("--fit", action="store_true", help="search the layouts and options that fit, cheapest first")
    parser.add_argument("--options", action="store_true", help="compare options of this layout in one table")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw memory and time to a file")
    parser.add_argument("--logdir", type=Path, metavar="FOLDER", help="write the drawing for TensorBoard")
    parser.add_argument("--price", type=float, metavar="P", help="price of a device for an hour, in any currency")
    given = parser.parse_intermixed_args(words)  # overrides may follow options
    if given.devices is not None and given.devices < 1:
        parser.error(f"--devices must be at least 1, but --devices {given.devices}")
    if given.price is not None and not 0 <= given.price < float("inf"):
        parser.error(f"--price must be a number of at least 0, but --price {given.price}")
    if (given.fit or given.options or given.price is not None) and given.gpu is None:
        option = "--fit" if given.fit else "--options" if given.options else "--price"
        parser.error(f"{option} needs the device: add --gpu NAME, such as --gpu h100-80")
    if (given.fit or given.options) and (given.plot or given.logdir):
        parser.error("--plot and --logdir draw one plan; remove --fit and --options")
    if given.plot is not None and given.plot.suffix != ".png":
        parser.error(f"--plot writes a .png file, but --plot {given.plot}")
    return given


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and overrides."""
    return [word for word in words if "=" not in word], [word for word in words if "=" in word]


def to_dict(
    plan: Plan, device: Device | None, estimate: Estimate | None, steps: int | None, price: float | None
) -> dict[str, Any]:
    """All that is known, for machines: bytes as integers, seconds."""
    from lockstep.strategies.planning import timing

    found: dict[str, Any] = {"plan": dataclasses.asdict(plan)}
    if device is not None:
        found["device"] = dataclasses.asdict(device)
        found["fits"] = timing.fits(plan, device)
        found["reserved"] = [int(timing.reserved(rank)) for rank in plan.ranks]
    if estimate is not None:
        found["time"] = {name: value for name, value in dataclasses.asdict(estimate).items() if name != "device"}
        if steps is not None:
            found["time"] |= {"steps": steps, "hours": estimate.hours(steps)}
            if price is not None:
                found["time"]["cost"] = estimate.hours(steps) * plan.world_size * price
    return found


def _search(given: argparse.Namespace, files: Sequence[str], overrides: Sequence[str], device: Device) -> int:
    from lockstep.trainer.cli.plan.search import Search, check_flops, command_words, table, to_dict

    check_flops(device)
    search = Search(files, overrides, device, given.devices, _progress)
    found = search.layouts() if given.fit else search.options()
    shown = {"layouts" if given.fit else "options": found}
    if given.fit and found[0].fits:
        shown["options"] = search.options(found[0].layout, found[0].options)
    if given.json:
        print(json.dumps({name: to_dict(entries) for name, entries in shown.items()}, indent=1))
    else:
        safe_print("\n\n".join(table(entries, device, given.price) for entries in shown.values()))
        if words := command_words(found):
            safe_print(f"\nThe first that fits: {words}")
    return 0 if any(entry.fits for entry in found) else 1


def _progress(line: str) -> None:
    safe_print(line, file=sys.stderr)
