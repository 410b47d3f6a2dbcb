"""Callbacks with Lightning's names and arguments."""
