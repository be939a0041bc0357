"""Flags of the commands, and of the scripts that the commands run."""

import contextlib
import dataclasses
import inspect
import math
import os
import shutil
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from onejit.base.text import nearest
from onejit.script.configs import field_names, read_flags
from onejit.script.contract import Script

# {flag of version 0.4: what to use instead}; goes with version 0.6
REMOVED = {
    "--trust": "is gone; a run directory with a script is a program, see SECURITY.md",
    "--force": "is gone but where a run is resumed; an edited copy is used, and named",
}
NARROWEST = 40  # columns of a terminal: with few of them, tyro's --help does not end


@dataclasses.dataclass(frozen=True)
class Hosts:
    """To train on several machines, give the same command on each of them."""

    coordinator: str | None = None  # HOST:PORT on which process 0 listens
    num_processes: int | None = None  # total number of processes
    process_id: int | None = None  # number of this process, from 0
    # take the other three from the cluster, such as SLURM
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False


def flags_of(command) -> list[str]:
    """The flags of a dataclass or of a function. Arguments of the function may be dataclasses."""
    arguments = {"": command}
    if inspect.isfunction(command):
        arguments = typing.get_type_hints(command)
        arguments.pop("return", None)
    names = []
    for name, kind in arguments.items():
        kind = getattr(kind, "__origin__", kind)  # without tyro's markers
        if dataclasses.is_dataclass(kind):
            names += [field.name for field in dataclasses.fields(kind)]
        else:
            names.append(name)
    return [f"--{name.replace('_', '-')}" for name in names]


def flag_before(word: str, words: list[str]) -> list[str]:
    """The flag whose values are followed by `word`, which is one too many, or nothing."""
    places = [i for i in range(1, len(words)) if words[i] == word]
    after_a_value = [i for i in places if not words[i - 1].startswith("--")]
    place = (after_a_value or places or [0])[-1]
    flags = [other for other in words[:place] if other.startswith("--")]
    return flags[-1:]


def mistake(event, command, words: list[str]) -> str | None:
    """The message for what tyro could not parse."""
    tokens = getattr(event, "tokens", ())
    unknown = [token for token in tokens if token.startswith("--")]
    if unknown and unknown[0] in REMOVED:
        return f"{unknown[0]}: {REMOVED[unknown[0]]}"
    if unknown:
        similar = nearest(unknown[0], flags_of(command))
        if getattr(command, "__module__", "") == "onejit.resume":
            similar = similar or "; a run that is resumed keeps its settings"
        return f"{unknown[0]}: is not a flag{similar}"
    if tokens:
        return f"{' '.join([*flag_before(tokens[0], words), *tokens])}: is one word too many"
    argument = getattr(event, "argument", None)
    if argument is None:
        return None
    choices = getattr(event, "choices", ["a value"])
    reason = getattr(event, "message", None) or f"takes {' | '.join(choices)}"
    name_and_value = f"{argument.display_name()} {getattr(event, 'value', '')}".rstrip()
    return f"{name_and_value}: {reason}"


def parse(command, words: list[str], **options: Any):
    """`tyro.cli` that raises a ValueError, which names the flag, for a wrong flag."""

    def refuse(event):
        message = mistake(event, command, words)
        if message is not None:
            raise ValueError(message)

    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    # A private name of tyro's. Without it tyro prints the mistake in a box, also with exit code 2.
    hook = getattr(getattr(tyro, "_errors", None), "on_parse_error", None)
    with hook(refuse) if hook else contextlib.nullcontext():
        markers = (tyro.conf.OmitArgPrefixes,)
        return tyro.cli(command, args=words, config=markers, **options)


def split_words(words: list[str]) -> tuple[str, Hosts, list[str]]:
    """`(first word, options of hosts, all other words)`, before a script is imported.

    Raises ValueError.
    """
    for old, command in (("--resume", "resume"), ("--find-nan", "find-nan")):
        if old in words[: 1 if old == "--find-nan" else None]:
            raise ValueError(f"{old}: is gone; use onejit {command} RUN_DIR")
    if not words or words[0].startswith("-"):
        raise ValueError("SCRIPT: must come first, the name or path of a script")
    hosts, _ = parse(Hosts, words[1:], return_unknown_args=True, add_help=False)
    return words[0], hosts, words[1:]


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
    for name in ("num_envs", "num_steps"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")
    if getattr(config, "total_timesteps", 1) < 1:
        raise ValueError(f"total_timesteps = {config.total_timesteps}: must be at least 1")
    for name, value in vars(config).items():
        numbers = value if isinstance(value, Mapping) else {"": value}  # env_params
        for key, number in numbers.items():
            if isinstance(number, float) and math.isnan(number):
                raise ValueError(f"{name} = {f'{key} {number}'.strip()}: must be a number")
        if type(value) is int and abs(value) >= 2**31 and name != "total_timesteps":
            raise ValueError(f"{name} = {value}: must fit in 32 bits")
    steps = config.num_envs * config.num_steps
    if steps >= 2**31:
        most = (2**31 - 1) // config.num_steps
        raise ValueError(
            f"num_envs = {config.num_envs}: {steps:.3g} steps in an update must fit in 32 bits; "
            f"at most {most:,} environments with num_steps = {config.num_steps}"
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
    script: Script, words: list[str], options, description: str | None, prog: str = "onejit"
):
    """`(config, options, hosts)` from the flags of a script, of `options` and of `Hosts`.

    `--help` begins with `prog`, such as "onejit train", and the name of the script.

    Raises ValueError.
    """
    options = without_clashes(options, script)

    def command(
        config: tyro.conf.FlagConversionOff[script.Config] = script.Config(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        options: options = options(),  # noqa: B008  # pyright: ignore[reportInvalidTypeForm]
        hosts: Hosts = Hosts(),
    ):
        return config, options, hosts

    words = read_flags(script, words, options, Hosts)
    config, options, hosts = parse(
        command,
        words,
        prog=f"{prog} {Path(script.__file__).stem}",
        description=description,
    )
    check_config(config)
    check_options(options)
    return config, options, hosts
