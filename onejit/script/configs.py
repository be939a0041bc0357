"""Configs of scripts as YAML files."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from onejit.base.files import load_yaml, write
from onejit.base.text import nearest
from onejit.script import conversion
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


def as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def values_of_yaml(file: Path, kinds: dict[str, Any], about: str) -> dict[str, Any]:
    """`{field: value}` of a YAML file. `kinds` are the types of all fields.

    Raises ValueError, which begins with `about`.
    """
    try:
        settings = load_yaml(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("must have lines of the form FIELD: VALUE")
    except Exception as error:  # of files, and the many kinds that PyYAML raises
        raise ValueError(f"{about}: {type(error).__name__}: {error}") from error
    values = {}
    for name, value in settings.items():
        field = field_of(str(name))
        if field not in kinds:
            raise ValueError(f"{about}: {name}: is not a field{nearest(field, kinds)}")
        try:
            values[field] = conversion.from_yaml(kinds[field], value)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{about}: {name} = {value}: {error}") from error
    return values


def write_config(path: Path, config) -> None:
    write(path, yaml.safe_dump(plain(config), sort_keys=False))


OF_THE_TASK = ("env_name", "env_params")


def task_of(settings: dict) -> str:
    """The environment and its changed parameters."""
    params = settings.get("env_params", {})  # the GridWorld has none
    changes = [f"{name}={value}" for name, value in sorted(params.items())]
    return " ".join([settings["env_name"], *changes])
