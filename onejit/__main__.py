"""onejit: train, sweep, compare and watch the agents of single-file reinforcement-learning scripts.

    onejit new ppo_continuous my_algorithm.py         start a project from a script
    onejit train ppo --num-seeds 64                   train, with checkpoints; --resume RUN_DIR continues a run
    onejit sweep ppo --lr 1e-4 1e-3 --num-seeds 16    hyperparameter search in one compiled program
    onejit list                                       the runs in runs/, with their state and return
    onejit compare RUN_DIR RUN_DIR                    statistics over seeds with intervals
    onejit render RUN_DIR                             an episode as GIF, MP4 or HTML; a board game as SVG
    onejit play RUN_DIR                               play a board game against an agent
    onejit plan ppo --gpu h100                        memory, kernels and time on a GPU, estimated without one
    onejit export RUN_DIR                             write a folder for a model hub

`onejit COMMAND --help` describes a command. `onejit train ppo --help` also lists the flags of ppo.py.
"""

import importlib
import os
import re
import sys

COMMANDS = re.findall(r"(?m)^    onejit (\w+)", __doc__)


def main(words=None) -> None:
    """Run a command. A user's mistake prints one line on standard error and exits with code 2."""
    words = sys.argv[1:] if words is None else [str(word) for word in words]
    if words[:1] in ([], ["-h"], ["--help"]):
        raise SystemExit(print(__doc__))
    if words == ["--version"]:
        from onejit import __version__

        raise SystemExit(print(__version__))
    name = words[0]
    if name == "plan":  # JAX reads these when it is imported. Autotuning would need the GPU.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = (
            "false"  # a cached program cannot be read again without the GPU
        )
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"
    from onejit import command_line

    with command_line.errors_in_one_line(f"onejit {name}" if name in COMMANDS else "onejit"):
        if name not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise ValueError(
                f"{name}: is not a command; commands are {known}{command_line.nearest(name, COMMANDS)}"
            )
        module = importlib.import_module(f"onejit.{name}")
        if name not in ("train", "sweep", "plan"):
            command_line.parse(module.main, words[1:], description=module.__doc__)
        elif words[1:2] in (["-h"], ["--help"]):
            raise SystemExit(print(module.__doc__))  # the flags depend on the script
        else:
            module.main(words[1:])


if __name__ == "__main__":
    main()
