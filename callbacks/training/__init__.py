"""Callbacks that change how a run trains: learning rates, accumulation, averaged weights, frozen layers."""
