"""Trials that Optuna proposes, batch by batch."""

import contextlib
import json
import warnings
from collections.abc import Callable
from typing import Any

from onejit.base import statistics
from onejit.engine.hosts import is_first, only_first
from onejit.run.record import as_json
from onejit.script.configs import plain
from onejit.sweep import study
from onejit.sweep.halving import train_rungs
from onejit.sweep.swept import DISTRIBUTIONS, make_trials, read_distribution, read_values
from onejit.sweep.trials import Group, Sweep, make_groups

MIRRORED = "one_minus_"  # of a field whose 1 - value Optuna proposes

# --- before training ---


def points_of_grid(sweep: Sweep) -> list[dict]:
    """The points of a grid that several sweeps share; none of another search."""
    if sweep.options.optuna != "grid":
        return []
    return make_trials(sweep.search.script, sweep.search.swept, 0, sweep.options.seed)


def planned_groups(sweep: Sweep) -> list[Group]:
    """The groups of all trials, which are of the fields of a grid; otherwise there is one."""
    points = points_of_grid(sweep)
    if points:
        return make_groups(sweep.search, points, range(len(points)))
    return [Group(sweep.search.config, list(range(sweep.options.samples)))]


def sizes_of_batches(sweep: Sweep) -> list[int]:
    samples = sweep.options.samples
    size = sweep.options.batch
    return [min(size, samples - first) for first in range(0, samples, size)]


def make_study(sweep: Sweep):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = sweep.options
    seed = study.seed_of(sweep) if options.storage else options.seed
    if options.optuna == "tpe":
        # constant_liar spreads out the trials of a batch
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    elif options.optuna == "cmaes":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.CmaEsSampler(
                seed=seed,
                popsize=max(4, options.batch),
                warn_independent_sampling=False,
                consider_pruned_trials=options.halving > 0,
            )
    else:
        sampler = optuna.samplers.RandomSampler(seed=seed)
    if not options.storage:
        return optuna.create_study(direction="maximize", sampler=sampler)
    return study.open_study(sweep, options.storage, sampler)


def make_space(sweep: Sweep) -> dict:
    """Optuna's distribution of each swept field, or of 1 - value with the prefix MIRRORED."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space = {}
    for name, words in sweep.search.swept.items():
        if words[0] not in DISTRIBUTIONS:
            space[name] = CategoricalDistribution(read_values(sweep.search.script, name, words))
            continue
        kind, low, high = read_distribution(sweep.search.script, name, words)
        if kind == "one-minus-log-uniform":
            space[MIRRORED + name] = FloatDistribution(1.0 - high, 1.0 - low, log=True)
        else:
            space[name] = FloatDistribution(low, high, log=kind == "log-uniform")
    return space


def as_stored(point: dict) -> dict:
    """The values of a trial as run.json holds them."""
    return json.loads(json.dumps(as_json(plain(point))))


# --- training ---


def train_proposals(
    sweep: Sweep, groups: list[Group], sizes: list[int], train_group: Callable[[Group], None]
) -> None:
    """Train batches that Optuna proposes from the returns of earlier ones. Raises ValueError.

    `groups` holds the groups of all trials, and `sizes` the number of trials of each batch.

    With `--halving` a batch is a bracket. A resumed sweep repeats the proposals; with `--storage`
    it remembers them, because Optuna has seen other results meanwhile. A batch of a grid that
    several sweeps share has its next points that no sweep has.
    """
    trials = sweep.trials.values
    with open_proposals(sweep, groups) as proposals:
        while len(trials) < sweep.options.samples:
            first = len(trials)
            batch = proposals.next_batch()
            if not batch:
                return  # other sweeps have all points
            if sweep.options.halving:
                train_rungs(sweep, batch, sizes, train_group)
            else:
                for group in batch:
                    train_group(group)
            if is_first():
                for trial in range(first, len(trials)):
                    study.retry(proposals.tell, trial)


@contextlib.contextmanager
def open_proposals(sweep: Sweep, groups: list[Group]):
    """The study belongs to process 0, which holds a lease if it shares the study."""
    proposals = Proposals(sweep, groups)
    only_first(proposals.open_study)
    if not is_first() or not sweep.options.storage:
        yield proposals
        return
    with study.holding_lease(proposals.study, sweep.record.owner):
        yield proposals


class Proposals:
    """What Optuna proposes, and is told."""

    def __init__(self, sweep: Sweep, groups: list[Group]):
        self.sweep = sweep
        points = points_of_grid(sweep)
        self.points = [points[i] for group in groups for i in group.trials] if points else []
        self.study: Any = None  # on process 0
        self.asked: list = []  # Optuna's trials, on process 0; None if an earlier session asked

    def open_study(self) -> None:
        self.study = study.retry(make_study, self.sweep)

    def next_batch(self) -> list[Group]:
        """The groups of the next trials. Raises ValueError if a resumed sweep had other trials."""
        trials = self.sweep.trials.values
        known = self.sweep.record.trials
        options = self.sweep.options
        first = len(trials)
        size = min(options.batch, options.samples - first)
        if options.storage and known[first:]:
            batch = known[first : first + size]
        else:
            batch = only_first(study.retry, self.ask, size)
        last = first + len(batch)
        if known[first:last] not in ([], batch):
            raise ValueError(
                "resume: Optuna proposes other trials than before; has its version changed?"
            )
        known[first:last] = batch
        self.asked += [None] * (last - len(self.asked))
        trials.extend(map(self.point_of, batch) if self.points else batch)
        return make_groups(self.sweep.search, trials, range(first, last))

    def point_of(self, stored: dict) -> dict:
        """The point of the grid that a record has stored, where a tuple is a list."""
        return next(point for point in self.points if as_stored(point) == stored)

    def ask(self, size: int) -> list[dict]:
        """The values of `size` new trials, or of fewer ones of a grid."""
        if self.sweep.options.storage:
            study.fail_expired(self.study)
        if self.points:
            points = study.claim(self.sweep, self.study, self.points, size)
            return [as_stored(point) for point in points]
        space = make_space(self.sweep)
        proposals = [self.study.ask(space) for _ in range(size)]
        trials = []
        for proposal in proposals:
            trial = {}
            for name, value in proposal.params.items():
                field = name.removeprefix(MIRRORED)
                trial[field] = value if field == name else 1.0 - value
                if field != name:
                    proposal.set_user_attr(field, trial[field])  # for readers of the study
            trials.append(trial)
        if self.sweep.options.storage:
            study.own(self.sweep, proposals)
        self.asked += proposals
        return trials

    def tell(self, trial: int) -> None:
        """Tell Optuna the return of a trial. Without a finite one it counts as the worst."""
        import optuna

        trials = self.sweep.trials
        group = trials.groups[trials.last_groups()[trial]]
        value = float(statistics.interquartile_mean(trials.returns[trial]))
        update = group.num_updates if group.num_updates < group.config.num_updates else None
        proposal = self.asked[trial]
        if self.sweep.options.storage:
            number = self.sweep.record.numbers[trial]
            if proposal is None or not study.is_running(self.study, number):
                study.tell_again(self.study, number, value, update)
                return
        if update is not None:
            proposal.report(value, step=update)
            self.study.tell(proposal, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(proposal, value)
