"""Comparing runs, in a user's own tests and on the command line."""
