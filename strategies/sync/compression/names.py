"""The compressors that have a name: "topk=0.01" and the others that `compress` takes."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import torch

from lockstep.strategies.sync.compression.compressor import Compressor
from lockstep.strategies.sync.compression.dense import Half, Int8, Sign
from lockstep.strategies.sync.compression.low_rank import PowerSGD
from lockstep.strategies.sync.compression.quantized import QSGD, TernGrad
from lockstep.strategies.sync.compression.sparse import RandomK, TopK

_PLAIN: dict[str, Callable[[], Compressor]] = {
    "fp16": lambda: Half(torch.float16),
    "bf16": lambda: Half(torch.bfloat16),
    "int8": Int8,
    "terngrad": TernGrad,
    "sign": Sign,
}
_SHARES: dict[str, Callable[..., Compressor]] = {"topk": TopK, "randomk": RandomK}
_WHOLE: dict[str, tuple[Callable[[int], Compressor], int, int, str]] = {
    "powersgd": (PowerSGD, 1, 2**31, "the rank, a whole number of at least 1"),
    "qsgd": (QSGD, 2, 48, "the bits of a number, a whole number from 2 to 48"),
}
_EXAMPLES = ("fp16", "bf16", "int8", "powersgd=4", "topk=0.01", "randomk=0.01", "qsgd=4", "terngrad", "sign")

REFUSES = {
    "manual_optimization": "compress sends the gradient of a whole step, so it needs automatic optimization; train "
    "without compress",
    "closures": "compress sends the gradient of a step once, so an optimizer that calls its closure again is refused; "
    "train without compress",
    "16-mixed": "precision='16-mixed' scales the gradient by a number that changes, and compress keeps a part of it "
    "for later steps; use 'bf16-mixed'",
}
"""What strategies that compress refuse."""


def compressor(given: str | Compressor) -> Compressor:
    """The compressor that `compress` names. Raises ValueError or TypeError in one sentence."""
    if isinstance(given, Compressor):
        if given.rounds > 1 and not given.linear:
            raise ValueError(f"rounds={given.rounds} needs linear=True, as {given!r} gets the means of rounds before")
        return given
    if not isinstance(given, str):
        raise TypeError(f"compress must be a name such as 'topk=0.01' or a Compressor, but compress={given!r}")
    name, equals, number = (piece.strip() for piece in given.partition("="))
    if name in _PLAIN:
        if equals:
            raise ValueError(f"compress={given!r} has a number, but {name!r} takes none; give compress={name!r}")
        return _PLAIN[name]()
    if name in _SHARES:
        number, comma, option = number.partition(",")
        share = _number(number)
        if share is None or not 0 < share <= 1:
            raise ValueError(f"compress={given!r} needs the share of elements to send, such as '{name}=0.01', up to 1")
        if not comma:
            return _SHARES[name](share)
        option, _, steps = (piece.strip() for piece in option.partition("="))
        if name != "topk" or option != "warmup" or not steps.isdecimal():
            raise ValueError(
                f"compress={given!r} has an option that there is not; write 'topk=0.01,warmup=100', with the number of "
                "steps at the beginning that send more"
            )
        return TopK(share, int(steps))
    if name in _WHOLE:
        make, least, most, what = _WHOLE[name]
        if not number.isdecimal() or not least <= int(number) <= most:
            raise ValueError(f"compress={given!r} needs {what}, such as '{name}=4'")
        return make(int(number))
    near = difflib.get_close_matches(given, [*_EXAMPLES, *_PLAIN, *_SHARES, *_WHOLE], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"compress must be one of {', '.join(_EXAMPLES)} or a Compressor, but compress={given!r}{hint}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
