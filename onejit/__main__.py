"""onejit: train, sweep, compare and watch the agents of single-file reinforcement-learning scripts.

    onejit new ppo_continuous my_algorithm.py         start a project from a script
    onejit train ppo --num-seeds 64                   train, with checkpoints and a record; --resume RUN_DIR goes on
    onejit sweep ppo --lr 1e-4 1e-3 --num-seeds 16    hyperparameter search in one compiled program
    onejit list                                       the runs below runs/, with their state and return
    onejit compare RUN_DIR RUN_DIR                    statistics over seeds with intervals
    onejit render RUN_DIR                             an episode as GIF, MP4 or HTML
    onejit plan ppo --gpu h100                        what a GPU would run, without one
    onejit export RUN_DIR                             a folder for a model hub

`onejit COMMAND --help` describes a command; `onejit train ppo --help` lists the flags of ppo.py, too.
"""

import importlib
import os
import re
import sys

COMMANDS = re.findall(r"(?m)^    onejit (\w+)", __doc__)


def main(words=None) -> None:
    """The command line. A user's mistake is one line on standard error, and exit code 2."""
    words = sys.argv[1:] if words is None else [str(word) for word in words]
    if words[:1] in ([], ["-h"], ["--help"]):
        raise SystemExit(print(__doc__))
    if words == ["--version"]:
        from onejit import __version__

        raise SystemExit(print(__version__))
    name = words[0]
    if name == "plan":  # JAX reads these when it is imported. Choosing kernels by trial would need the GPU itself.
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # without the GPU it cannot be read again
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    from onejit import command_line

    with command_line.errors_in_one_line(f"onejit {name}" if name in COMMANDS else "onejit"):
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise ValueError(f"{name}: is not a command; there are {known}{command_line.nearest(name, COMMANDS)}")
        importlib.import_module(f"onejit.{name}").run(words[1:])


if __name__ == "__main__":
    main()
