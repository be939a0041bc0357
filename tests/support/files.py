"""The files of the repository."""

import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def tracked() -> frozenset[str] | None:
    """The paths that git tracks, None without git or its checkout, as in an archive."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"],
            cwd=ROOT,
            env=environment,  # without what a hook of git sets
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if not (ROOT / ".git").exists() or done.returncode:
        return None
    return frozenset(done.stdout.split("\0"))


def repository_files(pattern: str) -> list[Path]:
    """The files that match, without those that a user has added and git does not track."""
    known = tracked()
    paths = [path for path in sorted(ROOT.glob(pattern)) if path.is_file()]
    if known is None:
        return paths
    return [path for path in paths if path.relative_to(ROOT).as_posix() in known]


SCRIPTS = [path.stem for path in repository_files("*.py")]
