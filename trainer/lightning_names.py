"""Names of Lightning that Lockstep does not have, each with what to write instead.

The Trainer's unknown arguments, missing attributes of Trainer and Module, and the check of hooks read them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_DEVICES = "give devices= and accelerator="
_FINDER = "give the callback LRFinder or BatchSizeFinder, which searches before fit"

ARGUMENTS: Mapping[str, str] = {
    "accumulate_grad_batches_schedule": "give the callback GradientAccumulationScheduler",
    "amp_backend": "give precision='16-mixed' or 'bf16-mixed'",
    "amp_level": "give precision='16-mixed' or 'bf16-mixed'",
    "auto_lr_find": _FINDER,
    "auto_scale_batch_size": _FINDER,
    "auto_select_gpus": _DEVICES,
    "barebones": (
        "give logger=False, enable_checkpointing=False, enable_progress_bar=False and num_sanity_val_steps=0"
    ),
    "checkpoint_callback": "give enable_checkpointing=, or a ModelCheckpoint to callbacks",
    "distributed_backend": "give strategy=",
    "enable_autolog_hparams": "call save_hyperparameters(logger=False) to keep hyperparameters out of the loggers",
    "flush_logs_every_n_steps": "loggers flush by themselves; log_every_n_steps is how often values are logged",
    "gpus": "give devices= and accelerator='gpu'",
    "ipus": _DEVICES,
    "log_gpu_memory": "give the callback DeviceStats",
    "model_registry": "copy the checkpoint folder to the registry after fit",
    "move_metrics_to_cpu": "callback_metrics are on the CPU",
    "multiple_trainloader_mode": "give fit a CombinedLoader(loaders, mode)",
    "num_processes": "give devices= and accelerator='cpu'",
    "plugins": (
        "precision is an argument, cluster environments are detected, ModelCheckpoint(async_save=True) saves "
        "asynchronously, and options of a strategy are arguments of its class"
    ),
    "prepare_data_per_node": "set prepare_data_per_node = False in the DataModule or Module",
    "progress_bar_refresh_rate": "give enable_progress_bar=, or the callback ProgressBar",
    "replace_sampler_ddp": "every loader is sharded, and a sampler of your own keeps its order",
    "reload_dataloaders_every_epoch": "give reload_dataloaders_every_n_epochs=1",
    "resume_from_checkpoint": "give ckpt_path= to fit",
    "stochastic_weight_avg": "give the callback WeightAveraging(decay=None)",
    "sync_batchnorm": "give strategy=DDP(sync_batchnorm=True)",
    "terminate_on_nan": "a loss or gradient that is not finite ends a run; the callback Guard can skip such steps",
    "tpu_cores": "accelerators are 'cpu' and 'gpu'",
    "track_grad_norm": "give the callback GradientNorm",
    "truncated_bptt_steps": "set automatic_optimization = False and step over the parts by hand",
    "use_distributed_sampler": "every loader is sharded, and a sampler of your own keeps its order",
    "weights_save_path": "give ModelCheckpoint(dirpath=…)",
    "weights_summary": "give enable_model_summary=, or the callback ModelSummary",
}
"""Arguments of Lightning's Trainer, of this and of earlier versions."""

TRAINER: Mapping[str, str] = {
    "auto_lr_find": _FINDER,
    "ckpt_path": "it is the argument of fit; trainer.checkpoint_callback.best_model_path names the best checkpoint",
    "data_parallel": "read trainer.world_size",
    "data_parallel_device_ids": "read trainer.strategy.topology.device",
    "device_ids": "read trainer.strategy.topology.device, the device of this rank",
    "distributed_sampler_kwargs": "loaders are sharded by the strategy; read trainer.world_size and global_rank",
    "early_stopping_callbacks": "read trainer.early_stopping_callback, or search trainer.callbacks",
    "enable_validation": "read trainer.num_val_batches",
    "evaluating": "read trainer.validating or trainer.testing",
    "evaluate_loop": "read trainer.global_step, current_epoch and callback_metrics",
    "fit_loop": "read trainer.global_step, current_epoch, is_last_batch and callback_metrics",
    "from_argparse_args": "write Trainer(**vars(args)), with the arguments that it takes",
    "gpus": "read trainer.num_devices",
    "init_module": "build large layers in Module.configure_model",
    "interrupted_by_user": "read trainer.interrupted",
    "lightning_optimizers": "read trainer.optimizers, or self.optimizers() in the module",
    "lr_find": _FINDER,
    "lr_schedulers": "call module.lr_schedulers()",
    "num_gpus": "read trainer.num_devices",
    "num_predict_batches": "take len() of the loader; limit_predict_batches is in trainer.arguments",
    "num_sanity_val_batches": "read trainer.num_val_batches and trainer.arguments.num_sanity_val_steps",
    "num_test_batches": "take len() of the loader; limit_test_batches is in trainer.arguments",
    "optimizer_frequencies": "set automatic_optimization = False and step by hand",
    "precision_plugin": "read trainer.precision",
    "predict_loop": "trainer.predict returns the predictions",
    "prediction_writer_callbacks": "search trainer.callbacks",
    "progress_bar_callback": "search trainer.callbacks for a ProgressBar",
    "received_sigterm": "read trainer.interrupted",
    "reset_train_dataloader": "give reload_dataloaders_every_n_epochs=1",
    "reset_val_dataloader": "give reload_dataloaders_every_n_epochs=1",
    "root_gpu": "read trainer.strategy.topology.device",
    "sanity_check": "read trainer.sanity_checking",
    "save_weights_only": "call trainer.save_checkpoint(path, weights_only=True)",
    "scaler": "the strategy scales losses under precision='16-mixed'",
    "test_loop": "trainer.test returns the metrics",
    "tune": _FINDER,
    "tuner": _FINDER,
    "use_amp": "read trainer.precision",
    "validate_loop": "trainer.validate returns the metrics",
    "val_check_batch": "read trainer.arguments.val_check_interval",
}
"""Attributes and methods of Lightning's Trainer."""

SET: Mapping[str, str] = {
    "current_epoch": "resume with fit(ckpt_path=…)",
    "datamodule": "give it to fit, validate, test or predict",
    "global_step": "resume with fit(ckpt_path=…)",
    "lightning_module": "give the module to fit, validate, test or predict",
    "log_dir": "give Trainer(default_root_dir=…), or save_dir, name and version of the logger",
    "logger": "give Trainer(logger=…)",
    "loggers": "give Trainer(logger=[…])",
    "model": "give the module to fit, validate, test or predict",
    "strategy": "give Trainer(strategy=…)",
    "train_dataloader": "give it to fit",
    "val_dataloaders": "give them to fit or validate",
    "test_dataloaders": "give them to test",
    "predict_dataloaders": "give them to predict",
}
"""Attributes of a Trainer that are read-only, and what to do instead of setting them."""

_AT_EPOCH_END = "log in the step, or collect in lists of your own and log in on_{}_epoch_end"

METHODS: Mapping[str, str] = {
    "configure_sharded_model": "call it configure_model",
    "optimizer_zero_grad": (
        "gradients are set to None after every step; keep them over steps with accumulate_grad_batches"
    ),
    "tbptt_split_batch": "set automatic_optimization = False and step over the parts by hand",
    "training_step_end": "training_step sees each rank's whole batch; do it there",
    "validation_step_end": "validation_step sees each rank's whole batch; do it there",
    "test_step_end": "test_step sees each rank's whole batch; do it there",
    "training_epoch_end": _AT_EPOCH_END.format("train"),
    "validation_epoch_end": _AT_EPOCH_END.format("validation"),
    "test_epoch_end": _AT_EPOCH_END.format("test"),
}
"""Methods that Lightning calls on a module and Lockstep does not."""

HOOKS: Mapping[str, str] = {
    "on_batch_end": "call it on_train_batch_end",
    "on_batch_start": "call it on_train_batch_start",
    "on_configure_sharded_model": "call it setup",
    "on_epoch_end": "call it on_train_epoch_end",
    "on_epoch_start": "call it on_train_epoch_start",
    "on_hpc_load": "call it on_load_checkpoint",
    "on_hpc_save": "call it on_save_checkpoint",
    "on_init_end": "do it in setup",
    "on_init_start": "do it in __init__",
    "on_keyboard_interrupt": "call it on_exception",
    "on_post_move_to_device": "do it in on_fit_start",
    "on_predict_dataloader": "do it in predict_dataloader",
    "on_pretrain_routine_end": "call it on_fit_start",
    "on_pretrain_routine_start": "call it on_fit_start",
    "on_test_dataloader": "do it in test_dataloader",
    "on_train_dataloader": "do it in train_dataloader",
    "on_val_dataloader": "do it in val_dataloader",
    "on_validation_model_zero_grad": "gradients are None when a validation begins",
}
"""Hooks of Lightning, of this and of earlier versions."""

MODULE: Mapping[str, str] = {
    "device_mesh": "read self.trainer.strategy",
    "fabric": "drive a strategy from a hand-written loop; see docs/strategies",
    "get_progress_bar_dict": "read self.trainer.progress_bar_metrics",
    "hparams_initial": "copy self.hparams after save_hyperparameters",
    "on_gpu": "read self.device.type == 'cuda'",
    "running_stage": "read self.trainer.state.stage",
    "summarize": "add the callback ModelSummary",
    "to_tensorrt": "call torch_tensorrt on what to_torch_export returns",
    "to_torchscript": "call torch.jit.script or torch.jit.trace on layers, or to_torch_export",
    "truncated_bptt_steps": "set automatic_optimization = False and step over the parts by hand",
    "use_amp": "read self.trainer.precision",
}
"""Attributes and methods of Lightning's modules."""

_SAVES = (
    "override on_save_checkpoint, after_save_checkpoint of a logger, or format_checkpoint_name for the folder's name"
)
_STOPS = "set trainer.should_stop in on_validation_end"
_SHOWS = "choose what the bar shows with log(prog_bar=True)"
_SEARCHES = "the search runs once, before fit"
_BAR = dict.fromkeys([f"init_{name}_tqdm" for name in ("sanity", "train", "validation", "test", "predict")], _SHOWS)

UNCALLED: Mapping[str, Mapping[str, str]] = {
    "ModelCheckpoint": dict.fromkeys(
        (
            "_save_checkpoint",
            "_remove_checkpoint",
            "_link_checkpoint",
            "_save_topk_checkpoint",
            "_save_last_checkpoint",
            "_save_monitor_checkpoint",
            "_save_none_monitor_checkpoint",
            "_update_best_and_save",
            "_should_skip_saving_checkpoint",
            "_should_remove_checkpoint",
            "_monitor_candidates",
            "_find_last_checkpoints",
            "_format_checkpoint_name",
            "_get_metric_interpolated_filepath_name",
            "check_monitor_top_k",
            "file_exists",
        ),
        _SAVES,
    ),
    "EarlyStopping": dict.fromkeys(
        (
            "_run_early_stopping_check",
            "_evaluate_stopping_criteria",
            "_should_skip_check",
            "_improvement_message",
            "_log_info",
            "monitor_op",
        ),
        _STOPS,
    ),
    "LearningRateFinder": {"lr_find": _SEARCHES},
    "BatchSizeFinder": {"scale_batch_size": _SEARCHES},
    "ProgressBar": _BAR,
    "TQDMProgressBar": _BAR,
}
"""By callback the methods that Lightning's classes call on themselves and ours do not."""

STRATEGIES: Mapping[str, str] = {
    "DDPStrategy": "DDP",
    "FSDPStrategy": "FSDP",
    "DeepSpeedStrategy": "DeepSpeed",
    "SingleDeviceStrategy": "SingleDevice",
}
"""Lightning's strategies, and ours, from which to derive."""


def missing(what: str, name: str, table: Mapping[str, str], known: Iterable[str] = ()) -> str:
    """What to say of a name that does not exist: what to write instead, or the nearest known name.

    `what` is the start of the sentence, such as "Trainer has no argument".
    """
    if name in table:
        return f"{what} {name!r}; {table[name]}"
    return f"{what} {name!r}{nearest(name, known)}"


_SHORT = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "max_epochs"),
    **dict.fromkeys(("steps", "num_steps", "num_train_steps"), "max_steps"),
    **dict.fromkeys(("num_gpus", "n_gpus", "gpu", "world_size", "nproc_per_node"), "devices"),
    **dict.fromkeys(
        ("output_dir", "logging_dir", "log_dir", "save_dir", "root_dir", "project_dir"), "default_root_dir"
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulation_steps", "grad_accum"), "accumulate_grad_batches"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad_norm"), "gradient_clip_val"),
    **dict.fromkeys(("eval_steps", "val_interval"), "val_check_interval"),
    **dict.fromkeys(("loggers", "report_to"), "logger"),
    "logging_steps": "log_every_n_steps",
    "mixed_precision": "precision",
}
"""Names of other trainers, and what they would be nearer to by their letters alone."""


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'max_epochs'?" for the known name most like `name`, or nothing."""
    lower = {other.lower(): other for other in known}
    words = _SHORT.get(name.lower(), "")
    words = words if words in lower else name.lower()
    found = difflib.get_close_matches(words, lower, 1)
    return f"; did you mean {lower[found[0]]!r}?" if found else ""
