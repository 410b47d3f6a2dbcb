"""The table behind `lockstep.lightning`: which names each of Lightning's modules has, and where ours are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OURS = "trainer.lightning"
VERSION = "2.6.0"
"""Of the Lightning whose names these are."""
_CORE = {
    f"{OURS}.names": "__version__=VERSION",
    "callbacks": "Callback",
    "trainer.seeding": "seed_everything",
    f"{OURS}.trainer": "Trainer",
    f"{OURS}.module": "LightningModule LightningDataModule",
}
_RANK_ZERO = {f"{OURS}.utilities": "rank_zero_only rank_zero_info rank_zero_warn rank_zero_debug rank_zero_deprecation"}
_SEED = {"trainer.seeding": "seed_everything", f"{OURS}.utilities": "isolate_rng"}
_TYPES = (
    "STEP_OUTPUT TRAIN_DATALOADERS EVAL_DATALOADERS LRSchedulerType LRSchedulerTypeUnion LRSchedulerTypeTuple "
    "LRSchedulerPLType LRSchedulerConfigType OptimizerConfig OptimizerLRSchedulerConfig "
    "OptimizerLRScheduler _METRIC _NUMBER _PATH _EVALUATE_OUTPUT _PREDICT_OUTPUT"
)

PATHS: Mapping[str, Mapping[str, str]] = {
    "": _CORE,
    "pytorch": _CORE,
    "pytorch.core": {
        f"{OURS}.module": "HyperparametersMixin LightningModule LightningDataModule",
        "trainer.run.manual": "LightningOptimizer=HeldOptimizer",
    },
    "pytorch.core.saving": {
        f"{OURS}.module": "LightningModule LightningDataModule",
        f"{OURS}.utilities": "save_hparams_to_yaml load_hparams_from_yaml save_hparams_to_tags_csv "
        "load_hparams_from_tags_csv",
    },
    "pytorch.trainer": {
        "trainer.seeding": "seed_everything",
        "trainer.facts": "TrainerState",
        f"{OURS}.types": "RunningStage TrainerFn TrainerStatus",
        f"{OURS}.trainer": "Trainer",
    },
    "pytorch.callbacks": {
        "callbacks": "Callback LambdaCallback LearningRateMonitor GradientAccumulationScheduler Timer",
        "callbacks.early_stopping": "EarlyStoppingReason",
        f"{OURS}.callbacks.model_checkpoint": "Checkpoint ModelCheckpoint",
        f"{OURS}.callbacks.finetuning": "BackboneFinetuning BaseFinetuning",
        f"{OURS}.callbacks.pruning": "ModelPruning",
        f"{OURS}.callbacks.stochastic_averaging": "StochasticWeightAveraging",
        f"{OURS}.callbacks.adapters": "BasePredictionWriter BatchSizeFinder DeviceStatsMonitor EarlyStopping "
        "LearningRateFinder EMAWeightAveraging WeightAveraging",
        f"{OURS}.callbacks.shown": "ModelSummary ProgressBar RichModelSummary RichProgressBar RichProgressBarTheme "
        "TQDMProgressBar",
    },
    "pytorch.loggers": {
        "callbacks": "Logger",
        f"{OURS}.loggers": "CSVLogger MLFlowLogger TensorBoardLogger WandbLogger",
    },
    "pytorch.loggers.csv_logs": {f"{OURS}.loggers": "CSVLogger ExperimentWriter=CSVLogger"},
    "pytorch.loggers.logger": {
        "callbacks": "Logger",
        "trainer.facts": "DummyLogger=SilentLogger",
        "callbacks._support.null_writer": "DummyExperiment=NullWriter",
        f"{OURS}.loggers": "rank_zero_experiment",
    },
    "pytorch.strategies": {
        "strategies": "Strategy ParallelStrategy=Strategy",
        f"{OURS}.strategies": "DDPStrategy FSDPStrategy DeepSpeedStrategy SingleDeviceStrategy",
    },
    "pytorch.accelerators": {
        f"{OURS}.strategies": "CPUAccelerator CUDAAccelerator find_usable_cuda_devices",
    },
    "pytorch.profilers": {
        f"{OURS}.strategies": "SimpleProfiler PyTorchProfiler",
    },
    "pytorch.tuner": {f"{OURS}.tuner": "Tuner"},
    "pytorch.cli": {
        "trainer.cli.lightning_cli": "LightningCLI ArgsType OptimizerCallable LRSchedulerCallable ReduceLROnPlateau"
    },
    "pytorch.plugins": {},
    "pytorch.utilities": {
        f"{OURS}.combined": "CombinedLoader",
        f"{OURS}.utilities": "AttributeDict grad_norm move_data_to_device rank_zero_only rank_zero_info rank_zero_warn "
        "rank_zero_deprecation",
        f"{OURS}.parsing": "find_shared_parameters is_picklable set_shared_parameters",
    },
    "pytorch.utilities.parsing": {
        f"{OURS}.utilities": "AttributeDict",
        f"{OURS}.parsing": "clean_namespace is_picklable str_to_bool str_to_bool_or_int str_to_bool_or_str",
    },
    "pytorch.utilities.memory": {f"{OURS}.parsing": "garbage_collection_cuda is_oom_error recursive_detach"},
    "pytorch.utilities.types": {
        f"{OURS}.types": _TYPES,
        "trainer.setup.optimizers": "LRSchedulerConfig=SchedulerConfig",
    },
    "pytorch.utilities.rank_zero": _RANK_ZERO,
    "pytorch.utilities.exceptions": {
        f"{OURS}.utilities": "MisconfigurationException",
        "strategies.launch.failure": "SIGTERMException=Terminated",
    },
    "pytorch.utilities.model_helpers": {f"{OURS}.module": "is_overridden"},
    "pytorch.utilities.model_summary": {f"{OURS}.utilities": "ModelSummary UNKNOWN_SIZE summarize"},
    "pytorch.utilities.combined_loader": {f"{OURS}.combined": "CombinedLoader"},
    "pytorch.utilities.seed": _SEED,
    "fabric": {"trainer.seeding": "seed_everything"},
    "fabric.utilities": _RANK_ZERO | {f"{OURS}.utilities ": "AttributeDict move_data_to_device"},
    "fabric.utilities.rank_zero": _RANK_ZERO,
    "fabric.utilities.seed": _SEED,
}
"""By path below `lightning`: by module of ours, the names that it gives, or `Lightning's=ours`."""

SAME: Mapping[str, str] = {
    "pytorch.core": "module lightning datamodule hooks optimizer mixins mixins.hparams_mixin",
    "pytorch.trainer": "trainer states",
    "pytorch.callbacks": (
        "batch_size_finder callback checkpoint device_stats_monitor early_stopping finetuning "
        "gradient_accumulation_scheduler lambda_function lr_finder lr_monitor model_checkpoint model_summary "
        "on_exception_checkpoint prediction_writer progress progress.base progress.progress_bar "
        "progress.rich_progress progress.tqdm_progress pruning rich_model_summary spike stochastic_weight_avg "
        "throughput_monitor timer weight_averaging"
    ),
    "pytorch.loggers": "comet litlogger mlflow neptune tensorboard wandb",
    "pytorch.strategies": "ddp deepspeed fsdp model_parallel parallel single_device strategy",
    "pytorch.accelerators": "accelerator cpu cuda",
    "pytorch.profilers": "advanced profiler pytorch simple",
    "pytorch.tuner": "tuning lr_finder",
    "pytorch.plugins": "environments io precision",
    "pytorch.utilities": "grads",
    "pytorch.utilities.model_summary": "model_summary",
}
"""Modules below a path that have the names of that path: Lightning's files for them."""

_LOGGER = "derive a small class from lockstep.callbacks.Logger (docs/logging.md)"
_PROFILER = "give Trainer(profiler='simple') or profiler='torch', or the callback lockstep.callbacks.Profiler"
_ENVIRONMENT = "launchers are detected (docs/launching.md); remove it"
_PRECISION = "give Trainer(precision=…)"
_IO = "checkpoints are folders that the Trainer writes; ModelCheckpoint(async_save=True) writes asynchronously"
_FABRIC = "drive a strategy from a hand-written loop (docs/strategies)"
_ACCELERATOR = "accelerators are 'cpu' and 'gpu'"

REFUSED: Mapping[str, str] = {
    "AdvancedProfiler": _PROFILER,
    "Profiler": _PROFILER,
    "PassThroughProfiler": _PROFILER,
    "XLAProfiler": _PROFILER,
    "Accelerator": _ACCELERATOR,
    "MPSAccelerator": _ACCELERATOR,
    "XLAAccelerator": _ACCELERATOR,
    "AcceleratorRegistry": _ACCELERATOR,
    "StrategyRegistry": "name strategies by the entry-point group lockstep.strategies (docs/strategies)",
    "Fabric": _FABRIC,
    "CometLogger": _LOGGER,
    "LitLogger": _LOGGER,
    "NeptuneLogger": _LOGGER,
    "LightningArgumentParser": "write a YAML file and run `lockstep fit run.yaml` (docs/command-line.md)",
    "SaveConfigCallback": "every run's folder has its config (docs/command-line.md)",
    "ModelParallelStrategy": "give Trainer(strategy='fsdp=2,tensor=2'), whose sizes are the mesh (docs/strategies)",
    "XLAStrategy": _ACCELERATOR,
    "SingleDeviceXLAStrategy": _ACCELERATOR,
    "OnExceptionCheckpoint": (
        "signals commit a checkpoint by themselves; for other errors give ModelCheckpoint(every_n_train_steps=…)"
    ),
    "SpikeDetection": "use lockstep.callbacks.Guard, which skips or stops at spikes of the loss",
    "ThroughputMonitor": "use lockstep.callbacks.ThroughputMonitor, which counts samples by itself",
    "Throughput": "use lockstep.callbacks.ThroughputMonitor",
    "measure_flops": "use torch.utils.flop_counter.FlopCounterMode; ModelSummary shows FLOPs with example_input_array",
    "AsyncCheckpointIO": _IO,
    "CheckpointIO": _IO,
    "TorchCheckpointIO": _IO,
    "XLACheckpointIO": _IO,
    "BitsandbytesPrecision": _PRECISION,
    "DeepSpeedPrecision": _PRECISION,
    "DoublePrecision": "give Trainer(precision='64-true')",
    "HalfPrecision": _PRECISION,
    "MixedPrecision": "give Trainer(precision='16-mixed' or 'bf16-mixed')",
    "Precision": _PRECISION,
    "TransformerEnginePrecision": _PRECISION,
    "FSDPPrecision": _PRECISION,
    "XLAPrecision": _PRECISION,
    "LayerSync": "give strategy=DDP(sync_batchnorm=True)",
    "TorchSyncBatchNorm": "give strategy=DDP(sync_batchnorm=True)",
    "LightningEnvironment": _ENVIRONMENT,
    "ClusterEnvironment": _ENVIRONMENT,
    "KubeflowEnvironment": _ENVIRONMENT,
    "LSFEnvironment": _ENVIRONMENT,
    "MPIEnvironment": _ENVIRONMENT,
    "SLURMEnvironment": _ENVIRONMENT,
    "TorchElasticEnvironment": _ENVIRONMENT,
    "XLAEnvironment": _ENVIRONMENT,
    "GradClipAlgorithmType": "write 'norm' or 'value'",
    "LightningEnum": "use enum.Enum",
    "disable_possible_user_warnings": "use warnings.filterwarnings",
    "is_shared_filesystem": "checkpoints check it by themselves (docs/checkpoints.md)",
    "suggested_max_num_workers": "read len(os.sched_getaffinity(0))",
    "ModelHooks": "derive from LightningModule, which has the hooks",
    "DataHooks": "derive from LightningModule or LightningDataModule, which have the hooks",
    "CheckpointHooks": "derive from LightningModule or LightningDataModule, which have the hooks",
}
"""Names of Lightning's modules that are not offered, and what to write instead."""

ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "enable_autolog_hparams": (True,),
    "model_registry": (),
    "plugins": ([], ()),
    "use_distributed_sampler": (True,),
}
"""Arguments of Trainer that ours lacks, with the values that ask for what it does anyway."""
