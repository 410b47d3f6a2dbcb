"""Where the values of a run are written."""
