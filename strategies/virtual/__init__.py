"""Virtual ranks: the same bits on any number of ranks."""
