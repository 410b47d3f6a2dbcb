"""Data parallelism of one process: slices of a batch share all objects of the program."""
