"""The Trainer: the loop, the Module and DataModule that a user writes, checkpoints, configuration, command line."""
