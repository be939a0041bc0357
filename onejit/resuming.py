"""`--resume RUN_DIR` of `onejit train` and `onejit sweep`: locking and reading the run."""

import contextlib
import sys
from pathlib import Path

import tyro

from onejit import command_line, run_directory
from onejit.command_line import Hosts
from onejit.hosts import is_first, only_first
from onejit.packages import versions


@contextlib.contextmanager
def holding(run_dir: Path, is_new: bool = False):
    """Hold the lock of a run directory, in process 0. Raises ValueError.

    A new directory is made. It is removed if the block fails before it has written run.json.
    """
    held = []

    def take():
        held.append(run_directory.claim(run_dir) if is_new else run_directory.lock(run_dir))

    only_first(take)
    try:
        yield
    except BaseException:
        if held and is_new and not (run_dir / "run.json").exists():
            run_directory.remove(run_dir)
        raise
    finally:
        for lock in held:
            lock.release()


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

    given = command_line.parse(command, words[1:], config=(tyro.conf.OmitArgPrefixes,))
    command_line.check_options(given)
    run_dir = Path(words[0])
    record = run_directory.read_record(run_dir)
    if run_directory.kind_of(record) != kind:
        raise ValueError(
            f"resume: {words[0]} was not started by onejit {kind}, and has no checkpoints"
        )
    missing = [name for name in ("versions", "seconds") if name not in record]
    if missing:
        raise ValueError(f"{run_dir / 'run.json'}: is damaged, it lacks {missing[0]}")
    until_the_end.enter_context(holding(run_dir))
    # again: another process may have just finished the run
    record = run_directory.read_record(run_dir)
    if is_first():
        warn_of_changed_versions(record["versions"])
    return run_dir, record, given


def warn_of_changed_versions(old: dict) -> None:
    now = versions()
    changes = []
    for name, version in old.items():
        if now.get(name) != version:
            changes.append(f"{name} {version} -> {now.get(name)}")
    if changes:
        text = f"versions have changed since the run began: {', '.join(changes)}"
        print(f"resume: note: {text}", file=sys.stderr)
