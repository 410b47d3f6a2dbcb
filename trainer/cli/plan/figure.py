"""A plan as a picture: a bar of memory for each kind of rank, and one of the time of a step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.callbacks._support.tables import human_size
from lockstep.strategies.planning import timing
from lockstep.strategies.planning.devices import Device
from lockstep.strategies.planning.plan import Plan
from lockstep.strategies.planning.timing import Estimate
from lockstep.trainer.cli.plan import report

if TYPE_CHECKING:
    from PIL.Image import Image

COLORS = {
    "parameters": "#4c78a8",
    "gradients": "#f58518",
    "optimizer": "#54a24b",
    "buffers": "#b279a2",
    "other_state": "#ff9da6",
    "activations": "#e45756",
    "gathered": "#72b7b2",
    "inputs": "#9d755d",
    "temporary": "#eeca3b",
    "allowance": "#d0d0d0",
    "forward": "#4c78a8",
    "backward": "#e45756",
    "communication": "#72b7b2",
    "waiting": "#d0d0d0",
}
LEFT, WIDTH, ROW, BAR = 200, 760, 64, 26
"""Pixels: margin of the labels, length of the longest bar, height of a row and of its bar."""

Bar = tuple[str, str, list[tuple[str, float]]]
"""Label, what is written behind the bar, and the parts with their sizes."""


def save(plan: Plan, device: Device | None, estimate: Estimate | None, file: Path | None, logdir: Path | None) -> None:
    """Write the picture to a PNG file, and for TensorBoard as "plan" into a folder."""
    image = draw(plan, device, estimate)
    if file is not None:
        image.save(file)
    if logdir is not None:
        import numpy as np
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(logdir)) as writer:
            writer.add_image("plan", np.asarray(image), dataformats="HWC")


def draw(plan: Plan, device: Device | None, estimate: Estimate | None) -> Image:
    """Raises ModuleNotFoundError without Pillow, naming the extra to install."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a picture needs Pillow: pip install 'lockstep-trainer[plot]'") from error
    memory = [_memory(rank, device) for rank in plan.ranks]
    groups: list[tuple[list[Bar], float]] = [(memory, 0.0 if device is None else device.memory)]
    if estimate is not None:
        groups.append(([_time(estimate)], 0.0))
    num_rows = sum(len(bars) for bars, _ in groups)
    image = Image.new("RGB", (LEFT + WIDTH + 220, 60 + num_rows * ROW), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    title = f"{plan.strategy} on {plan.world_size} ranks, {plan.precision}, {plan.num_parameters:,} parameters"
    canvas.text((12, 12), title, fill="black", font=font)
    top = 44
    for bars, limit in groups:
        longest = max([limit, *(sum(value for _, value in parts) for _, _, parts in bars)]) or 1.0
        for label, after, parts in bars:
            _draw_bar(canvas, font, top, label, after, parts, WIDTH / longest)
            if limit:
                x = LEFT + WIDTH * limit / longest
                canvas.line([(x, top - 4), (x, top + BAR + 4)], fill="black", width=2)
            top += ROW
    return image


def _draw_bar(
    canvas: Any, font: Any, top: int, label: str, after: str, parts: list[tuple[str, float]], scale: float
) -> None:
    canvas.text((12, top + 4), label, fill="black", font=font)
    x = float(LEFT)
    legend = float(LEFT)
    for name, value in parts:
        canvas.rectangle([x, top, x + value * scale, top + BAR], fill=COLORS.get(name, "#888888"))
        x += value * scale
        canvas.rectangle([legend, top + BAR + 8, legend + 10, top + BAR + 18], fill=COLORS.get(name, "#888888"))
        canvas.text((legend + 14, top + BAR + 4), name, fill="black", font=font)
        legend += 14 + canvas.textlength(name, font=font) + 14
    canvas.text((x + 8, top + 4), after, fill="black", font=font)


def _memory(rank: Any, device: Device | None) -> Bar:
    parts = [(kind, float(value)) for kind, value in report.peak_parts(rank)]
    after = human_size(rank.peak)
    if device is not None:
        needed = timing.reserved(rank)
        parts.append(("allowance", needed - rank.peak))
        after = f"{human_size(needed)} of {human_size(device.memory)}"
    return f"{rank.role} x {rank.num_ranks}", after, parts


def _time(estimate: Estimate) -> Bar:
    slowest = max(estimate.ranks, key=lambda rank: rank.seconds)
    parts = [("forward", slowest.forward), ("backward", slowest.backward), ("communication", slowest.exposed)]
    parts += [("optimizer", slowest.optimizer)]
    parts.append(("waiting", max(0.0, estimate.seconds - sum(value for _, value in parts))))
    return "a step", report.seconds(estimate.seconds), [(name, value) for name, value in parts if value]
