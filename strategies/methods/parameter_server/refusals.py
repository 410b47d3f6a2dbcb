"""What a parameter server refuses before a step, and why."""

from __future__ import annotations

from torch.optim import Optimizer

from lockstep.strategies.losses import own_backward_refused
from lockstep.strategies.modules.parameter_hooks import ParameterHooks
from lockstep.strategies.optimizers.modes import has_modes
from lockstep.strategies.optimizers.probe import probe

LATER = "the gradient of a step is on the servers, once all workers have sent theirs"
REFUSES = {
    "manual_optimization": "a parameter server steps optimizers itself, so it needs automatic optimization; use "
    "strategy='ddp'",
    "backward": own_backward_refused("a parameter server runs it on each worker"),
    "closures": "a parameter server steps optimizers on gradients that have arrived, so one that calls a closure is "
    "refused; use strategy='ddp'",
    "assigned_optimizers": "the servers step those that were set up before any hook",
    "16-mixed": "precision='16-mixed' scales losses by what overflowed, which a parameter server learns too late; use "
    "'bf16-mixed'",
    "parameter_state": "a worker of a parameter server has parameters that are up to `staleness` steps old",
    "on_after_backward": f"on_after_backward cannot be called: {LATER}; use strategy='ddp'",
    "on_before_optimizer_step": f"on_before_optimizer_step cannot be called with gradients: {LATER}; use "
    "strategy='ddp'",
    "on_before_zero_grad": f"on_before_zero_grad cannot be called with gradients: {LATER}; use on_train_batch_end, or "
    "strategy='ddp'",
    "optimizer_step": "optimizer_step cannot be overridden: the servers step the optimizers; use strategy='ddp'",
    "configure_gradient_clipping": f"configure_gradient_clipping cannot be overridden: {LATER}; give gradient_clip_val",
}


def couples_parameters(key: str, optimizer: Optimizer) -> bool:
    """Whether one server must step all parameters of `optimizer`.

    Raises ValueError if none can.
    """
    found, why = probe(optimizer), ""
    if found.kind == "unknown" or found.draws:
        why = found.reason
    elif optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        why = "it has a step hook, which would run during a training step"
    elif has_modes(optimizer):
        why = "it has other weights to evaluate than to train"
    if why:
        raise ValueError(
            f"optimizer {key!r} ({type(optimizer).__name__}) cannot be stepped by a parameter server, because {why}; "
            "use strategy='ddp', or another optimizer"
        )
    return found.kind == "coupled" or found.keeps_numbers


def refuse_hooks(hooks: ParameterHooks) -> None:
    if hooks.taken:
        raise ValueError(f"gradient hooks on parameters are refused: {LATER}; use strategy='ddp'")
