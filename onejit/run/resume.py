"""Opening a run or a sweep that has begun: its lock, its record, and what has changed since."""

import contextlib
import dataclasses
import sys
from pathlib import Path

from onejit.base.packages import versions
from onejit.engine.hosts import is_first
from onejit.run.lock import holding
from onejit.run.record import Record, numerics, read_record
from onejit.script.configs import as_flag


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """All else stays as it was when the run began."""

    # more environment steps per agent than before, to extend a run; not for a sweep
    total_timesteps: int | None = None
    # GiB of each device to use for programs of a sweep that have not been compiled yet
    memory: float | None = None
    # continue with the run's copies of the script and of your modules although they were edited
    force: bool = False


def open_run(run_dir: Path, until_the_end: contextlib.ExitStack) -> Record:
    """Lock and read a run or a sweep. Raises ValueError."""
    if read_record(run_dir).kind not in ("train", "sweep"):
        raise ValueError(
            f"{run_dir}: was not started by onejit train or onejit sweep, and has no checkpoints"
        )
    until_the_end.enter_context(holding(run_dir))
    # again: another process may have just finished the run
    record = read_record(run_dir)
    if is_first():
        warn_of_changed_versions(record.versions)
    check_random_numbers(record)
    return record


def options_of(kind, run_dir: Path, record: Record, memory: float | None = None):
    """The options of a run that has begun. `kind` is their dataclass.

    `memory` replaces the option of this name if it is given. Raises ValueError if an option is none
    of this version's.
    """
    known = {field.name for field in dataclasses.fields(kind)}
    values = {}
    for name, value in record.options.items():
        if name not in known and value:
            raise ValueError(
                f"{run_dir}: {as_flag(name)} is an option of another version of onejit, which can "
                "continue it"
            )
        # older versions have written None for some options that are 0 now
        if name in known and value is not None:
            values[name] = value
    if memory is not None:
        values["memory"] = memory
    settings = record.settings
    return kind(num_seeds=settings["num_seeds"], seed=settings["seed"], run_dir=run_dir, **values)


def warn_of_changed_versions(old: dict) -> None:
    now = versions()
    changes = []
    for name, version in old.items():
        if now.get(name) != version:
            changes.append(f"{name} {version} -> {now.get(name)}")
    if changes:
        text = f"versions have changed since the run began: {', '.join(changes)}"
        print(f"onejit: note: {text}", file=sys.stderr)


def check_random_numbers(record: Record) -> None:
    """Raise ValueError if random keys or the precision are other than when the run began."""
    import jax

    now = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    before = record.random_keys or now  # a run of a script's own `main` does not say it
    if before != now:
        raise ValueError(
            f"the run has keys of kind {before}, and this process {now}; "
            f"set JAX_DEFAULT_PRNG_IMPL={before}"
        )
    current = numerics()
    for name, value in record.numerics.items():
        if current.get(name) != value:
            raise ValueError(
                f"the run has {name}={value!r}, and this process {current.get(name)!r}; "
                "its numbers would differ"
            )
