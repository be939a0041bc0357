"""Sweeps that decide what to train, without training."""


def groups_of(request, strategy):
    """The groups of a strategy, one after the other, which the caller gives returns.

    It notes each in `request.groups` and puts the returns of its trials into `request.returns`.
    """
    with strategy:
        for number, group in enumerate(iter(strategy.next, None)):
            request.groups.append(group)
            yield group
            strategy.tell(number, group, {trial: request.returns[trial] for trial in group.trials})
