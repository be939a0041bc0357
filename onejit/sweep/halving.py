"""Successive halving: the best trials of a rung go on to the next one, and the others stop.

Jamieson & Talwalkar 2016 (arXiv 1502.07943), algorithm 1. All trials of a bracket train to the
first rung. With `--halving ETA` the best 1/ETA of them train from there to the second rung, and so
on until the last rung, which has the full budget. A trial keeps the schedules of the full budget.
"""

from onejit.base.files import delete_folder
from onejit.base.text import plural
from onejit.engine import hosts
from onejit.script.steps import steps_of, timesteps_until
from onejit.sweep.options import Options, required
from onejit.sweep.ranking import sort_trials, trials_of_tasks
from onejit.sweep.slices import checkpoints_of, finished_slices, read_slice
from onejit.sweep.strategy import Strategy
from onejit.sweep.trials import Group, Search, Sweep


def updates_until(config, timesteps: int) -> int:
    """The updates that end within so many timesteps, warm-up included."""
    return (timesteps - getattr(config, "warmup_timesteps", 0)) // steps_of(config)


def most_rungs(config, eta: int) -> int:
    """The largest number of rungs with which the first rung has at least one update."""
    timesteps = config.total_timesteps
    rungs = 0
    while timesteps > 0 and updates_until(config, timesteps) > 0:
        rungs += 1
        timesteps //= eta
    return rungs


def timesteps_from_first(config, options: Options) -> list[int]:
    """The timesteps of all rungs but the last one, from --first-rung on. Raises ValueError."""
    first = required(options.first_rung)
    eta = required(options.halving)
    total = config.total_timesteps
    if first >= total:
        raise ValueError(f"first_rung = {first}: must be below total_timesteps = {total}")
    if updates_until(config, first) < 1:
        raise ValueError(
            f"first_rung = {first}: must be at least {timesteps_until(config, 1)}, "
            "where the first update ends"
        )
    timesteps = [first]
    while timesteps[-1] * eta < total:
        timesteps.append(timesteps[-1] * eta)
    return timesteps


def timesteps_from_last(config, options: Options, num_trials: int, groups) -> list[int]:
    """The timesteps of all rungs but the last one, which has the full budget. Raises ValueError.

    Without --rungs there are as many as leave at least one trial for the last rung.
    """
    eta = required(options.halving)
    total = config.total_timesteps
    most = min(most_rungs(group.config, eta) for group in groups)
    if options.rungs is not None and options.rungs > most:
        raise ValueError(
            f"rungs = {options.rungs}: with more than {most}, the first rung has no update"
        )
    if most < 2:
        raise ValueError(
            f"halving = {eta}: total_timesteps = {total} has too few updates for two rungs"
        )
    number = options.rungs
    if number is None:
        number = 2
        while number < most and eta**number <= num_trials:
            number += 1
    return [total // eta**i for i in range(number - 1, 0, -1)]


def ends_of_rungs(config, options: Options, num_trials: int, groups) -> list[int]:
    """The update at which each rung ends. `num_trials` is the size of the largest bracket.

    Raises ValueError.
    """
    if options.first_rung is not None:
        timesteps = timesteps_from_first(config, options)
    else:
        timesteps = timesteps_from_last(config, options, num_trials, groups)
    ends = [updates_until(config, steps) for steps in timesteps]
    if ends[-1] >= config.num_updates:
        raise ValueError(
            f"first_rung = {options.first_rung}: the last rung, after {timesteps[-1]} timesteps, "
            "has no update"
        )
    return [*ends, config.num_updates]


def number_left(num_trials: int, eta: int, rung: int) -> int:
    """How many of the trials train in a rung."""
    return max(1, num_trials // eta**rung)


def sizes_of_tasks(search: Search, values: list[dict]) -> list[int]:
    """The number of trials of each environment."""
    tasks = trials_of_tasks(search, values, range(len(values)))
    return [len(of_task) for of_task in tasks.values()]


class Halving(Strategy):
    """A bracket, which consists of `groups`, rung by rung.

    `sizes` are the numbers of trials of which only the best go on: of each environment, or of each
    batch of Optuna.
    """

    def __init__(self, sweep: Sweep, groups: list[Group], sizes: list[int]):
        super().__init__(sweep, groups)
        self.sizes = sizes
        self.eta = required(sweep.search.options.halving)
        self.bracket = [trial for group in groups for trial in group.trials]
        self.rung = -1
        self.ends: list[list[int]] = []  # the update that ends each rung, of each group
        self.waiting: list[tuple[int, Group]] = []  # of the rung, with their place in `groups`
        self.trained: dict[int, int] = {}  # {place in `groups`: number} of the rung
        self.before: dict[int, int] = {}  # the same of the rung before
        self.returns: dict = {}

    def ends_of(self, config) -> list[int]:
        return ends_of_rungs(config, self.sweep.search.options, max(self.sizes), self.groups)

    def plan(self):
        """The rungs of compile groups are about the same."""
        if max(self.sizes) < self.eta:
            raise ValueError(
                f"halving = {self.eta}: needs at least {self.eta} trials at a time; "
                f"there are {max(self.sizes)}"
            )
        ends = [self.ends_of(group.config) for group in self.groups][-1]
        trained = 0
        for size in self.sizes:
            first = 0
            for rung, last in enumerate(ends):
                number = number_left(size, self.eta, rung)
                trained += number * (last - first)
                first = last
        return trained * self.sweep.search.options.num_seeds * steps_of(self.groups[-1].config)

    def announce(self, devices):
        config = self.groups[0].config
        rungs = []
        for rung, end in enumerate(self.ends_of(config)):
            trials = plural(number_left(max(self.sizes), self.eta, rung), "trial")
            rungs.append(f"{trials} to {timesteps_until(config, end):,}")
        return [*super().announce(devices), f"halving: {', '.join(rungs)} timesteps"]

    def next(self):
        if not self.waiting:
            if self.rung < 0:
                self.ends = [self.ends_of(group.config) for group in self.groups]
                self.begin_rung(self.bracket)
            elif not self.end_rung():
                return None
        return self.waiting[0][1]

    def tell(self, number, group, returns):
        place, _ = self.waiting.pop(0)
        self.trained[place] = number
        self.returns |= returns

    def begin_rung(self, trials: list[int]) -> None:
        """Let these trials go on."""
        self.rung += 1
        for place, group in enumerate(self.groups):
            left = [trial for trial in group.trials if trial in trials]
            if not left:
                continue
            continued = Group(
                config=group.config,
                trials=left,
                rung=self.rung,
                first_update=self.ends[place][self.rung - 1] if self.rung else 0,
                last_update=self.ends[place][self.rung],
                continues=self.before.get(place),
            )
            self.waiting.append((place, continued))

    def end_rung(self) -> bool:
        """Begin the next rung with the best trials. Returns whether there is one."""
        for number in self.before.values():  # nobody continues them any more
            hosts.only_first(delete_checkpoints, self.sweep, number)
        self.before = self.trained
        self.trained = {}
        if self.rung + 1 == len(self.ends[0]):
            return False
        self.begin_rung(hosts.only_first(choose, self))
        return True


def choose(bracket: Halving) -> list[int]:
    """The trials of a bracket that go on after the rung that was trained last.

    Raises ValueError if there is nothing to choose by.
    """
    sweep = bracket.sweep
    groups = [sweep.trials.groups[number] for number in bracket.before.values()]
    trained = {trial for group in groups for trial in group.trials}
    rungs = dict.fromkeys(trained, bracket.rung)
    chosen = []
    for of_task in trials_of_tasks(sweep.search, sweep.trials.values, bracket.bracket).values():
        left = [trial for trial in of_task if trial in trained]
        number = number_left(len(of_task), bracket.eta, bracket.rung + 1)
        chosen += sort_trials(left, bracket.returns, rungs)[:number]
    if len(chosen) < len(trained) and not any_episode(sweep, list(bracket.before.values())):
        timesteps = timesteps_until(groups[0].config, groups[0].num_updates)
        raise ValueError(
            f"first_rung: no episode has ended in {timesteps} timesteps; it needs more of them"
        )
    return sorted(chosen)


def any_episode(sweep: Sweep, numbers: list[int]) -> bool:
    """Whether an episode has ended in the groups `numbers`."""
    for number in numbers:
        for file in finished_slices(sweep.run_dir, number):
            if read_slice(file, ["episodes"])["episodes"].any():
                return True
    return False


def delete_checkpoints(sweep: Sweep, number: int) -> None:
    """Delete the checkpoints of a group."""
    for folder in checkpoints_of(sweep.run_dir, number):
        delete_folder(folder)
