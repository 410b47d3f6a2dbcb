"""Checkpoints: their format, how they are written, verified, read and converted."""
