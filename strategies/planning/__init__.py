"""What a run will need in memory, communication and work, found on one process with fake tensors."""
