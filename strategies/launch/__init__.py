"""Ranks as processes: who they are, how they are started, watched, restarted and ended."""
