"""The directory of a run: taking it, locking it, giving it back."""

import contextlib
from pathlib import Path

import filelock

from onejit.base.files import delete_folder
from onejit.base.text import resume_command
from onejit.engine.hosts import only_first

LOOK = 0.5  # seconds: `onejit list` holds the lock for a moment to see if it is free


@contextlib.contextmanager
def holding(run_dir: Path, is_new: bool = False):
    """Hold the lock of a run directory, in process 0. Raises ValueError.

    A new directory is made. It is removed if the block fails before it has written run.json.
    """
    held = []

    def take():
        held.append(claim(run_dir) if is_new else lock(run_dir))

    only_first(take)
    try:
        yield
    except BaseException:
        if held and is_new and not (run_dir / "run.json").exists():
            remove(run_dir)
        raise
    finally:
        for each in held:
            each.release()


def check_new(run_dir: Path) -> None:
    """Raise ValueError if a run directory holds anything but a lock: no run is overwritten."""
    if run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= {".lock"}:
        return
    if run_dir.exists():
        is_run = (run_dir / "run.json").exists()
        advice = f"; {resume_command(run_dir)} continues it" if is_run else ""
        raise ValueError(f"run_dir = {run_dir}: already exists{advice}")


def claim(run_dir: Path):
    """Make a new run directory and lock it for as long as the result lives. Raises ValueError.

    An empty directory is taken as it is: it may be a volume or a link.
    """
    check_new(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run_dir = {run_dir}: cannot be made ({error})") from error
    held = lock(run_dir)
    check_new(run_dir)  # another process may have had it until now
    return held


def remove(run_dir: Path) -> None:
    """Remove a run directory in which nothing was begun. A volume or a link stays, empty."""
    for path in list(run_dir.glob("*")):
        if path.is_dir():
            delete_folder(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        run_dir.rmdir()


def lock(run_dir: Path):
    """Lock a run directory for as long as the result lives. Raises ValueError."""
    held = filelock.FileLock(Path(run_dir) / ".lock")
    try:
        held.acquire(timeout=LOOK)
    except filelock.Timeout:
        raise ValueError(f"{run_dir}: another process is writing into this run") from None
    except OSError as error:
        raise ValueError(f"{run_dir}: cannot be locked ({error})") from error
    return held


def is_locked(run_dir: Path) -> bool:
    """Whether a process is writing into a run directory. Changes nothing."""
    path = Path(run_dir) / ".lock"
    if not path.is_file():  # trying the lock would make the file
        return False
    try:
        with filelock.FileLock(path).acquire(timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # the directory is read-only
        return False
