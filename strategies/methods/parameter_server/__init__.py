"""A parameter server with bounded staleness."""
