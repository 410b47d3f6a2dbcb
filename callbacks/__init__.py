"""Callbacks: code hung into the moments of a run. Loggers are callbacks too."""

from callbacks.base import Callback, Logger
from callbacks.channels_last import ChannelsLast
from callbacks.communication_ledger import CommunicationLedger
from callbacks.csv_logger import CSVLogger
from callbacks.early_stopping import EarlyStopping
from callbacks.guard import Guard
from callbacks.lr_monitor import LearningRateMonitor
from callbacks.lr_scaling import LRScaling
from callbacks.lr_warmup import LRWarmup
from callbacks.model_checkpoint import ModelCheckpoint
from callbacks.model_summary import ModelSummary
from callbacks.profiler import Profiler
from callbacks.progress_bar import ProgressBar
from callbacks.tensorboard_logger import TensorBoardLogger
from callbacks.throughput_monitor import ThroughputMonitor
from callbacks.timer import Timer

__all__ = [
    "CSVLogger",
    "Callback",
    "ChannelsLast",
    "CommunicationLedger",
    "EarlyStopping",
    "Guard",
    "LRScaling",
    "LRWarmup",
    "LearningRateMonitor",
    "Logger",
    "ModelCheckpoint",
    "ModelSummary",
    "Profiler",
    "ProgressBar",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
]
