"""Seeing agents act: `onejit render` and `onejit play`."""
