"""What runs have reached: `onejit list` and `onejit compare`."""
