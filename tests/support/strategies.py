"""Sweeps that decide what to train, without training."""


def groups_of(sweep, strategy):
    """The groups of a strategy, one after the other, which the caller gives returns.

    It notes each as one that has started, and puts the returns of its trials into `sweep.trials`.
    """
    trials = sweep.trials
    with strategy:
        for number, group in enumerate(iter(strategy.next, None)):
            trials.groups.append(group)
            yield group
            strategy.tell(number, group, {trial: trials.returns[trial] for trial in group.trials})
