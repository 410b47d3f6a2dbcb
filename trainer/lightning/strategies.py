"""Strategies, accelerators and profilers under Lightning's names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from lockstep.strategies.ddp import DDP
from lockstep.strategies.deepspeed.strategy import DeepSpeed
from lockstep.strategies.mesh.fsdp import FSDP
from lockstep.strategies.single import SingleDevice


class _Renamed(type):
    """A class that builds another from Lightning's arguments; `isinstance` asks for that other class."""

    ours: type

    def __init__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        if bases:
            raise TypeError(
                f"{name} derives from {bases[0].__name__} of lockstep.lightning, which only makes a "
                f"{cls.ours.__name__}; derive from lockstep.strategies.{cls.ours.__name__}, whose methods are others"
            )

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        options = {name: value for name, value in kwargs.items() if value is not None}
        if "timeout" in options:
            timeout = options.pop("timeout")
            options["timeout_s"] = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if options.get("start_method") in ("popen", "spawn"):
            del options["start_method"]
        if options.get("process_group_backend") == ("nccl" if torch.cuda.is_available() else "gloo"):
            del options["process_group_backend"]
        try:
            return cls.convert(*args, **options)  # type: ignore[attr-defined]
        except TypeError as error:
            raise TypeError(
                f"{cls.__name__} of lockstep.lightning: {error}; see {cls.ours.__name__} for options"
            ) from None

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.ours)


class DDPStrategy(metaclass=_Renamed):
    """Builds `lockstep.strategies.DDP`."""

    ours = DDP
    convert = DDP


class FSDPStrategy(metaclass=_Renamed):
    """Builds `lockstep.strategies.FSDP`; layers to wrap are its `wrap`."""

    ours = FSDP

    @staticmethod
    def convert(**options: Any) -> FSDP:
        layers = options.pop("activation_checkpointing_policy", options.pop("activation_checkpointing", None))
        if layers is not None:
            options["activation_checkpointing"] = layers
        policy = options.pop("auto_wrap_policy", None)
        if isinstance(policy, set | frozenset):
            options["wrap"] = list(policy)
        elif policy is not None:
            raise TypeError("auto_wrap_policy must be a set of layer classes; give others as wrap=")
        if isinstance(options.get("activation_checkpointing"), set | frozenset):
            options["activation_checkpointing"] = list(options["activation_checkpointing"])
        sharding = str(options.pop("sharding_strategy", "FULL_SHARD"))
        if sharding == "SHARD_GRAD_OP":
            options["reshard_after_forward"] = False
        elif sharding != "FULL_SHARD":
            raise TypeError(f"sharding_strategy={sharding!r} is replicas= here, or DDP for 'NO_SHARD'")
        options.pop("state_dict_type", None)  # one format for all strategies
        return FSDP(**options)


class DeepSpeedStrategy(metaclass=_Renamed):
    """Builds `lockstep.strategies.DeepSpeed`; options other than these are in its `config`."""

    ours = DeepSpeed

    @staticmethod
    def convert(**options: Any) -> DeepSpeed:
        if "config" not in options:
            options.setdefault("stage", 2)
        return DeepSpeed(**options)


class SingleDeviceStrategy(metaclass=_Renamed):
    """Builds `lockstep.strategies.SingleDevice`; the Trainer's `accelerator` says which device."""

    ours = SingleDevice

    @staticmethod
    def convert(device: Any = "cpu", **options: Any) -> SingleDevice:
        if torch.device(device).index:
            raise TypeError(f"device={device!r} is chosen by CUDA_VISIBLE_DEVICES and Trainer(accelerator='gpu')")
        return SingleDevice(**options)


class _Word(type):
    """A class of Lightning's for which we have a word, which it gives if it is called; `isinstance` asks for it."""

    word: str

    def __init__(cls, name: str, bases: tuple[Any, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        if bases:
            raise TypeError(f"{bases[0].__name__} of lockstep.lightning is a word for Lockstep and has no subclasses")

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if args or options:
            raise TypeError(f"{cls.__name__} of lockstep.lightning takes no options; it stands for {cls.word!r}")
        return cls.word

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, str) and instance == cls.word


class CPUAccelerator(metaclass=_Word):
    """Stands for "cpu"."""

    word = "cpu"

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1


class CUDAAccelerator(metaclass=_Word):
    """Stands for "gpu"."""

    word = "gpu"

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        return torch.cuda.device_count()


class SimpleProfiler(metaclass=_Word):
    """Stands for "simple"."""

    word = "simple"


class PyTorchProfiler(metaclass=_Word):
    """Stands for "torch"."""

    word = "torch"


def find_usable_cuda_devices(num_devices: int = -1) -> int:
    """What to give as `devices`: ranks take the first GPUs that torch sees."""
    return num_devices
