"""Flags of the commands, and of the scripts that the commands run. tyro prints their --help."""

import dataclasses
import inspect
import math
import os
import shutil
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from onejit.base.text import nearest
from onejit.script import conversion
from onejit.script.configs import as_flag, field_names, field_of, values_of_yaml
from onejit.script.contract import Script

MACHINES = "is gone; several machines share a sweep with --storage, a grid with --optuna grid"
POPULATIONS = "is gone; copy examples/population.py, which trains populations with any script"
# {option of version 0.4: what to use instead}; goes with version 0.6
REMOVED = {
    "resume": "is gone; use onejit resume RUN_DIR",
    "find_nan": "is gone; use onejit find-nan RUN_DIR",
    "trust": "is gone; a run directory with a script is a program, see SECURITY.md",
    "force": "is gone but where a run is resumed; an edited copy is used, and named",
    "pbt": POPULATIONS,
    "exploit_interval": POPULATIONS,
    "keep_replay": POPULATIONS,
    "replay": POPULATIONS,
    "first_rung": "is gone; use --rungs",
    "part": MACHINES,
    "merge": "is gone; onejit compare RUN_DIR RUN_DIR ... makes one table of several sweeps",
}
NARROWEST = 40  # columns of a terminal: with few of them, tyro's --help does not end


@dataclasses.dataclass(frozen=True)
class Hosts:
    """To train on several machines, give the same command on each of them."""

    coordinator: str | None = None  # HOST:PORT on which process 0 listens
    num_processes: int | None = None  # total number of processes
    process_id: int | None = None  # number of this process, from 0
    # take the other three from the cluster, such as SLURM
    distributed: bool = False


# --- flags ---


def split_flags(words: list[str]) -> dict[str, list[str]]:
    """`{name: its words}` of a command line, and those before all flags as `{"": words}`.

    The last flag of a name wins.
    """
    name = ""
    flags = {name: []}
    for word in words:
        if word == "-h":
            flags["help"] = []
        elif word.startswith("--") and word != "--":
            flag, equals, value = word.partition("=")
            name = field_of(flag)
            flags[name] = [value] if equals else []
        else:
            flags[name].append(word)
    return flags


class Flag(NamedTuple):
    """What a flag is for."""

    kind: Any  # its type
    argument: str  # of the function
    field: str = ""  # of the argument, if it is a dataclass
    is_switch: bool = False  # a bool that the flag alone makes true


def arguments_of(command) -> list[tuple[str, Any, list]]:
    """`(name, type, tyro's markers)` of each argument of a function, or field of a dataclass."""
    hints = typing.get_type_hints(command, include_extras=True)
    arguments = []
    for name in inspect.signature(command).parameters:
        kind, *markers = (
            typing.get_args(hints[name]) if hasattr(hints[name], "__metadata__") else [hints[name]]
        )
        arguments.append((name, kind, markers))
    return arguments


def flags_of(command) -> dict[str, Flag]:
    """The flags of a function, by name. An argument that is a dataclass has one for each field.

    Where two fields have one name, the flag of the second one is `--onejit-NAME`.
    """
    flags = {}
    for argument, kind, markers in arguments_of(command):
        if dataclasses.is_dataclass(kind):
            has_switches = tyro.conf.FlagConversionOff not in markers
            for field, of_field, _ in arguments_of(kind):
                name = f"onejit_{field}" if field in flags else field
                flags[name] = Flag(of_field, argument, field, has_switches and of_field is bool)
        elif tyro.conf.Positional not in markers:
            flags[argument] = Flag(kind, argument, is_switch=kind is bool)
    return flags


def read_flag(name: str, kind, words: list[str]) -> Any:
    """A value of a type. Raises ValueError, which names the flag and its words."""
    try:
        return conversion.from_words(kind, words)
    except ValueError as error:
        raise ValueError(f"{' '.join([as_flag(name), *words])}: {error}") from error


def read(command, flags: dict[str, list[str]], values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a function, from its flags. `values` are of flags that are not given.

    Raises ValueError.
    """
    known = flags_of(command)
    values = dict(values)
    others = [[word] for word in flags[""]]
    for name, words in flags.items():
        if name == "":
            continue
        if name not in known:
            similar = nearest(as_flag(name), map(as_flag, known))
            if command.__module__ == "onejit.resume":
                similar = similar or "; a run that is resumed keeps its settings"
            similar = similar or "; --help lists all"
            raise ValueError(f"{as_flag(name)}: {REMOVED.get(name, f'is not a flag{similar}')}")
        number = conversion.number_of_words(known[name].kind)
        if known[name].is_switch:
            number = 0
        mine = words[:number]
        others += [[as_flag(name), word] for word in words[len(mine) :]]
        values[name] = known[name].is_switch or read_flag(name, known[name].kind, mine)

    fields = {}
    arguments = read_positional(command, others)
    for name, value in values.items():
        flag = known[name]
        if flag.field:
            fields.setdefault(flag.argument, {})[flag.field] = value
        else:
            arguments[flag.argument] = value
    for argument, kind, _ in arguments_of(command):
        if argument in fields:
            arguments[argument] = kind(**fields[argument])
    return arguments


def read_positional(command, others: list[list[str]]) -> dict[str, Any]:
    """The argument without a flag. `others` are words, each after the flag that it follows.

    Raises ValueError.
    """
    arguments = {}
    for name, kind, markers in arguments_of(command):
        if tyro.conf.Positional not in markers:
            continue
        number = conversion.number_of_words(kind)
        words = [words[-1] for words in others[:number]]
        others = others[len(words) :]
        if words or number is None:
            arguments[name] = conversion.from_words(kind, words)
        elif inspect.signature(command).parameters[name].default is inspect.Parameter.empty:
            raise ValueError(f"{name}: must be given")
    if others:
        raise ValueError(f"{' '.join(others[0])}: is one word too many")
    return arguments


def print_help(command, prog: str, description: str | None) -> None:
    """Print the flags of a function and what its docstring says of them, and exit."""
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    markers = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    tyro.cli(command, args=["--help"], prog=prog, description=description, config=markers)


def parse(command, words: list[str], prog: str = "onejit", description: str | None = None):
    """Call a function with the arguments that the words are. Raises ValueError."""
    flags = split_flags(words)
    if "help" in flags:
        print_help(command, prog, description)
    return command(**read(command, flags, {}))


# --- flags of scripts ---


def take_script(words: list[str]) -> tuple[str, dict[str, list[str]]]:
    """`(script, flags)` of a command line that begins with a script. Raises ValueError."""
    flags = split_flags(words)
    if not flags[""]:
        for name in flags:
            if name in REMOVED:
                raise ValueError(f"{as_flag(name)}: {REMOVED[name]}")
        raise ValueError("SCRIPT: must come first, the name or path of a script")
    return flags[""].pop(0), flags


def read_hosts(flags: dict[str, list[str]]) -> Hosts:
    """The options of hosts alone, before a script is imported. Raises ValueError."""
    of_hosts = {name: words for name, words in flags.items() if name in flags_of(Hosts)}
    return Hosts(**read(Hosts, {"": [], **of_hosts}, {}))


def without_clashes(options, script: Script):
    """The dataclass `options`, where a flag that the script has, too, is `--onejit-NAME`."""
    renamed = []
    for field in dataclasses.fields(options):
        if field.name in field_names(script):
            kind = Annotated[field.type, tyro.conf.arg(name=f"onejit-{field.name}")]
            renamed.append((field.name, kind, field))
    if not renamed:
        return options
    return dataclasses.make_dataclass(options.__name__, renamed, bases=(options,), frozen=True)


def check_config(config) -> None:
    """Raise ValueError if no update has a step, a number is NaN or an int has over 32 bits.

    Whole numbers of JAX have 32 bits.
    """
    for name in ("num_envs", "num_steps", "total_timesteps"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    for name, value in vars(config).items():
        if name.endswith(("size", "sizes")) or name == "convolutions":
            sizes = np.array(value)
            if sizes.dtype.kind == "i" and sizes.min(initial=1) < 1:
                raise ValueError(f"{name} = {value}: sizes must be at least 1")
        if name == "learning_starts" and value < 0:
            raise ValueError(f"{name} = {value}: must be at least 0")
        numbers = value if isinstance(value, Mapping) else {"": value}  # env_params
        for key, number in numbers.items():
            if isinstance(number, float) and math.isnan(number):
                raise ValueError(f"{name} = {f'{key} {number}'.strip()}: must be a number")
        if type(value) is int and abs(value) >= 2**31 and name != "total_timesteps":
            raise ValueError(f"{name} = {value}: must fit in 32 bits")
    steps = config.num_envs * config.num_steps
    if steps >= 2**31:
        raise ValueError(
            f"num_envs = {config.num_envs}: {steps:.3g} steps in an update must fit in 32 bits"
        )
    if config.num_updates >= 2**31:
        raise ValueError(
            f"total_timesteps = {config.total_timesteps}: makes {config.num_updates:.3g} "
            f"updates; at most {2**31 - 1:,} are possible"
        )


def check_options(options) -> None:
    """Raise ValueError if an option is out of its range."""
    for name, value in vars(options).items():
        if name == "total_timesteps":  # of a resumed run; it has no limit, as in `check_config`
            continue
        least = 1 if name == "num_seeds" else 0
        if name == "memory" and value is not None and not 0 < value < math.inf:
            raise ValueError(f"memory = {value}: must be a number of GiB above 0")
        limit = 2**32 if name == "seed" else 2**31  # as in a script's own `main`
        if isinstance(value, (int, float)) and not least <= value < limit:
            raise ValueError(f"{name} = {value}: must be at least {least} and fit in 32 bits")


def parse_with(
    script: Script,
    flags: dict[str, list[str]],
    options,
    description: str | None,
    prog: str = "onejit",
):
    """`(config, options, hosts)` from the flags of a script, of `options` and of `Hosts`.

    `--config FILE.yaml` may stand anywhere, and all other flags override it. `--help` begins with
    `prog`, such as "onejit train", and the name of the script. Raises ValueError.
    """
    options = without_clashes(options, script)

    def command(
        config: tyro.conf.FlagConversionOff[script.Config] = script.Config(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        options: options = options(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        hosts: Hosts = Hosts(),
    ):
        return config, options, hosts

    file = Path(script.__file__)
    if "help" in flags:
        print_help(command, f"{prog} {file.stem}", description)
    flags = dict(flags)
    values = {}
    if "config" in flags:
        path = read_flag("config", Path, flags.pop("config"))
        kinds = {name: flag.kind for name, flag in flags_of(command).items()}
        values = values_of_yaml(path, kinds, f"--config {path}")
    config, options, hosts = command(**read(command, flags, values))
    check_config(config)
    check_options(options)
    return config, options, hosts
