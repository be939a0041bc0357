"""Trials that Optuna proposes, batch by batch."""

import contextlib
import json
import warnings
from typing import Any

from onejit.base import statistics
from onejit.engine.hosts import is_first, only_first
from onejit.run.record import as_json
from onejit.script.configs import plain
from onejit.sweep import storage
from onejit.sweep.halving import Halving
from onejit.sweep.options import required
from onejit.sweep.request import Group, Request, make_groups
from onejit.sweep.strategy import Grid, Strategy
from onejit.sweep.values import DISTRIBUTIONS, make_trials, read_distribution, read_values


def make_study(request: Request):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = request.options
    seed = storage.seed_of(request) if options.storage else options.seed
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
    return storage.open_study(request, sampler)


MIRRORED = "one_minus_"  # of a field whose 1 - value Optuna proposes


def make_space(request: Request) -> dict:
    """Optuna's distribution of each swept field, or of 1 - value with the prefix MIRRORED."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space = {}
    for name, words in request.swept.items():
        if words[0] not in DISTRIBUTIONS:
            space[name] = CategoricalDistribution(read_values(request.script, name, words))
            continue
        kind, low, high = read_distribution(request.script, name, words)
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

    def __init__(self, request: Request):
        self.samples = required(request.options.samples)
        self.points: list = []  # of the grid that several sweeps share
        groups = [Group(request.config, list(range(self.samples)))]
        if request.options.optuna == "grid":
            in_order = make_trials(request.script, request.swept, None, request.options.seed)
            whole = request._replace(trials=in_order)
            groups = make_groups(whole, range(len(in_order)))
            self.points = [in_order[i] for group in groups for i in group.trials]
            self.samples = min(self.samples, len(self.points))
        super().__init__(request, groups)
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
            self.study = storage.retry(make_study, self.request)

        only_first(make)
        if is_first():
            self.space = {} if self.points else make_space(self.request)
            if self.request.options.storage:
                owner = required(self.request.record.owner)
                self.until_the_end.enter_context(storage.holding_lease(self.study, owner))
        return self

    def __exit__(self, *error):
        self.until_the_end.close()

    def strategy_of(self, groups: list[Group]) -> Strategy:
        """How a batch is trained."""
        if self.request.options.halving is None:
            return Grid(self.request, groups)
        size = self.request.options.batch
        rest = self.samples % size
        sizes = [size] * (self.samples // size) + ([rest] if rest else [])
        return Halving(self.request, groups, sizes)

    def plan(self):
        return self.strategy_of(self.groups).plan()

    def describe(self, devices):
        first, *others = self.strategy_of(self.groups).describe(devices)
        return [f"{first}, {self.request.options.batch} at a time by Optuna", *others]

    def next(self):
        group = self.batch.next() if self.batch else None
        if group is not None:
            return group
        if self.batch and is_first():
            for trial in range(self.first, len(self.request.trials)):
                storage.retry(self.tell_study, trial)
        if len(self.request.trials) == self.samples:
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
        trials = self.request.trials
        known = self.request.record.trials
        self.first = len(trials)
        size = min(self.request.options.batch, self.samples - self.first)
        if self.request.options.storage and known[self.first :]:
            batch = known[self.first : self.first + size]
        else:
            batch = only_first(storage.retry, self.ask, size)
        last = self.first + len(batch)
        if known[self.first : last] not in ([], batch):
            raise ValueError(
                "resume: Optuna proposes other trials than before; has its version changed?"
            )
        known[self.first : last] = batch
        self.asked += [None] * (last - len(self.asked))
        trials.extend(map(self.point_of, batch) if self.points else batch)
        return make_groups(self.request, range(self.first, last))

    def point_of(self, stored: dict) -> dict:
        """The point of the grid that a record has stored, where a tuple is a list."""
        return next(point for point in self.points if as_stored(point) == stored)

    def ask(self, size: int) -> list[dict]:
        """The values of `size` new trials, or of fewer ones of a grid."""
        if self.request.options.storage:
            storage.fail_expired(self.study)
        if self.points:
            points = storage.claim(self.request, self.study, self.points, size)
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
        if self.request.options.storage:
            storage.own(self.request, proposals)
        self.asked += proposals
        return trials

    def tell_study(self, trial: int) -> None:
        """Tell Optuna the return of a trial. Without a finite one it counts as the worst."""
        import optuna

        proposal = self.asked[trial]  # None if an earlier session has asked for it
        value = float(statistics.interquartile_mean(self.returns[trial]))
        group = self.last_group[trial]
        update = group.num_updates if group.num_updates < group.config.num_updates else None
        if self.request.options.storage:
            number = self.request.record.numbers[trial]
            if proposal is None or not storage.is_running(self.study, number):
                storage.tell_again(self.study, number, value, update)
                return
        if update is not None:
            proposal.report(value, step=update)
            self.study.tell(proposal, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(proposal, value)
