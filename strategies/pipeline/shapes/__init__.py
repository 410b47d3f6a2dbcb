"""Layers over ranks: torch's pipelining schedules around an unchanged training step."""
