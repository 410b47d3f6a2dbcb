"""What a model is made of and what it costs: parameters, bytes, sizes, FLOPs."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lockstep.callbacks._support.printing import safe_print
from lockstep.callbacks._support.shadow import call, fitting, restored_rng, shadow
from lockstep.callbacks._support.tables import columns
from lockstep.callbacks.base import Callback

if TYPE_CHECKING:
    from lockstep import Module, Trainer

BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
FLOPS = ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs")


class ModelSummary(Callback):
    """Prints a table of the model's layers and totals on rank 0 when `fit` starts.

    Sizes of inputs and outputs and FLOPs are shown where the module has an `example_input_array`.

    Args:
        max_depth: how many levels of submodules to list; 0 gives the totals only, -1 everything.
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        if trainer.is_global_zero:
            safe_print(summarize(module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """Return the table that ModelSummary prints; `max_depth` levels of submodules, 0 for totals only, -1 for all.

    Sharded parameters count with their global shape, shared ones once in the totals. Where the module has
    an `example_input_array` (a tensor, a tuple of arguments or a dict of keyword arguments), forward and
    backward are traced on tensors without data: nothing is computed, no collective is called, and modes,
    gradients, buffers and random numbers stay as they are.
    """
    _check_depth(max_depth)
    modules = {
        name: child
        for name, child in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    }
    trace = _trace(module, modules)
    header = ["Name", "Type", "Params", "Trainable", "Bytes"]
    rows = [[name, type(child).__name__, *_cells(child.parameters())] for name, child in modules.items()]
    if max_depth != 0 and any(True for _ in module.parameters(recurse=False)):
        rows.append(["(own)", type(module).__name__, *_cells(module.parameters(recurse=False))])
    if trace and not trace.error:
        header += ["In", "Out"]
        rows = [[*row, *trace.sizes.get(row[0], ("", ""))] for row in rows]
    return "\n".join([*(_table(header, rows) if rows else []), *_totals(module, trace)])


@dataclass
class _Trace:
    """What running the model on its example would take."""

    sizes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Sizes that went into and came out of a submodule at its first call, by its name."""
    num_samples: int | None = None
    """Length of the first dimension of the example's first tensor."""
    forward_flops: int = 0
    """Two for a multiplication with its addition."""
    step_flops: int = 0
    """Forward and backward; 0 where no output needs a gradient."""
    error: str = ""


def _trace(module: nn.Module, modules: Mapping[str, nn.Module]) -> _Trace | None:
    """Run a look-alike of `module` on fake tensors; None where there is no example."""
    example = getattr(module, "example_input_array", None)
    if example is None:
        return None
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    trace = _Trace()
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        made.requires_grad_(tensor.requires_grad)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    try:
        with restored_rng(), torch.enable_grad(), warnings.catch_warnings(), fake:
            warnings.simplefilter("ignore")
            copy = shadow(module, empty)
            names = {id(child): name for name, child in copy.named_modules() if name in modules}

            def note(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                inputs = [
                    value
                    for value in (*args, *kwargs.values())
                    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
                ]
                trace.sizes.setdefault(
                    names[id(child)], (_size(inputs[0] if len(inputs) == 1 else inputs), _size(output))
                )

            for child in copy.modules():
                if id(child) in names:
                    child.register_forward_hook(note, with_kwargs=True)
            inputs = fitting(module, example, empty)
            trace.num_samples = next(
                (leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), None
            )
            with FlopCounterMode(display=False) as counter:
                output = call(copy, inputs)
            trace.forward_flops = counter.get_total_flops()
            moving = [
                leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            if moving:
                with FlopCounterMode(display=False) as counter:
                    torch.stack(moving).sum().backward()
                trace.step_flops = trace.forward_flops + counter.get_total_flops()
    except Exception as error:  # whatever the user's forward raises, or an operator that cannot run without data
        trace.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return trace


def _counted(parameters: Iterable[nn.Parameter]) -> tuple[int, int, int, int]:
    """Return elements, trainable elements, bytes, and how many parameters have no shape yet."""
    parameters = list(parameters)
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    return (
        sum(parameter.numel() for parameter in known),
        sum(parameter.numel() for parameter in known if parameter.requires_grad),
        sum(parameter.numel() * parameter.element_size() for parameter in known),
        len(parameters) - len(known),
    )


def _cells(parameters: Iterable[nn.Parameter]) -> list[str]:
    count, trainable, num_bytes, num_lazy = _counted(parameters)
    return ["?", "?", "?"] if num_lazy else [f"{count:,}", f"{trainable:,}", _in_units(num_bytes, 1024, BYTES)]


def _totals(module: nn.Module, trace: _Trace | None) -> list[str]:
    count, trainable, num_bytes, num_lazy = _counted(module.parameters())
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers() if not is_lazy(buffer))
    lines = [
        f"Parameters: {count:,} = {trainable:,} trainable + {count - trainable:,} non-trainable"
        + (f" (and {num_lazy} lazy ones that have no shape yet)" if num_lazy else ""),
        f"Bytes:      {_in_units(num_bytes, 1024, BYTES)} in parameters"
        + (f", {_in_units(buffer_bytes, 1024, BYTES)} in buffers" if buffer_bytes else ""),
    ]
    if trace and trace.error:
        lines.append(f"Sizes and FLOPs are unknown: forward on example_input_array failed with {trace.error}")
    elif trace and trace.forward_flops:
        lines.append(
            f"Compute:    {_in_units(trace.forward_flops, 1000, FLOPS)} forward"
            + (f", {_in_units(trace.step_flops, 1000, FLOPS)} forward and backward" if trace.step_flops else "")
            + (f", for a batch of {trace.num_samples}" if trace.num_samples is not None else "")
            + (
                ", recurrent layers not counted"
                if any(isinstance(child, nn.RNNBase) for child in module.modules())
                else ""
            )
        )
    return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = columns([header, *rows], right=range(2, 5), gap=" | ")
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:], rule]


def _size(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(list(value.shape))
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_size, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_size(item)}' for key, item in value.items())}}}"
    return "-" if value is None else type(value).__name__


def _in_units(number: int, base: int, units: tuple[str, ...]) -> str:
    scaled, index = float(number), 0
    while scaled >= base and index < len(units) - 1:
        scaled, index = scaled / base, index + 1
    return f"{number} {units[0]}" if index == 0 else f"{scaled:.1f} {units[index]}"


def _check_depth(max_depth: int) -> None:
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ValueError(
            f"max_depth must be -1 (all levels), 0 (totals only) or a number of levels, but it is {max_depth!r}"
        )
