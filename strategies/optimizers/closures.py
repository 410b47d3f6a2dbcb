"""Which optimizers take their gradients from a closure that they call within a step."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch.optim import LBFGS, Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step` cannot do without a closure: LBFGS, or of classes that are not torch's (sharpness-aware ones),
    those that require the argument, raise without it, or call it without asking whether it is there.

    Read from the source of `step`: calling it, even on a copy, would be seen by those who count steps.
    """
    if isinstance(optimizer, LBFGS):
        return True
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch."):
            return False
        if "step" in vars(kind) and _needs(inspect.unwrap(vars(kind)["step"])):
            return True
    return False


def _needs(step: Callable[..., Any]) -> bool:
    try:
        parameter = inspect.signature(step).parameters.get("closure")
        if parameter is None or parameter.default is inspect.Parameter.empty:
            return parameter is not None
        nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(step)))))
    except (OSError, TypeError, ValueError, SyntaxError):  # without source, as in a C extension
        return False
    tests = [node for node in nodes if isinstance(node, ast.If | ast.IfExp) and _names(node.test)]
    requires = any(isinstance(node, ast.Assert) and _is_given(node.test) for node in nodes) or any(
        isinstance(inner, ast.Raise) and asks(test.test)
        for test in tests
        if isinstance(test, ast.If)
        for asks, branch in ((_is_missing, test.body), (_is_given, test.orelse))
        for inner in branch
    )
    return requires or (not tests and any(isinstance(node, ast.Call) and _calls(node) for node in nodes))


def _is_given(test: ast.expr) -> bool:
    """Whether `test` holds only with a closure, as `closure is not None` does."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_is_given, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_missing(test.operand)
    if isinstance(test, ast.Call):
        return ast.unparse(test) == "callable(closure)"
    return ast.unparse(test) in ("closure", "closure is not None")


def _is_missing(test: ast.expr) -> bool:
    """Whether `test` holds always without a closure, as `closure is None` does."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return any(map(_is_missing, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_given(test.operand)
    return ast.unparse(test) == "closure is None"


def _names(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == "closure" for inner in ast.walk(node))


def _calls(call: ast.Call) -> bool:
    """`closure()`, or `torch.enable_grad()(closure)`; not `super().step(closure)`."""
    own = isinstance(call.func, ast.Name) and call.func.id == "closure"
    return own or (isinstance(call.func, ast.Call) and any(_names(argument) for argument in call.args))
