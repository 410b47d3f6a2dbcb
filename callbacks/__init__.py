"""Callbacks: code hung into the moments of a run. Loggers are callbacks too."""

from typing import TYPE_CHECKING

from lockstep._lazy import exports

if TYPE_CHECKING:
    from lockstep.callbacks.base import Callback, Logger
    from lockstep.callbacks.channels_last import ChannelsLast
    from lockstep.callbacks.early_stopping import EarlyStopping
    from lockstep.callbacks.guard import Guard
    from lockstep.callbacks.lambda_callback import LambdaCallback
    from lockstep.callbacks.loggers.csv import CSVLogger
    from lockstep.callbacks.loggers.mlflow import MLflowLogger
    from lockstep.callbacks.loggers.tensorboard import TensorBoardLogger
    from lockstep.callbacks.loggers.wandb import WandbLogger
    from lockstep.callbacks.model_checkpoint import ModelCheckpoint
    from lockstep.callbacks.model_summary import ModelSummary
    from lockstep.callbacks.monitors.client_metrics import ClientMetrics
    from lockstep.callbacks.monitors.communication_ledger import CommunicationLedger
    from lockstep.callbacks.monitors.device_stats import DeviceStats
    from lockstep.callbacks.monitors.gradient_norm import GradientNorm
    from lockstep.callbacks.monitors.lr_monitor import LearningRateMonitor
    from lockstep.callbacks.monitors.throughput_monitor import ThroughputMonitor
    from lockstep.callbacks.prediction_writer import PredictionWriter
    from lockstep.callbacks.profiler import Profiler
    from lockstep.callbacks.progress_bar import ProgressBar
    from lockstep.callbacks.timer import Timer
    from lockstep.callbacks.training.finetuning import BackboneFinetuning, BaseFinetuning
    from lockstep.callbacks.training.gradient_accumulation import GradientAccumulationScheduler
    from lockstep.callbacks.training.lr_scaling import LRScaling
    from lockstep.callbacks.training.lr_warmup import LRWarmup
    from lockstep.callbacks.training.weight_averaging import WeightAveraging
    from lockstep.callbacks.tuning.batch_size_finder import BatchSizeFinder
    from lockstep.callbacks.tuning.lr_finder import LRFinder
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "base": ["Callback", "Logger"],
            "channels_last": ["ChannelsLast"],
            "early_stopping": ["EarlyStopping"],
            "guard": ["Guard"],
            "lambda_callback": ["LambdaCallback"],
            "loggers.csv": ["CSVLogger"],
            "loggers.mlflow": ["MLflowLogger"],
            "loggers.tensorboard": ["TensorBoardLogger"],
            "loggers.wandb": ["WandbLogger"],
            "model_checkpoint": ["ModelCheckpoint"],
            "model_summary": ["ModelSummary"],
            "monitors.client_metrics": ["ClientMetrics"],
            "monitors.communication_ledger": ["CommunicationLedger"],
            "monitors.device_stats": ["DeviceStats"],
            "monitors.gradient_norm": ["GradientNorm"],
            "monitors.lr_monitor": ["LearningRateMonitor"],
            "monitors.throughput_monitor": ["ThroughputMonitor"],
            "prediction_writer": ["PredictionWriter"],
            "profiler": ["Profiler"],
            "progress_bar": ["ProgressBar"],
            "timer": ["Timer"],
            "training.finetuning": ["BackboneFinetuning", "BaseFinetuning"],
            "training.gradient_accumulation": ["GradientAccumulationScheduler"],
            "training.lr_scaling": ["LRScaling"],
            "training.lr_warmup": ["LRWarmup"],
            "training.weight_averaging": ["WeightAveraging"],
            "tuning.batch_size_finder": ["BatchSizeFinder"],
            "tuning.lr_finder": ["LRFinder"],
        },
    )

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "CSVLogger",
    "Callback",
    "ChannelsLast",
    "ClientMetrics",
    "CommunicationLedger",
    "DeviceStats",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "GradientNorm",
    "Guard",
    "LRFinder",
    "LRScaling",
    "LRWarmup",
    "LambdaCallback",
    "LearningRateMonitor",
    "Logger",
    "MLflowLogger",
    "ModelCheckpoint",
    "ModelSummary",
    "PredictionWriter",
    "Profiler",
    "ProgressBar",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "WandbLogger",
    "WeightAveraging",
]
