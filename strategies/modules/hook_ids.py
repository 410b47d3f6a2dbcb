"""The keys of torch's hooks, which are counted in each process."""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from lockstep.strategies.modules.parameter_hooks import ATTRIBUTES


def reserve_hook_ids(module: nn.Module) -> None:
    """Let hooks that are registered from here on take the place of none that the module has.

    torch numbers the hooks of one process. Those of a module that was unpickled, say by `torch.load`, have the numbers
    of the process that registered them, and a later hook of the same layer with the same number would replace one.
    """
    kept = [value for layer in module.modules() for name, value in vars(layer).items() if name.endswith("_hooks")]
    kept += [getattr(parameter, name) for parameter in module.parameters() for name in ATTRIBUTES]
    ids = [key for hooks in kept if isinstance(hooks, dict) for key in hooks if isinstance(key, int)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(key + 1 for key in ids)])
