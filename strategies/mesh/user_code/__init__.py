"""What user code does to weights and gradients of which ranks hold shards."""
