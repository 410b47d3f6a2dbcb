"""What a program has set in its own process, and the ranks that it starts take over."""
