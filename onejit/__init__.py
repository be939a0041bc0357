"""onejit for operators: one command that trains, resumes, sweeps, compares and renders what the scripts define.

The scripts themselves never import this package.
"""

__version__ = "0.2.0"
