"""The command line: flags, hosts, tables, and reports of mistakes."""

import contextlib
import dataclasses
import difflib
import importlib.util
import inspect
import itertools
import math
import os
import sys
import typing
from typing import Annotated

import jax
import tyro
from jax.experimental import multihost_utils

# --- flags ---


def nearest(name, known) -> str:
    """'; did you mean NAME?' with the closest known name, or nothing if none is close."""
    found = difflib.get_close_matches(str(name), list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def flags_of(command) -> list[str]:
    """The flags of a dataclass or of a function. Arguments of the function may be dataclasses."""
    hints = typing.get_type_hints(command) if inspect.isfunction(command) else {"": command}
    found = {
        name: getattr(each, "__origin__", each) for name, each in hints.items() if name != "return"
    }  # unmarked
    names = [
        [field.name for field in dataclasses.fields(each)]
        if dataclasses.is_dataclass(each)
        else [name]
        for name, each in found.items()
    ]
    return [f"--{name.replace('_', '-')}" for name in itertools.chain(*names)]


def parse(command, words: list[str], **how):
    """`tyro.cli` that raises a ValueError, which names the flag, for a wrong flag."""

    def refuse(event):
        argument, tokens = getattr(event, "argument", None), getattr(event, "tokens", ())
        if unknown := [word for word in tokens if word.startswith("--")]:
            raise ValueError(f"{unknown[0]}: is not a flag{nearest(unknown[0], flags_of(command))}")
        if tokens:  # most likely after another value; the flag before it names the field
            after_value = [
                i
                for i in range(1, len(words))
                if words[i] == tokens[0] and not words[i - 1].startswith("--")
            ]
            before = [word for word in words[: (after_value or [0])[-1]] if word.startswith("--")]
            raise ValueError(f"{' '.join([*before[-1:], *tokens])}: is one word too many")
        if argument is not None:
            reason = (
                getattr(event, "message", None)
                or f"takes {' | '.join(getattr(event, 'choices', ['a value']))}"
            )
            value = getattr(event, "value", "")
            raise ValueError(f"{argument.display_name()} {value}: {reason}")

    module = command.__module__ if inspect.isfunction(command) else ""
    how = (
        {"prog": module.replace(".", " ")} | how if module.startswith("onejit.") else how
    )  # "onejit play"
    # A private name of tyro's. Without it tyro prints the mistake in a box, also with exit code 2.
    hook = getattr(getattr(tyro, "_errors", None), "on_parse_error", None)
    with hook(refuse) if hook else contextlib.nullcontext():
        return tyro.cli(command, args=words, **how)


def read_flags(script, words: list[str]) -> list[str]:
    """The script's own `read_flags`, which puts the flags of --config FILE first. Raises ValueError."""
    try:
        return script.read_flags(words)
    except Exception as error:  # many kinds: of YAML, of its content, of files
        place = next((i for i, word in enumerate(words) if word.startswith("--config")), 0)
        raise ValueError(
            f"{' '.join(words[place : place + 2])}: {type(error).__name__}: {error}"
        ) from error


@dataclasses.dataclass(frozen=True)
class Hosts:
    """To train on several machines, give the same command on each of them."""

    coordinator: str | None = None  # HOST:PORT on which process 0 listens
    num_processes: int | None = None  # total number of processes
    process_id: int | None = None  # number of this process, from 0
    distributed: tyro.conf.FlagCreatePairsOff[bool] = (
        False  # take the other three from the cluster, such as SLURM
    )


def split_words(words: list[str]) -> tuple[str, Hosts, list[str]]:
    """`(first word, the options of hosts, all other words)`, before a script is imported. Raises ValueError."""
    if not words or (words[0].startswith("-") and words[0] != "--resume"):
        raise ValueError(
            "SCRIPT: must come first, the name or path of a script; or --resume RUN_DIR"
        )
    hosts, _ = parse(Hosts, words[1:], return_unknown_args=True, add_help=False)
    return words[0], hosts, words[1:]


def without_clashes(options, config):
    """The dataclass `options`. If `config` has a field of the same name, the flag of the option is `--onejit-NAME`."""
    taken = {field.name for field in dataclasses.fields(config)}
    renamed = [
        (field.name, Annotated[field.type, tyro.conf.arg(name=f"onejit-{field.name}")], field)
        for field in dataclasses.fields(options)
        if field.name in taken
    ]
    return (
        dataclasses.make_dataclass(options.__name__, renamed, bases=(options,), frozen=True)
        if renamed
        else options
    )


def parse_with(script, words: list[str], options, description: str):
    """`(config, options, hosts)` from the flags of a script, of `options` and of `Hosts`. Raises ValueError."""
    options = without_clashes(options, script.Config)

    def command(
        config: tyro.conf.FlagConversionOff[script.Config] = script.Config(),  # noqa: B008
        options: options = options(),  # noqa: B008
        hosts: Hosts = Hosts(),
    ):
        return config, options, hosts

    words = read_flags(script, words)
    parsed = parse(command, words, description=description, config=(tyro.conf.OmitArgPrefixes,))
    for name, value in vars(parsed[0]).items():
        if type(value) is int and abs(value) >= 2**31 and name != "total_timesteps":
            raise ValueError(f"{name} = {value}: must fit in 32 bits")
    for name, value in vars(parsed[1]).items():
        least = 1 if name == "num_seeds" else 0
        if name == "memory" and value is not None and not 0 < value < math.inf:
            raise ValueError(f"memory = {value}: must be a number of GiB above 0")
        if isinstance(value, (int, float)) and not least <= value < 2**31:
            raise ValueError(f"{name} = {value}: must be at least {least} and fit in 32 bits")
    return parsed


def check_packages(option: str, packages) -> None:
    """Raise ValueError if packages that an option needs are not installed."""
    if missing := [
        name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None
    ]:
        raise ValueError(
            f"{option}: needs {' and '.join(missing)}; pip install {' '.join(missing)}"
        )


# --- tables ---


def align(rows: list[list[str]]) -> str:
    """Align rows of cells as columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# --- errors ---


@contextlib.contextmanager
def errors_in_one_line(tool: str, code: int = 2, kinds=(ValueError, OSError), about: str = ""):
    """Print an exception of these kinds as one line that begins with `about`, and exit with `code`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader is gone, as of `onejit list | head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python complains at its end
        raise SystemExit(code) from None
    except kinds as error:
        print(f"{tool}: error: {about}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():
            os._exit(code)  # a normal exit would wait for processes that may be gone
        raise SystemExit(code) from None


@contextlib.contextmanager
def failures_in_one_line(tool: str):
    """Print one line and exit with 1 if memory runs out or another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, multihost_utils.ProcessFailureError) as error:
        text = " ".join(str(error).split())[:300]
        if "RESOURCE_EXHAUSTED" not in text and jax.process_count() == 1:
            raise
        cause = (
            "out of memory, try --memory"
            if "RESOURCE_EXHAUSTED" in text
            else "another process may be gone"
        )
        print(f"{tool}: error: {cause}: {text}", file=sys.stderr, flush=True)
        os._exit(1)  # a normal exit would wait for the other processes
