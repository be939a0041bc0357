"""What a sweep is asked to do: its options, its trials and their compile groups."""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from onejit.base.files import delete_folder
from onejit.base.paths import expanded
from onejit.engine import hosts
from onejit.run.directory import new_run_dir, read_config, script_of
from onejit.run.record import Record, make_record
from onejit.run.resume import ResumeOptions, open_run, options_of
from onejit.script import command_line
from onejit.script.command_line import REMOVED
from onejit.script.configs import as_flag, field_names, field_of
from onejit.script.contract import Script
from onejit.script.load import load_script
from onejit.script.steps import steps_of
from onejit.sweep.options import (
    Options,
    check_options,
)
from onejit.sweep.values import is_float, is_swept, make_trials


class Group(NamedTuple):
    """Trials that train in one program, because they differ only in float fields.

    With `--halving` they train from the end of the rung before to the end of this rung.
    """

    config: Any
    trials: list[int]
    rung: int = 0
    first_update: int = 0
    last_update: int | None = None  # the update that ends the rung; None for all updates
    before: int | None = None  # number of the group that trained them up to `first_update`

    @property
    def num_updates(self) -> int:
        return self.config.num_updates if self.last_update is None else self.last_update

    def steps(self, num_runs: int) -> int:
        """Environment steps of so many runs, without the warm-up."""
        return num_runs * (self.num_updates - self.first_update) * steps_of(self.config)


class Request(NamedTuple):
    """What the command line requests. Lists and dicts collect what the sweep has done so far."""

    script: Script
    config: Any  # the values of the fields that are not swept
    options: Options
    run_dir: Path
    swept: dict  # {field: its words on the command line}
    trials: list  # a {swept field: value} per trial; Optuna's are added when they are proposed
    record: Record  # run.json
    groups: list[Group]  # groups that have started
    # {trial: final return of each seed}, -inf if not finite, NaN if not known yet; on process 0
    returns: dict


# --- the command line ---


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


def read_request(words: list[str], description: str | None = None) -> Request:
    """Connect to other hosts, then import the script. `description` is for --help.

    Raises ValueError.
    """
    name, flags = command_line.take_script(words)
    hosts.connect(command_line.read_hosts(flags))
    check_given_once(words)
    script = load_script(name)
    config, options, swept = parse(script, flags, description)
    return new_request(script, config, options, swept, ["sweep", *words])


def read_resumed(
    given: ResumeOptions, run_dir: Path, until_the_end: contextlib.ExitStack
) -> Request | None:
    """The sweep of `onejit resume RUN_DIR`; None if it has finished. Raises ValueError."""
    if given.total_timesteps is not None:
        raise ValueError("total_timesteps: a sweep cannot be extended, only a run")
    record = open_run(run_dir, until_the_end)
    if record.finished is not None:
        delete_folder(run_dir / "slices")  # a kill may have left them
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    return request_of(run_dir, record, given)


def parse(script: Script, flags: dict[str, list[str]], description: str | None) -> tuple:
    """`(config, options, swept)` of a command line. Raises ValueError."""
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
    if options.optuna == "grid" and options.samples is None:
        points = make_trials(script, swept, None, options.seed)
        options = dataclasses.replace(options, samples=len(points))
    if options.storage:
        options = dataclasses.replace(options, storage=with_absolute_path(options.storage))
    return config, options, swept


def new_request(
    script: Script, config, options: Options, swept: dict, command: list[str]
) -> Request:
    """The request of a sweep that begins, with its new directory and record. Raises ValueError."""
    trials = trials_of(script, swept, options)
    run_dir = options.run_dir or new_run_dir(script, config, prefix="sweep-")
    run_dir = Path(hosts.agree(str(run_dir)))
    record = make_record("sweep", script, config, options, command)
    record.swept = swept
    if options.storage:
        record.owner = hosts.agree(uuid.uuid4().hex)
    return Request(script, config, options, run_dir, swept, trials, record, [], {})


def request_of(run_dir: Path, record: Record, given: ResumeOptions) -> Request:
    """The request of a sweep that has begun. Raises ValueError."""
    script = script_of(run_dir, record, accept_edited=given.force)
    if not record.swept:
        raise ValueError(
            f"{run_dir}: is a sweep of an older version of onejit, which alone can read its options"
        )
    config = read_config(script, run_dir / "config.yaml")
    used = [name for name in REMOVED if record.options.pop(name, None) or name in record.others]
    if used:
        raise ValueError(f"{run_dir}: {as_flag(used[0])} {REMOVED[used[0]]}")
    options = options_of(Options, run_dir, record, given.memory)
    trials = trials_of(script, record.swept, options)
    return Request(script, config, options, run_dir, record.swept, trials, record, [], {})


# --- trials ---


def trials_of(script: Script, swept: dict, options: Options) -> list[dict]:
    """The trials that are known before the first one is trained. Raises ValueError."""
    if options.optuna:
        return []
    return make_trials(script, swept, options.samples, options.seed)


def float_names(request: Request) -> list[str]:
    return [name for name in request.swept if is_float(request.script, name)]


def config_of(request: Request, trial: int):
    return dataclasses.replace(request.config, **request.trials[trial])


def make_groups(request: Request, trials: Iterable[int]) -> list[Group]:
    """The groups of these trials."""
    floats = float_names(request)
    groups = {}
    for index in trials:
        trial = request.trials[index]
        static = {name: value for name, value in trial.items() if name not in floats}
        key = tuple(static.items())
        if key not in groups:
            groups[key] = Group(dataclasses.replace(request.config, **static), [])
        groups[key].trials.append(index)
    return list(groups.values())
