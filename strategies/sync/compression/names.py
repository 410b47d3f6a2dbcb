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
    named, *options = given.split(",")
    name, equals, number = (piece.strip() for piece in named.partition("="))
    made: Compressor | None = None
    if name in _PLAIN:
        if equals:
            raise ValueError(f"compress={given!r} has a number, but {name!r} takes none; give compress={name!r}")
        made = _PLAIN[name]()
    elif name in _SHARES:
        share = _number(number)
        if share is None or not 0 < share <= 1:
            raise ValueError(f"compress={given!r} needs the share of elements to send, such as '{name}=0.01', up to 1")
        made = _SHARES[name](share)
    elif name in _WHOLE:
        make, least, most, what = _WHOLE[name]
        if not number.isdecimal() or not least <= int(number) <= most:
            raise ValueError(f"compress={given!r} needs {what}, such as '{name}=4'")
        made = make(int(number))
    if made is not None:
        keys = [option.partition("=")[0].strip() for option in options]
        for key, option in zip(keys, options, strict=True):
            _set(made, option, given)
            if keys.count(key) > 1:
                raise ValueError(f"compress={given!r} has {key} more than once; give it once")
        return made
    near = difflib.get_close_matches(given, [*_EXAMPLES, *_PLAIN, *_SHARES, *_WHOLE], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"compress must be one of {', '.join(_EXAMPLES)} or a Compressor, but compress={given!r}{hint}")


def _set(made: Compressor, option: str, given: str) -> None:
    """Set what is after a comma. Raises ValueError in one sentence."""
    key, _, value = (piece.strip() for piece in option.partition("="))
    if (key == "start" or (key == "warmup" and isinstance(made, TopK))) and value.isdecimal():
        setattr(made, key, int(value))
        return
    number = _number(value)
    if key == "momentum" and isinstance(made, TopK) and number is not None and 0 <= number < 1:
        made.momentum = number
        return
    name = given.partition(",")[0]
    examples = [f"'{name},start=100' (so many gradients at the beginning are sent as they are)"]
    if isinstance(made, TopK):
        examples.append(f"'{name},warmup=100' (and of so many more is sent)")
        examples.append(f"'{name},momentum=0.9' (momentum correction, below 1)")
    raise ValueError(f"compress={given!r} has an option that there is not, {option!r}; write {', '.join(examples)}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
