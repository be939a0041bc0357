"""A script: finding it, its config, its flags, its environment, its user's own modules."""
