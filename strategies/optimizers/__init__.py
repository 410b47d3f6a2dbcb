"""What optimizers need, and how they are stepped where ranks hold shards of parameters or none of them."""
