"""Data parallelism of one process: replicas of the model in threads."""
