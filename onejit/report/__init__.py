"""What runs have reached: `onejit list`, `onejit compare`, and trackers."""
