"""What a sweep trains: all of its trials, the best ones of rungs, or what Optuna proposes."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from onejit.base.text import plural
from onejit.sweep import halving, proposals
from onejit.sweep.trials import Group, Sweep, make_groups, trials_of_tasks


class Plan(NamedTuple):
    """What is known before the first trial is trained."""

    groups: list[Group]  # of all trials, as far as they are known
    # numbers of trials of which with `--halving` only the best go on: of each environment, or of
    # each batch of Optuna
    sizes: list[int]
    steps: int  # environment steps of all runs
    lines: list[str]  # what is going to be trained, in words


def make_plan(sweep: Sweep) -> Plan:
    """Raises ValueError if the options are not possible."""
    options = sweep.options
    if options.optuna:
        groups = proposals.planned_groups(sweep)
        sizes = proposals.sizes_of_batches(sweep)
    else:
        values = sweep.trials.values
        groups = make_groups(sweep.search, values, range(len(values)))
        tasks = trials_of_tasks(sweep.search, values, range(len(values)))
        sizes = [len(of_task) for of_task in tasks.values()]
    num_trials = sum(len(group.trials) for group in groups)
    trials = f"{plural(num_trials, 'trial')} x {plural(options.num_seeds, 'seed')}"
    devices = plural(len(jax.devices()), "device")
    lines = [f"{trials} in {plural(len(groups), 'compile group')} on {devices}"]
    if options.optuna:
        lines[0] += f", {options.batch} at a time by Optuna"
    if options.halving:
        steps, line = halving.plan(options, groups, sizes)
        return Plan(groups, sizes, steps, [*lines, line])
    steps = sum(group.steps(len(group.trials) * options.num_seeds) for group in groups)
    return Plan(groups, sizes, steps, lines)


def train(sweep: Sweep, plan: Plan, train_group: Callable[[Group], None]) -> None:
    """Train what the options ask for. `train_group` adds to `sweep.trials`. Raises ValueError."""
    if sweep.options.optuna:
        proposals.train_proposals(sweep, plan.groups, plan.sizes, train_group)
    elif sweep.options.halving:
        halving.train_rungs(sweep, plan.groups, plan.sizes, train_group)
    else:
        for group in plan.groups:
            train_group(group)
