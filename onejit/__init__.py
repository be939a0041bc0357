"""onejit for operators: one command that trains, sweeps, compares and renders agents.

The scripts themselves never import this package. `load_run`, `evaluate` and `compare_runs`
are imported when they are first used, so `import onejit` does not import JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onejit.engine.evaluation import evaluate
    from onejit.report.compare import compare_runs
    from onejit.run.directory import load_run

__version__ = "0.4.0"
__all__ = ["compare_runs", "evaluate", "load_run"]

MODULE_OF = {
    "compare_runs": "onejit.report.compare",
    "evaluate": "onejit.engine.evaluation",
    "load_run": "onejit.run.directory",
}


def __getattr__(name: str):
    if name not in MODULE_OF:
        raise AttributeError(f"module 'onejit' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULE_OF[name]), name)
