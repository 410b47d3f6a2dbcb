"""Callbacks that find a setting before a run and change nothing else of it."""
