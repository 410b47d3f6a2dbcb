"""ZeRO stages 1, 2 and 3 of DeepSpeed's own engine."""
