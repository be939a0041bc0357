"""The command line: `python benchmarks/plan SCRIPT`. training.py describes what is planned."""

import os
import sys
from pathlib import Path

# JAX and XLA read these when they are imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
# a cached program cannot be read again without the GPU
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# autotuning would need the GPU
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from onejit.base.output import survive_closed_output
from onejit.script.errors import errors_in_one_line
from plan import training

if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(training.__doc__)  # the flags depend on the script
        sys.exit()
    survive_closed_output()
    with errors_in_one_line("plan"):
        training.main(sys.argv[1:])
