"""What `lockstep.lightning` offers: Lightning's names and arguments, mapped onto Lockstep's."""

__version__ = "2.6.0"
"""Of the Lightning whose names these are."""
