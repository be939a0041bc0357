"""Random bad command lines and YAML files: onejit train never shows a traceback, always exit code 2
and one line.

500 of them in `make test-all`, few in `make test`. Two kinds: what is bad by construction has to be
refused, and the line names the field; what is random may be refused or taken, but nothing else may
happen. No training begins: whatever gets as far as a program that could be compiled has been taken.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import re
import string
import typing
from collections.abc import Mapping

import jax
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support.files import SCRIPTS
from support.small import flags, origin, small_config

from onejit import train
from onejit.base.text import printable
from onejit.engine import compilation
from onejit.script import errors

EXAMPLES = pytest.mark.parametrize("examples", [12, pytest.param(250, marks=pytest.mark.slow)])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
WORDS = st.text(
    string.ascii_letters + "-_./[]{}:, '\"\n\t#&*!|>%@`\u00e9\u2028\u4e2d", min_size=1, max_size=12
)

LARGE = st.integers(2**31, 10**40) | st.integers(-(10**40), -(2**31))  # more than 32 bits
TAGS = st.sampled_from(
    ["int", "float", "bool", "timestamp", "set", "omap", "pairs", "binary", "null", "str"]
)


class TakenError(Exception):
    """The input was taken, training would begin."""


def take(script, config, names, size, options):
    """Instead of a program that is compiled, only seen to be one."""
    with errors.about_the_config(script, config):
        init, update = script.make_learner(config)
        jax.eval_shape(lambda key: update(init(key)), jax.random.key(0))
    raise TakenError


def run(script, args, names) -> str | None:
    """What the tool says where it refuses, None where it takes the input.

    Anything else that it does is raised.

    `args` set `names`; flags make the rest a small config, which is good.
    """
    words = flags(small_config(script))
    begins = [i for i, word in enumerate(words) if word.startswith("--")]
    # some take several words
    settings_of = [words[i:j] for i, j in itertools.pairwise([*begins, len(words)])]
    good = [word for each in settings_of if each[0][2:] not in names for word in each]
    original, said = compilation.compile_slice, io.StringIO()
    compilation.compile_slice = take
    try:
        with contextlib.redirect_stderr(said):
            train.main([script.__file__, *good, "--num-seeds=2", *args])
    except TakenError:
        return None
    except SystemExit as stop:
        assert stop.code == 2, f"exit code {stop.code}"
        return said.getvalue()
    except Exception as error:  # of a training: the traceback ends in a note
        (note,) = [note for note in error.__notes__ if note.startswith(errors.CONFIG)]
        return f": error: {' '.join(note.split())}\n"
    finally:
        compilation.compile_slice = original
    raise AssertionError("it has run")


def plain(text: str) -> str:
    """Without what the message may lose: flags are shown with dashes, and boxes are taken away.

    Control characters are shown in words.
    """
    without_boxes = re.sub(r"-{4,}|[|\u2500-\u257f]", " ", text.replace("_", "-"))
    return " ".join(printable(word) for word in without_boxes.split())


def assert_one_line(said: str, *names: str) -> None:
    assert said.endswith("\n") and len(said.splitlines()) == 1, said
    assert ": error: " in said and "Traceback" not in said, said
    for name in names:
        assert plain(name) in plain(said), f"{name} is not in: {said}"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


SIZES = [
    "total_timesteps",
    "num_envs",
    "num_steps",
    "update_epochs",
    "num_minibatches",
    "batch_size",
    "gradient_steps",
]


def bad_values(name: str, kind) -> st.SearchStrategy:
    """Values that a field of this type cannot have, as YAML would give them."""
    words = WORDS.filter(lambda text: not is_number(text) and not text.startswith("-"))
    not_whole = st.floats(-1e6, 1e6).filter(lambda value: not value.is_integer())
    negative = st.integers(-(10**15), -1)
    mappings = st.dictionaries(
        st.text(string.ascii_letters, min_size=1), st.integers(), min_size=1, max_size=2
    )
    lists = st.lists(st.integers(1, 9), min_size=2, max_size=3)
    if kind is int:
        refused = negative if name in SIZES else st.none()
        return st.one_of(words, not_whole, refused, mappings, lists, st.booleans(), st.none())
    if kind is float:
        return st.one_of(words, mappings, lists, st.booleans(), st.none())
    if kind is bool:
        return st.one_of(words.filter(lambda text: text not in ("True", "False")), negative, lists)
    if kind is str or typing.get_origin(kind) is typing.Literal:
        return st.one_of(words.map(lambda text: f"no{text}"), negative, mappings)
    if typing.get_origin(kind) is Mapping:
        return st.one_of(
            mappings.map(lambda mapping: {f"no_{key}": value for key, value in mapping.items()}),
            negative,
        )
    return st.one_of(words, mappings, not_whole, st.lists(negative, min_size=1, max_size=1))


@st.composite
def bad_settings(draw, script):
    """`(name, value)`, of which one is wrong; the name is to be in the message."""
    field = draw(st.sampled_from(dataclasses.fields(script.Config)))
    if draw(st.integers(0, 4)) == 0:
        ending = draw(st.text(string.ascii_letters + "_-.", min_size=1, max_size=5))
        if "".join([field.name, ending]).replace("-", "_") not in vars(script.Config()):
            return field.name + ending, 1
    # its stand-in takes any argument
    if typing.get_origin(field.type) is Mapping and origin(script) == "brax":
        return field.name, draw(st.integers())
    return field.name, draw(bad_values(field.name, field.type))


def as_flags(name: str, value) -> list[str]:
    values = [*value.items()] if isinstance(value, dict) else value
    return [f"--{name}", *map(str, np.ravel(np.asarray(values, dtype=object)))]


@EXAMPLES
def test_what_is_bad_by_construction(examples, tmp_path):
    file = tmp_path / "bad.yaml"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        script = importlib.import_module(data.draw(st.sampled_from(SCRIPTS), label="script"))
        name, value = data.draw(bad_settings(script), label="setting")
        by_flag = data.draw(st.booleans(), label="by flag")
        if not by_flag:
            file.write_text(yaml.safe_dump({name: value}, allow_unicode=True), encoding="utf-8")
        said = run(script, as_flags(name, value) if by_flag else [f"--config={file}"], [name])
        assert said is not None, "it was taken"
        assert_one_line(said, name)

    check()


def random_values() -> st.SearchStrategy:
    scalars = st.one_of(
        st.none(), st.booleans(), st.integers(-3, 10**7), LARGE, st.floats(), TEXT, st.dates()
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)
        ),
        max_leaves=5,
    )


@EXAMPLES
def test_what_is_random(examples, tmp_path):
    file = tmp_path / "bad.yaml"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        script = importlib.import_module(data.draw(st.sampled_from(SCRIPTS), label="script"))
        names = [
            field.name
            for cls in (script.Config, train.Options)
            for field in dataclasses.fields(cls)
        ]
        name = st.sampled_from([name for name in names if name != "run_dir"])
        pairs = data.draw(
            st.dictionaries(st.one_of(name, name, TEXT), random_values(), max_size=3),
            label="settings",
        )
        form = data.draw(st.sampled_from(["flags", "words", "yaml", "text"]), label="form")
        if form == "flags":
            args = [f"--{name}={json.dumps(value, default=str)}" for name, value in pairs.items()]
        elif form == "words":
            args = [word for pair in pairs.items() for word in (f"--{pair[0]}", str(pair[1]))]
        else:
            text = (
                yaml.safe_dump(pairs, allow_unicode=True)
                if form == "yaml"
                else data.draw(TEXT | TAGS.map("lr: !!{} x".format), label="text")
            )
            file.write_bytes(text.encode("utf-8"))
            args = [f"--config={file}"]
        said = run(script, args, pairs)
        if said is not None:
            assert_one_line(said)
            flags_named = [each.partition("=")[0] for each in pairs]  # --NAME=VALUE ends NAME
            named = [*flags_named, *names, "bad.yaml"]
            assert any(plain(each) in plain(said) for each in named), said

    check()


def test_numbers_of_more_than_32_bits():
    for name in ("ppo", "q_learning_gridworld"):
        script = importlib.import_module(name)
        for field in dataclasses.fields(script.Config):
            if field.type is int and field.name != "total_timesteps":
                args = [f"--{field.name}=3e9", "--total-timesteps=1e12"]
                assert_one_line(run(script, args, [field.name, "total_timesteps"]), field.name)
    args = ["--env_name=CartPole-v1", "--env_params", "max_steps_in_episode", "3000000000"]
    assert_one_line(run(importlib.import_module("ppo"), args, ["env_params"]), "env_params")
