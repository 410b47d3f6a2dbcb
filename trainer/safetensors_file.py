"""Safetensors files: which dtypes they hold, and their bytes tensor by tensor.

Format: 8 bytes little-endian length of the header, JSON header, data. https://github.com/huggingface/safetensors#format
complex128 has no code there and lies as float64 with a last dimension of 2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

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


def content(tensors: dict[str, Tensor]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, one tensor at a time, so that only one is copied to the host at once.

    Format: 8 bytes little-endian length of the header, JSON header, data. Larger elements come first, so that
    every tensor is aligned to its element size. https://github.com/huggingface/safetensors#format
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key in order:
        tensor = tensors[key]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        shape = [*tensor.shape, 2] if tensor.dtype in PAIRS else [*tensor.shape]
        header[key] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in order:
        # Conjugate and negative views are flags on the same memory: resolve them before bytes are taken.
        tensor = tensors[key].detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data
