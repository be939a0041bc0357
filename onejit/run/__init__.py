"""A run on disk: its directory, record, lock, agents, results, and resuming it."""
