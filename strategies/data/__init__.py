"""Which samples each rank sees, and when."""
