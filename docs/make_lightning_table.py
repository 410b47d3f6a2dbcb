"""Write the table of Lightning's public names into docs/migrating/lightning.md, read from both packages.

    .venv/bin/python -m docs.make_lightning_table

Needs the extra `bench`. `tests/trainer/lightning/test_table.py` fails if the page does not show what this writes.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import lockstep.lightning.pytorch as ours
from lockstep import Trainer, callbacks
from lockstep.trainer.lightning.install import places
from lockstep.trainer.lightning.names import REFUSED
from lockstep.trainer.lightning_names import ARGUMENTS, HOOKS, METHODS, MODULE, TRAINER

PAGE = Path(__file__).resolve().parent / "migrating" / "lightning.md"
BEGIN, END = "<!-- names -->", "<!-- end of names -->"

_MANIFEST = "hyperparameters are in the checkpoint's manifest"
_UPPER = {f"CHECKPOINT_HYPER_PARAMS_{word}": _MANIFEST for word in ("KEY", "NAME", "TYPE")}
_DATAMODULE = _UPPER | {
    "name": "give it to the logger",
    "remove_ignored_hparams": "give save_hyperparameters(ignore=[…])",
}

_TRAINER_OF_LIGHTNING = (
    "barebones ckpt_path device_ids enable_validation evaluating num_predict_batches "
    "num_sanity_val_batches num_test_batches"
).split()

DIFFERENT: Mapping[str, Mapping[str, str]] = {
    "Arguments of Trainer": {
        "barebones": "with `lockstep.lightning` what it turns off is turned off, but `self.log`",
        "default_root_dir": "`runs` by default; the working directory with `lockstep.lightning`; no address such as "
        "`s3://…`",
        "enable_autolog_hparams": "True is accepted by `lockstep.lightning`",
        "inference_mode": "evaluation runs under `no_grad`, which gives the same numbers, with True and False",
        "log_every_n_steps": "a whole number above 0; `logger=False` logs nothing",
        "logger": "True is TensorBoard in `runs/<module>`; in `lightning_logs` with `lockstep.lightning`",
        **dict.fromkeys(
            ("limit_train_batches", "max_steps"), "0, which trains nothing, with `lockstep.lightning` only"
        ),
        "max_epochs": "a run without an end is an error; 1,000 epochs with `lockstep.lightning`, and 0 trains nothing",
        "overfit_batches": "validates on the training batches too",
        "plugins": "an empty list is accepted by `lockstep.lightning`",
        "profiler": "`'simple'` or `'torch'`",
        "reload_dataloaders_every_n_epochs": "loads both loaders at the start of an epoch",
        "strategy": "`lockstep.lightning` maps Lightning's names and classes; also pipelines and meshes",
        "sync_batchnorm": "`strategy=DDP(sync_batchnorm=True)`; mapped by `lockstep.lightning`",
        "use_distributed_sampler": "True is accepted by `lockstep.lightning`",
        "val_check_interval": "batches or a part of an epoch, no time such as `'00:00:10:00'`",
    },
    "Attributes and methods of Trainer": {
        **dict.fromkeys(_TRAINER_OF_LIGHTNING, "with `lockstep.lightning`"),
        "accelerator": 'the word that was given; with `lockstep.lightning` "cpu" or "gpu", an instance of '
        "`CPUAccelerator` or `CUDAAccelerator`",
        "datamodule": "read-only; give it to the run",
        "estimated_stepping_batches": "infinity if the length of the data is not known",
        "fit_loop": "with `lockstep.lightning`: progress and limits; no `run`, `state_dict` and `restarting`",
        "predict_loop": "with `lockstep.lightning`: numbers of batches, and `predictions`",
        **dict.fromkeys(("test_loop", "validate_loop"), "with `lockstep.lightning`: numbers of batches"),
        "fit": "needs an end; a second `fit` counts on",
        "global_step": "one for each step of the loop, whatever the number of optimizers",
        "is_last_batch": "False if the length of the loader is not known",
        **dict.fromkeys(("logger", "loggers"), "read-only; set between runs with `lockstep.lightning`"),
        "model": "the module as the strategy has wrapped it, while it runs",
        "optimizers": "read-only; `param_groups` may change",
        "predict": "each sample once, in order; under a launcher on rank 0",
        "save_checkpoint": "a folder, written by all ranks; `.ckpt` by `lockstep checkpoint export`; refused after a "
        "fit that failed; after one on several ranks, or with callbacks such as `WeightAveraging` and `ModelPruning`, "
        "it copies what ModelCheckpoint saved of the last step, or needs `weights_only=True`",
        "callbacks": "the loggers are among them, first",
        "callback_metrics": "also those of the validation before training, until training begins",
        "early_stopping_callbacks": "with `lockstep.lightning`",
        "progress_bar_callback": "with `lockstep.lightning`",
        "should_stop": "ends after the next step at the latest, on all ranks alike; a shortened epoch does not count",
        "state": "`status`, `fn` and `stage`, and the `stage` of `setup` and `teardown`, are strings, "
        "members of the enums with `lockstep.lightning`",
        "strategy": 'a strategy of Lockstep; with one device `SingleDevice`, for `"ddp"` too',
        "train_dataloader": "this rank's shard; your loader is its `.loader`",
    },
    "Methods, hooks and attributes of LightningModule": {
        "all_gather": "no gradient flows",
        "backward": "called in automatic optimization; refused if the engine of a strategy owns the backward (`dp`, "
        "`pipeline`, DeepSpeed, `federated`, `parameter_server`)",
        "hparams_initial": "with `lockstep.lightning`",
        "clip_gradients": "clips by what it is given, whatever the Trainer's `gradient_clip_val` is; by that if "
        "nothing is given",
        "configure_optimizers": "None only in manual optimization; also a dict of optimizers by name, each with its "
        "loss, in automatic optimization; torch's optimizers, no `LightningOptimizer`",
        "global_step": "one for each step of the loop, whatever the number of optimizers",
        "hparams": "a config of omegaconf that is given whole becomes a dict with attributes; loggers get the values "
        "at the start of fit; a module that is built in another's `__init__` has its own arguments only",
        "load_from_checkpoint": "reads folders and `.ckpt` files of Lightning 1.0 and later; refuses arguments "
        "that `__init__` lacks; modules, classes and functions are given again; `hparams_file`, a YAML or CSV file of "
        "single arguments, with `lockstep.lightning`",
        "strict_loading": "with `lockstep.lightning`, in `load_from_checkpoint`; `fit` resumes whole checkpoints",
        "log": "a step's value is the mean since the previous one; values always span all ranks; in any hook of a run, "
        "an error outside of one; calls of one name in a step add to one mean; a metric named `step` is a metric",
        "log_dict": "as `log`",
        "on_before_zero_grad": "after the step",
        "on_load_checkpoint": "what `on_save_checkpoint` filled; `state_dict` cannot be changed on resume",
        "on_save_checkpoint": "fill it with tensors and JSON data; removes frozen weights only",
        "on_train_batch_end": "`outputs` is what `training_step` returned; a dict with `lockstep.lightning`",
        "optimizers": "objects whose `step` and `zero_grad` keep ranks together; the optimizer is their `.optimizer`; "
        "`step` returns None",
        "optimizer_step": "called once the gradients are ready; its closure returns the loss",
        **dict.fromkeys(("toggled_optimizer", "to_torchscript"), "with `lockstep.lightning`"),
    },
    "Methods and hooks of LightningDataModule": {
        "from_datasets": "with `lockstep.lightning`; a loader that was not given is None",
        "hparams_initial": "with `lockstep.lightning`",
        "hparams": "those that the module has too are logged as `data.<name>`",
        "load_from_checkpoint": "as a module's; of a checkpoint of weights alone without its state",
        "state_dict": "tensors and JSON data; restored in `fit`",
    },
    "Hooks and attributes of Callback": {
        "on_before_zero_grad": "after the step",
        "on_load_checkpoint": "what `on_save_checkpoint` filled; `state_dict` cannot be changed on resume",
        "on_save_checkpoint": "fill it with tensors and JSON data; removes frozen weights only; before `state_dict`",
        "on_train_batch_end": "`outputs` is what `training_step` returned; a dict with `lockstep.lightning`",
        "state_dict": "tensors and JSON data",
        "state_key": "the class's name, so two callbacks of a class need names of their own",
    },
    "Callbacks": {
        "BackboneFinetuning": "its rate is the last one times `lambda_func(epoch)` after what schedulers made of it; "
        "as in Lightning with `lockstep.lightning`; `train_bn=False` freezes BatchNorm from the start, in Lightning "
        "once the backbone joins",
        "BasePredictionWriter": "of ranks that share samples one writes; `PredictionWriter` writes one file in order",
        "BatchSizeFinder": "trials are runs of their own, of fit only, and at least one; finds a size that was "
        "tried, and not twice the last one; searches before a run only, so a subclass has no `scale_batch_size` to "
        "call in a hook; works with several devices too; sets an attribute and a hyperparameter of one name both, "
        "without a warning",
        "Checkpoint": "a base class for callbacks of your own, beside which the default ModelCheckpoint saves",
        "DeviceStatsMonitor": "`DeviceStats`, whose values have other names, one for each logged step of "
        "training; works without a logger too",
        "EarlyStopping": "a check that reaches a threshold counts in `best_score` and `wait_count` too",
        "EMAWeightAveraging": "`WeightAveraging(decay)`, whose `use_buffers` is False; buffers of whole numbers stay "
        "those of training, and with `use_buffers=False` all do; a buffer that validation changes, or whose shape "
        "changes, needs `use_buffers=False`; before its first update the weights that train are validated and "
        "returned, in Lightning those of the start",
        "GradientAccumulationScheduler": "`accumulate_grad_batches` of the Trainer holds before its first epoch",
        "LearningRateMonitor": "works without a logger too; a value for each step of the optimizers",
        "LearningRateFinder": "`LRFinder`; trials are runs of their own, whose rates go from `min_lr` to "
        "`max_lr` and whose `results` are not smoothed; suggests where the loss falls fastest a step of the search, "
        "Lightning where it does by the rate itself; several optimizers are searched together; "
        "searches before a run only, so a subclass has no `lr_find` to call in a hook; the Tuner searches beside "
        "finders among the callbacks",
        "ModelCheckpoint": "a checkpoint is a folder, with `lockstep.lightning` of the name of Lightning's file; a `/` "
        "in a name becomes `_`; `save_last` is the same save under another name, once; without `monitor` the "
        "`save_top_k` newest are kept, in `best_k_models` too; a metric of training steps is there when steps are "
        "logged; NaN stays NaN, and of several the "
        "newest are kept; "
        "a metric in `filename` that is missing is `nan`, not 0; "
        "`train_time_interval` is checked every `log_every_n_steps` steps; `save_on_exception` and placeholders "
        "in `CHECKPOINT_NAME_LAST` are refused; `every_n_epochs` that is not given is None, not 1, and with "
        "0 `save_last` saves in every epoch, not at the end only",
        "ModelPruning": "`lockstep.lightning` only; ranks the weights of now, Lightning's those of the last forward; "
        "masks are beside the weights in every checkpoint, whose weights are pruned and have the names of the module "
        "as it was built; random masks follow the seed of the run; refused by strategies that shard weights, for a "
        "parameter of two layers, beside WeightAveraging, and on ranks with `make_pruning_permanent=False`; "
        "`use_lottery_ticket_hypothesis` rewinds at each end of an epoch, Lightning's on a CPU only at the first",
        "ModelSummary": "the table, its names, types and numbers, and its sums; no `in_sizes` and `out_sizes`",
        "ProgressBar": "not a base class for bars of your own; shown if it is given, whatever `enable_progress_bar` "
        "says; of `refresh_rate` only 0 has an effect, with `lockstep.lightning`",
        "RichModelSummary": "`ModelSummary`, which is the default, if rich is installed too",
        "RichProgressBar": "`ProgressBar`; the default bar is a `TQDMProgressBar`, if rich is installed too",
        "StochasticWeightAveraging": "`lockstep.lightning` only; refuses BatchNorm with statistics, which Lightning "
        "computes in an epoch more, and `avg_fn` if a strategy shards parameters; a module's `on_train_epoch_start` "
        "comes before it; the last checkpoint has the averages",
        "TQDMProgressBar": "`ProgressBar`",
        "Timer": "`max_time` of the Trainer holds beside it",
        "WeightAveraging": "buffers of whole numbers stay those of training, and with `use_buffers=False` all do; "
        "a buffer that validation changes, or whose shape changes, needs `use_buffers=False`; "
        "`avg_fn` and `multi_avg_fn` with `lockstep.lightning`, unless a strategy shards parameters",
    },
    "Loggers": {
        "CSVLogger": "drops rows after the checkpoint that is resumed, and no file that is there; `experiment` is the "
        "logger itself; `hparams.yaml` has plain data",
        "Logger": "`after_save_checkpoint` is refused beside `async_save`",
        "MLFlowLogger": "`MLflowLogger`",
        "TensorBoardLogger": "hides values after the checkpoint that is resumed; has its file from the start of a run, "
        "or `save()` before it, in which what was logged before is written, and `hparams.yaml`, of plain data, if "
        "there are hyperparameters",
        "WandbLogger": "a resumed run has each step once",
    },
}


class Row(NamedTuple):
    """A name of Lightning."""

    name: str
    status: str
    """ "same", "different" or "absent"."""
    how: str


def groups() -> dict[str, list[Row]]:
    """The rows of each group. Raises KeyError for a name that is missing and has no sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl

        trainer = Trainer(logger=False, enable_checkpointing=False)
        arguments = inspect.signature(Trainer).parameters
        module = {**_DATAMODULE, **METHODS, **HOOKS, **MODULE}
        their_trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
        their_module = _public(pl.LightningModule) - _public(nn.Module)
        our_module = _public(ours.LightningModule) - METHODS.keys() - {"to_tensorrt"}  # these raise
        return {
            title: _rows(title, *compared)
            for title, compared in {
                "Arguments of Trainer": (
                    [name for name in inspect.signature(pl.Trainer).parameters if name != "self"], arguments, ARGUMENTS
                ),
                "Attributes and methods of Trainer": (
                    _public(their_trainer), {*dir(trainer), *arguments}, {**ARGUMENTS, **TRAINER}
                ),
                "Methods, hooks and attributes of LightningModule": (their_module, our_module, module),
                "Methods and hooks of LightningDataModule": (
                    _public(pl.LightningDataModule), _public(ours.LightningDataModule), {**HOOKS, **_DATAMODULE}
                ),
                "Hooks and attributes of Callback": (_public(pl.Callback), _public(ours.Callback), HOOKS),
                "Callbacks": (pl.callbacks.__all__, places()["pytorch.callbacks"], REFUSED),
                "Loggers": (pl.loggers.__all__, places()["pytorch.loggers"], REFUSED),
            }.items()
        }  # fmt: skip


def table() -> str:
    """The tables as Markdown."""
    parts = []
    for title, rows in groups().items():
        same = ", ".join(f"`{row.name}`" for row in rows if row.status == "same")
        parts += [f"### {title}", "", "| | Lightning | Lockstep |", "|---|---|---|"]
        parts += [f"| same | {same} | |"] if same else []
        parts += [f"| different | `{row.name}` | {row.how} |" for row in rows if row.status == "different"]
        parts += [f"| absent | `{row.name}` | {row.how} |" for row in rows if row.status == "absent"]
        parts.append("")
    return "\n".join(parts)


def with_table(page: str) -> str:
    """The page with the tables of now."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table()}{END}", page, flags=re.DOTALL)


def _public(owner: Any) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def _rows(title: str, theirs: Iterable[str], ours_: Any, instead: Mapping[str, str]) -> list[Row]:
    return [_row(title, name, name in ours_, instead) for name in sorted(theirs)]


def _row(title: str, name: str, exists: bool, instead: Mapping[str, str]) -> Row:
    how = DIFFERENT[title].get(name)
    lacks = _lacking(title, name) if exists else ""
    if how is not None or lacks:
        return Row(name, "different", "; ".join(filter(None, [how, lacks])))
    return Row(name, "same", "") if exists else Row(name, "absent", instead[name].replace("|", "\\|"))


def _lacking(title: str, name: str) -> str:
    """Arguments of a callback or logger of Lightning's that the one of `lockstep.lightning` lacks."""
    package = {"Callbacks": "callbacks", "Loggers": "loggers"}.get(title)
    if package is None:
        return ""
    import lightning.pytorch as pl

    cls = getattr(getattr(ours, package), name)
    theirs = inspect.signature(getattr(getattr(pl, package), name)).parameters
    mine = inspect.signature(cls).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in mine.values()) or cls is callbacks.Logger:
        return ""
    lacking = [argument for argument in theirs if argument not in mine and argument != "kwargs"]
    return "without " + ", ".join(f"`{argument}`" for argument in lacking) if lacking else ""


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
