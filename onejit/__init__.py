"""onejit for operators: one command that trains, sweeps, compares and renders agents.

The scripts themselves never import this package.
"""

__version__ = "0.3.0"
