"""Configuration: YAML files and `key=value` overrides, checked against the signatures that they configure.

    module:                              # required: a Module
      class: examples.digits.Digits      # an import path; every other key is an argument of the class
      width: 64
    data: {class: examples.digits.DigitsData, batch_size: 32}
    trainer:                             # the Trainer's arguments
      max_epochs: 5
      strategy: {class: DDP, static_graph: true}
      callbacks: [{class: LRWarmup, steps: 100}]
    optimizer: {class: AdamW, lr: 1e-3}  # short for module.optimizer; lr_scheduler likewise
    ckpt_path: auto
    seed: 0                              # at the top level every Trainer argument is short for trainer.<name>

Files are merged in order, then overrides in order. A mapping that names another `class` replaces the one
before, since the arguments of one class mean nothing to another; other mappings merge, lists replace.
`${trainer.seed}` and `${oc.env:HOME}` are omegaconf's interpolations; `vars` is a section of values for them alone.

A class can be named only where the signature asks for a Module, DataModule, Callback, Strategy, Dataset,
or, as `Callable[..., Optimizer]`, for a factory of optimizers or LR schedulers; it must be a subclass.
Callbacks, strategies, optimizers and schedulers also go by their short names.
"""

from lockstep.trainer.cli.config.build import Run, build
from lockstep.trainer.cli.config.check import check
from lockstep.trainer.cli.config.load import resolve
from lockstep.trainer.cli.errors import ConfigError, Resolved

__all__ = ["ConfigError", "Resolved", "Run", "build", "check", "resolve"]
