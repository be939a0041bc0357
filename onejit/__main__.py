"""onejit: train, sweep, compare and watch the agents of single-file reinforcement-learning scripts.

    onejit train ppo --num-seeds 64                   train
    onejit sweep ppo --lr 1e-4 1e-3 --num-seeds 16    hyperparameter search in one compiled program
    onejit resume RUN_DIR                             continue a run or a sweep
    onejit find-nan RUN_DIR                           find where NaN came from in a run
    onejit list                                       the runs in runs/, with their state and return
    onejit compare RUN_DIR RUN_DIR                    statistics over seeds with intervals
    onejit render RUN_DIR                             an episode as GIF, MP4, HTML or SVG
    onejit play RUN_DIR                               play a board game against an agent

`onejit COMMAND --help` describes a command. `onejit train ppo --help` also lists the flags of
ppo.py.
"""

import importlib
import os
import sys

MODULE_OF = {
    "train": "onejit.train",
    "sweep": "onejit.sweep",
    "resume": "onejit.resume",
    "find-nan": "onejit.train.find_nan",
    "list": "onejit.report.list",
    "compare": "onejit.report.compare",
    "render": "onejit.watch.render",
    "play": "onejit.watch.play",
}
COMMANDS = list(MODULE_OF)
WITH_FLAGS_OF_SCRIPTS = ("train", "sweep")
# {command or option of version 0.4: what to use instead}; goes with version 0.6
REMOVED = {
    "new": "is no command any more; `cp` copies a script",
    "plan": "is no command any more; `python benchmarks/plan` in the repository, see dev/plan.md",
    "export": "is no command any more; docs/agents.md has recipes for StableHLO, ONNX and hubs",
}


def prepare_pictures() -> None:
    """Draw without a screen and in Matplotlib's own style, whatever the user's settings are."""
    os.environ["MPLBACKEND"] = "agg"  # read when Matplotlib is imported; a notebook sets its own
    import matplotlib

    matplotlib.rcdefaults()


def run_command(name: str, words: list[str]) -> None:
    """Run a command. Raises ValueError if there is no such command."""
    if name in REMOVED:
        raise ValueError(f"{name}: {REMOVED[name]}")
    if name not in COMMANDS:
        from onejit.base.text import nearest

        known = ", ".join(COMMANDS)
        raise ValueError(f"{name}: is not a command; commands are {known}{nearest(name, COMMANDS)}")
    from onejit.base.signals import raising_interrupts

    with raising_interrupts():
        prepare_pictures()
        module = importlib.import_module(MODULE_OF[name])
    if name not in WITH_FLAGS_OF_SCRIPTS:
        from onejit.script.command_line import parse

        parse(module.main, words, prog=f"onejit {name}", description=module.__doc__)
    elif words[:1] in (["-h"], ["--help"]):
        print(module.__doc__)  # the flags depend on the script
        sys.exit()
    else:
        module.main(words)


def main(words=None) -> None:
    """Run a command. A user's mistake is one line on standard error and exit code 2."""
    words = sys.argv[1:] if words is None else [str(word) for word in words]
    if words[:1] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    if words == ["--version"]:
        from onejit import __version__

        print(__version__)
        sys.exit()
    name = words[0]
    from onejit.base.output import print_plain_lines, survive_closed_output

    print_plain_lines()
    is_training = name in ("train", "sweep", "resume")  # which goes on whatever its output does
    survive_closed_output(OSError if is_training else BrokenPipeError)
    from onejit.script.errors import errors_in_one_line

    tool = f"onejit {name}" if name in COMMANDS else "onejit"
    try:
        with errors_in_one_line(tool):
            run_command(name, words[1:])
    except SystemExit as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.stdout.flush()
            os._exit(130)  # a normal exit would wait for compiled code that still runs
        raise


if __name__ == "__main__":
    main()
