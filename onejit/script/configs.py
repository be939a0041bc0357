"""Configs of scripts as YAML files and as flags of the command line."""

import contextlib
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml

from onejit.base.files import load_yaml, write
from onejit.base.text import nearest
from onejit.script.contract import Script


def plain(config) -> dict:
    """A config, or a dict of some of its fields, as a dict for YAML and JSON."""
    values = {}
    for name, value in (config if isinstance(config, dict) else vars(config)).items():
        values[name] = dict(value) if isinstance(value, Mapping) else value
    return values


def field_names(script: Script) -> list[str]:
    return [field.name for field in dataclasses.fields(script.Config)]


def field_of(flag: str) -> str:
    """The field that a flag such as `--num-envs` is for."""
    return flag.removeprefix("--").replace("-", "_")


def read_yaml(file: str) -> dict:
    """The `{field: value}` of a YAML file. Raises ValueError, which names the file."""
    try:
        settings = load_yaml(Path(file).read_text())
        if not isinstance(settings, dict):
            raise ValueError("must have lines of the form FIELD: VALUE")
    except Exception as error:  # of files, and the many kinds that PyYAML raises
        raise ValueError(f"--config {file}: {type(error).__name__}: {error}") from error
    return settings


def as_words(value) -> list[str]:
    """A value of a YAML file as words of the command line."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, (list, tuple)):
        return [str(value)]
    return [word for part in value for word in as_words(part)]


def flags_of_yaml(file: str, script: Script, known: list[str]) -> list[str]:
    """The flags that mean the same as a YAML file. `known` are all fields and options.

    Raises ValueError, which names the file.
    """
    words = []
    for name, value in read_yaml(file).items():
        field = field_of(str(name))
        if field not in known:
            about = f"is not a field of {Path(script.__file__).name}"
            raise ValueError(f"--config {file}: {name}: {about}{nearest(field, known)}")
        words += [f"--{name}", *as_words(value)]
    return words


def as_whole_number(word: str) -> str:
    """5e5 as 500000. The message about what is no whole number is tyro's."""
    with contextlib.suppress(ValueError, OverflowError):
        number = float(word)
        if number == int(number) and not word.isdecimal():
            return str(int(number))
    return word


def read_flags(script: Script, words: list[str], *options) -> list[str]:
    """The flags of a command line, where `--config FILE.yaml` may stand anywhere.

    The flags of the file come first, and all other flags override them. `--flag=value` becomes two
    words. 5e5 becomes 500000 if the field is a whole number. `options` are the dataclasses whose
    fields are flags, too. Raises ValueError.
    """
    fields = [field for part in (script.Config, *options) for field in dataclasses.fields(part)]
    known = [field.name for field in fields]
    separate = []
    for word in words:
        separate += word.split("=", 1) if word.startswith("--") else [word]
    words = separate

    if "--config" in words:
        place = words.index("--config")
        if place + 1 == len(words):
            raise ValueError("--config: needs a file, as in --config FILE.yaml")
        from_file = flags_of_yaml(words[place + 1], script, known)
        words = from_file + words[:place] + words[place + 2 :]

    whole = []
    for part in (script.Config, *options):
        hints = typing.get_type_hints(part)  # types, also if a script imports annotations
        whole += [name for name, kind in hints.items() if kind in (int, int | None)]
    for i in range(len(words) - 1):
        if words[i].startswith("--") and field_of(words[i]) in whole:
            words[i + 1] = as_whole_number(words[i + 1])
    return words


def write_config(path: Path, config) -> None:
    write(path, yaml.safe_dump(plain(config), sort_keys=False))


OF_THE_TASK = ("env_name", "env_params")


def env_name_of(config) -> str:
    return getattr(config, "env_name", "")


def task_of(settings: dict) -> str:
    """The environment and its changed parameters."""
    params = settings.get("env_params", {})  # the GridWorld has none
    changes = [f"{name}={value}" for name, value in sorted(params.items())]
    return " ".join([settings["env_name"], *changes])
