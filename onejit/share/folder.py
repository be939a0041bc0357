"""The folder that `onejit export` writes for a model hub."""

import contextlib
import dataclasses
import io
import shutil
from pathlib import Path

from onejit.base.files import write
from onejit.run.directory import copy_of_script
from onejit.run.record import Record, write_record
from onejit.script import local_modules
from onejit.script.contract import Script
from onejit.share.card import Shown, model_card

COPIED = (
    "agent.safetensors",
    "best_agent.safetensors",
    "config.yaml",
    "metrics.npz",
    "evaluation.npy",
    "evaluations.npz",
    "learning_curve.png",
)


def check_finished(run_dir: Path, record: Record, force: bool) -> None:
    """Raise ValueError unless a run of `onejit train` has finished and has its script."""
    if record.final_return is None or record.finished is None:
        raise ValueError(f"run_dir = {run_dir}: is not a finished run of onejit train")
    if copy_of_script(run_dir, record, force) is None:
        raise ValueError(f"run_dir = {run_dir}: has no copy of its script")


def copy_files(run_dir: Path, record: Record, folder: Path) -> None:
    """Copy the files of a run, and the user's own modules."""
    for name in COPIED:
        if (run_dir / name).is_file():
            shutil.copy(run_dir / name, folder / name)
    # without paths on this machine and passwords of databases
    public = dataclasses.replace(record, command=None, path=None, folders=[])
    write_record(folder, public)
    modules = local_modules.read_copies(run_dir, record, force=True)  # checked by `load_run`
    local_modules.write_copies(folder, modules)


def replay(run_dir: Path, agent: int, folder: Path, force: bool, trust: bool) -> None:
    """Write replay.gif. Raises ValueError."""
    from onejit.watch import render

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it names a file that is renamed
            (path,) = render.main(
                run_dir,
                agents=(str(agent),),
                formats=("gif",),
                out=folder,
                force=force,
                trust=trust,
            )
    except ValueError as error:
        raise ValueError(f"video: {error}; --no-video exports without it") from error
    path.replace(folder / "replay.gif")


def write_folder(
    run_dir: Path,
    record: Record,
    script: Script,
    shown: Shown,
    out: Path,
    video: bool,
    force: bool,
    trust: bool,
) -> None:
    """Write the folder completely or not at all. Raises ValueError."""
    folder = out.with_name(f"{out.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        copy_files(run_dir, record, folder)
        shutil.copy(script.__file__, folder)
        if video:
            replay(run_dir, shown.agent, folder, force, trust)
            picture = f"![an episode of agent {shown.agent}](replay.gif)"
            shown = shown._replace(pictures=f"{picture}\n\n{shown.pictures}")
        write(folder / "README.md", model_card(record, shown))
        folder.replace(out)
