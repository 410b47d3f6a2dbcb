"""What user code holds in attributes, kept in checkpoints for a run that continues."""
