"""What ranks tell each other beside gradients: step result, host all-gather, collective fingerprint."""
