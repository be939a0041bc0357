"""Taking agents elsewhere: `onejit export`."""
