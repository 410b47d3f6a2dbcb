"""Which layers tensor parallelism shards, and how: found or given, checked, applied."""
