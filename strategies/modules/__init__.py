"""Transforms and inspections of an `nn.Module` that any engine uses."""
