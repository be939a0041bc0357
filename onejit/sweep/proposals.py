"""Trials that Optuna proposes, batch by batch."""

import contextlib
import json
import warnings
from typing import Any

from onejit.base import statistics
from onejit.engine.hosts import is_first, only_first
from onejit.run.record import as_json
from onejit.script.configs import plain
from onejit.sweep import study
from onejit.sweep.halving import Halving
from onejit.sweep.options import required
from onejit.sweep.strategy import Grid, Strategy
from onejit.sweep.swept import DISTRIBUTIONS, make_trials, read_distribution, read_values
from onejit.sweep.trials import Group, Sweep, make_groups


def make_study(sweep: Sweep):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = sweep.search.options
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
                consider_pruned_trials=options.halving is not None,
            )
    else:
        sampler = optuna.samplers.RandomSampler(seed=seed)
    if not options.storage:
        return optuna.create_study(direction="maximize", sampler=sampler)
    return study.open_study(sweep, sampler)


MIRRORED = "one_minus_"  # of a field whose 1 - value Optuna proposes


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


class Optuna(Strategy):
    """Trials that Optuna proposes from earlier returns, batch by batch.

    With `--halving` a batch is a bracket. A resumed sweep repeats the proposals; with `--storage`
    it remembers them, because Optuna has seen other results meanwhile. A batch of a grid that
    several sweeps share has its next points that no sweep has.
    """

    def __init__(self, sweep: Sweep):
        self.samples = required(sweep.search.options.samples)
        self.points: list = []  # of the grid that several sweeps share
        groups = [Group(sweep.search.config, list(range(self.samples)))]
        search = sweep.search
        if search.options.optuna == "grid":
            in_order = make_trials(search.script, search.swept, None, search.options.seed)
            groups = make_groups(search, in_order, range(len(in_order)))
            self.points = [in_order[i] for group in groups for i in group.trials]
            self.samples = min(self.samples, len(self.points))
        super().__init__(sweep, groups)
        self.study: Any = None  # on process 0
        self.space: dict = {}  # on process 0
        self.asked: list = []  # Optuna's trials, on process 0
        self.batch: Strategy | None = None  # what is trained now
        self.first = 0  # the first trial of the batch
        self.returns: dict = {}
        self.last_group: dict[int, Group] = {}  # {trial: the last group that has trained it}
        self.until_the_end = contextlib.ExitStack()

    def __enter__(self):
        def make():
            self.study = study.retry(make_study, self.sweep)

        only_first(make)
        if is_first():
            self.space = {} if self.points else make_space(self.sweep)
            if self.sweep.search.options.storage:
                owner = required(self.sweep.record.owner)
                self.until_the_end.enter_context(study.holding_lease(self.study, owner))
        return self

    def __exit__(self, *error):
        self.until_the_end.close()

    def strategy_of(self, groups: list[Group]) -> Strategy:
        """How a batch is trained."""
        if self.sweep.search.options.halving is None:
            return Grid(self.sweep, groups)
        size = self.sweep.search.options.batch
        rest = self.samples % size
        sizes = [size] * (self.samples // size) + ([rest] if rest else [])
        return Halving(self.sweep, groups, sizes)

    def plan(self):
        return self.strategy_of(self.groups).plan()

    def announce(self, devices):
        first, *others = self.strategy_of(self.groups).announce(devices)
        return [f"{first}, {self.sweep.search.options.batch} at a time by Optuna", *others]

    def next(self):
        group = self.batch.next() if self.batch else None
        if group is not None:
            return group
        if self.batch and is_first():
            for trial in range(self.first, len(self.sweep.trials.values)):
                study.retry(self.tell_study, trial)
        if len(self.sweep.trials.values) == self.samples:
            return None
        groups = self.propose()
        if not groups:
            return None  # other sweeps have all points
        self.batch = self.strategy_of(groups)
        return self.batch.next()

    def tell(self, number, group, returns):
        assert self.batch is not None
        self.batch.tell(number, group, returns)
        self.returns |= returns
        self.last_group |= dict.fromkeys(group.trials, group)

    def propose(self) -> list[Group]:
        """The groups of the next batch. Raises ValueError if a resumed sweep had another one."""
        trials = self.sweep.trials.values
        known = self.sweep.record.trials
        self.first = len(trials)
        size = min(self.sweep.search.options.batch, self.samples - self.first)
        if self.sweep.search.options.storage and known[self.first :]:
            batch = known[self.first : self.first + size]
        else:
            batch = only_first(study.retry, self.ask, size)
        last = self.first + len(batch)
        if known[self.first : last] not in ([], batch):
            raise ValueError(
                "resume: Optuna proposes other trials than before; has its version changed?"
            )
        known[self.first : last] = batch
        self.asked += [None] * (last - len(self.asked))
        trials.extend(map(self.point_of, batch) if self.points else batch)
        return make_groups(self.sweep.search, trials, range(self.first, last))

    def point_of(self, stored: dict) -> dict:
        """The point of the grid that a record has stored, where a tuple is a list."""
        return next(point for point in self.points if as_stored(point) == stored)

    def ask(self, size: int) -> list[dict]:
        """The values of `size` new trials, or of fewer ones of a grid."""
        if self.sweep.search.options.storage:
            study.fail_expired(self.study)
        if self.points:
            points = study.claim(self.sweep, self.study, self.points, size)
            return [as_stored(point) for point in points]
        proposals = [self.study.ask(self.space) for _ in range(size)]
        trials = []
        for proposal in proposals:
            trial = {}
            for name, value in proposal.params.items():
                field = name.removeprefix(MIRRORED)
                trial[field] = value if field == name else 1.0 - value
                if field != name:
                    proposal.set_user_attr(field, trial[field])  # for readers of the study
            trials.append(trial)
        if self.sweep.search.options.storage:
            study.own(self.sweep, proposals)
        self.asked += proposals
        return trials

    def tell_study(self, trial: int) -> None:
        """Tell Optuna the return of a trial. Without a finite one it counts as the worst."""
        import optuna

        proposal = self.asked[trial]  # None if an earlier session has asked for it
        value = float(statistics.interquartile_mean(self.returns[trial]))
        group = self.last_group[trial]
        update = group.num_updates if group.num_updates < group.config.num_updates else None
        if self.sweep.search.options.storage:
            number = self.sweep.record.numbers[trial]
            if proposal is None or not study.is_running(self.study, number):
                study.tell_again(self.study, number, value, update)
                return
        if update is not None:
            proposal.report(value, step=update)
            self.study.tell(proposal, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(proposal, value)
