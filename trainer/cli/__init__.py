"""The command line `lockstep`, and the configuration that it reads."""
