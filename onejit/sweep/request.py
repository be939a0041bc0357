"""What a sweep is asked to do: its options, its trials and their compile groups."""

import contextlib
import dataclasses
import shutil
import uuid
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import tyro

from onejit import command_line, hosts, local_modules, resuming, run_directory
from onejit.configs import field_names, field_of, read_flags
from onejit.packages import check_packages
from onejit.scripts import load_script
from onejit.sweep.values import DISTRIBUTIONS, is_float, is_swept, make_trials
from onejit.tracking import TRACKERS
from onejit.train import new_run_dir

T = TypeVar("T")
# samplers of Optuna, and the packages that they need
SAMPLERS = {"tpe": ["optuna"], "random": ["optuna"], "cmaes": ["optuna", "cmaes"]}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a sweep."""

    num_seeds: int = 4  # agents per trial; all trials use the same random keys
    samples: int | None = None  # number of draws of the fields with a distribution
    # sampler of Optuna that proposes the samples
    optuna: Literal["tpe", "cmaes", "random"] | None = None
    # file, or URL of a database, with a study of Optuna's that several sweeps share
    storage: str | None = None
    batch: int = 8  # number of trials that Optuna proposes at a time, and that train together
    # share of the trials to train, such as 1/4; --merge joins the results of all shares
    part: str | None = None
    # successive halving: the best 1/HALVING of the trials of a rung go on to the next rung
    halving: int | None = None
    # number of rungs of --halving, by default as many as the number of trials allows; the last rung
    # ends at all timesteps, and each earlier rung at 1/HALVING of the timesteps of the next rung
    rungs: int | None = None
    # timesteps of an agent in the first rung of --halving, several episodes; instead of --rungs
    first_rung: int | None = None
    # population-based training: --samples is the size of a population, --num-seeds the number of
    # independent populations
    pbt: tyro.conf.FlagCreatePairsOff[bool] = False
    # updates between exchanges of --pbt; must divide the number of updates
    exploit_interval: int | None = None
    # agents of --pbt that copy another one keep their own replay and episodes
    keep_replay: tyro.conf.FlagCreatePairsOff[bool] = False
    seed: int = 0  # seed of the key that the agents' keys are split from, and of the draws
    # new directory for the results; runs/SCRIPT/sweep-ENVIRONMENT-TIME-NUMBER by default
    run_dir: Path | None = None
    keep: int = 5  # number of best trials whose agents are saved
    # tracker for the final returns of each trial
    track: Literal["tensorboard", "trackio", "wandb"] | None = None
    # seconds between checkpoints of the current slice; 0 for none
    checkpoint_interval: float = 60.0
    memory: float | None = None  # GiB of each device to use; 90 % of what is free by default


@dataclasses.dataclass(frozen=True)
class ResumeOptions:
    """Options that can be given with --resume RUN_DIR."""

    # GiB of each device to use for programs that have not been compiled yet
    memory: float | None = None
    # use the sweep's copies of the script and of your modules although they were edited
    force: tyro.conf.FlagCreatePairsOff[bool] = False
    # execute code outside of the run directory that the sweep names
    trust: tyro.conf.FlagCreatePairsOff[bool] = False


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
        return (
            num_runs * (self.num_updates - self.first_update) * run_directory.steps_of(self.config)
        )


class Request(NamedTuple):
    """What the command line requests. Lists and dicts collect what the sweep has done so far."""

    script: Any
    config: Any  # the values of the fields that are not swept
    options: Options
    run_dir: Path
    swept: dict  # {field: its words on the command line}
    trials: list  # a {swept field: value} per trial; Optuna's are added when they are proposed
    record: dict  # run.json
    groups: list[Group]  # groups that have started
    # {trial: final return of each seed}, -inf if not finite, NaN if not known yet; on process 0
    returns: dict


# --- the command line ---


def split_flags(words: list[str]) -> dict[str, list[str]]:
    """`{field: its words}`; the last flag of a name wins. Raises ValueError."""
    flags = {}
    values = None
    for word in words:
        if word.startswith("--"):
            values = []
            flags[field_of(word)] = values
        elif values is None:
            raise ValueError(f"{word}: is not a flag")
        else:
            values.append(word)
    return flags


def join_flags(flags: dict[str, list[str]]) -> list[str]:
    words = []
    for name, values in flags.items():
        words += [f"--{name.replace('_', '-')}", *values]
    return words


def with_absolute_path(name: str) -> str:
    """A storage whose file is found from any folder, as `--resume` and Optuna's locks need it."""
    scheme, _, file = name.rpartition(":///")
    if scheme.startswith("sqlite"):
        if file.startswith((":", "file:")) or not file:  # in memory, or an URI of SQLite's own
            return name
        return f"{scheme}:///{Path(file).absolute()}"
    return name if "://" in name else str(Path(name).absolute())


def without_password(name: str) -> str:
    """The URL of a database without its user and its options."""
    scheme, separator, place = name.partition("://")
    return f"{scheme}{separator}{place.rpartition('@')[2].partition('?')[0]}"


def required(value: T | None) -> T:
    """An option without a default, where `check_options` has seen to it that it is there."""
    assert value is not None
    return value


def check_given_once(words: list[str]) -> None:
    """Raise ValueError if a flag is given twice."""
    flags = [word.split("=")[0] for word in words if word.startswith("--")]
    fields = [field_of(flag) for flag in flags]
    for flag in flags:
        if fields.count(field_of(flag)) > 1:
            raise ValueError(f"{flag}: is given twice")


def check_options(script, swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if options do not fit together."""
    if not swept:
        raise ValueError("nothing to sweep over: give a field several values, as in --lr 1e-4 1e-3")
    drawn = [name for name, words in swept.items() if words[0] in DISTRIBUTIONS]
    for name in ("samples", "batch"):
        if getattr(options, name) == 0:
            raise ValueError(f"{name} = 0: must be at least 1")
    if options.samples is None and drawn:
        kind = swept[drawn[0]][0]
        raise ValueError(f"{drawn[0]}: {kind} needs --samples, the number of values to draw")
    if options.samples is None and options.optuna:
        raise ValueError(f"optuna = {options.optuna}: needs --samples, the number of trials")
    if options.samples is not None and not drawn and not options.optuna:
        kinds = ", ".join(DISTRIBUTIONS)
        raise ValueError(
            f"samples = {options.samples}: needs a field to draw, with {kinds}, or --optuna"
        )
    check_halving(swept, options)
    check_population(script, swept, options)
    check_packages(f"optuna = {options.optuna}", SAMPLERS.get(options.optuna or "", ()))
    check_packages(f"track = {options.track}", TRACKERS.get(options.track or "", ()))
    if options.optuna == "cmaes" and len(drawn) < 2:
        raise ValueError(
            "optuna = cmaes: needs at least two fields with a distribution; tpe needs one"
        )
    if options.batch != Options.batch and not options.optuna:
        raise ValueError(f"batch = {options.batch}: goes with --optuna")
    if options.storage is not None and not options.optuna:
        name = without_password(options.storage)
        raise ValueError(f"storage = {name}: goes with --optuna")
    if options.storage == "":
        raise ValueError("storage: needs a file or the URL of a database")
    if options.optuna:
        for name in swept:
            if not is_float(script, name):
                raise ValueError(
                    f"{name}: is not a float field; Optuna can only choose values of float fields"
                )


def read_part(text: str) -> tuple[int, int]:
    """`(I, N)` of "I/N". Raises ValueError."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal()):
        raise ValueError(f"part = {text}: must be I/N, such as 1/4")
    part = int(first)
    parts = int(second)
    if not 1 <= part <= parts:
        raise ValueError(f"part = {text}: must be one of 1/{parts} to {parts}/{parts}")
    return part, parts


def check_part(num_trials: int, options: Options) -> None:
    """Raise ValueError if there is no such part."""
    if options.part is None:
        return
    _, parts = read_part(options.part)
    if options.optuna:
        raise ValueError(f"part = {options.part}: does not go with --optuna; --storage does")
    if options.halving:
        raise ValueError(
            f"part = {options.part}: does not go with --halving, which compares all trials"
        )
    if parts > num_trials:
        raise ValueError(f"part = {options.part}: there are only {num_trials} trials")


def check_halving(swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if options of --halving do not fit together."""
    for name in ("rungs", "first_rung"):
        value = getattr(options, name)
        if value is not None and options.halving is None:
            raise ValueError(f"{name} = {value}: goes with --halving")
    if options.halving is None:
        return
    if options.halving < 2:
        raise ValueError(f"halving = {options.halving}: must be at least 2")
    if options.rungs is not None and options.rungs < 2:
        raise ValueError(f"rungs = {options.rungs}: must be at least 2")
    if options.rungs is not None and options.first_rung is not None:
        raise ValueError(f"first_rung = {options.first_rung}: does not go with --rungs")
    if "total_timesteps" in swept:
        raise ValueError(
            "total_timesteps: cannot be swept with --halving, which compares trials at equal steps"
        )


def check_population(script, swept: dict[str, list[str]], options: Options) -> None:
    """Raise ValueError if options of --pbt do not fit together."""
    if not options.pbt:
        if options.exploit_interval is not None:
            raise ValueError(f"exploit_interval = {options.exploit_interval}: goes with --pbt")
        if options.keep_replay:
            raise ValueError("keep_replay: goes with --pbt")
        return
    for name in ("optuna", "halving", "part", "track"):
        value = getattr(options, name)
        if value is not None:
            raise ValueError(f"{name} = {value}: does not go with --pbt")
    for name, words in swept.items():
        if not is_float(script, name):
            raise ValueError(
                f"{name}: is not a float field; agents of different shapes cannot exchange, so "
                "--pbt needs a single value"
            )
        if words[0] not in DISTRIBUTIONS:
            kinds = ", ".join(DISTRIBUTIONS)
            raise ValueError(f"{name}: is a list of values; --pbt needs {kinds} LOW HIGH")
    if required(options.samples) < 4:
        raise ValueError(
            f"samples = {options.samples}: must be at least 4 with --pbt, whose agents exchange by "
            "quarters"
        )
    if options.exploit_interval is None:
        raise ValueError("pbt: needs --exploit-interval, the updates between exchanges")


def read_request(
    words: list[str], until_the_end: contextlib.ExitStack, description: str | None = None
) -> Request | None:
    """None if the sweep has finished. `description` is for --help. Raises ValueError."""
    command = ["sweep", *words]
    name, _, words = command_line.split_words(words)
    if name != "--resume":
        check_given_once(words)
        script = load_script(name)
        words = read_flags(script, words, Options, command_line.Hosts)
        request = make_request(script, words, description)
        keep = request.options.keep
        if request.options.pbt and keep != Options.keep:
            raise ValueError(
                f"keep = {keep}: does not go with --pbt, whose best agents are all kept"
            )
        return begin_record(request, command)

    run_dir, record, given = resuming.read_resumed(words, "sweep", ResumeOptions, until_the_end)
    run_directory.check_random_numbers(record)
    if "finished" in record:
        shutil.rmtree(run_dir / "slices", ignore_errors=True)  # a kill may have left them
        print(f"{run_dir} has finished: there is nothing left to do")
        return None
    script = run_directory.script_of(run_dir, record, given.force, given.trust)
    request = make_request(script, record["words"], description)
    trials = [config_of(request, trial) for trial in range(len(request.trials))]
    for env_name in dict.fromkeys(map(run_directory.env_name_of, [request.config, *trials])):
        local_modules.check_environment(run_dir, record, env_name, given.trust)
    memory = given.memory or request.options.memory
    options = dataclasses.replace(
        request.options, memory=memory, **record.get("replay_options", {})
    )
    return request._replace(options=options, run_dir=run_dir, record=record)


def make_request(script, words: list[str], description: str | None) -> Request:
    """The request of a command line, without its directory. Raises ValueError."""
    swept = {}
    others = {}
    flags = split_flags(words)
    if any(flags.get("storage", [])):
        flags["storage"] = [with_absolute_path(name) for name in flags["storage"]]
    for name, values in flags.items():
        is_field = name in field_names(script)
        if is_field and is_swept(script, name, values):
            swept[name] = values
        else:
            others[name] = values
    config, options, _ = command_line.parse_with(
        script, join_flags(others), Options, description, prog="onejit sweep"
    )
    check_options(script, swept, options)
    trials = []
    if not options.optuna:
        samples = options.samples
        if options.pbt:  # a trial is an agent, which begins with values of its own
            samples *= options.num_seeds
        trials = make_trials(script, swept, samples, options.seed)
    check_part(len(trials), options)
    record = {"words": join_flags(flags)}
    return Request(script, config, options, options.run_dir, swept, trials, record, [], {})


def begin_record(request: Request, command: list[str]) -> Request:
    """The request with its new directory and the record of a new sweep. Raises ValueError."""
    script = request.script
    options = request.options
    run_dir = request.run_dir or new_run_dir(script, request.config, prefix="sweep-")
    run_dir = Path(hosts.agree(str(run_dir)))
    record = run_directory.make_record("sweep", script, request.config, options, command)
    record |= request.record
    record["slices"] = []
    if options.storage:
        record["owner"] = hosts.agree(uuid.uuid4().hex)
        record["numbers"] = []  # of the trials in the study
    if options.optuna:
        record["num_trials"] = options.samples
    else:
        record["num_trials"] = sum(len(group.trials) for group in groups_of_part(request))
    return request._replace(run_dir=run_dir, record=record)


# --- trials ---


def float_names(request: Request) -> list[str]:
    return [name for name in request.swept if is_float(request.script, name)]


def config_of(request: Request, trial: int):
    return dataclasses.replace(request.config, **request.trials[trial])


def make_groups(request: Request) -> list[Group]:
    """The groups of all trials of a grid."""
    floats = float_names(request)
    groups = {}
    for index, trial in enumerate(request.trials):
        static = {name: value for name, value in trial.items() if name not in floats}
        key = tuple(static.items())
        if key not in groups:
            groups[key] = Group(dataclasses.replace(request.config, **static), [])
        groups[key].trials.append(index)
    return list(groups.values())


def groups_of_part(request: Request) -> list[Group]:
    """The groups of the trials to train: of all trials, or of a share of them with `--part`.

    A share is a range of the trials in the order of their groups, and therefore has few groups.
    """
    groups = make_groups(request)
    if request.options.part is None:
        return groups
    part, parts = read_part(request.options.part)
    number = len(request.trials)
    share = range(number * (part - 1) // parts, number * part // parts)
    begin = 0  # of the group
    mine = []
    for group in groups:
        trials = [trial for i, trial in enumerate(group.trials, start=begin) if i in share]
        if trials:
            mine.append(group._replace(trials=trials))
        begin += len(group.trials)
    return mine
