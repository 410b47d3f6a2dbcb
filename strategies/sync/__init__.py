"""What ranks tell each other beside gradients: step agreement, host all-gather, collective fingerprint."""
