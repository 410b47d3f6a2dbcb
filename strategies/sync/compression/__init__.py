"""Gradients that are sent in fewer bytes, and what is left of them for later steps."""
