"""onejit for operators: one command that trains, resumes, sweeps, compares and renders agents of the scripts.

The scripts themselves never import this package.
"""

__version__ = "0.2.0"
