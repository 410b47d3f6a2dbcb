"""What user code may see of parameters that ZeRO keeps in pieces: all of them, or a sentence that says how."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ALLOWED = frozenset(
    (
        "requires_grad requires_grad_ grad dtype device layout is_leaf grad_fn retains_grad names _version _is_view "
        "is_nested get_device "
        "is_cuda is_cpu is_meta is_mps is_sparse is_sparse_csr is_mkldnn is_quantized is_floating_point is_complex "
        "element_size __repr__ "
        "_backward_hooks _post_accumulate_grad_hooks register_hook register_post_accumulate_grad_hook __deepcopy__ "
        "output_nr name untyped_storage"
    ).split()
)
"""What may be asked of an empty parameter, as the answer is that of the whole one."""
_SIZES: dict[str, Callable[..., Any]] = {
    "shape": lambda p: p.ds_shape,
    "size": lambda p, dim=None: p.ds_shape if dim is None else p.ds_shape[dim],
    "numel": lambda p: p.ds_numel,
    "nelement": lambda p: p.ds_numel,
    "dim": lambda p: len(p.ds_shape),
    "ndimension": lambda p: len(p.ds_shape),
    "ndim": lambda p: len(p.ds_shape),
    "__len__": lambda p: p.ds_shape[0],
}
"""What is answered for an empty parameter as for the whole one."""


class Access:
    """Who reads parameters now: user code, which must not take a piece for the whole, or the engine."""

    def __init__(self) -> None:
        self.is_users = True
        self.hides_gradients = False
        """Whether the engine holds the gradient of a window, so that `.grad` is empty."""
        self._outer: list[bool] = []

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """While it lasts, what is read is read as it is."""
        before, self.is_users = self.is_users, False
        try:
            yield
        finally:
            self.is_users = before

    def begin_engine(self, *_: Any) -> None:
        """As a hook: the engine reads parameters until the matching `end_engine`."""
        self._outer.append(self.is_users)
        self.is_users = False

    def end_engine(self, *_: Any) -> None:
        self.is_users = self._outer.pop()

    def guard(self, name: str, parameter: nn.Parameter, stepped: bool) -> None:
        """Watch a parameter that the engine holds, until `release`; the gradient too if its optimizer steps it."""
        vars(parameter)["zero_access"] = self
        vars(parameter)["zero_stepped"] = stepped
        vars(parameter)["zero_name"] = name
        cut = hasattr(parameter, "ds_id")
        vars(parameter)["zero_class"] = type(parameter)
        parameter.__class__ = _guarded(type(parameter), cut)
        if cut:
            for verb in ("all_gather", "partition"):  # the engine's, called where user code reads a layer's weight
                setattr(parameter, verb, functools.partial(self._as_engine, getattr(parameter, verb)))

    def release(self, parameter: nn.Parameter) -> None:
        """Make it a plain parameter again."""
        if isinstance(parameter, _Guarded):
            parameter.__class__ = vars(parameter)["zero_class"]
            for key in ("zero_access", "zero_class", "zero_name", "zero_stepped"):
                del vars(parameter)[key]

    def _as_engine(self, verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with self.of_engine():
            return verb(*args, **options)


class _Guarded:
    """A parameter whose gradient the engine holds."""

    __slots__ = ()
    zero_access: Access | None = None  # a copy has none
    zero_name = ""
    zero_stepped = False

    @property
    def grad(self) -> Tensor | None:
        self._check_gradient()
        return Tensor.grad.__get__(self)  # type: ignore[union-attr]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._check_gradient()
        Tensor.grad.__set__(self, value)  # type: ignore[union-attr]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _check_gradient(self) -> None:
        access = self.zero_access
        if access is not None and self.zero_stepped and access.is_users and access.hides_gradients:
            raise RuntimeError(
                f"the gradient of {self.zero_name} is in DeepSpeed's engine, in pieces, and not in .grad; read or "
                "change it within "
                "`with trainer.whole(module):`, ask module.grad_norm() for the norm of all, or use strategy='ddp' or "
                "'fsdp'"
            )


class _Cut(_Guarded):
    """A parameter that is also empty while no layer that holds it runs."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in args:
            if isinstance(value, _Cut):
                if value.is_empty():
                    return _ask_empty(value, func, args, kwargs or {})
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, _Cut) and item.is_empty():
                        return _ask_empty(item, func, args, kwargs or {})
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    def is_empty(self) -> bool:
        access = self.zero_access
        if access is None or not access.is_users:
            return False
        return self.ds_status.name == "NOT_AVAILABLE"  # type: ignore[attr-defined]


def refuse_copy(*_: Any) -> Any:
    raise RuntimeError(
        "a module whose parameters are in pieces over the ranks under ZeRO-3 was copied (copy.deepcopy); copy it in "
        "__init__ or configure_model, and bring it up to date within `with trainer.whole(module):`"
    )


def _ask_empty(parameter: _Cut, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        name = func.__self__.__name__  # type: ignore[attr-defined]
    if name in _SIZES and args[0] is parameter:
        return _SIZES[name](*args, **kwargs)
    if name not in _ALLOWED:
        raise RuntimeError(
            f"{parameter.zero_name} is in pieces over the ranks under ZeRO-3, and empty here, so {name} would not see "
            "it; read or change it in "
            "a hook within `with trainer.whole(module):`, or use strategy='deepspeed_stage_2', which keeps parameters "
            "whole"
        )
    with torch.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


@functools.cache
def _guarded(cls: type[nn.Parameter], cut: bool) -> type[Any]:
    return type(cls.__name__, (_Cut if cut else _Guarded, cls), {"__module__": cls.__module__})
