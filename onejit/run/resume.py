"""`--resume RUN_DIR` of `onejit train` and `onejit sweep`: locking and reading the run."""

import contextlib
import sys
from pathlib import Path

import tyro

from onejit.base.packages import versions
from onejit.engine.hosts import is_first
from onejit.run.lock import holding
from onejit.run.record import Record, numerics, read_record, read_stored
from onejit.script import command_line
from onejit.script.command_line import Hosts


def read_resumed(words: list[str], kind: str, options, until_the_end: contextlib.ExitStack):
    """Lock and read the run of `--resume RUN_DIR`: `(run_dir, record, options)`.

    `kind` is the command, "train" or "sweep", and `options` the dataclass of the options that can
    be given. Raises ValueError.
    """
    if not words or words[0].startswith("-"):
        raise ValueError("resume: needs RUN_DIR, the run to continue")

    def command(
        given: options = options(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        hosts: Hosts = Hosts(),  # noqa: B008
    ):
        return given

    try:
        given = command_line.parse(
            command, words[1:], prog=f"onejit {kind} --resume", config=(tyro.conf.OmitArgPrefixes,)
        )
    except ValueError as error:
        if "is not a flag" not in str(error):
            raise
        raise ValueError(f"resume: {error}; a resumed run keeps its settings") from error
    command_line.check_options(given)
    run_dir = Path(words[0])
    record = read_record(run_dir)
    if record.kind != kind:
        raise ValueError(
            f"resume: {words[0]} was not started by onejit {kind}, and has no checkpoints"
        )
    missing = [name for name in ("versions", "seconds") if name not in read_stored(run_dir)]
    if missing:
        raise ValueError(f"{run_dir / 'run.json'}: is damaged, it lacks {missing[0]}")
    until_the_end.enter_context(holding(run_dir))
    # again: another process may have just finished the run
    record = read_record(run_dir)
    if is_first():
        warn_of_changed_versions(record.versions)
    check_random_numbers(record)
    return run_dir, record, given


def options_of(kind, run_dir: Path, record: Record, memory: float | None = None):
    """The options of a run that has begun. `kind` is their dataclass.

    `memory` replaces the option of this name if it is given.
    """
    values = dict(record.options)
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
        print(f"resume: note: {text}", file=sys.stderr)


def check_random_numbers(record: Record) -> None:
    """Raise ValueError if random keys or the precision are other than when the run began."""
    import jax

    now = jax.config.jax_default_prng_impl  # pyright: ignore[reportAttributeAccessIssue]
    before = record.random_keys or now  # a run of a script's own `main` does not say it
    if before != now:
        raise ValueError(
            f"resume: the run has keys of kind {before}, and this process {now}; "
            f"set JAX_DEFAULT_PRNG_IMPL={before}"
        )
    current = numerics()
    for name, value in record.numerics.items():
        if current.get(name) != value:
            raise ValueError(
                f"resume: the run has {name}={value!r}, and this process {current.get(name)!r}; "
                "its numbers would differ"
            )
