"""How a sweep decides what to train: strategies."""

from typing import Self

from onejit.base.text import plural
from onejit.sweep.trials import Group, Sweep


class Strategy:
    """Decides what a sweep trains next, by the returns of what it has trained.

        with strategy:
            while (group := strategy.next()) is not None:
                strategy.tell(number, group, returns)

    All processes call the methods. Only process 0 has returns.
    """

    def __init__(self, sweep: Sweep, groups: list[Group]):
        self.sweep = sweep
        self.groups = groups  # of all trials, as far as they are known

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        pass

    def plan(self) -> int:
        """Environment steps of all runs. Raises ValueError if the options are not possible."""
        num_seeds = self.sweep.search.options.num_seeds
        return sum(group.steps(len(group.trials) * num_seeds) for group in self.groups)

    def announce(self, devices: str) -> list[str]:
        """What is going to be trained, in one or two lines."""
        options = self.sweep.search.options
        num_trials = sum(len(group.trials) for group in self.groups)
        trials = f"{plural(num_trials, 'trial')} x {plural(options.num_seeds, 'seed')}"
        return [f"{trials} in {plural(len(self.groups), 'compile group')} on {devices}"]

    def next(self) -> Group | None:
        """The group to train now, or None at the end. Raises ValueError."""
        raise NotImplementedError

    def tell(self, number: int, group: Group, returns: dict) -> None:
        """The group `number` has been trained: {trial: final return of each seed}."""


class Grid(Strategy):
    """All trials, also those of a random search."""

    def __init__(self, sweep: Sweep, groups: list[Group]):
        super().__init__(sweep, groups)
        self.waiting = list(groups)

    def next(self):
        return self.waiting.pop(0) if self.waiting else None
