"""Random bad command lines and YAML files: never a traceback, always exit code 2 and one line that names the field.

500 of them in `make test-all`, few in `make test`. Two kinds: what is bad by construction has to be refused; what is
random may be refused or taken, but nothing else may happen. No training begins: whatever gets as far as the run
directory has been taken.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import re
import string
from collections.abc import Mapping

import pytest
import yaml
from conftest import SCRIPTS, flags, origin, small_config
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = pytest.mark.parametrize("examples", [12, pytest.param(250, marks=pytest.mark.slow)])
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
WORDS = st.text(string.ascii_letters + "-_./[]{}:, '\"\n\t#&*!|>%@`\u00e9\u2028\u4e2d", min_size=1, max_size=12)

LARGE = st.integers(2**31, 10**40) | st.integers(-(10**40), -(2**31))  # more than 32 bits
TAGS = st.sampled_from(["int", "float", "bool", "timestamp", "set", "omap", "pairs", "binary", "null", "str"])


class Taken(Exception):
    """The input was taken, training would begin."""


def take(*_):
    raise Taken


def run(script, args, names) -> str | None:
    """What `main` says where it refuses, None where it takes the input. Anything else that it does is raised.

    `args` set `names`; flags make the rest a small config, which is good.
    """
    words = flags(small_config(script))
    begins = [i for i, word in enumerate(words) if word.startswith("--")]
    settings_of = [words[i:j] for i, j in itertools.pairwise([*begins, len(words)])]  # a tuple takes several words
    good = [word for each in settings_of if each[0][2:].split("=")[0] not in names for word in each]
    original, said = script.open_run_dir, io.StringIO()
    script.open_run_dir = take
    try:
        with contextlib.redirect_stderr(said):
            script.main([*good, "--num-seeds=2", *args])
    except Taken:
        return None
    except SystemExit as stop:
        assert stop.code == 2, f"exit code {stop.code}"
        return said.getvalue()
    finally:
        script.open_run_dir = original
    raise AssertionError("it has run")


def plain(text: str) -> str:
    """Without what the message may lose: flags are shown with dashes, and boxes are taken away."""
    return " ".join(re.sub(r"-{4,}|[|\u2500-\u257f]", " ", text.replace("_", "-")).split())


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


def bad_values(kind) -> st.SearchStrategy:
    """Values that a field of this type cannot have, as YAML would give them."""
    words = WORDS.filter(lambda text: not is_number(text))
    not_whole = st.floats(-1e6, 1e6).filter(lambda value: not value.is_integer())
    negative = st.integers(-(10**15), -1)
    mappings = st.dictionaries(st.text(string.ascii_letters, min_size=1), st.integers(), min_size=1, max_size=2)
    lists = st.lists(st.integers(1, 9), min_size=2, max_size=3)
    if kind is int:
        return st.one_of(words, not_whole, negative, mappings, lists, st.booleans(), st.none())
    if kind is float:
        infinite = st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e300])
        return st.one_of(words, infinite, mappings, lists, st.booleans(), st.none())
    if kind is bool:
        return st.one_of(words.filter(lambda text: text.strip().lower() not in ("true", "false")), negative, lists)
    if kind is str:
        return st.one_of(words.map(lambda text: f"no{text}"), negative, mappings)
    if kind is Mapping:
        unknown = mappings.map(lambda mapping: {f"no_{name}": value for name, value in mapping.items()})
        return st.one_of(unknown, negative, lists, st.booleans())
    return st.one_of(words, negative, mappings, not_whole, st.lists(negative, min_size=1, max_size=3))


@st.composite
def bad_settings(draw, script):
    """`(name, value)`, of which one is wrong; the name is to be in the message."""
    field = draw(st.sampled_from(dataclasses.fields(script.Config)))
    if draw(st.integers(0, 4)) == 0:
        ending = draw(st.text(string.ascii_letters + "_-.", min_size=1, max_size=5))
        if "".join([field.name, ending]).replace("-", "_") not in vars(script.Config()):
            return field.name + ending, 1
    if field.type is Mapping and origin(script) == "brax":  # its stand-in in tests takes any argument
        return field.name, draw(st.integers())
    return field.name, draw(bad_values(field.type))


def as_flag(name: str, value) -> str:
    return f"--{name}={json.dumps(value, default=str) if isinstance(value, dict) else value}"


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
        said = run(script, [as_flag(name, value)] if by_flag else [f"--config={file}"], [name])
        assert said is not None, "it was taken"
        assert_one_line(said, name)

    check()


def random_values() -> st.SearchStrategy:
    scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**7), LARGE, st.floats(), TEXT, st.dates())
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
        max_leaves=5,
    )


@EXAMPLES
def test_what_is_random(examples, tmp_path):
    file = tmp_path / "bad.yaml"

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(st.data())
    def check(data):
        script = importlib.import_module(data.draw(st.sampled_from(SCRIPTS), label="script"))
        names = [field.name for cls in (script.Config, script.Options) for field in dataclasses.fields(cls)]
        name = st.sampled_from([name for name in names if name not in ("config", "run_dir", "resume")])
        pairs = data.draw(st.dictionaries(st.one_of(name, name, TEXT), random_values(), max_size=3), label="settings")
        form = data.draw(st.sampled_from(["flags", "words", "yaml", "text"]), label="form")
        if form == "flags":
            args = [as_flag(*pair) for pair in pairs.items()]
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
            assert any(plain(each) in plain(said) for each in [*pairs, *names, "bad.yaml"]), said

    check()


@pytest.mark.parametrize(
    "text",
    [
        "lr: " + "[" * 3000,
        "env_params: &a {x: *a}",
        "env_params: &a [*a]",
        'lr: !!int ""',
        "lr: !!bool x",
        '"a\\nb": 1',
    ],
    ids=range(6),
)
def test_yaml_that_readers_stumble_over(text, tmp_path):
    file, script = tmp_path / "bad.yaml", importlib.import_module("q_learning_gridworld")
    file.write_text(text)
    said = run(script, [f"--config={file}"], ["lr", "env_params"])
    assert_one_line(said, "bad.yaml")


@pytest.mark.parametrize(
    "value", ['{a: !!int ""}', "[" * 3000, "{a: &b [*b]}", "{height: 1000000, width: 1000000}"], ids=range(4)
)
def test_mappings_that_readers_stumble_over(value):
    said = run(importlib.import_module("q_learning_gridworld"), [f"--env_params={value}"], ["env_params"])
    assert_one_line(said, "env_params")


def test_numbers_of_more_than_32_bits():
    for name in ("ppo", "q_learning_gridworld"):
        script = importlib.import_module(name)
        for field in dataclasses.fields(script.Config):
            if field.type is int and field.name != "total_timesteps":
                assert_one_line(
                    run(script, [f"--{field.name}=3e9", "--total_timesteps=1e12"], [field.name]), field.name
                )
    for text in ("{max_steps_in_episode: 3000000000}", "{gravity: 3000000000}"):
        said = run(importlib.import_module("ppo"), ["--env_name=CartPole-v1", f"--env_params={text}"], ["env_params"])
        assert_one_line(said, "env_params")
