"""What travels between stages, found by a run without data."""
