"""Strategies that change the method, say so in their name, and equal the exact one in a limit case."""
