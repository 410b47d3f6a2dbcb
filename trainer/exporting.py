"""A trained module as a graph for other programs: ONNX, or torch's own ExportedProgram."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from torch import nn

from lockstep.callbacks._support.shadow import fitting

if TYPE_CHECKING:
    from torch.export import ExportedProgram

ONNX_FILE_LIMIT = 3 << 29
"""Bytes of weights above which they are saved beside the ONNX file, which can hold 2 GiB."""


class Exporting:
    """The exports of a Module: `forward` in evaluation mode, without anything of the Trainer."""

    def to_torch_export(self, input_sample: Any = None, **options: Any) -> ExportedProgram:
        """Return `torch.export.export` of `forward`, traced on `input_sample`.

        `input_sample` is a tensor, a tuple of positional or a dict of keyword arguments, in any dtype and on any
        device; None takes `example_input_array`. `options` are those of `torch.export.export`, such as
        `dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)` for batches of any size. The module is unchanged. Raises
        ValueError without a sample, RuntimeError while the parameters are sharded or on the meta device.
        """
        import torch.export

        with ready(self, input_sample) as (module, args, kwargs):
            return torch.export.export(module, args, kwargs, **{"strict": False, **options})

    def to_onnx(
        self, file_path: str | os.PathLike[str] | BinaryIO | None = None, input_sample: Any = None, **options: Any
    ) -> Any:
        """Write `forward`, traced on `input_sample`, to an ONNX file; above 1.5 GiB, weights go to a file beside it.

        `file_path` may be an open binary file, for models below 2 GiB; None writes nothing. Returns what
        `torch.onnx.export` does, an `ONNXProgram` unless `dynamo=False`. `input_sample` is as in `to_torch_export`;
        `options` are those of `torch.onnx.export`, such as `dynamic_shapes` and `input_names`. The module is unchanged.
        Raises ImportError if onnx or onnxscript is not installed, else as `to_torch_export`.
        """
        import torch.onnx

        for package in ("onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ImportError(
                    f"to_onnx needs the package {package}, which is not installed: pip install 'lockstep-trainer[onnx]'"
                )
        with ready(self, input_sample) as (module, args, kwargs):
            size = sum(tensor.nbytes for tensor in module.state_dict().values() if isinstance(tensor, torch.Tensor))
            options = {"dynamo": True, "verbose": False, "external_data": size > ONNX_FILE_LIMIT, **options}
            if file_path is None or isinstance(file_path, str | os.PathLike):
                path = None if file_path is None else os.fspath(file_path)
                return torch.onnx.export(module, args, path, kwargs=kwargs, **options)
            program: Any = torch.onnx.export(module, args, kwargs=kwargs, **options)
            file_path.write(program.model_proto.SerializeToString())
            return program


@contextmanager
def ready(module: Any, input_sample: Any) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """The module in evaluation mode and detached from its Trainer, and the arguments of `forward`."""
    name = type(module).__name__
    sample = module.example_input_array if input_sample is None else input_sample
    if sample is None:
        raise ValueError(f"exporting {name} needs an input of forward: give input_sample, or set example_input_array")
    parameters = list(module.parameters())
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        raise RuntimeError(f"{name} cannot be exported while its parameters are sharded over ranks: do it after fit")
    if any(parameter.is_meta for parameter in parameters):
        raise RuntimeError(f"{name} cannot be exported from the meta device, where it has no weights: load them first")
    sample = fitting(module, sample)
    args = () if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    before = [
        (child, {key: value for key, value in vars(child).items() if key in ("training", "_trainer")})
        for child in module.modules()
    ]
    try:
        for child, held in before:
            vars(child).update(dict.fromkeys(held) | {"training": False})
        yield module, args, dict(sample) if isinstance(sample, Mapping) else {}
    finally:
        for child, held in before:
            vars(child).update(held)
