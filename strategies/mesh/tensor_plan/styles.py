"""How one layer is cut: torch's parallel styles, with layouts that follow whether activations are sharded along the
sequence."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.overrides import TorchFunctionMode

from lockstep.strategies.mesh.tensor_plan.linear import in_features, is_linear, is_transposed, shard_transposed
from lockstep.strategies.sync.collective_fingerprint import counting_once

NORMS = (nn.LayerNorm, nn.RMSNorm)


class SequenceSharding:
    """Sequence parallelism: from the first of a row of blocks to the last, each rank holds its share of dimension 1.

    Layers split along columns gather the sequence, layers split along rows hand their sums out along it, and what works
    on each position alone works on a share. A sequence that does not divide by the ranks passes whole.
    """

    def __init__(self, rows: list[list[nn.Module]], size: int) -> None:
        self.on = False
        self.follows = False
        """Whether a backward that computes a block again has set `on` as it was."""
        self._has_cut = False
        self._turn = 0
        self._rows, self._size = rows, size

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Mapping[str, nn.Module], styles: dict[str, Any], size: int
    ) -> SequenceSharding:
        """Find the rows of blocks and add their normalization layers to `styles`. Raises ValueError naming what does
        not fit."""
        if not blocks:
            raise ValueError(
                f"sequence_parallel=True works between the blocks of a list or sequence, but {type(model).__name__} "
                "has none; "
                "leave it out, or name them with wrap"
            )
        for name, block in blocks.items():
            for inner, layer in block.named_modules():
                full = f"{name}.{inner}" if inner else name
                if isinstance(layer, NORMS):
                    styles[full] = "position"
                elif full not in styles and next(layer.parameters(recurse=False), None) is not None:
                    leaf = next(leaf for leaf, _ in layer.named_parameters(recurse=False))
                    raise ValueError(
                        "sequence_parallel=True needs every layer of a block in the plan, or to be LayerNorm or "
                        f"RMSNorm, but {full}.{leaf} is neither; "
                        "leave it out, or add the layer to the plan"
                    )
                elif styles.get(full) in ("gather", "scatter", "embedding", "replicated"):
                    raise ValueError(
                        f"sequence_parallel=True needs layers of a block that are sharded by 'column' or 'row', but "
                        f"{full} is sharded by {styles[full]!r}, which takes the whole sequence; leave it out"
                    )
        rows: dict[str, list[str]] = {}
        for name in blocks:
            rows.setdefault(name.rpartition(".")[0], []).append(name)
        order = {name: i for i, (name, _) in enumerate(model.named_modules())}
        return cls([[blocks[name] for name in sorted(names, key=order.__getitem__)] for names in rows.values()], size)

    def watch(self, mesh: DeviceMesh) -> None:
        """Cut what enters the first block of each row, and gather what leaves the last."""

        def enter(row: list[nn.Module], index: int, module: nn.Module, args: Any) -> Any:
            self._refuse_recomputation()
            if self._turn != index:
                self._turn, self.on = 0, False
                raise RuntimeError(
                    "sequence_parallel=True needs the blocks of a list to run in their order, but a "
                    f"{type(module).__name__} ran out of turn; leave it out"
                )
            self._turn = (index + 1) % len(row)
            x = args[0] if args else None
            if index or not isinstance(x, Tensor) or x.dim() < 3 or x.shape[1] % self._size:
                return None
            self.on = self._has_cut = True
            return (
                DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                .redistribute(placements=[Shard(1)])
                .to_local(),
                *args[1:],
            )

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            if not self.on:
                return None
            self.on = False
            if not isinstance(output, Tensor):
                raise ValueError(
                    f"sequence_parallel=True needs blocks that return one tensor, but {type(module).__name__} returned "
                    f"{type(output).__name__}"
                )
            return (
                DTensor.from_local(output, mesh, [Shard(1)], run_check=False)
                .redistribute(placements=[Replicate()])
                .to_local()
            )

        for row in self._rows:
            for index, block in enumerate(row):
                block.register_forward_pre_hook(functools.partial(enter, row, index))
            row[-1].register_forward_hook(leave)

    def holds(self, module: nn.Module) -> bool:
        """Whether a module is within a block, and may so work on a share of the sequence."""
        return any(
            inner is module for row in self._rows for block in row for inner in block.modules() if inner is not block
        )

    def layouts(self) -> tuple[Any, ...]:
        if not torch.compiler.is_compiling():
            self._refuse_recomputation()
        return (Shard(1),) if self.on else (Replicate(),)

    def _refuse_recomputation(self) -> None:
        """Raise RuntimeError if the model calls torch.utils.checkpoint, whose second forward is cut in another way."""
        if self._has_cut and not self.follows and torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "sequence_parallel=True cannot follow a model that calls torch.utils.checkpoint (as "
                "gradient_checkpointing_enable makes models of transformers do); turn it off, and give "
                "activation_checkpointing=True to the strategy, which computes the same"
            )

    def close(self) -> None:
        """A step is over, to its end or not."""
        self._turn, self.on = 0, False


def _apply_transposed(style: Any, module: nn.Module, mesh: DeviceMesh, dim: int, layouts: Any) -> nn.Module:
    """Apply a style of torch to a layer that holds its weight transposed; `layouts` are those that its input gets."""
    shard_transposed(module, mesh, dim)
    inputs = functools.partial(style._prepare_input_fn, style.input_layouts, layouts)
    outputs = functools.partial(style._prepare_output_fn, style.output_layouts, style.use_local_output)
    return distribute_module(module, mesh, None, inputs, outputs)


class _Columns(ColwiseParallel):
    """torch's style, also for layers that hold their weight transposed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if is_transposed(module):
            return _apply_transposed(self, module, device_mesh, 1, self.desired_input_layouts)
        return super()._apply(module, device_mesh)


class _Rows(RowwiseParallel):
    """torch's style, also for layers that hold their weight transposed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if is_transposed(module):
            return _apply_transposed(self, module, device_mesh, 0, (Shard(-1),))
        return super()._apply(module, device_mesh)


class Column(_Columns):
    """Split along outputs. Layers of one module that get the same tensor gather it once, and sum its gradient once.

    `within`: the sequence that hands their outputs on; whoever else calls them gets whole outputs.
    In what is compiled each does so by itself: a graph does not tell whether the tensor was changed in between.
    """

    def __init__(self, sequence: SequenceSharding | None, within: nn.Sequential | None = None) -> None:
        super().__init__()
        self.sequence, self._within = sequence, within
        self._given: tuple[Tensor, tuple[int, bool, bool]] | None = None
        self._whole: Any = None

    def _prepare_input_fn(  # type: ignore[override]
        self, input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        layouts = self.sequence.layouts() if self.sequence else input_layouts
        gather = functools.partial(
            ColwiseParallel._prepare_input_fn, layouts, desired_input_layouts, mod, inputs, device_mesh
        )
        x = inputs[0]
        if torch.compiler.is_compiling() or x.is_inference():  # which has no version
            return gather()
        key = x._version, x.requires_grad, is_grad_enabled()
        if self._given is None or self._given[0] is not x or self._given[1] != key:
            self._given, self._whole = (x, key), gather()
        return self._whole

    def _prepare_output_fn(  # type: ignore[override]
        self, output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if self._within is not None and not torch.compiler.is_compiling() and caller(mod) is not self._within:
            self.forget()
            output_layouts = self.sequence.layouts() if self.sequence else (Replicate(),)
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)

    def forget(self, *_: Any) -> None:
        """A forward hook of the module around the layers, and the end of a step's forward: keep nothing alive."""
        self._given = self._whole = None


class Row(_Rows):
    """Split along inputs, of which it gets this rank's or, if the layer is called by itself, all."""

    def __init__(self, sequence: SequenceSharding | None) -> None:
        super().__init__()
        self.sequence = sequence

    def _prepare_input_fn(  # type: ignore[override]
        self, input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if is_linear(mod) and inputs[0].shape[-1] == in_features(mod):
            input_layouts = self.sequence.layouts() if self.sequence else (Replicate(),)
        return RowwiseParallel._prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh)

    def _prepare_output_fn(  # type: ignore[override]
        self, output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        layouts = self.sequence.layouts() if self.sequence else output_layouts
        return RowwiseParallel._prepare_output_fn(layouts, use_local_output, mod, outputs, device_mesh)


class Position(ParallelStyle):
    """A layer that works on each position alone: whole parameters, whose gradients are summed over the shares of the
    sequence."""

    def __init__(self, sequence: SequenceSharding | None) -> None:
        super().__init__()
        self.sequence = sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._inputs, self._outputs)

    def _inputs(self, module: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
        layouts = self.sequence.layouts() if self.sequence else (Replicate(),)
        return (DTensor.from_local(inputs[0], device_mesh, layouts, run_check=False), *inputs[1:])

    def _outputs(self, module: nn.Module, outputs: Any, device_mesh: DeviceMesh) -> Any:
        return outputs.to_local()


class Replicated(ParallelStyle):
    """Whole parameters of a layer that works on shards of activations, such as a norm of each head: a rank has the part
    of their gradients that its shard gives, and they are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_module(module, device_mesh)
        whole: list[tuple[nn.Module, str, nn.Parameter]] = []
        compared = False

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal compared
            if not compared and not torch.compiler.is_compiling():
                compared = self._compare(module, args, device_mesh)
            for inner in module.modules():
                for name, parameter in inner.named_parameters(recurse=False):
                    whole.append((inner, name, parameter))
                    shards: Any = parameter
                    inner._parameters[name] = shards.to_local(grad_placements=[Partial()])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            while whole:
                inner, name, parameter = whole.pop()
                inner._parameters[name] = parameter

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module

    @staticmethod
    def _compare(module: nn.Module, args: Any, mesh: DeviceMesh) -> bool:
        """Raise ValueError if all ranks of `mesh` have the same input, of which each would then have the whole
        gradient; return whether the input tells."""
        if not args or not isinstance(args[0], Tensor):
            return False
        x = args[0].detach().double().flatten()
        ramp = torch.arange(1, x.numel() + 1, dtype=x.dtype, device=x.device)
        mine = torch.stack([x.abs().sum(), (x * ramp).sum()])
        everywhere = [torch.empty_like(mine) for _ in range(mesh.size())]
        with counting_once():
            dist.all_gather(everywhere, mine, group=mesh.get_group())
        if not torch.stack(everywhere).any():
            return False
        if mesh.size() > 1 and dist.get_backend() != "fake" and all(torch.equal(mine, other) for other in everywhere):
            raise ValueError(
                f"the plan of strategy tensor says 'replicated' of a {type(module).__name__}, which is for a layer "
                "that works on shards, but all ranks gave it the same input; leave it out of the plan"
            )
        return True


class Classes(_Columns):
    """A head split along classes: in training its logits stay cut, for the loss; otherwise they are gathered."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        if mod.training and is_grad_enabled():
            return outputs
        return outputs.redistribute(placements=[Replicate()]).to_local()


STYLES: dict[str, Callable[[SequenceSharding | None], ParallelStyle]] = {
    "column": Column,
    "row": Row,
    "gather": lambda _: _Columns(output_layouts=Replicate()),
    "scatter": lambda _: _Rows(input_layouts=Replicate()),
    "embedding": lambda _: _Rows(input_layouts=Replicate()),
    "classes": lambda _: Classes(),
    "position": Position,
    "replicated": lambda _: Replicated(),
}
"""What a plan may say of a layer."""


def caller(layer: nn.Module) -> Any:
    """The sequence whose forward has called a layer that runs now, or None."""
    frame = sys._getframe(1)
    while frame is not None and not (frame.f_code is _CALL and frame.f_locals.get("self") is layer):
        frame = frame.f_back  # type: ignore[assignment]
    frame = frame and frame.f_back  # type: ignore[assignment]
    return frame.f_locals.get("self") if frame is not None and frame.f_code is _SEQUENTIAL else None


_CALL, _SEQUENTIAL = nn.Module.__call__.__code__, nn.Sequential.forward.__code__


def writable(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of a sharded layer: its output may be changed in place and read through its memory (by numpy,
    pickle or safetensors), which torch forbids for what DTensor hands out."""
    if torch.compiler.is_compiling() or not isinstance(output, Tensor) or isinstance(output, DTensor):
        return None
    if output.requires_grad and output._is_view():
        return _Writable.apply(output)
    return output.wait() if isinstance(output, AsyncCollectiveTensor) else None


class _Writable(torch.autograd.Function):
    """The same numbers as a tensor that autograd takes for no view. Nobody else holds or has saved them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return (x.wait() if isinstance(x, AsyncCollectiveTensor) else x).data

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _refuse_second_derivatives()
        return gradient


def differentiable_twice(module: nn.Module, args: Any) -> None:
    """A forward pre-hook of a sharded layer: let gradients of gradients reach what comes before it.

    The backward of `DTensor.from_local` sums over ranks without a graph; where one is wanted, it is given the sum.
    """
    if torch.compiler.is_compiling():  # what is compiled has no second derivatives, and torch says so
        return
    for x in args:
        if isinstance(x, DTensor) and x.requires_grad and x.grad_fn is not None:
            x.register_hook(functools.partial(_summed, x.placements))


def _refuse_second_derivatives() -> None:
    if is_grad_enabled() and torch.__version__ < "2.12":  # as versions, not as texts
        raise RuntimeError(
            "a gradient is to be differentiated (create_graph=True) through layers that are sharded over tensor ranks, "
            f"of which torch {torch.__version__} loses parts; use torch 2.12 or later, or strategy='ddp' or 'fsdp'"
        )


def _summed(placements: tuple[Any, ...], gradient: Tensor) -> Tensor | None:
    _refuse_second_derivatives()
    if not is_grad_enabled() or not isinstance(gradient, DTensor) or gradient.placements == placements:
        return None
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in placements])


class PlainLoss(TorchFunctionMode):
    """Within it the cross entropy of cut logits is a plain tensor, to be logged and added to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output.full_tensor() if func is F.cross_entropy and isinstance(output, DTensor) else output
