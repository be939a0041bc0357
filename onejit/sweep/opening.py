"""Opening a sweep: what the command line asks for, or what a run directory has begun."""

import contextlib
import dataclasses
import uuid
from pathlib import Path

from onejit.base.paths import expanded
from onejit.engine import hosts
from onejit.run.directory import new_run_dir, read_config, script_of
from onejit.run.record import make_record
from onejit.run.resume import ResumeOptions, open_run, options_of
from onejit.script import command_line
from onejit.script.configs import field_names, field_of
from onejit.script.contract import Script
from onejit.script.load import load_script
from onejit.sweep.options import Options, check_options
from onejit.sweep.slices import delete_slices
from onejit.sweep.swept import is_swept, make_trials
from onejit.sweep.trials import Search, Sweep, Trials


def with_absolute_path(name: str) -> str:
    """A storage whose file is found from any folder, as `onejit resume` and Optuna's locks need it.

    `~` and variables in the file's path are replaced. Raises ValueError.
    """
    scheme, _, file = name.rpartition(":///")
    if scheme.startswith("sqlite"):
        if file.startswith((":", "file:")) or not file:  # in memory, or an URI of SQLite's own
            return name
        return f"{scheme}:///{Path(expanded(file)).absolute()}"
    return name if "://" in name else str(Path(expanded(name)).absolute())


def check_given_once(words: list[str]) -> None:
    """Raise ValueError if a flag is given twice."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    fields = [field_of(flag) for flag in flags]
    for flag in flags:
        if fields.count(field_of(flag)) > 1:
            raise ValueError(f"{flag}: is given twice")


def read_sweep(words: list[str], description: str | None = None) -> Sweep:
    """Connect to other hosts, then import the script. `description` is for --help.

    Raises ValueError.
    """
    name, flags = command_line.take_script(words)
    hosts.connect(command_line.read_hosts(flags))
    check_given_once(words)
    script = load_script(name)
    search = parse(script, flags, description)
    config = search.config
    options = search.options
    run_dir = options.run_dir or new_run_dir(script, config, prefix="sweep-")
    run_dir = Path(hosts.agree(str(run_dir)))
    record = make_record("sweep", script, config, options, ["sweep", *words])
    record.swept = search.swept
    if options.storage:
        record.owner = hosts.agree(uuid.uuid4().hex)
    return Sweep(search, Trials(first_values(search)), run_dir, record)


def open_sweep(
    given: ResumeOptions, run_dir: Path, until_the_end: contextlib.ExitStack
) -> Sweep | None:
    """The sweep of `onejit resume RUN_DIR`; None if it has finished. Raises ValueError."""
    if given.total_timesteps is not None:
        raise ValueError("total_timesteps: a sweep cannot be extended, only a run")
    record = open_run(run_dir, until_the_end)
    if record.finished is not None:
        delete_slices(run_dir)  # a kill may have left them
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    script = script_of(run_dir, record, accept_edited=given.force)
    if not record.swept:
        raise ValueError(
            f"{run_dir}: is a sweep of an older version of onejit, which alone can read its options"
        )
    config = read_config(script, run_dir / "config.yaml")
    options = options_of(Options, run_dir, record, given.memory)
    search = Search(script, config, options, record.swept)
    return Sweep(search, Trials(first_values(search)), run_dir, record)


def first_values(search: Search) -> list[dict]:
    """The trials that are known before the first one is trained. Raises ValueError."""
    options = search.options
    if options.optuna:
        return []
    return make_trials(search.script, search.swept, options.samples, options.seed)


def parse(script: Script, flags: dict[str, list[str]], description: str | None) -> Search:
    """The search that a command line asks for. Raises ValueError."""
    swept = {}
    others = {}
    for name, words in flags.items():
        is_field = name in field_names(script)
        part = swept if is_field and is_swept(script, name, words) else others
        part[name] = words
    config, options, _ = command_line.parse_with(
        script, others, Options, description, prog="onejit sweep"
    )
    check_options(script, swept, options)
    if options.optuna == "grid" and not options.samples:
        points = make_trials(script, swept, 0, options.seed)
        options = dataclasses.replace(options, samples=len(points))
    if options.storage:
        options = dataclasses.replace(options, storage=with_absolute_path(options.storage))
    return Search(script, config, options, swept)
