"""Words of the command line, and values of YAML files, as values of a type.

The fields of a dataclass and the arguments of a function may have these types: bool, int, float,
str, Path, Literal, tuples, mappings and unions of them.
"""

import contextlib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from onejit.base.paths import as_folder

TAKES = {
    bool: "True | False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
}


def is_union(kind) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_mapping(kind) -> bool:
    return typing.get_origin(kind) in (Mapping, dict)


def is_list(kind) -> bool:
    """Whether a type is a tuple of any length."""
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[-1] is Ellipsis


def number_of_words(kind) -> int | None:
    """How many words a value has; None if the type does not say."""
    if is_mapping(kind) or is_list(kind):
        return None
    if is_union(kind):
        numbers = {number_of_words(part) for part in typing.get_args(kind)}
        return 1 if numbers == {1} else None
    return len(typing.get_args(kind)) if typing.get_origin(kind) is tuple else 1


def refuse(kind):
    """Raise ValueError, which says what a type takes."""
    if typing.get_origin(kind) is Literal:
        raise ValueError(f"takes {' | '.join(map(str, typing.get_args(kind)))}")
    raise ValueError(f"takes {TAKES.get(kind, kind)}")


def of_the_first(read, kinds, value):
    """`read(kind, value)` of the first type that takes the value. Raises ValueError."""
    kinds = [kind for kind in kinds if kind is not types.NoneType]
    for kind in kinds[:-1]:
        with contextlib.suppress(ValueError):
            return read(kind, value)
    return read(kinds[-1], value)


# --- words ---


def from_words(kind, words: list[str]):
    """Raises ValueError, which says what the type takes."""
    parts = typing.get_args(kind)
    if is_union(kind):
        if types.NoneType in parts and words == ["None"]:
            return None
        return of_the_first(from_words, parts, words)
    if is_mapping(kind):
        if len(words) % 2:
            raise ValueError("takes pairs of a name and a value")
        values = [from_words(parts[1], [word]) for word in words[1::2]]
        return dict(zip(words[::2], values, strict=True))
    if is_list(kind):
        size = number_of_words(parts[0]) or 1
        rows = [words[i : i + size] for i in range(0, len(words), size)]
        return tuple(from_words(parts[0], row) for row in rows)
    if typing.get_origin(kind) is tuple:
        if len(words) != len(parts):
            raise ValueError(f"takes {len(parts)} values")
        return tuple(from_words(part, [word]) for part, word in zip(parts, words, strict=True))
    if len(words) != 1:
        refuse(kind)
    return from_word(kind, words[0])


def from_word(kind, word: str):
    if typing.get_origin(kind) is Literal:
        for choice in typing.get_args(kind):
            if word == str(choice):
                return choice
        refuse(kind)
    if kind is bool and word in ("True", "False"):
        return word == "True"
    if kind in (int, float):
        return number_from(kind, word)
    if kind is Path:
        return as_folder(word)
    if kind in (str, Any):
        return word
    return refuse(kind)


def number_from(kind, text: str):
    """5e5 is a whole number, too; YAML reads it as text. Raises ValueError."""
    with contextlib.suppress(ValueError):
        return kind(text)
    with contextlib.suppress(ValueError):
        if "e" in text.lower() and float(text).is_integer():
            return int(float(text))
    return refuse(kind)


# --- YAML ---


def from_yaml(kind, value):
    """Raises ValueError, which says what the type takes. A type that is not known takes all."""
    parts = typing.get_args(kind)
    if is_union(kind):
        return value if type(value) in parts else of_the_first(from_yaml, parts, value)
    if is_mapping(kind):
        if not isinstance(value, dict):
            raise ValueError("takes names with their values")
        return {str(name): from_yaml(parts[1], each) for name, each in value.items()}
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError("takes a list")
        kinds = [parts[0]] * len(value) if is_list(kind) else parts
        if len(value) != len(kinds):
            raise ValueError(f"takes {len(kinds)} values")
        return tuple(from_yaml(part, each) for part, each in zip(kinds, value, strict=True))
    if typing.get_origin(kind) is Literal:
        return value if value in parts else refuse(kind)
    if kind is Path and isinstance(value, str):
        return as_folder(value)
    if kind in (int, float):
        return number_of_yaml(kind, value)
    return value if kind not in (bool, str, Path) or type(value) is kind else refuse(kind)


def number_of_yaml(kind, value):
    if isinstance(value, str):
        return number_from(kind, value)
    is_fraction = isinstance(value, float) and not value.is_integer()
    if type(value) not in (int, float) or (kind is int and is_fraction):
        refuse(kind)
    return kind(value)
