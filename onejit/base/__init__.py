"""What knows nothing of reinforcement learning: text, files, packages, signals, statistics."""
