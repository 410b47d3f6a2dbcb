"""Safetensors files: which dtypes they hold, and their bytes tensor by tensor.

Format: 8 bytes little-endian length of the header, JSON header, data. https://github.com/huggingface/safetensors#format
complex128 has no code there and lies as float64 with a last dimension of 2.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.strategies.launch.program.values import elements

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "F64",
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}
PAIRS = {torch.complex128}


def content(
    layout: Mapping[str, tuple[torch.dtype, Sequence[int]]], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    """The bytes of a safetensors file, one tensor at a time, so that only one is copied to the host at once.

    `layout` gives dtype and shape of each key and `read(key)` its tensor. Larger elements come first, so that every
    tensor is aligned to its element size.
    """
    order = sorted(layout, key=lambda key: (-layout[key][0].itemsize, key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in order:
        dtype, shape = layout[key]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": CODES[dtype],
            "shape": [*shape, 2] if dtype in PAIRS else [*shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in order:
        # Conjugate and negative views are flags on the same memory: resolve them before bytes are taken.
        tensor = read(key).detach().cpu().resolve_conj().resolve_neg()
        yield elements(tensor).view(torch.uint8).numpy().data
