"""Whose code calls torch: a user's, Lockstep's or a library's."""

from __future__ import annotations

import os
import sys

import torch

_HERE = os.path.dirname(__file__)
_FRAMEWORK = os.path.realpath(os.path.join(_HERE, "..", "..")) + os.sep
OWN = tuple(os.path.join(_FRAMEWORK, name) + os.sep for name in ("strategies", "trainer", "callbacks", "lockstep"))
DEEPSPEED = f"{os.sep}site-packages{os.sep}deepspeed{os.sep}"
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")
_MODES = (__file__, os.path.join(_HERE, "trial_mode.py"))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OPTIMIZERS = os.path.join(_TORCH, "optim") + os.sep
_NO_OPTIMIZER = ("optimizer.py", "lr_scheduler.py", "swa_utils.py")


class ValueUnknownError(ValueError):
    """The step asks for values of a tensor that has none."""


def unknown_value(file: str, what: str) -> ValueUnknownError:
    """What to raise where `file`, that of the user's code or an optimizer of torch, `what` the value of a tensor."""
    instead = "plan with another optimizer" if is_optimizer(file) else "let the step depend on shapes only"
    return ValueUnknownError(
        f"{user_line()} {what} the value of a tensor, which a plan does not have; {instead}, or measure the run on a "
        "device"
    )


def nearest_file() -> str:
    """The file that called torch, or that of an optimizer of torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_optimizer(file) or (not file.startswith((_TORCH, "<")) and file not in _MODES):
            return os.path.realpath(file)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def user_line() -> str:
    """File and line of the user's code that runs, or of an optimizer of torch."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        known = os.path.realpath(file).startswith(OWN) or any(part in file for part in _LIBRARIES)
        if is_optimizer(file) or (not known and not file.startswith("<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the step"


def is_optimizer(file: str) -> bool:
    """Whether an optimizer of torch is written there."""
    return file.startswith(_OPTIMIZERS) and not file.endswith(_NO_OPTIMIZER)
