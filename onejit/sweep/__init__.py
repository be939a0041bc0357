"""Try hyperparameters of a script, each with many seeds, in one compiled program.

    onejit sweep ppo --lr 1e-4 3e-4 1e-3 --clip-eps 0.1 0.2 --num-seeds 16
    onejit sweep ppo --gamma one-minus-log-uniform 0.9 0.999 --samples 64 --num-seeds 16
    onejit sweep ppo --lr log-uniform 1e-5 1e-2 --ent-coef uniform 0 0.05 --optuna tpe --samples 64
    onejit sweep path/to/my_algorithm.py --num-envs 4 16 --num-seeds 8

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
from functools import partial
from pathlib import Path

from onejit.base.signals import Stopped
from onejit.engine import hosts
from onejit.run import tracking
from onejit.run.command import run
from onejit.run.lock import holding, remove
from onejit.run.resume import ResumeOptions
from onejit.run.write import begin_run
from onejit.script.errors import about_the_config
from onejit.sweep import results, strategies
from onejit.sweep.execution import Trainer
from onejit.sweep.opening import open_sweep, read_sweep
from onejit.sweep.options import Options
from onejit.sweep.trials import Sweep

__all__ = ["Options", "main", "read_sweep", "resume"]

TOOL = "onejit sweep"


def begin(
    sweep: Sweep, until_the_end: contextlib.ExitStack, is_new: bool = False
) -> strategies.Plan:
    """What to train. Makes the directory, locks it and checks the configs. Raises ValueError."""
    script = sweep.search.script
    record = sweep.record
    if is_new:
        until_the_end.enter_context(holding(sweep.run_dir, is_new=True))
    hosts.only_first(tracking.check_login, sweep.options.track)
    plan = strategies.make_plan(sweep)
    for group in plan.groups:
        with about_the_config(script, group.config):  # before anything is compiled
            script.make_learner(group.config)
    record.steps_done = 0  # slices on disk are counted again
    record.steps_total = plan.steps
    if is_new:
        env_names = dict.fromkeys(group.config.env_name for group in plan.groups)
        config = sweep.search.config
        hosts.only_first(begin_run, sweep.run_dir, config, record, script, env_names)
    if hosts.is_first():
        print("\n".join(plan.lines))
    return plan


def train(sweep: Sweep, plan: strategies.Plan, progress, caught, is_new: bool = False) -> None:
    """Train all groups. A new directory in which nothing was begun is removed."""
    trainer = Trainer(sweep, progress, caught)
    try:
        strategies.train(sweep, plan, trainer.train_group)
    except Exception as error:
        nothing_begun = is_new and not sweep.record.slices
        if nothing_begun and not isinstance(error, Stopped):
            hosts.only_first(remove, sweep.run_dir)
        raise


def finish(sweep: Sweep, _) -> bool:
    """Write the results. Returns whether a seed of any trial is left that has not diverged."""
    if not sweep.trials.values:
        hosts.only_first(remove, sweep.run_dir)
        print("other sweeps of the study have all points of the grid: nothing is left to do")
        return True
    return hosts.only_first(results.write_results, sweep)


def main(words) -> Path | None:
    """Sweep as the command line says. Returns the run directory."""
    words = [str(word) for word in words]
    begin_new = partial(begin, is_new=True)
    train_new = partial(train, is_new=True)
    return run(TOOL, lambda _: read_sweep(words, __doc__), begin_new, train_new, finish)


def resume(run_dir: Path, given: ResumeOptions) -> Path:
    """Continue a sweep; the command line gave only the options in `given`. Returns `run_dir`."""
    run("onejit resume", partial(open_sweep, given, run_dir), begin, train, finish)
    return run_dir
