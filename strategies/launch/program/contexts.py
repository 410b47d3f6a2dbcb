"""What `fit` may be called within, and what computes elsewhere (ranks, other threads) would not be in."""

from __future__ import annotations

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def refuse_contexts(where: str) -> None:
    """Raise ValueError for a context of this thread that changes what is computed here, but not in `where`."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            precision = {"float16": "16-mixed"}.get(dtype, "bf16-mixed")
            raise ValueError(
                f"{where} do not compute within the torch.autocast({device!r}, {dtype}) that surrounds this call; give "
                f"the Trainer precision={precision!r} instead"
            )
    default = torch.get_default_device()
    if default.type != "cpu":
        raise ValueError(
            f"{where} do not compute within the default device {default} of torch.set_default_device that surrounds "
            "this call; set it back with torch.set_default_device(None), and give tensors device=self.device"
        )
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes]
    names = [name for name in names if name != "DeviceContext"]  # of the CPU
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        names.append("saved_tensors_hooks")
    if names:
        raise ValueError(
            f"{where} do not compute within the {names[0]} that surrounds this call; enter it in training_step"
        )


def refuse_hooks_on_all() -> None:
    """Raise ValueError for hooks on all modules or optimizers, which those that strategies add would call too."""
    for kind in ("forward", "forward_pre", "backward", "backward_pre"):
        if vars(modules)[f"_global_{kind}_hooks"]:
            name = "full_backward" if kind == "backward" else kind.replace("backward", "full_backward")
            raise ValueError(
                f"a hook on all modules (register_module_{name}_hook) would be called for those that strategies add "
                "too; register it on modules of your own"
            )
    for when in ("pre", "post"):
        if vars(optimizers)[f"_global_optimizer_{when}_hooks"]:
            raise ValueError(
                f"a hook on all optimizers (register_optimizer_step_{when}_hook of torch.optim.optimizer) would not be "
                "called on ranks as on one process; register it on the optimizers of configure_optimizers"
            )
