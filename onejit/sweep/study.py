"""A study of Optuna in a file or a database, on which several sweeps work together.

Each sweep trains batches of its own and reads the results of all others. It holds a lease on its
trials, which it renews while it runs. If its machine dies, the lease ends, and another sweep marks
its trials as failed.
"""

import contextlib
import json
import threading
import time
import zlib
from pathlib import Path

from onejit.script.configs import plain
from onejit.sweep.options import without_password
from onejit.sweep.swept import show_value
from onejit.sweep.trials import Sweep

LEASE = 300.0  # seconds without a renewal after which a sweep counts as dead
OF_STUDY = "sweep"  # the study's attribute for what all of its sweeps have in common
OWNER = "owner"  # a trial's attribute for the sweep that trains it
REPLACES = "replaces"  # a trial's attribute for the failed trial whose result it has


def open_storage(name: str):
    """Optuna's journal in a file, or a database with a URL. Raises ValueError."""
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        if "://" in name:
            return RDBStorage(name)
        lock = Path(f"{name}.lock")
        if lock.is_symlink() and not lock.exists():  # Optuna would wait for it for ever
            lock.unlink()
        return JournalStorage(JournalFileBackend(name))
    except Exception as error:  # many kinds: of files, databases and missing packages
        cause = " ".join(str(error).split()).replace(name, without_password(name))[:300]
        raise ValueError(
            f"storage = {without_password(name)}: cannot be opened ({cause})"
        ) from error


def retry(function, *args):
    """Call a function of the study, again and again while the storage is away for a moment.

    Raises OSError if it is away for longer than a lease.
    """
    from optuna.exceptions import StorageInternalError

    deadline = time.monotonic() + LEASE
    while True:
        try:
            return function(*args)
        except (OSError, StorageInternalError) as error:
            if time.monotonic() > deadline:
                cause = " ".join(str(error).split())[:300]
                raise OSError(f"storage: is away ({cause}); `onejit resume` continues") from error
            time.sleep(LEASE / 100)


def common(sweep: Sweep) -> dict:
    """What all sweeps of a study have in common."""
    options = sweep.options
    names = ("num_seeds", "halving", "rungs")
    settings = plain(sweep.search.config)
    swept = {name: " ".join(words) for name, words in sweep.search.swept.items()}
    fixed = {name: value for name, value in settings.items() if name not in swept}
    given = {name: getattr(options, name) for name in names if getattr(options, name)}
    values = fixed | swept | given
    values["script"] = sweep.record.sha256
    return json.loads(json.dumps(values))  # as the storage returns it


def open_study(sweep: Sweep, storage: str, sampler):
    """The study in the storage, a new one if there is none.

    Raises ValueError if the study minimizes, or belongs to another search.
    """
    import optuna

    study = optuna.create_study(
        direction="maximize",
        sampler=sampler,
        storage=open_storage(storage),
        study_name="onejit",
        load_if_exists=True,
    )
    about = f"storage = {without_password(storage)}"
    if study.directions != [optuna.study.StudyDirection.MAXIMIZE]:
        raise ValueError(f"{about}: its study onejit does not maximize; a sweep needs a new study")
    mine = common(sweep)
    theirs = study.user_attrs.get(OF_STUDY)
    if theirs is None and study.get_trials(deepcopy=False):
        raise ValueError(f"{about}: its study onejit has trials of another search")
    if theirs is None:
        study.set_user_attr(OF_STUDY, mine)
        return study
    for name in mine | theirs:
        if mine.get(name) != theirs.get(name):
            raise ValueError(f"{about}: belongs to a sweep with another {name}")
    return study


def seed_of(sweep: Sweep) -> int:
    """A seed of the sampler that no other sweep of the study has, nor this one before."""
    text = f"{sweep.options.seed} {sweep.record.owner} {len(sweep.record.trials)}"
    return zlib.crc32(text.encode())


# --- leases ---


@contextlib.contextmanager
def holding_lease(study, owner: str):
    """Renew the lease of `owner` until the end."""
    over = threading.Event()

    def renew():
        while not over.wait(LEASE / 5):
            with contextlib.suppress(Exception):  # many kinds: a disk may be away for a while
                study.set_user_attr(owner, time.time())

    retry(study.set_user_attr, owner, time.time())
    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def fail_expired(study) -> None:
    """Mark the trials of sweeps that have died as failed."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        begun = trial.datetime_start.timestamp()
        renewed = study.user_attrs.get(trial.user_attrs.get(OWNER), begun)
        if time.time() - renewed > LEASE:
            with contextlib.suppress(ValueError, RuntimeError):  # another sweep was faster
                study.tell(trial.number, state=TrialState.FAIL)


def own(sweep: Sweep, trials: list) -> None:
    """Note to whom new trials belong, in the study and in the record."""
    for trial in trials:
        trial.set_user_attr(OWNER, sweep.record.owner)
    sweep.record.numbers += [trial.number for trial in trials]


def claim(sweep: Sweep, study, points: list[dict], size: int) -> list[dict]:
    """Up to `size` points of a grid that no other sweep has, which now belong to this one.

    Each is a running trial. If two sweeps add a trial of a point at the same time, the first trial
    in the study counts, and the other one fails.
    """
    from optuna.distributions import CategoricalDistribution
    from optuna.trial import TrialState, create_trial

    params = [{name: as_choice(value) for name, value in point.items()} for point in points]
    space = {}
    for name in points[0]:
        choices = dict.fromkeys(param[name] for param in params)
        space[name] = CategoricalDistribution(list(choices))

    def trials_of(param: dict) -> list:
        trials = study.get_trials(deepcopy=False)
        return [
            trial for trial in trials if trial.params == param and trial.state != TrialState.FAIL
        ]

    owner = {OWNER: sweep.record.owner}
    claimed = {}  # {number of the trial: point}
    for point, param in zip(points, params, strict=True):
        if len(claimed) == size:
            break
        if not trials_of(param):
            trial = create_trial(
                state=TrialState.RUNNING, params=param, distributions=space, user_attrs=owner
            )
            study.add_trial(trial)
        first, *others = trials_of(param)
        for trial in others:
            if trial.user_attrs == owner and trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
        # also a claim that a kill has left before the record was written
        if first.user_attrs == owner and first.state == TrialState.RUNNING:
            claimed[first.number] = point
    sweep.record.numbers += claimed
    return list(claimed.values())


def as_choice(value):
    """A value of a field as Optuna stores it."""
    return value if isinstance(value, (bool, int, float, str)) else show_value(value)


# --- trials of a sweep that was resumed, or whose lease has ended ---


def is_running(study, number: int) -> bool:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False)[number].state == TrialState.RUNNING


def tell_again(study, number: int, value: float, stopped_at: int | None) -> None:
    """Tell the result of a trial that an earlier session has asked for.

    `stopped_at` is the update at which `--halving` stopped it. Such a trial, or one that was marked
    as failed in the meantime, is added to the study as a new trial.
    """
    from optuna.trial import TrialState, create_trial

    trials = study.get_trials(deepcopy=False)
    trial = trials[number]
    is_replaced = any(other.user_attrs.get(REPLACES) == number for other in trials)
    if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) or is_replaced:
        return
    if trial.state == TrialState.RUNNING:
        if stopped_at is None:
            study.tell(number, value)
            return
        study.tell(number, state=TrialState.FAIL)
    is_complete = stopped_at is None
    new = create_trial(
        state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
        value=value,
        intermediate_values={} if is_complete else {stopped_at: value},
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={REPLACES: number},
    )
    study.add_trial(new)
