"""Try hyperparameters of a script, each with many seeds, in one compiled program.

    onejit sweep ppo --lr 1e-4 3e-4 1e-3 --clip-eps 0.1 0.2 --num-seeds 16
    onejit sweep ppo --gamma one-minus-log-uniform 0.9 0.999 --samples 64 --num-seeds 16
    onejit sweep ppo --lr log-uniform 1e-5 1e-2 --ent-coef uniform 0 0.05 --optuna tpe --samples 64
    onejit sweep path/to/my_algorithm.py --num-envs 4 16 --num-seeds 8
    onejit sweep --resume RUN_DIR

The trials are a grid, a random search or chosen by Optuna. A hyperparameter with several values is
swept over, and several such hyperparameters make a grid. A single value holds for all trials.
`uniform LOW HIGH`, `log-uniform LOW HIGH` and `one-minus-log-uniform LOW HIGH` draw `--samples`
values of a float; each point of a grid gets the same draws. If a field holds several values, commas
join the values of one trial: `--hidden-sizes 64,64 256,256`. All float fields share one program.
Each combination of the other fields is a compile group of its own. With `--optuna`, each batch of
`--batch` trials is proposed from the returns of the batches before it. With `--halving ETA` only
the best 1/ETA of the trials go on at each of several rungs. `--storage` shares a study of Optuna's
between several machines, with `--optuna grid` a grid; `onejit compare` makes one table of them.
`onejit sweep SCRIPT --help` lists all flags; docs/sweep.md describes the results.
"""

import contextlib
from pathlib import Path

import jax

from onejit.base.signals import Stopped, catching_signals, stopping
from onejit.base.text import plural
from onejit.engine import hosts
from onejit.engine.progress import progress_bar
from onejit.report import tracking
from onejit.run.lock import holding, remove
from onejit.run.write import begin_run
from onejit.script import command_line
from onejit.script.configs import env_name_of
from onejit.script.errors import (
    about_the_config,
    errors_in_one_line,
    exit_as_diverged,
    failures_in_one_line,
)
from onejit.sweep import execution, halving, results, search
from onejit.sweep.options import Options, ResumeOptions, refuse_removed
from onejit.sweep.request import Request, make_groups, read_request
from onejit.sweep.strategy import Grid, Strategy

__all__ = ["Options", "ResumeOptions", "main", "read_request"]

TOOL = "onejit sweep"


def strategy_of(request: Request) -> Strategy:
    """Trials are listed or drawn, stopped early, or proposed by Optuna."""
    if request.options.optuna:
        return search.Optuna(request)
    groups = make_groups(request, range(len(request.trials)))
    if request.options.halving:
        return halving.Halving(request, groups, halving.sizes_of_tasks(request))
    return Grid(request, groups)


def begin(request: Request, is_new: bool, until_the_end: contextlib.ExitStack) -> Strategy:
    """What to train. Makes the directory, locks it and checks the configs. Raises ValueError."""
    record = request.record
    if is_new:
        until_the_end.enter_context(holding(request.run_dir, is_new=True))
    hosts.only_first(tracking.check_login, request.options.track)
    strategy = strategy_of(request)
    groups = strategy.groups
    for group in groups:
        with about_the_config(request.script, group.config):  # before anything is compiled
            request.script.make_learner(group.config)
    steps_total = strategy.plan()
    record.steps_done = 0  # slices on disk are counted again
    record.steps_total = steps_total
    if is_new:
        env_names = dict.fromkeys(env_name_of(group.config) for group in groups)
        hosts.only_first(
            begin_run, request.run_dir, request.config, record, request.script, env_names
        )
    if hosts.is_first():
        print("\n".join(strategy.describe(plural(len(jax.devices()), "device"))))
    return strategy


def train(request: Request, strategy: Strategy, is_new: bool, bar, caught) -> None:
    """Train all groups. A directory in which nothing was begun is removed."""
    try:
        with strategy:
            execution.run_groups(request, strategy, bar, caught)
    except Exception as error:
        nothing_begun = is_new and not request.record.slices
        if nothing_begun and not isinstance(error, Stopped):
            hosts.only_first(remove, request.run_dir)
        raise


def main(words) -> Path:
    """Sweep as the command line says. Returns the run directory."""
    words = [str(word) for word in words]
    is_new = words[:1] != ["--resume"]
    with (
        stopping(TOOL, "nothing was started"),
        errors_in_one_line(TOOL),
        failures_in_one_line(TOOL),
        contextlib.ExitStack() as until_the_end,
    ):
        refuse_removed(word.removeprefix("--") for word in words[:1])
        _, hosts_options, _ = command_line.split_words(words)
        hosts.connect(hosts_options)  # before importing a script, which starts JAX
        request = read_request(words, until_the_end, description=__doc__)
        if request is None:
            return Path(words[1])
        run_dir = request.run_dir
        strategy = begin(request, is_new, until_the_end)
        # keeps the lock of the run beyond this block, until the results are written
        until_the_end = until_the_end.pop_all()
    with (
        until_the_end,
        errors_in_one_line(TOOL, 1, (OSError,), about=f"run_dir = {run_dir}: "),
        failures_in_one_line(TOOL),
    ):
        go_on = f"{TOOL} --resume {run_dir} continues"
        bar = progress_bar(request.record.steps_total, disable=not hosts.is_first())
        with (
            stopping(TOOL, go_on),
            catching_signals(f"{TOOL}: stopped at once; {go_on}") as caught,
        ):
            with errors_in_one_line(TOOL, kinds=(ValueError,)), bar:
                train(request, strategy, is_new, bar, caught)
            if not request.trials:
                hosts.only_first(remove, run_dir)
                print(
                    "other sweeps of the study have all points of the grid: nothing is left to do"
                )
                return run_dir
            is_any_left = hosts.only_first(results.write_results, request)
    if not is_any_left:
        exit_as_diverged(TOOL, run_dir)
    return run_dir
