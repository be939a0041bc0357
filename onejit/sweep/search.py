"""Trials that Optuna proposes, batch by batch."""

from onejit import statistics
from onejit.hosts import is_first, only_first
from onejit.sweep.request import Group, Request
from onejit.sweep.values import DISTRIBUTIONS, read_distribution, read_values


def make_study(request: Request):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options = request.options
    if options.optuna == "tpe":
        # constant_liar spreads out the trials of a batch
        sampler = optuna.samplers.TPESampler(seed=options.seed, constant_liar=True)
    elif options.optuna == "cmaes":
        sampler = optuna.samplers.CmaEsSampler(
            seed=options.seed, popsize=max(4, options.batch), warn_independent_sampling=False
        )
    else:
        sampler = optuna.samplers.RandomSampler(seed=options.seed)
    return optuna.create_study(direction="maximize", sampler=sampler)


def is_mirrored(request: Request, name: str) -> bool:
    """Whether Optuna proposes 1 - value of a field."""
    return request.swept[name][0] == "one-minus-log-uniform"


def make_space(request: Request) -> dict:
    """Optuna's distribution of each swept field, or of 1 - value if it is mirrored."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    space = {}
    for name, words in request.swept.items():
        if words[0] not in DISTRIBUTIONS:
            space[name] = CategoricalDistribution(read_values(request.script, name, words))
            continue
        kind, low, high = read_distribution(request.script, name, words)
        if is_mirrored(request, name):
            space[name] = FloatDistribution(1.0 - high, 1.0 - low, log=True)
        else:
            space[name] = FloatDistribution(low, high, log=kind == "log-uniform")
    return space


def ask(request: Request, study, space: dict, size: int) -> list[dict]:
    """The values of `size` new trials."""
    proposals = [study.ask(space).params for _ in range(size)]
    trials = []
    for params in proposals:
        trial = {}
        for name in space:
            trial[name] = 1.0 - params[name] if is_mirrored(request, name) else params[name]
        trials.append(trial)
    return trials


def propose_groups(request: Request):
    """Groups of `batch` trials, which Optuna proposes from earlier returns.

    A resumed sweep repeats the proposals.
    """
    options = request.options
    trials = request.trials
    known = request.record.setdefault("proposed", [])
    study = make_study(request) if is_first() else None
    space = make_space(request) if is_first() else {}
    while len(trials) < options.samples:
        first = len(trials)
        size = min(options.batch, options.samples - first)
        trials.extend(only_first(ask, request, study, space, size))
        last = len(trials)
        if known[first:last] not in ([], trials[first:]):
            raise ValueError(
                "resume: Optuna proposes other trials than before; has its version changed?"
            )
        known[first:last] = trials[first:]
        yield Group(request.config, list(range(first, last)))
        if is_first():
            for index in range(first, last):
                value = statistics.interquartile_mean(request.returns[index])
                study.tell(index, float(value))  # -inf ranks last
