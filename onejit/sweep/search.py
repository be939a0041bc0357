"""Trials that Optuna proposes, batch by batch."""

import contextlib
import warnings

from onejit import statistics
from onejit.hosts import is_first, only_first
from onejit.sweep import halving, storage
from onejit.sweep.ranking import last_groups
from onejit.sweep.request import Group, Request, required
from onejit.sweep.values import DISTRIBUTIONS, read_distribution, read_values


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


def ask(request: Request, studies: list, space: dict, size: int, asked: list) -> list[dict]:
    """The values of `size` new trials. Adds Optuna's trials to `asked`."""
    (study,) = studies
    if request.options.storage:
        storage.fail_expired(study)
    proposals = [study.ask(space) for _ in range(size)]
    trials = []
    for proposal in proposals:
        trial = {}
        for name, value in proposal.params.items():
            field = name.removeprefix(MIRRORED)
            trial[field] = value if field == name else 1.0 - value
            if field != name:
                proposal.set_user_attr(field, trial[field])  # for readers of the study
        trials.append(trial)
    if request.options.storage:
        storage.own(request, proposals)
    asked += proposals
    return trials


def stopped_at(request: Request, index: int) -> int | None:
    """The update at which `--halving` has stopped a trial."""
    if request.options.halving is None:
        return None
    group = request.groups[last_groups(request)[index]]
    return group.last_update if group.num_updates < group.config.num_updates else None


def tell(request: Request, study, index: int, proposal) -> None:
    """Tell Optuna the result of a trial. A trial without a finite result counts as the worst.

    `proposal` is Optuna's trial, or None if an earlier session has asked for it.
    """
    import optuna

    value = float(statistics.interquartile_mean(request.returns[index]))
    update = stopped_at(request, index)
    if request.options.storage:
        number = request.record["numbers"][index]
        if proposal is None or not storage.is_running(study, number):
            storage.tell_again(study, number, value, update)
            return
    if update is not None:
        proposal.report(value, step=update)
        study.tell(proposal, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(proposal, value)


def propose_groups(request: Request):
    """Groups of `batch` trials, which Optuna proposes from earlier returns.

    With `--halving` a batch is a bracket. A resumed sweep repeats the proposals; with `--storage`
    it remembers them, because Optuna has seen other results meanwhile.
    """
    options = request.options
    samples = required(options.samples)
    trials = request.trials
    known = request.record.setdefault("proposed", [])
    studies = []  # the study, on process 0
    asked = []  # Optuna's trials, on process 0
    only_first(lambda: studies.append(storage.retry(make_study, request)))
    space = make_space(request) if is_first() else {}
    with contextlib.ExitStack() as until_the_end:
        if is_first() and options.storage:
            until_the_end.enter_context(storage.holding_lease(studies[0], request.record["owner"]))
        while len(trials) < samples:
            first = len(trials)
            size = min(options.batch, samples - first)
            if options.storage and known[first:]:
                trials.extend(known[first : first + size])
                asked += [None] * size
            else:
                trials.extend(only_first(storage.retry, ask, request, studies, space, size, asked))
            last = len(trials)
            if known[first:last] not in ([], trials[first:]):
                raise ValueError(
                    "resume: Optuna proposes other trials than before; has its version changed?"
                )
            known[first:last] = trials[first:]
            group = Group(request.config, list(range(first, last)))
            yield from halving.rungs(request, [group]) if options.halving else [group]
            if is_first():
                for index in range(first, last):
                    storage.retry(tell, request, *studies, index, asked[index])
