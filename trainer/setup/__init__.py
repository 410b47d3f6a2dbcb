"""Everything before the loop: from what the user gave to what a step needs."""
